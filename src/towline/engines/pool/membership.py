"""Who serves: how replicas leave the pool and come back into it.

A replica leaves at the first call that finds it gone. It comes back with the pool's current weights, or not at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from towline.engines.base import Engine, EngineGone, EngineInfo, PauseMode
from towline.engines.pool.combining import combine
from towline.engines.pool.dispatch import Dispatcher
from towline.engines.pool.replica import Replica, Weights
from towline.errors import EngineError

log = logging.getLogger("towline.engines")
_GRACE = 1.0
"""Seconds that turns on a lost replica have to fail by themselves, with what they had got, before they are given up."""
_EARLY = 0.01
"""Seconds by which a timer may fire too early."""


class Membership:
    def __init__(self, replicas: Sequence[Replica], deadline: float):
        self.replicas = replicas
        self.dispatcher = Dispatcher(replicas)
        self.deadline = deadline
        self.weights = Weights(0)
        """What every replica must have to serve."""
        self.version = 0
        """Of the weights that the pool last had for certain: while an update is under way, those before it."""
        self.changing = asyncio.Lock()
        """Held while weights or the pause change, so that no replica comes in between."""
        self.updating = asyncio.Lock()
        self.watchers: list[Callable[[], None]] = []
        """Called when replicas that are out may find it worth while to try again."""
        self.on_reach: list[Callable[[str], None]] = []
        """Told of the trouble when the last replica leaves, and with an empty text when the first is back."""
        self._inhabited = asyncio.Event()
        self._deserted = 0.0
        """Since when no replica serves, if none does."""

    @property
    def serving(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.serving]

    @property
    def info(self) -> EngineInfo:
        """What those that have served are together."""
        infos = {replica.name: replica.info for replica in self.replicas if replica.info is not None}
        return combine(infos or {replica.name: replica.engine.info for replica in self.replicas})

    def check(self, replica: Replica) -> None:
        """Raise for a replica that is not what the pool is."""
        infos = {r.name: r.info for r in self.replicas if r.info is not None and r is not replica}
        info = replica.engine.info
        if infos and combine({**infos, replica.name: info}).capture is not combine(infos).capture:
            raise EngineError(f"it tells less of a turn than the others: {info.capture}")

    def admit(self, replica: Replica) -> None:
        """The replica has the current weights: it serves."""
        replica.epoch += 1
        replica.info = replica.engine.info
        replica.serving, replica.trouble = True, ""
        if not self._inhabited.is_set():
            self._inhabited.set()
            self._tell_reach("")
        self.dispatcher.rearrange()

    async def readmit(self, replica: Replica, weights: Weights) -> bool:
        """Let the replica serve, unless the weights that it was given have become old."""
        async with self.changing:
            if weights != self.weights:
                return False
            if not self.dispatcher.open:
                await self._hold(replica)
            self.admit(replica)
            return True

    async def _hold(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(_GRACE):
                await replica.engine.pause(PauseMode.ABORT)
        except TimeoutError as error:
            raise EngineGone("it answers, but does not pause") from error

    def lose(self, replica: Replica, reason: str) -> None:
        """The replica serves no more; what runs there goes on elsewhere."""
        if not replica.serving:
            return
        replica.serving, replica.trouble, replica.load = False, reason, None
        replica.counts.failures += 1
        log.warning("replica %s left the pool: %s", replica.name, reason)
        asyncio.get_running_loop().call_later(_GRACE, self._give_up, replica, replica.epoch)
        if not self.serving:
            self._inhabited.clear()
            self._deserted = asyncio.get_running_loop().time()
            self.await_replicas()
            self._tell_reach(f"no replica serves: {self.troubles()}")
        self.dispatcher.rearrange()

    def _tell_reach(self, trouble: str) -> None:
        for tell in self.on_reach:
            tell(trouble)

    async def inhabited(self) -> bool:
        """Wait until a replica serves, up to the deadline."""
        try:
            async with asyncio.timeout(self.deadline):
                await self._inhabited.wait()
        except TimeoutError:
            return False
        return True

    def stir(self) -> None:
        for watcher in self.watchers:
            watcher()

    def _give_up(self, replica: Replica, epoch: int) -> None:
        if replica.epoch == epoch:
            replica.give_up()

    def end_strays(self) -> None:
        """End what still runs on replicas that left: nothing may sample there under weights of the past."""
        for replica in self.replicas:
            if not replica.serving:
                replica.give_up()

    async def each(self, act: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
        """Do the same on every replica that serves; those that cannot do it leave."""
        replicas = self.serving
        calls = (replica.do(act(replica.engine)) for replica in replicas)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, EngineError):
                self.lose(replica, str(outcome))
            elif outcome is not None:
                raise outcome

    def reopen(self) -> None:
        """The pool is resumed: those who wait get their slots, and if no replica serves, their patience starts anew."""
        self.dispatcher.open = True
        self._deserted = asyncio.get_running_loop().time()
        self.await_replicas()
        self.dispatcher.rearrange()

    def await_replicas(self) -> None:
        """Those who wait from here on while no replica serves do so until the deadline."""
        if not self.serving:
            asyncio.get_running_loop().call_later(self.deadline, self._expire)

    def _expire(self) -> None:
        if self.serving or not self.dispatcher.open:
            return
        began = asyncio.get_running_loop().time() - self.deadline + _EARLY
        for waiter in list(self.dispatcher.waiting()):
            if max(waiter.since, self._deserted) <= began:
                told = f"no replica has served for {self.deadline:g} s: {self.troubles()}"
                waiter.slot.set_exception(EngineError(told))

    def troubles(self) -> str:
        return "; ".join(f"{replica.name}: {replica.trouble}" for replica in self.replicas if not replica.serving)
