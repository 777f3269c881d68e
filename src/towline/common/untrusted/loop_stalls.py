"""Measures how long an event loop is blocked: everything that it serves waits for that long.

A timer asks to be called every `INTERVAL`; how late it is called is how long something else held the loop. Exported as a
histogram, so that a node or a server that stalls is seen before its clients time out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.samples import Sample

INTERVAL = 0.1
"""Seconds between two measurements."""
NAME = "towline_event_loop_stall_seconds"
_HELP = "How late the event loop ran a timer that is due every 0.1 s"
_BOUNDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class LoopStalls:
    """The stalls of one event loop since it was started."""

    def __init__(self) -> None:
        self.worst = 0.0
        """The longest stall in seconds."""
        self.total = 0.0
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Measure the running loop until `close`."""
        if self._timer is None:
            self._schedule()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        due = time.monotonic() + INTERVAL
        self._timer = asyncio.get_running_loop().call_later(INTERVAL, self._tick, due)

    def _tick(self, due: float) -> None:
        self.add(max(0.0, time.monotonic() - due))
        self._schedule()

    def add(self, seconds: float) -> None:
        """Count one measurement."""
        self.worst = max(self.worst, seconds)
        self.total += seconds
        place = next((n for n, bound in enumerate(_BOUNDS) if seconds <= bound), len(_BOUNDS))
        self._counts[place] += 1

    def collect(self, process: str) -> Iterable[Metric]:
        """The stalls as a histogram of a process: `server` or `node`."""
        metric = Metric(NAME, _HELP, "histogram")
        count = 0
        for bound, found in zip((*map(str, _BOUNDS), "+Inf"), self._counts, strict=True):
            count += found
            metric.samples.append(Sample(f"{NAME}_bucket", {"process": process, "le": bound}, count))
        metric.samples.append(Sample(f"{NAME}_count", {"process": process}, count))
        metric.samples.append(Sample(f"{NAME}_sum", {"process": process}, self.total))
        return [metric]


def merged(metrics: Iterable[Metric]) -> list[Metric]:
    """One family per name: the server and its nodes report the same metric."""
    families: dict[str, Metric] = {}
    for metric in metrics:
        known = families.setdefault(metric.name, metric)
        if known is not metric:
            known.samples += metric.samples
    return list(families.values())
