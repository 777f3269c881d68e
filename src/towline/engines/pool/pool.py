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
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from towline.common.images import ImagePlaceholder
from towline.conversation import Finish, Media
from towline.engines.base import (
    MOVED,
    AcceptsImages,
    AnnouncesVersions,
    Engine,
    EngineInfo,
    EngineUnreachable,
    Ids,
    PauseMode,
    PoisonTurn,
    Sample,
    SampleRequest,
)
from towline.engines.pool.dispatch import Dispatcher, QueuedTurn
from towline.engines.pool.membership import PoolMembership, ReplicaMonitor
from towline.engines.pool.replica import ConcurrencyLimit, PoolWeights, Replica, combine_infos
from towline.engines.stalls import PauseGate, PauseState
from towline.engines.validation import check_sample
from towline.errors import EngineError

_NONE: Ids = np.empty(0, np.int32)


@dataclass(slots=True)
class PooledTurn:
    """A turn and the parts of it that replicas have sampled."""

    request: SampleRequest
    parts: list[Sample] = field(default_factory=list)
    moves: int = 0
    fruitless: int = 0
    """Consecutive replicas whose death this turn was the first to notice, since it last got a token."""

    def replica_lost(self, partial: Sample | None, *, first: bool) -> Sample | None:
        """Keep what a lost replica had sampled; `first`: this turn noticed the loss first. Returns the whole turn if
        nothing more was to come."""
        self.moves += 1
        self.fruitless += first
        if partial is None or not self._can_continue(partial):
            return None
        self.fruitless = 0
        self.parts.append(partial)
        if int(partial.ids[-1]) in self.request.stop_ids:
            return self._join(Finish.STOP)
        if self.remaining().max_tokens <= 0:
            return self._join(Finish.LENGTH)
        return None

    def remaining(self) -> SampleRequest:
        """The request for what is still missing."""
        if not self.parts:
            return self.request
        request, so_far = self.request, np.concatenate([part.ids for part in self.parts])
        return replace(
            request,
            prompt=np.concatenate([request.prompt, so_far]),
            max_tokens=request.max_tokens - len(so_far),
            forced=None if request.forced is None else request.forced[len(so_far) :],
        )

    def complete(self, last: Sample) -> Sample:
        """The whole turn, with its last part."""
        if not self.moves:
            return last
        self.parts.append(last)
        return self._join(last.finish)

    def aborted(self) -> Sample:
        """The turn as it is, ended before a replica took it."""
        nothing = Sample(_NONE, np.empty(0, np.float32), _NONE, Finish.ABORT, len(self.remaining().prompt))
        return self.complete(nothing)

    def _can_continue(self, partial: Sample) -> bool:
        """A stop string may span parts, and a server that renders by itself cannot continue half a reply: both restart."""
        return len(partial.ids) > 0 and partial.prompt is None and not self.request.stop_strings

    def _join(self, finish: Finish) -> Sample:
        first, last = self.parts[0], self.parts[-1]
        before = sum(len(part.ids) for part in self.parts[:-1])
        return Sample(
            ids=np.concatenate([part.ids for part in self.parts]),
            logprobs=np.concatenate([part.logprobs for part in self.parts]),
            versions=np.concatenate([part.versions for part in self.parts]),
            finish=finish,
            # The last replica saw the prompt and what had been sampled after it.
            prompt_tokens=last.prompt_tokens - before,
            cached_tokens=min(first.cached_tokens, len(self.request.prompt)),
            mixed_cache=sum(part.mixed_cache for part in self.parts),
            stop_string=last.stop_string,
            flags=tuple(dict.fromkeys([MOVED, *(flag for part in self.parts for flag in part.flags)])),
            prompt=last.prompt,
            reply=last.reply,
        )


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
    ):
        """
        `replicas`: engines of one model, by name; without names, by number.
        `limit`: how many turns run on a replica at once to begin with; `max_limit`: how far that may grow.
        `interval`: seconds between two health checks of a replica.
        `deadline`: seconds that a turn waits while no replica serves.
        `max_moves`: how many replicas may die during one turn before it is taken to be the cause; `max_fruitless`: how many
        in a row without a token in between, counting only those whose death this turn was the first to notice: the other
        turns of a replica that one turn kills are not to blame.
        """
        named = replicas if isinstance(replicas, Mapping) else {str(n): engine for n, engine in enumerate(replicas)}
        if not named:
            raise EngineError("a pool needs at least one replica")
        self.replicas = [
            Replica(name, engine, ConcurrencyLimit(limit, maximum=max_limit)) for name, engine in named.items()
        ]
        self._members = PoolMembership(self.replicas, deadline)
        self._dispatcher = self._members.dispatcher
        self._monitors = [ReplicaMonitor(self._members, replica, interval) for replica in self.replicas]
        self._max_moves, self._max_fruitless = max_moves, max_fruitless
        self._gate = PauseGate()
        self._started = self._closed = False

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
        """Start every replica. At least one must be reachable; the others join when they answer."""
        if self._started:
            return
        starts = (replica.engine.start() for replica in self.replicas)
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        for replica, outcome in zip(self.replicas, outcomes, strict=True):
            replica.problem = "" if outcome is None else str(outcome)
            if isinstance(outcome, EngineUnreachable):
                log.warning("replica %s is not reachable yet: %s", replica.name, outcome)
            elif isinstance(outcome, EngineError):
                raise EngineError(f"replica {replica.name} cannot be used: {outcome}") from outcome
            elif outcome is not None:
                raise outcome
        started = [replica for replica in self.replicas if not replica.problem]
        if not started:
            raise EngineError(f"no replica can be reached: {self._members.problems()}")
        combine_infos({replica.name: replica.engine.info for replica in started})
        version = max(replica.engine.version for replica in started)
        self._members.weights, self._members.version = PoolWeights(version), version
        for replica in started:
            if replica.engine.version == version:
                self._members.admit(replica)
            else:
                replica.problem = f"it has weights of version {replica.engine.version}, others of {version}"
                log.warning("replica %s waits for the next weights: %s", replica.name, replica.problem)
        for monitor in self._monitors:
            monitor.start()
        self._started = True

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(monitor.stop() for monitor in self._monitors))
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
