"""A pool of replicas, itself an engine: a turn goes to a replica, and to another if that one dies during it.

Invariants:
- Every turn gets one result: the turns of a replica that dies continue on others, from their prompt and the tokens so
  far, and the caller sees only the flag `moved`. Each token enters a turn once: what a lost replica had streamed is kept,
  what it had not sent is sampled again (`PooledTurn`).
- One policy version: a replica serves only with the current weights. After `update_weights` returns, no replica samples
  under an older version; one that failed the update is out until it has the weights. The version of each token is that of
  the replica which sampled it. A trainer that pushes weights by its own means reaches one replica after the other: until
  it announces the version, replicas serve with the weights they have, each token labelled with its own.

Metrics of the replicas are read when Prometheus scrapes; the label `engine` is the replica's name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from towline.common.background import BackgroundTasks
from towline.common.images import ImagePlaceholder
from towline.conversation import Finish, Media
from towline.engines.base import (
    AcceptsImages,
    AnnouncesVersions,
    Engine,
    EngineInfo,
    EngineUnreachable,
    PauseMode,
    PoisonTurn,
    Sample,
    SampleRequest,
)
from towline.engines.pool.dispatch import Dispatcher, QueuedTurn
from towline.engines.pool.membership import PoolMembership
from towline.engines.pool.monitor import ReplicaMonitor
from towline.engines.pool.replica import ConcurrencyLimit, PoolWeights, Replica, combine_infos
from towline.engines.pool.turn import PooledTurn
from towline.engines.pool.upstreams import ReplicaListing
from towline.engines.stalls import PauseGate, PauseState
from towline.engines.validation import check_sample
from towline.errors import EngineError

_START_RETRY = 2.0
"""Seconds between two attempts to reach the first replica."""


_GAUGES: dict[str, tuple[str, Callable[[Replica], float | None]]] = {
    "towline_engine_healthy": ("1 while the replica serves", lambda r: r.serving),
    "towline_engine_in_flight": ("Turns on the replica", lambda r: r.in_flight),
    "towline_engine_limit": ("Maximum number of turns that may run on it at once", lambda r: r.concurrency.limit),
    "towline_engine_version": ("Policy version of its weights", lambda r: r.engine.version),
    "towline_engine_kv_usage": ("Share of its key-value cache in use", lambda r: r.load.kv_usage if r.load else None),
    "towline_engine_queued": ("Turns in its own queue", lambda r: r.load.waiting if r.load else None),
}
_COUNTERS: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "towline_engine_turns": ("Turns that it returned", lambda r: r.counters.turns),
    "towline_engine_tokens": ("Tokens that it sampled", lambda r: r.counters.tokens),
    "towline_engine_prompt_tokens": ("Prompt tokens that it was given", lambda r: r.counters.prompt_tokens),
    "towline_engine_cached_tokens": ("Prompt tokens that came from its cache", lambda r: r.counters.cached_tokens),
    "towline_engine_moved_turns": ("Turns that other replicas continued", lambda r: r.counters.moved),
    "towline_engine_failures": ("How often it left the pool", lambda r: r.counters.failures),
}


def replica_metrics(replicas: Sequence[Replica], dispatcher: Dispatcher) -> Iterator[Metric]:
    for name, (help, gauge) in _GAUGES.items():
        family = GaugeMetricFamily(name, help, labels=["engine"])
        for replica in replicas:
            value = gauge(replica)
            if value is not None:
                family.add_metric([replica.name], value)
        yield family
    for name, (help, counter) in _COUNTERS.items():
        counted = CounterMetricFamily(name, help, labels=["engine"])
        for replica in replicas:
            counted.add_metric([replica.name], counter(replica))
        yield counted
    waiting = GaugeMetricFamily(
        "towline_engine_waiting", "Turns waiting in the pool; `any`: for any replica", labels=["engine"]
    )
    waiting.add_metric(["any"], dispatcher.waiting_for(None))
    for replica in replicas:
        waiting.add_metric([replica.name], dispatcher.waiting_for(replica))
    yield waiting


log = logging.getLogger("towline.engines")


class EnginePool:
    """Replicas of one model behind the interface of one engine."""

    def __init__(
        self,
        replicas: Sequence[Engine] | Mapping[str, Engine],
        *,
        limit: int = 64,
        max_limit: int = 1024,
        interval: float = 1.0,
        deadline: float = 300.0,
        max_moves: int = 8,
        max_fruitless: int = 2,
        listing: ReplicaListing | None = None,
        start_seconds: float = 0.0,
    ):
        """
        `replicas`: engines of one model, by name; without names, by number.
        `limit`: how many turns run on a replica at once to begin with; `max_limit`: how far that may grow.
        `interval`: seconds between two health checks of a replica.
        `deadline`: seconds that a turn waits while no replica serves.
        `max_moves`: how many replicas may die during one turn before it is taken to be the cause; `max_fruitless`: how many
        in a row without a token in between, counting only those whose death this turn was the first to notice: the other
        turns of a replica that one turn kills are not to blame.
        `listing`: lists further replicas, which join and leave as it does.
        `start_seconds`: how long `start` waits for the first replica.
        """
        named = replicas if isinstance(replicas, Mapping) else {str(n): engine for n, engine in enumerate(replicas)}
        if not named and listing is None:
            raise EngineError("a pool needs at least one replica")
        self._limits, self._interval = (limit, max_limit), interval
        self._listing, self._start_seconds = listing, start_seconds
        self.replicas: list[Replica] = []
        self._members = PoolMembership(self.replicas, deadline)
        self._dispatcher = self._members.dispatcher
        self._monitors: dict[Replica, ReplicaMonitor] = {}
        self._background = BackgroundTasks()
        self._max_moves, self._max_fruitless = max_moves, max_fruitless
        self._gate = PauseGate()
        self._started = self._closed = False
        for name, engine in named.items():
            self._add(name, engine)

    @property
    def info(self) -> EngineInfo:
        return self._members.info

    @property
    def version(self) -> int:
        return self._members.version

    @property
    def pauses(self) -> PauseState:
        return self._gate.pauses

    @property
    def outage(self) -> str:
        return self._members.outage

    def on_outage(self, callback: Callable[[str], None]) -> None:
        self._members.outage_callbacks.append(callback)

    async def start(self) -> None:
        """Start every replica. At least one must be reachable, before `start_seconds` are over; the others join when they
        answer."""
        if self._started:
            return
        loop = asyncio.get_running_loop()
        deadline, waited = loop.time() + self._start_seconds, False
        while not await self._start_replicas(quiet=waited):
            left = deadline - loop.time()
            if left <= 0:
                raise EngineError(f"no replica can be reached: {self._members.problems()}")
            if not waited:
                log.warning("waiting up to %g s for the engine: %s", self._start_seconds, self._members.problems())
            waited = True
            await asyncio.sleep(min(_START_RETRY, left))
        if waited:
            log.warning("the engine is up: %s", ", ".join(replica.name for replica in self._members.serving))
        for monitor in self._monitors.values():
            monitor.start()
        self._started = True
        if self._listing is not None:
            self._background.start(self._follow_listing(self._listing), "replica listing")

    async def _start_replicas(self, *, quiet: bool) -> bool:
        """Start the replicas that are reachable; returns whether there are any."""
        await self._list()
        starts = (replica.engine.start() for replica in self.replicas)
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        for replica, outcome in zip(self.replicas, outcomes, strict=True):
            replica.problem = "" if outcome is None else str(outcome)
            if isinstance(outcome, EngineUnreachable):
                if not quiet:
                    log.warning("replica %s is not reachable yet: %s", replica.name, outcome)
            elif isinstance(outcome, EngineError):
                raise EngineError(f"replica {replica.name} cannot be used: {outcome}") from outcome
            elif outcome is not None:
                raise outcome
        started = [replica for replica in self.replicas if not replica.problem]
        if not started:
            return False
        combine_infos({replica.name: replica.engine.info for replica in started})
        version = max(replica.engine.version for replica in started)
        self._members.weights, self._members.version = PoolWeights(version), version
        for replica in started:
            if replica.engine.version == version:
                self._members.admit(replica)
            else:
                replica.problem = f"it has weights of version {replica.engine.version}, others of {version}"
                log.warning("replica %s waits for the next weights: %s", replica.name, replica.problem)
        return True

    # Replicas that come and go

    def _add(self, name: str, engine: Engine) -> None:
        limit, maximum = self._limits
        replica = Replica(name, engine, ConcurrencyLimit(limit, maximum=maximum))
        self.replicas.append(replica)
        self._dispatcher.add(replica)
        self._monitors[replica] = monitor = ReplicaMonitor(self._members, replica, self._interval)
        if self._started:
            monitor.start()

    async def _drop(self, replica: Replica) -> None:
        """Forget a replica that does not serve."""
        await self._monitors.pop(replica).stop()
        replica.cancel_calls()
        self.replicas.remove(replica)
        self._dispatcher.drop(replica)
        await replica.engine.close()

    async def _list(self) -> None:
        """Add the replicas that are listed now; forget those that are not and do not serve."""
        if self._listing is None:
            return
        listed = await self._listing.replicas()
        own = {replica.name for replica in self.replicas}
        for name, url in listed.items():
            if name not in own:
                self._add(name, self._listing.make(url))
        for replica in [one for one in self.replicas if one.name not in listed and not one.serving]:
            await self._drop(replica)

    async def _follow_listing(self, listing: ReplicaListing) -> None:
        while True:
            await asyncio.sleep(listing.interval)
            before = {replica.name for replica in self.replicas}
            try:
                await self._list()
            except EngineError as error:
                log.error("the replicas stay as they are: %s", error)
            now = {replica.name for replica in self.replicas}
            if now != before:
                added, dropped = (", ".join(sorted(names)) or "none" for names in (now - before, before - now))
                log.warning("replicas added: %s; forgotten: %s", added, dropped)

    async def close(self) -> None:
        self._closed = True
        await self._background.close()
        await asyncio.gather(*(monitor.stop() for monitor in self._monitors.values()))
        for turn in list(self._dispatcher.waiting()):
            turn.slot.set_exception(EngineError("the pool is closed"))
        for replica in self.replicas:
            replica.serving, replica.problem = False, "the pool is closed"
        await asyncio.gather(*(replica.engine.close() for replica in self.replicas))

    # Turns

    async def sample(self, request: SampleRequest) -> Sample:
        turn, arrival = PooledTurn(request), self._dispatcher.arrive(request.id)
        while (replica := await self._wait_for_slot(request, arrival)) is not None:
            epoch = replica.epoch
            try:
                rest = turn.remaining()
                part = check_sample(
                    await replica.call(replica.engine.sample(rest)), rest, replica.engine.info.vocabulary
                )
            except EngineUnreachable as error:
                self._dispatcher.release(replica)
                replica.counters.moved += 1
                first = replica.epoch == epoch and replica.serving
                if first:
                    self._members.remove(replica, str(error))
                if (finished := turn.replica_lost(error.partial, first=first)) is not None:
                    return finished
                if turn.moves > self._max_moves or turn.fruitless > self._max_fruitless:
                    raise PoisonTurn(f"{turn.moves} replicas were lost during this turn; the last: {error}") from error
                continue
            except BaseException:
                self._dispatcher.release(replica)
                raise
            replica.record(part)
            if part.finish is Finish.ABORT:
                self._dispatcher.keep_place(request.id, arrival)
            # Not at once: a turn that was cut short and comes back immediately finds its place.
            asyncio.get_running_loop().call_soon(self._dispatcher.release, replica)
            return turn.complete(part)
        self._dispatcher.keep_place(request.id, arrival)
        return turn.aborted()

    async def _wait_for_slot(self, request: SampleRequest, arrival: int) -> Replica | None:
        """A replica with a slot for the turn; None if the turn is aborted before it has one."""
        loop = asyncio.get_running_loop()
        with request.suspended():
            while True:
                if self._closed or not self._started:
                    raise EngineError("the pool is closed" if self._closed else "the pool is not started")
                slot: asyncio.Future[Replica | None] = loop.create_future()
                self._dispatcher.enqueue(
                    QueuedTurn(arrival, loop.time(), request.id, request.conversation, request.group, slot)
                )
                self._members.start_outage_timer()
                try:
                    replica = await slot
                except asyncio.CancelledError:
                    granted = None if slot.cancel() or slot.exception() is not None else slot.result()
                    if granted is not None:
                        self._dispatcher.release(granted)
                    raise
                if replica is None or replica.serving:
                    return replica
                self._dispatcher.release(replica)

    async def abort(self, ids: Sequence[str]) -> None:
        names = frozenset(ids)
        for turn in list(self._dispatcher.waiting()):
            if turn.id in names:
                turn.slot.set_result(None)
        await self._members.call_each(lambda engine: engine.abort(ids))

    async def render_media(self, media: Sequence[Media]) -> Sequence[ImagePlaceholder | None]:
        """By any replica: all of them render alike."""
        while await self._members.wait_for_replica():
            replica = min(self._members.serving, key=lambda replica: replica.utilization)
            if not isinstance(replica.engine, AcceptsImages):
                return [None] * len(media)
            try:
                return await replica.call(replica.engine.render_media(media))
            except EngineUnreachable as error:
                self._members.remove(replica, str(error))
        raise EngineError(f"no replica can render the images: {self._members.problems()}")

    # One policy over all replicas

    async def pause(self, mode: PauseMode = PauseMode.DRAIN, deadline: float | None = None) -> None:
        async with self._members.changing:
            self._gate.clear()
            self._dispatcher.open = False
            await self._members.call_each(lambda engine: engine.pause(mode, deadline))
            self._members.cancel_strays()

    async def resume(self, version: int | None = None) -> None:
        async with self._members.changing:
            await self._members.call_each(lambda engine: engine.resume(version))
            if version is not None and version != self.version:
                self._members.cancel_strays()
                self._members.weights, self._members.version = PoolWeights(version, pushed=True), version
            self._gate.set()
            # Turns that were cut short come before those that have not begun: let them queue first.
            await asyncio.sleep(0)
            self._members.reopen()

    async def announce(self, version: int | None) -> int:
        """Note that a trainer has replaced the weights of the replicas by its own means; nothing is paused."""
        async with self._members.changing:
            announced = await self._members.announce(version)
            self._members.weights, self._members.version = PoolWeights(announced, pushed=True), announced
            self._members.wake_monitors()
            return announced

    async def same_weights(self) -> bool:
        engines = [replica.engine for replica in self._members.serving]
        return bool(engines) and all(
            [isinstance(engine, AnnouncesVersions) and await engine.same_weights() for engine in engines]
        )

    async def ready(self) -> None:
        await self._gate.wait()

    async def update_weights(self, folder: Path, version: int) -> None:
        """Replace the weights of every replica. Those that fail leave, and come back with these weights; if none takes
        them, the pool stays at the weights it had."""
        # Half an update would leave replicas with different weights: it continues even if the caller is cancelled.
        updating = asyncio.get_running_loop().create_task(self._update(PoolWeights(version, folder)))
        updating.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(updating)

    async def _update(self, weights: PoolWeights) -> None:
        self.pauses.add("updating")
        try:
            await self._members.update_weights(weights)
        finally:
            self.pauses.remove("updating")

    def collect(self) -> Iterable[Metric]:
        """Metrics of each replica, for a Prometheus registry that this pool is registered with."""
        return replica_metrics(self.replicas, self._dispatcher)
