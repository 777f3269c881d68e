"""Prometheus metrics of the server, in their own registry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, Summary, generate_latest

from towline.cluster.runner import SessionOutcome
from towline.schema import POLICY, BreakerStatus, EndReason, FailureReason, SessionState
from towline.server.pacing.pacer import Pacer
from towline.server.scheduling.ending import SessionEnd
from towline.server.scheduling.fairness import FairShare
from towline.server.scheduling.stragglers import StageDurations
from towline.server.store import names
from towline.server.store.queries import ConsumerLag

_LENGTHS = {"turns": "Turns", "trained_tokens": "Trained tokens", "seconds": "Run seconds"}
_SECONDS = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class ServerMetrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.durations = StageDurations()
        self.tasks = Counter("towline_tasks_accepted", "Accepted new tasks", registry=registry)
        self.refused = Counter(
            "towline_submissions_refused", "Submissions rejected because the queue was full", registry=registry
        )
        self.sessions = Counter("towline_sessions_ended", "Ended sessions by state", ["state"], registry=registry)
        self.failures = Counter(
            "towline_sessions_failed", "Failed and lost sessions", ["reason", "stage"], registry=registry
        )
        self.retries = Counter("towline_sessions_retried", "Retried sessions", ["reason"], registry=registry)
        self.stage_seconds = Histogram(
            "towline_stage_seconds", "Duration of session stages", ["stage"], buckets=_SECONDS, registry=registry
        )
        self.cut = Counter("towline_sessions_cut", "Sessions stopped early, their group complete", registry=registry)
        self.length = {
            name: Summary(
                f"towline_early_stop_{name}",
                f"{about} in groups that may be stopped early",
                ["outcome"],
                registry=registry,
            )
            for name, about in _LENGTHS.items()
        }
        self.turns = Counter("towline_turns", "Turns of ended sessions", registry=registry)
        self.sampled = Counter("towline_sampled_tokens", "Tokens sampled in turns of ended sessions", registry=registry)
        self.engine_errors = Counter(
            "towline_engine_errors", "Turns failed by an engine", ["engine", "reason"], registry=registry
        )
        for reason in (FailureReason.ENGINE, FailureReason.STALL):
            self.engine_errors.labels(POLICY, reason.value)
        self.delivered = Counter("towline_results_delivered", "Delivered results", ["unit"], registry=registry)
        self.acked = Counter("towline_results_acked", "Acknowledged results", registry=registry)
        self.dropped = Counter("towline_results_dropped", "Dropped stale results", ["unit"], registry=registry)
        self.flagged = Counter("towline_results_flagged", "Delivered stale results", ["unit"], registry=registry)
        self.callbacks = Counter("towline_callbacks", "Callbacks by outcome", ["outcome"], registry=registry)
        self.pacing_idle = Gauge(
            "towline_pacing_idle_slot_seconds", "Slot seconds left empty by pacing", registry=registry
        )
        self.pacing_withheld = Gauge(
            "towline_pacing_withheld_seconds",
            "Seconds waited for older groups",
            ["consumer", "tenant"],
            registry=registry,
        )
        self.trained_share = Gauge(
            "towline_trained_share",
            "Share of trained groups by duration quartile, 1 is the fastest",
            ["consumer", "quartile", "tenant"],
            registry=registry,
        )
        self.waiting = Gauge("towline_sessions_waiting", "Sessions in the queue", registry=registry)
        self.active = Gauge("towline_sessions_active", "Active sessions", registry=registry)
        self.version = Gauge("towline_policy_version", "Policy version", registry=registry)
        self.paused = Gauge("towline_policy_paused", "1 while sampling is paused", registry=registry)
        self.held = Gauge("towline_queue_held", "1 while no session is started", registry=registry)
        self.broken = Gauge("towline_broken", "1 if the server needs a restart", registry=registry)
        self.database = Gauge("towline_database_up", "0 while the database is down", registry=registry)
        self.breaker_open = Gauge(
            "towline_breaker_open", "1 while the circuit breaker is open", ["component"], registry=registry
        )
        self.breaker_opened = Gauge(
            "towline_breaker_openings", "Times the circuit breaker has opened", ["component"], registry=registry
        )
        self.starts = Gauge(
            "towline_sandbox_starts",
            "Sandboxes of a node that are starting, or waiting for its start limit",
            ["node", "state"],
            registry=registry,
        )
        self.start_seconds = Gauge(
            "towline_sandbox_start_seconds", "Mean duration of a node's recent starts", ["node"], registry=registry
        )
        self.lag = Gauge(
            "towline_consumer_lag",
            "Results not yet delivered to a consumer",
            ["consumer", "unit", "tenant"],
            registry=registry,
        )
        self.leases = Gauge("towline_leases_open", "Open leases", ["consumer", "unit", "tenant"], registry=registry)
        self.tenant_waiting = Gauge(
            "towline_tenant_sessions_waiting", "Sessions of a tenant in the queue", ["tenant"], registry=registry
        )
        self.tenant_active = Gauge(
            "towline_tenant_sessions_active", "Active sessions of a tenant", ["tenant"], registry=registry
        )
        self.tenant_slot_seconds = Gauge(
            "towline_tenant_slot_seconds",
            "Seconds times session slots that a tenant has held since the server started",
            ["tenant"],
            registry=registry,
        )
        self.disk_free = Gauge("towline_disk_free_bytes", "Free space in the data folder", registry=registry)

    def session(self, outcome: SessionOutcome) -> None:
        """Count the stages, turns and tokens of an ended session."""
        self.durations.add(outcome)
        for stage, seconds in outcome.timings.items():
            self.stage_seconds.labels(stage).observe(seconds)
        self.turns.inc(outcome.summary.turns)
        self.sampled.inc(outcome.sampled_tokens)

    def ended(self, ending: SessionEnd) -> None:
        """Count an end that is stored."""
        self.sessions.labels(ending.state.value).inc()
        if ending.state not in (SessionState.FAILED, SessionState.LOST):
            return
        reason = ending.failure or FailureReason.INTERNAL
        self.failures.labels(reason.value, ending.stage.value).inc()
        if ending.retried:
            self.retries.labels(reason.value).inc()

    def ended_in_group(self, ending: SessionEnd) -> None:
        """Measure a session of a group that may be stopped early: finished, or cut as far as it got."""
        cut = ending.end_reason is EndReason.EARLY_STOP
        if not cut and ending.state is not SessionState.DONE:
            return
        self.cut.inc(cut)
        for name, summary in self.length.items():
            summary.labels("cut" if cut else "finished").observe(getattr(ending, name))

    def engine_failed(self, engine: str, reason: FailureReason) -> None:
        """Count a turn that an engine failed."""
        self.engine_errors.labels(engine, reason.value).inc()

    def breakers(self, statuses: Iterable[BreakerStatus]) -> None:
        for one in statuses:
            self.breaker_open.labels(one.component).set(one.open)
            self.breaker_opened.labels(one.component).set(one.opened)

    def nodes(self, statuses: Iterable[Mapping[str, Any]]) -> None:
        """Show how many sandboxes are starting; a node that does not report it is left out."""
        self.starts.clear()
        self.start_seconds.clear()
        for node in statuses:
            starts = node.get("starts") or {}
            for state in ("starting", "waiting"):
                if state in starts:
                    self.starts.labels(node["name"], state).set(starts[state])
            if starts.get("mean_seconds") is not None:
                self.start_seconds.labels(node["name"]).set(starts["mean_seconds"])

    def consumers(self, lags: Iterable[ConsumerLag]) -> None:
        self.lag.clear()
        self.leases.clear()
        for one in lags:
            self.lag.labels(one.consumer, one.unit, one.tenant).set(one.lag)
            self.leases.labels(one.consumer, one.unit, one.tenant).set(one.leases)

    def tenants(self, waiting: Mapping[str, int], share: FairShare, tenant: str | None) -> None:
        """Show the queue and the slots of one tenant, or of all."""
        shown = (
            (self.tenant_waiting, waiting),
            (self.tenant_active, share.active),
            (self.tenant_slot_seconds, share.slot_seconds),
        )
        for gauge, values in shown:
            gauge.clear()
            for name, value in values.items():
                if names.visible(name, tenant):
                    gauge.labels(name).set(value)

    def pacing(self, pacer: Pacer, tenant: str | None) -> None:
        """Show the consumers of one tenant, or of all."""
        self.pacing_idle.set(pacer.idle_seconds)
        self.pacing_withheld.clear()
        self.trained_share.clear()
        for key, seconds in pacer.withheld_seconds.items():
            if names.visible(owner := names.tenant_of(key), tenant):
                self.pacing_withheld.labels(names.plain(key), owner).set(seconds)
        for key in pacer.bias.consumers:
            if names.visible(owner := names.tenant_of(key), tenant):
                for number, one in enumerate(pacer.bias.quartiles(key), 1):
                    self.trained_share.labels(names.plain(key), str(number), owner).set(one.trained_share)

    def text(self, engines: Iterable[Metric] = ()) -> bytes:
        """All metrics, with those of the engines, in the text format."""
        others = CollectorRegistry()
        others.register(_Collected(engines))
        return generate_latest(self.registry) + generate_latest(others)


class _Collected:
    """Metrics that were collected elsewhere."""

    def __init__(self, metrics: Iterable[Metric]):
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics
