"""Circuit breakers: one per engine and per sandbox runtime.

A breaker opens when its component fails several times in a row, or is unreachable. While it is open, sessions that need
the component wait and their budgets stand still. It probes the component with exponential backoff and closes when a probe
succeeds.

An *outage* is an opening that a probe has confirmed. Failures during an outage are attributed to the component: sessions
that end on them are retried without using an attempt. A component that fails real work and passes every probe has no
outage, so sessions that keep failing there run out of attempts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from towline.errors import TowlineError
from towline.schema import BreakerStatus

log = logging.getLogger("towline.node")
Probe = Callable[[], Awaitable[None]]
"""Uses the component once; raises `TowlineError` or `OSError` with the reason if that fails."""
ENGINE_FAILURES = 5
SANDBOX_FAILURES = 3
"""Consecutive failures that open a breaker."""
_OUTAGES = 64
"""Number of outages that are remembered."""


@dataclass(frozen=True, slots=True)
class ProbeBackoff:
    """Seconds between two probes: `first`, doubled after each failure, up to `longest`."""

    first: float = 0.5
    longest: float = 15.0
    probe: float = 60.0
    """Time limit of one probe."""


@dataclass(slots=True)
class _Outage:
    began: float
    ended: float | None = None

    def holds(self, at: float) -> bool:
        return self.began <= at and (self.ended is None or at <= self.ended)


class CircuitBreaker:
    """The circuit breaker of one component."""

    def __init__(
        self,
        component: str,
        probe: Probe,
        *,
        failures: int,
        changed: Callable[[CircuitBreaker], None],
        backoff: ProbeBackoff | None = None,
    ):
        self.component = component
        self._probe = probe
        self._most = failures
        self._changed = changed
        self.backoff = backoff or ProbeBackoff()
        self._failures = 0
        self._streak = 0.0
        """When the consecutive failures began (monotonic)."""
        self._last_failure = 0.0
        """When the latest of them happened (monotonic)."""
        self._checking = asyncio.Lock()
        self._reason = ""
        self._since = time.time()
        self._tripped_at = 0.0
        """When it last opened (monotonic)."""
        self._opened = 0
        self._closed = asyncio.Event()
        self._closed.set()
        self._tripped = asyncio.Event()
        """The opposite of `_closed`."""
        self._probed = asyncio.Event()
        """Set once a probe since the last opening has ended."""
        self._probe_requested = asyncio.Event()
        self._outages: deque[_Outage] = deque(maxlen=_OUTAGES)
        self._probing: asyncio.Task[None] | None = None

    @property
    def status(self) -> BreakerStatus:
        return BreakerStatus(
            component=self.component, open=self.open, reason=self._reason, since=self._since, opened=self._opened
        )

    @property
    def open(self) -> bool:
        return not self._closed.is_set()

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def open_seconds(self) -> float:
        """How long it has been open; 0 while it is closed."""
        return time.monotonic() - self._tripped_at if self.open else 0.0

    # Reports about the component

    def succeeded(self, began: float | None = None) -> None:
        """The component did its work: earlier failures are over. Work that began (monotonic) before the latest failure
        proves nothing about the time since, and changes nothing."""
        if self._failures and began is not None and began < self._last_failure:
            return
        self._failures = 0
        if self.open:
            self._close()

    def failed(self, reason: str, *, unreachable: bool = False) -> None:
        """The component failed; `unreachable` opens the breaker at once."""
        self._last_failure = time.monotonic()
        if not self._failures:
            self._streak = self._last_failure
        self._failures += 1
        if self.open:
            self._reason = reason
        elif unreachable or self._failures >= self._most:
            self._open(reason)

    async def check(self) -> str | None:
        """Probe now; the problem, which also opens the breaker, or None."""
        problem = await run_probe(self._probe, self.backoff.probe)
        if problem is None:
            self.succeeded()
        else:
            self.failed(problem, unreachable=True)
            self._confirm()
        return problem

    def probe_now(self) -> None:
        """Probe without waiting for the next interval: the component may be back."""
        self._probe_requested.set()

    # Waiting

    async def wait(self) -> None:
        """Wait until the breaker is closed."""
        await self._closed.wait()

    async def lasts(self, seconds: float) -> CircuitBreaker:
        """Wait until it has been open for `seconds` without interruption."""
        while True:
            await self._tripped.wait()
            try:
                async with asyncio.timeout(seconds):
                    await self._closed.wait()
            except TimeoutError:
                return self

    async def outage_at(self, moment: float) -> bool:
        """Whether an outage covers the (monotonic) moment.

        A closed breaker that has seen failures since, but too few to open, probes the component first: a single session may
        be all that runs when an outage begins. An open breaker waits for its first probe.
        """
        async with self._checking:
            if not self.open and self._failures and self._streak <= moment:
                await self.check()
        if self.open and not self._probed.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self._probed, self._closed)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return any(outage.holds(moment) for outage in self._outages)

    async def close(self) -> None:
        """Stop probing."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)

    # Opening and closing

    def _open(self, reason: str) -> None:
        self._reason, self._since = reason, time.time()
        self._opened += 1
        self._tripped_at = time.monotonic()
        self._closed.clear()
        self._tripped.set()
        self._probed.clear()
        self._probe_requested.clear()
        log.warning("circuit breaker %s is open: %s", self.component, reason)
        self._probing = asyncio.get_running_loop().create_task(self._until_usable(), name=f"probe {self.component}")
        self._changed(self)

    def _close(self) -> None:
        self._failures, self._since = 0, time.time()
        if self._outages and self._outages[-1].ended is None:
            self._outages[-1].ended = time.monotonic()
        self._tripped.clear()
        self._closed.set()
        log.warning("circuit breaker %s is closed", self.component)
        if self._probing is not None and self._probing is not asyncio.current_task():
            self._probing.cancel()
        self._changed(self)

    def _confirm(self) -> None:
        """A probe has failed: the opening is an outage since its first failure."""
        if not self._probed.is_set():
            self._outages.append(_Outage(self._streak))
            self._probed.set()

    async def _until_usable(self) -> None:
        pause = self.backoff.first
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._probe_requested.wait(), pause)
            self._probe_requested.clear()
            problem = await run_probe(self._probe, self.backoff.probe)
            if problem is None:
                self._probed.set()
                self._close()
                return
            self._confirm()
            self._reason = problem
            self._changed(self)
            pause = min(pause * 2, self.backoff.longest)


async def run_probe(probe: Probe, seconds: float) -> str | None:
    """Run one probe; the problem, or None."""
    try:
        async with asyncio.timeout(seconds):
            await probe()
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except (TowlineError, OSError) as error:
        return " ".join((str(error) or repr(error)).split())
    except Exception as error:
        # A bug in one engine or runtime must not stop the probing: the breaker would stay open forever.
        log.exception("a probe raised an unexpected error")
        return repr(error)
    return None


class ComponentUnavailable(TowlineError):
    """A component that a session needs is unavailable."""

    def __init__(self, breaker: CircuitBreaker):
        super().__init__(f"{breaker.component} is unavailable: {breaker.reason}")
        self.failure = breaker.component.partition(":")[0]


class CircuitBreakers:
    """All breakers of a node by component."""

    def __init__(self, backoff: ProbeBackoff | None = None) -> None:
        self.on_breaker: Callable[[BreakerStatus], None] = lambda status: None
        """Called with every change."""
        self.backoff = backoff or ProbeBackoff()
        self._breakers: dict[str, CircuitBreaker] = {}
        self._published: dict[str, BreakerStatus] = {}

    def add(
        self, component: str, probe: Probe, failures: int, changed: Callable[[CircuitBreaker], None] | None = None
    ) -> CircuitBreaker:
        """The component's breaker; created on first use."""
        if component not in self._breakers:

            def publish(breaker: CircuitBreaker) -> None:
                if changed is not None:
                    changed(breaker)
                self._publish(breaker)

            self._breakers[component] = CircuitBreaker(
                component, probe, failures=failures, changed=publish, backoff=self.backoff
            )
        return self._breakers[component]

    def __getitem__(self, component: str) -> CircuitBreaker:
        return self._breakers[component]

    async def wait(self, components: Iterable[str], seconds: float, *, since_opening: bool = False) -> None:
        """Return once all of them are closed; raises `ComponentUnavailable` after `seconds`. With `since_opening`, the
        time that a breaker has already been open counts too."""
        for component in components:
            breaker = self._breakers[component]
            try:
                async with asyncio.timeout(seconds - (breaker.open_seconds if since_opening else 0.0)):
                    await breaker.wait()
            except TimeoutError as error:
                raise ComponentUnavailable(breaker) from error

    async def lasting(self, components: Iterable[str], seconds: float) -> ComponentUnavailable:
        """Wait until one of them has been open for `seconds` without interruption; returns the error for it."""
        waits = [asyncio.ensure_future(self._breakers[component].lasts(seconds)) for component in components]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return ComponentUnavailable(done.pop().result())
        finally:
            for wait in waits:
                wait.cancel()

    @property
    def statuses(self) -> list[BreakerStatus]:
        return [breaker.status for breaker in self._breakers.values()]

    def _publish(self, breaker: CircuitBreaker) -> None:
        status = breaker.status
        if self._published.get(breaker.component) != status:
            self._published[breaker.component] = status
            self.on_breaker(status)

    async def close(self) -> None:
        await asyncio.gather(*(breaker.close() for breaker in self._breakers.values()))
