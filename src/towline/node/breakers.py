"""Circuit breakers: one per engine and per sandbox runtime.

A breaker opens when its component fails several times in a row, or cannot be reached at all. While it is open, sessions
that need the component wait and their budgets stand still. It probes the component with growing intervals and closes when
a probe succeeds.

An *outage* is an opening that a probe has confirmed. Failures within one are nobody's fault but the component's: sessions
that end on them are retried without using up an attempt. A component that fails real work and passes every probe has no
outage, so what keeps failing there runs out of attempts.
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
"""Failures in a row, without a success in between, that open a breaker."""
_OUTAGES = 64
"""Outages that are remembered."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds between two probes: `first`, doubled after each that fails, up to `longest`."""

    first: float = 0.5
    longest: float = 15.0
    probe: float = 60.0
    """Longest that one probe may take."""


@dataclass(slots=True)
class _Outage:
    began: float
    ended: float | None = None

    def holds(self, at: float) -> bool:
        return self.began <= at and (self.ended is None or at <= self.ended)


class Breaker:
    """The circuit breaker of one component."""

    def __init__(
        self,
        component: str,
        probe: Probe,
        *,
        failures: int,
        changed: Callable[[Breaker], None],
        backoff: Backoff | None = None,
    ):
        self.component = component
        self._probe = probe
        self._most = failures
        self._changed = changed
        self.backoff = backoff or Backoff()
        self._failures = 0
        self._streak = 0.0
        """When the failures in a row began (monotonic)."""
        self._reason = ""
        self._since = time.time()
        self._tripped_at = 0.0
        """When it last opened (monotonic)."""
        self._opened = 0
        self._closed = asyncio.Event()
        self._closed.set()
        self._tripped = asyncio.Event()
        """The opposite of `_closed`."""
        self._judged = asyncio.Event()
        """Set once a probe since the last opening has ended."""
        self._stirred = asyncio.Event()
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

    # What the component does

    def succeeded(self) -> None:
        """The component did its work: whatever failed before is over."""
        self._failures = 0
        if self.open:
            self._close()

    def failed(self, reason: str, *, unreachable: bool = False) -> None:
        """The component failed; `unreachable` opens the breaker at once."""
        if not self._failures:
            self._streak = time.monotonic()
        self._failures += 1
        if self.open:
            self._reason = reason
        elif unreachable or self._failures >= self._most:
            self._open(reason)

    async def check(self) -> str | None:
        """Probe now; what is wrong, with which the breaker opens, or None."""
        problem = await probed(self._probe, self.backoff.probe)
        if problem is None:
            self.succeeded()
        else:
            self.failed(problem, unreachable=True)
        return problem

    def stir(self) -> None:
        """Probe now: the component may be back."""
        self._stirred.set()

    # Waiting

    async def wait(self) -> None:
        """Returns once the breaker is closed."""
        await self._closed.wait()

    async def lasts(self, seconds: float) -> Breaker:
        """Return when it has been open for so long without a break."""
        while True:
            await self._tripped.wait()
            try:
                async with asyncio.timeout(seconds):
                    await self._closed.wait()
            except TimeoutError:
                return self

    async def outage_at(self, moment: float) -> bool:
        """Whether an outage covers the (monotonic) moment; waits for the first probe of an open breaker."""
        if self.open and not self._judged.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self._judged, self._closed)]
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
        self._judged.clear()
        self._stirred.clear()
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

    async def _until_usable(self) -> None:
        pause = self.backoff.first
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stirred.wait(), pause)
            self._stirred.clear()
            problem = await probed(self._probe, self.backoff.probe)
            if problem is None:
                self._judged.set()
                self._close()
                return
            if not self._judged.is_set():
                self._outages.append(_Outage(self._streak))
                self._judged.set()
            self._reason = problem
            self._changed(self)
            pause = min(pause * 2, self.backoff.longest)


async def probed(probe: Probe, seconds: float) -> str | None:
    """One probe; what is wrong, or None."""
    try:
        async with asyncio.timeout(seconds):
            await probe()
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except (TowlineError, OSError) as error:
        return " ".join((str(error) or repr(error)).split())
    except Exception as error:
        # A defect of one engine or runtime: without its probe the breaker would stay open for good.
        log.exception("a probe failed unexpectedly")
        return repr(error)
    return None


class HeldTooLong(TowlineError):
    """A component that a session needs cannot be used."""

    def __init__(self, breaker: Breaker):
        super().__init__(f"{breaker.component} cannot be used: {breaker.reason}")
        self.failure = breaker.component.partition(":")[0]


class Breakers:
    """All breakers of a node by component."""

    def __init__(self, backoff: Backoff | None = None) -> None:
        self.on_breaker: Callable[[BreakerStatus], None] = lambda status: None
        """Told of every change."""
        self.backoff = backoff or Backoff()
        self._breakers: dict[str, Breaker] = {}
        self._waits: set[asyncio.Future[BreakerStatus]] = set()
        self._told: dict[str, BreakerStatus] = {}

    def add(
        self, component: str, probe: Probe, failures: int, changed: Callable[[Breaker], None] | None = None
    ) -> Breaker:
        """The component's breaker; made when it is first asked for."""
        if component not in self._breakers:

            def tell(breaker: Breaker) -> None:
                if changed is not None:
                    changed(breaker)
                self._tell(breaker)

            self._breakers[component] = Breaker(component, probe, failures=failures, changed=tell, backoff=self.backoff)
        return self._breakers[component]

    def __getitem__(self, component: str) -> Breaker:
        return self._breakers[component]

    async def wait(self, components: Iterable[str], seconds: float, *, since_opening: bool = False) -> None:
        """Return once all of them are closed; raises `HeldTooLong` after so long. With `since_opening`, the time that a
        breaker was open before counts too."""
        for component in components:
            breaker = self._breakers[component]
            try:
                async with asyncio.timeout(seconds - (breaker.open_seconds if since_opening else 0.0)):
                    await breaker.wait()
            except TimeoutError as error:
                raise HeldTooLong(breaker) from error

    async def lasting(self, components: Iterable[str], seconds: float) -> HeldTooLong:
        """Return, with the error for it, when one of them has been open for so long without a break."""
        waits = [asyncio.ensure_future(self._breakers[component].lasts(seconds)) for component in components]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return HeldTooLong(done.pop().result())
        finally:
            for wait in waits:
                wait.cancel()

    @property
    def statuses(self) -> list[BreakerStatus]:
        return [breaker.status for breaker in self._breakers.values()]

    async def changed(self) -> BreakerStatus:
        """Wait for the next change."""
        wait: asyncio.Future[BreakerStatus] = asyncio.get_running_loop().create_future()
        self._waits.add(wait)
        try:
            return await wait
        finally:
            self._waits.discard(wait)

    def _tell(self, breaker: Breaker) -> None:
        status = breaker.status
        if self._told.get(breaker.component) == status:
            return
        self._told[breaker.component] = status
        for wait in list(self._waits):
            if not wait.done():
                wait.set_result(status)
        self.on_breaker(status)

    async def close(self) -> None:
        await asyncio.gather(*(breaker.close() for breaker in self._breakers.values()))
