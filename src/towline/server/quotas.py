"""Quotas: what a tenant's tasks and requests may ask for. What exceeds a limit is refused, with its name and value."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from towline.config.tenants import TenantLimits
from towline.schema import Task
from towline.server.errors import InvalidInput, TooManyRequests

BURST_SECONDS = 5.0
"""A tenant may send the requests of this many seconds at once."""


def check_task(task: Task, size: int, limits: TenantLimits, at: Callable[[str], str]) -> None:
    """Raise `InvalidInput` for a task that exceeds a limit of its tenant. `size`: its bytes; `at`: the path of a field."""
    for field, value, name in _demands(task):
        _check(value, name, getattr(limits, name), at(field))
    _check(size, "task_bytes", limits.task_bytes, at("task_id"), ": upload its files with `POST /v1/files`")


def _demands(task: Task) -> Iterator[tuple[str, float | None, str]]:
    """What a task asks for: the field, its value, and the limit that bounds it."""
    yield "num_samples", task.num_samples, "samples"
    yield "max_attempts", task.max_attempts, "attempts"
    yield "priority", task.priority, "priority"
    yield "timeouts.run", task.timeouts.run, "run_seconds"
    yield "steps", _step_seconds(task), "run_seconds"
    for stage in ("init", "build", "evaluate"):
        yield f"timeouts.{stage}", getattr(task.timeouts, stage), "stage_seconds"
    yield "grace_seconds", task.grace_seconds, "stage_seconds"
    seconds = task.evaluator.get("seconds")
    yield "evaluator.seconds", seconds if isinstance(seconds, int | float) else None, "stage_seconds"
    for name in ("memory_mb", "disk_mb", "cpus", "pids"):
        yield f"environment.resources.{name}", getattr(task.environment.resources, name), name


def _step_seconds(task: Task) -> float | None:
    """What the steps of a task may run together, as far as it says."""
    given = [one for step in task.steps if (one := step.seconds or task.timeouts.run) is not None]
    return sum(given) if given else None


def _check(value: float | None, name: str, limit: float | None, field: str, advice: str = "") -> None:
    if value is not None and limit is not None and value > limit:
        raise InvalidInput(f"{value} exceeds the limit {name} = {limit} of this tenant{advice}", field=field)


class RequestQuota:
    """Counts the requests of each tenant: how many per second, and how many at once."""

    def __init__(self, limits: Callable[[str], TenantLimits], clock: Callable[[], float] = time.monotonic):
        self._limits = limits
        self._clock = clock
        self._spent: dict[str, tuple[float, float]] = {}
        """Requests that count at a time, by tenant; they are forgotten at its rate."""
        self.in_flight: Counter[str] = Counter()

    def take(self, tenant: str) -> None:
        """Count a request; raises `TooManyRequests` if the tenant has sent too many."""
        limits = self._limits(tenant)
        if limits.requests_in_flight is not None and self.in_flight[tenant] >= limits.requests_in_flight:
            raise TooManyRequests(
                f"{limits.requests_in_flight} requests of this tenant are being answered (requests_in_flight): retry later",
                retry_after=1.0,
            )
        rate = limits.requests_per_second
        if rate is None:
            return
        now = self._clock()
        spent, at = self._spent.get(tenant, (0.0, now))
        spent = max(0.0, spent - (now - at) * rate)
        if spent + 1 > rate * BURST_SECONDS:
            raise TooManyRequests(
                f"this tenant sends more than {rate:g} requests per second (requests_per_second): retry later",
                retry_after=1.0,
            )
        self._spent[tenant] = (spent + 1, now)

    @contextmanager
    def in_flight_of(self, tenant: str) -> Iterator[None]:
        """For the duration of a request that was taken."""
        self.in_flight[tenant] += 1
        try:
            yield
        finally:
            self.in_flight[tenant] -= 1
            if self.in_flight[tenant] <= 0:
                del self.in_flight[tenant]
