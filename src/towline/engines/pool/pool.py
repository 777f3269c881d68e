"""A pool of replicas, itself an engine: a turn goes to a replica, and to another if that one dies under it.

Invariants:
- Every turn gets one answer: a replica that dies hands its turns to others, from their prompt and the tokens so far, and
  the caller sees only the flag `moved`.
- One version: a replica serves only with the current weights. After `update_weights` returns, no replica samples under an
  older version; one that failed the update is out until it was given the weights again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from prometheus_client import Metric

from towline.conversation import Finish, Media
from towline.engines.base import Engine, EngineGone, EngineInfo, PauseMode, Sample, SampleRequest, Seeing, TurnAtFault
from towline.engines.holds import Gate, Holds
from towline.engines.pool.combining import combine
from towline.engines.pool.dispatch import Waiter
from towline.engines.pool.membership import Membership
from towline.engines.pool.metrics import figures
from towline.engines.pool.pacing import Pace
from towline.engines.pool.replica import Replica, Weights
from towline.engines.pool.turn import MovingTurn
from towline.engines.pool.updating import update
from towline.engines.pool.watching import Watch
from towline.engines.validation import check_sample
from towline.errors import EngineError
from towline.images import Placeholder

log = logging.getLogger("towline.engines")


class Pool:
    def __init__(
        self,
        replicas: Sequence[Engine] | Mapping[str, Engine],
        *,
        limit: int = 64,
        most: int = 1024,
        interval: float = 1.0,
        deadline: float = 300.0,
        moves: int = 8,
        fruitless: int = 2,
    ):
        """
        `replicas`: engines of one model, by name; without names, by number.
        `limit`: how many turns run on a replica at once to begin with; `most`: to how many that may grow.
        `interval`: seconds between two looks at a replica.
        `deadline`: seconds that a turn waits while no replica serves.
        `moves`: how many replicas may die under one turn before it is held to be what kills them; `fruitless`: how many in
        a row without a token in between, counting those whose death this turn was the first to notice: the others of a
        replica that one turn kills are not to blame.
        """
        named = replicas if isinstance(replicas, Mapping) else {str(n): engine for n, engine in enumerate(replicas)}
        if not named:
            raise EngineError("a pool needs at least one replica")
        self.replicas = [Replica(name, engine, Pace(limit, most=most)) for name, engine in named.items()]
        self._members = Membership(self.replicas, deadline)
        self._dispatcher = self._members.dispatcher
        self._watches = [Watch(self._members, replica, interval) for replica in self.replicas]
        self._moves, self._fruitless = moves, fruitless
        self._running = Gate()
        self._started = self._closed = False

    @property
    def info(self) -> EngineInfo:
        return self._members.info

    @property
    def version(self) -> int:
        return self._members.version

    @property
    def holds(self) -> Holds:
        return self._running.holds

    @property
    def trouble(self) -> str:
        return "" if self._members.serving else f"no replica serves: {self._members.troubles()}"

    def watch_reach(self, tell: Callable[[str], None]) -> None:
        self._members.on_reach.append(tell)

    async def start(self) -> None:
        """Start every replica. Those that cannot be reached join when they answer; one at least must."""
        if self._started:
            return
        starts = (replica.engine.start() for replica in self.replicas)
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        for replica, outcome in zip(self.replicas, outcomes, strict=True):
            replica.trouble = "" if outcome is None else str(outcome)
            if isinstance(outcome, EngineGone):
                log.warning("replica %s is not there yet: %s", replica.name, outcome)
            elif isinstance(outcome, EngineError):
                raise EngineError(f"replica {replica.name} cannot be used: {outcome}") from outcome
            elif outcome is not None:
                raise outcome
        begun = [replica for replica in self.replicas if not replica.trouble]
        if not begun:
            raise EngineError(f"no replica can be reached: {self._members.troubles()}")
        combine({replica.name: replica.engine.info for replica in begun})
        version = max(replica.engine.version for replica in begun)
        self._members.weights, self._members.version = Weights(version), version
        for replica in begun:
            if replica.engine.version == version:
                self._members.admit(replica)
            else:
                replica.trouble = f"it has weights of version {replica.engine.version}, others of {version}"
                log.warning("replica %s waits for the next weights: %s", replica.name, replica.trouble)
        for watch in self._watches:
            watch.start()
        self._started = True

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(watch.stop() for watch in self._watches))
        for waiter in list(self._dispatcher.waiting()):
            waiter.slot.set_exception(EngineError("the pool is closed"))
        for replica in self.replicas:
            replica.serving, replica.trouble = False, "the pool is closed"
        await asyncio.gather(*(replica.engine.close() for replica in self.replicas))

    # Turns

    async def sample(self, request: SampleRequest) -> Sample:
        turn, arrival = MovingTurn(request), self._dispatcher.arrive(request.id)
        while (replica := await self._granted(request, arrival)) is not None:
            epoch = replica.epoch
            try:
                asked = turn.rest()
                part = check_sample(
                    await replica.do(replica.engine.sample(asked)), asked, replica.engine.info.vocabulary
                )
            except EngineGone as gone:
                self._dispatcher.leave(replica)
                replica.counts.moved += 1
                first = replica.epoch == epoch and replica.serving
                if first:
                    self._members.lose(replica, str(gone))
                if (finished := turn.move(gone.partial, first=first)) is not None:
                    return finished
                if turn.moves > self._moves or turn.fruitless > self._fruitless:
                    raise TurnAtFault(f"{turn.moves} replicas went away under this turn; the last: {gone}") from gone
                continue
            except BaseException:
                self._dispatcher.leave(replica)
                raise
            replica.count(part)
            if part.finish is Finish.ABORT:
                self._dispatcher.cut(request.id, arrival)
            # Later: a turn that was cut short and comes again at once is to find its place.
            asyncio.get_running_loop().call_soon(self._dispatcher.leave, replica)
            return turn.whole(part)
        self._dispatcher.cut(request.id, arrival)
        return turn.aborted()

    async def _granted(self, request: SampleRequest, arrival: int) -> Replica | None:
        with request.waiting():
            return await self._slot(request, arrival)

    async def _slot(self, request: SampleRequest, arrival: int) -> Replica | None:
        """Wait for a replica; None if the turn is aborted before it has one."""
        loop = asyncio.get_running_loop()
        while True:
            if self._closed or not self._started:
                raise EngineError("the pool is closed" if self._closed else "the pool is not started")
            slot: asyncio.Future[Replica | None] = loop.create_future()
            waiter = Waiter(arrival, loop.time(), request.id, request.conversation, request.group, slot)
            self._dispatcher.enter(waiter)
            self._members.await_replicas()
            try:
                replica = await slot
            except asyncio.CancelledError:
                granted = None if slot.cancel() or slot.exception() is not None else slot.result()
                if granted is not None:
                    self._dispatcher.leave(granted)
                raise
            if replica is None or replica.serving:
                return replica
            self._dispatcher.leave(replica)

    async def abort(self, ids: Sequence[str]) -> None:
        names = frozenset(ids)
        for waiter in list(self._dispatcher.waiting()):
            if waiter.id in names:
                waiter.slot.set_result(None)
        await self._members.each(lambda engine: engine.abort(ids))

    async def render_media(self, media: Sequence[Media]) -> Sequence[Placeholder | None]:
        """By any replica, since all of them prepare alike."""
        while await self._members.inhabited():
            replica = min(self._members.serving, key=lambda replica: replica.fill)
            if not isinstance(replica.engine, Seeing):
                return [None] * len(media)
            try:
                return await replica.do(replica.engine.render_media(media))
            except EngineGone as gone:
                self._members.lose(replica, str(gone))
        raise EngineError(f"no replica can prepare the images: {self._members.troubles()}")

    # One policy over all replicas

    async def pause(self, mode: PauseMode = PauseMode.DRAIN, deadline: float | None = None) -> None:
        async with self._members.changing:
            self._running.clear()
            self._dispatcher.open = False
            await self._members.each(lambda engine: engine.pause(mode, deadline))
            self._members.end_strays()

    async def resume(self, version: int | None = None) -> None:
        async with self._members.changing:
            await self._members.each(lambda engine: engine.resume(version))
            if version is not None and version != self.version:
                self._members.end_strays()
                self._members.weights, self._members.version = Weights(version, pushed=True), version
            self._running.set()
            # Turns that were cut short come before those that have not begun: let them enter.
            await asyncio.sleep(0)
            self._members.reopen()

    async def ready(self) -> None:
        await self._running.wait()

    async def update_weights(self, folder: Path, version: int) -> None:
        """Replace the weights of every replica. Those that fail leave, and return with these weights; if none takes them,
        the pool stays at the weights it had."""
        # Half an update would leave replicas with different weights: it goes on even if the caller leaves.
        giving = asyncio.get_running_loop().create_task(self._update(Weights(version, folder)))
        giving.add_done_callback(lambda giving: giving.cancelled() or giving.exception())
        await asyncio.shield(giving)

    async def _update(self, weights: Weights) -> None:
        self.holds.hold("updating")
        try:
            await update(self._members, weights)
        finally:
            self.holds.release("updating")

    # Figures

    def collect(self) -> Iterable[Metric]:
        """Figures of each replica, for a Prometheus registry that this pool is registered with."""
        return figures(self.replicas, self._dispatcher)
