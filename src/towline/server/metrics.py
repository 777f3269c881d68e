"""Figures for Prometheus, in a registry of the server's own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.tasks = Counter("towline_tasks_accepted", "Tasks that were new", registry=registry)
        self.refused = Counter(
            "towline_submissions_refused", "Submissions that found the queue full", registry=registry
        )
        self.sessions = Counter("towline_sessions_ended", "Sessions by end", ["state"], registry=registry)
        self.delivered = Counter("towline_results_delivered", "Results handed out", ["unit"], registry=registry)
        self.acked = Counter("towline_results_acked", "Results acknowledged", registry=registry)
        self.dropped = Counter("towline_results_dropped", "Stale results passed over", ["unit"], registry=registry)
        self.flagged = Counter("towline_results_flagged", "Stale results handed out", ["unit"], registry=registry)
        self.callbacks = Counter("towline_callbacks", "Callbacks by outcome", ["outcome"], registry=registry)
        self.waiting = Gauge("towline_sessions_waiting", "Sessions that wait for a node", registry=registry)
        self.active = Gauge("towline_sessions_active", "Sessions on a node", registry=registry)
        self.version = Gauge("towline_policy_version", "Policy version", registry=registry)
        self.paused = Gauge("towline_policy_paused", "1 while sampling is paused", registry=registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)
