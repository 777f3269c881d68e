"""Figures of the replicas for Prometheus, read when they are asked for; the label `engine` is the replica's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from towline.engines.pool.dispatch import Dispatcher
from towline.engines.pool.replica import Replica

_GAUGES: dict[str, tuple[str, Callable[[Replica], float | None]]] = {
    "towline_engine_healthy": ("1 while the replica serves", lambda r: r.serving),
    "towline_engine_in_flight": ("Turns on the replica", lambda r: r.taken),
    "towline_engine_limit": ("How many turns may be on it at once", lambda r: r.pace.limit),
    "towline_engine_version": ("Policy version of its weights", lambda r: r.engine.version),
    "towline_engine_kv_usage": ("Share of its key-value cache in use", lambda r: r.load.kv_usage if r.load else None),
    "towline_engine_queued": ("Turns in its own queue", lambda r: r.load.waiting if r.load else None),
}
_COUNTERS: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "towline_engine_turns": ("Turns that it answered", lambda r: r.counts.turns),
    "towline_engine_tokens": ("Tokens that it sampled", lambda r: r.counts.tokens),
    "towline_engine_prompt_tokens": ("Prompt tokens that it was given", lambda r: r.counts.prompt_tokens),
    "towline_engine_cached_tokens": ("Prompt tokens that came from its cache", lambda r: r.counts.cached_tokens),
    "towline_engine_moved_turns": ("Turns that others went on with", lambda r: r.counts.moved),
    "towline_engine_failures": ("How often it left the pool", lambda r: r.counts.failures),
}


def figures(replicas: Sequence[Replica], dispatcher: Dispatcher) -> Iterator[Metric]:
    for name, (told, gauge) in _GAUGES.items():
        family = GaugeMetricFamily(name, told, labels=["engine"])
        for replica in replicas:
            value = gauge(replica)
            if value is not None:
                family.add_metric([replica.name], value)
        yield family
    for name, (told, counter) in _COUNTERS.items():
        counted = CounterMetricFamily(name, told, labels=["engine"])
        for replica in replicas:
            counted.add_metric([replica.name], counter(replica))
        yield counted
    waiting = GaugeMetricFamily(
        "towline_engine_waiting", "Turns that wait in the pool; `any` for those that wait for any", labels=["engine"]
    )
    waiting.add_metric(["any"], dispatcher.waiting_for(None))
    for replica in replicas:
        waiting.add_metric([replica.name], dispatcher.waiting_for(replica))
    yield waiting
