"""Which replicas serve: how one leaves the pool, how it comes back, and how all of them get new weights.

A replica leaves at the first call that finds it unreachable, or when its health checks fail. It comes back with the pool's
current weights, or not at all: once it answers again it is given the weights, inspected again, paused if the pool is
paused, and only then serves. While it serves, the load that it reports sets its concurrency limit.

A weight update succeeds if at least one replica takes the weights: then they are the pool's. If none does, the pool stays
at those it had. A replica that could not take them leaves, and comes back with whatever the pool's weights are then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from towline.engines.base import (
    AnnouncesVersions,
    Engine,
    EngineInfo,
    EngineUnreachable,
    PauseMode,
)
from towline.engines.pool.dispatch import Dispatcher
from towline.engines.pool.replica import PoolWeights, Replica, combine_infos
from towline.errors import EngineError

log = logging.getLogger("towline.engines")
_GRACE = 1.0
"""Seconds that turns on a lost replica have to fail by themselves, with what they had got, before they are cancelled."""
_EARLY = 0.01
"""Seconds by which a timer may fire too early."""
_READY_TIMEOUT = 1.0
"""Seconds that an engine has to confirm that it is not paused."""


class PoolMembership:
    """The replicas of a pool, with the weights that each must have to serve."""

    def __init__(self, replicas: Sequence[Replica], deadline: float):
        self.replicas = replicas
        self.dispatcher = Dispatcher(replicas)
        self.deadline = deadline
        self.weights = PoolWeights(0)
        """What every replica must have to serve."""
        self.version = 0
        """Version of the last confirmed weights: during an update, those before it."""
        self.changing = asyncio.Lock()
        """Held while weights or the pause change, so that no replica joins in between."""
        self.updating = asyncio.Lock()
        self.wake_callbacks: list[Callable[[], None]] = []
        """Called when it may be worth while for replicas that are out to try again."""
        self.outage_callbacks: list[Callable[[str], None]] = []
        """Called with the reason when the last replica leaves, and with an empty text when the first is back."""
        self._has_replica = asyncio.Event()
        self._empty_since = 0.0
        """Since when no replica serves, if none does."""

    @property
    def serving(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.serving]

    @property
    def info(self) -> EngineInfo:
        """What the replicas that have served are together."""
        infos = {replica.name: replica.info for replica in self.replicas if replica.info is not None}
        return combine_infos(infos or {replica.name: replica.engine.info for replica in self.replicas})

    def check(self, replica: Replica) -> None:
        """Raise for a replica that does not match the pool."""
        infos = {r.name: r.info for r in self.replicas if r.info is not None and r is not replica}
        info = replica.engine.info
        if infos and combine_infos({**infos, replica.name: info}).capture is not combine_infos(infos).capture:
            raise EngineError(f"it reports less of a turn than the others: {info.capture}")

    def admit(self, replica: Replica) -> None:
        """Let a replica serve that has the current weights."""
        replica.epoch += 1
        replica.info = replica.engine.info
        replica.serving, replica.problem = True, ""
        if not self._has_replica.is_set():
            self._has_replica.set()
            self._notify_outage("")
        self.dispatcher.redistribute()

    async def readmit(self, replica: Replica, weights: PoolWeights) -> bool:
        """Let a replica serve, unless the weights that it was given are outdated by now."""
        async with self.changing:
            if weights != self.weights:
                return False
            if not self.dispatcher.open:
                await self._pause(replica)
            self.admit(replica)
            return True

    async def _pause(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(_GRACE):
                await replica.engine.pause(PauseMode.ABORT)
        except TimeoutError as error:
            raise EngineUnreachable("it answers, but does not pause") from error

    def remove(self, replica: Replica, reason: str) -> None:
        """The replica stops serving; its turns continue on others."""
        if not replica.serving:
            return
        replica.serving, replica.problem, replica.load = False, reason, None
        replica.counters.failures += 1
        log.warning("replica %s left the pool: %s", replica.name, reason)
        asyncio.get_running_loop().call_later(_GRACE, self._cancel_calls, replica, replica.epoch)
        if not self.serving:
            self._has_replica.clear()
            self._empty_since = asyncio.get_running_loop().time()
            self.start_outage_timer()
            self._notify_outage(self.outage)
        self.dispatcher.redistribute()

    def _cancel_calls(self, replica: Replica, epoch: int) -> None:
        if replica.epoch == epoch:
            replica.cancel_calls()

    def _notify_outage(self, reason: str) -> None:
        for callback in self.outage_callbacks:
            callback(reason)

    @property
    def outage(self) -> str:
        """Why no replica serves; empty while one does."""
        return "" if self.serving else f"no replica serves: {self.problems()}"

    def problems(self) -> str:
        return "; ".join(f"{replica.name}: {replica.problem}" for replica in self.replicas if not replica.serving)

    async def wait_for_replica(self) -> bool:
        """Wait until a replica serves, up to the deadline."""
        try:
            async with asyncio.timeout(self.deadline):
                await self._has_replica.wait()
        except TimeoutError:
            return False
        return True

    def wake_monitors(self) -> None:
        for callback in self.wake_callbacks:
            callback()

    def cancel_strays(self) -> None:
        """Cancel what still runs on replicas that left: nothing may sample there under outdated weights."""
        for replica in self.replicas:
            if not replica.serving:
                replica.cancel_calls()

    async def call_each(self, act: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
        """Do the same on every replica that serves; those that fail leave."""
        replicas = self.serving
        calls = (replica.call(act(replica.engine)) for replica in replicas)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, EngineError):
                self.remove(replica, str(outcome))
            elif outcome is not None:
                raise outcome

    def reopen(self) -> None:
        """The pool is resumed: waiting turns get their slots; if no replica serves, their deadline starts over."""
        self.dispatcher.open = True
        self._empty_since = asyncio.get_running_loop().time()
        self.start_outage_timer()
        self.dispatcher.redistribute()

    def start_outage_timer(self) -> None:
        """Turns that wait from here on while no replica serves do so until the deadline."""
        if not self.serving:
            asyncio.get_running_loop().call_later(self.deadline, self._expire)

    def _expire(self) -> None:
        if self.serving or not self.dispatcher.open:
            return
        began = asyncio.get_running_loop().time() - self.deadline + _EARLY
        for turn in list(self.dispatcher.waiting()):
            if max(turn.queued_at, self._empty_since) <= began:
                message = f"no replica has served for {self.deadline:g} s: {self.problems()}"
                turn.slot.set_exception(EngineError(message))

    async def update_weights(self, weights: PoolWeights) -> None:
        """Give new weights to every replica; raises `EngineError` if none takes them."""
        async with self.updating:
            before = self.weights
            async with self.changing:
                self.weights = weights
                serving = self.serving
                failed = await self._load_on(serving, weights)
                taken = len(failed) < len(serving)
                if serving and not taken:
                    self.weights = before
                for replica, error in failed.items():
                    if not taken and await _kept_weights(replica.engine, error):
                        continue
                    replica.weights_unknown = True
                    self.remove(replica, f"it could not load the weights of version {weights.version}: {error}")
                self.cancel_strays()
            # If no replica serves, the first to come back is given these weights, which shows whether they can be used.
            taken = taken or (not serving and await self.wait_for_replica())
            if not taken:
                if self.weights == weights:
                    self.weights = before
                reasons = "; ".join(f"{replica.name}: {error}" for replica, error in failed.items()) or self.problems()
                raise EngineError(f"no replica took the weights of version {weights.version}: {reasons}")
            self.version = weights.version

    async def announce(self, version: int | None) -> int:
        """Announce a version to every replica that serves, and return it; with `None`, the highest that one reports.

        A replica that cannot have these weights leaves; if none can, it is an error and all stay.
        """
        serving = self.serving
        outcomes = await asyncio.gather(*(r.call(_announce(r, version)) for r in serving), return_exceptions=True)
        failed = {r: o for r, o in zip(serving, outcomes, strict=True) if isinstance(o, BaseException)}
        reached = [o for o in outcomes if isinstance(o, int)]
        for error in failed.values():
            if not isinstance(error, EngineError):
                raise error
        if not reached:
            reasons = "; ".join(f"{replica.name}: {error}" for replica, error in failed.items()) or self.problems()
            raise EngineError(f"no replica takes the announced version: {reasons}")
        for replica, error in failed.items():
            self.remove(replica, str(error))
        return max(reached)

    async def _load_on(self, replicas: list[Replica], weights: PoolWeights) -> dict[Replica, BaseException]:
        """Load the weights on all replicas at once; returns the failures."""
        assert weights.folder is not None
        calls = (replica.call(replica.engine.update_weights(weights.folder, weights.version)) for replica in replicas)
        for replica in replicas:
            replica.updating = True
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for replica in replicas:
            replica.updating = False
        self.wake_monitors()
        return {r: o for r, o in zip(replicas, outcomes, strict=True) if isinstance(o, BaseException)}


async def _announce(replica: Replica, version: int | None) -> int:
    if not isinstance(replica.engine, AnnouncesVersions):
        raise EngineError("its weights cannot be replaced by other means than a folder")
    return await replica.engine.announce(version)


async def _kept_weights(engine: Engine, error: BaseException) -> bool:
    """Whether an engine that refused weights continues with those it had: one that is not sure of them stays paused."""
    if not isinstance(error, EngineError) or isinstance(error, EngineUnreachable):
        return False
    try:
        async with asyncio.timeout(_READY_TIMEOUT):
            await engine.ready()
    except (TimeoutError, EngineError):
        return False
    return True
