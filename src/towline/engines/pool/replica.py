"""One replica: an engine, what the pool knows of it, and how many turns it may run at once.

Invariant: a replica that serves has the pool's current weights. One that left, for whatever reason, serves again only
after it was given them again, because it may not be the same process any more.

The concurrency limit follows the load that the engine reports: it grows while the key-value cache has room and turns are
held back, stands still when the cache is nearly full, and shrinks when it is full or the engine's own queue grows long.
Running turns are never stopped for it: a lower limit only holds back new ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from towline.engines.base import CaptureLevel, Engine, EngineInfo, EngineLoad, EngineUnreachable, Sample
from towline.errors import EngineError

T = TypeVar("T")
ROOMY = 0.6
"""Key-value usage below which the limit grows fast; from there to `NEARLY_FULL` it grows by one."""
NEARLY_FULL = 0.8
FULL = 0.9
_GROWTH = 1.5
_SHRINKAGE = 0.75


@dataclass(slots=True)
class ConcurrencyLimit:
    """How many turns a replica may run at once."""

    limit: int
    minimum: int = 1
    maximum: int = 1024

    def adapt(self, load: EngineLoad, in_flight: int) -> None:
        """Adapt to the load that the engine reports; `in_flight` turns are ours."""
        usage = load.kv_usage
        if (usage is not None and usage >= FULL) or load.waiting > max(1, load.running // 2):
            # Shrink from what runs, not from a limit that is never reached: that would take many rounds to have an effect.
            self.limit = max(self.minimum, int(min(self.limit, max(in_flight, 1)) * _SHRINKAGE))
            return
        held_back = in_flight >= self.limit
        if not held_back or load.waiting or (usage is not None and usage >= NEARLY_FULL):
            return
        fast = usage is None or usage < ROOMY
        grown = max(int(self.limit * _GROWTH), self.limit + 1) if fast else self.limit + 1
        self.limit = min(self.maximum, grown)


@dataclass(frozen=True, slots=True)
class PoolWeights:
    """The weights that a replica must have to serve."""

    version: int
    folder: Path | None = None
    """None for the weights that the replicas start with."""
    pushed: bool = False
    """Whether a trainer loaded them by other means than a folder: then the pool cannot give them to a replica again."""


@dataclass(slots=True)
class ReplicaCounters:
    """Counters of a replica since the pool started."""

    turns: int = 0
    """Turns, or parts of turns, that it returned."""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    moved: int = 0
    """Turns that it left unfinished and others continued."""
    failures: int = 0
    """How often it left the pool."""


@dataclass(slots=True, eq=False)
class Replica:
    """One engine of a pool."""

    name: str
    engine: Engine
    concurrency: ConcurrencyLimit
    serving: bool = False
    problem: str = "it has not been started"
    """Why it does not serve."""
    epoch: int = 0
    """How often it joined the pool: what began in one epoch says nothing about the next."""
    info: EngineInfo | None = None
    """What it was when it last served."""
    in_flight: int = 0
    """Slots in use: turns that run here or are about to."""
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    """Calls to its engine that have not returned, mostly turns."""
    updating: bool = False
    weights_unknown: bool = False
    """Whether an update failed on it: its weights are unknown until the next update."""
    load: EngineLoad | None = None
    counters: ReplicaCounters = field(default_factory=ReplicaCounters)

    @property
    def has_room(self) -> bool:
        return self.serving and self.in_flight < self.concurrency.limit

    @property
    def utilization(self) -> float:
        """The share of its slots that are in use."""
        return self.in_flight / self.concurrency.limit

    async def call(self, call: Coroutine[Any, Any, T]) -> T:
        """A call to the engine, which ends with `EngineUnreachable` if the replica's calls are cancelled meanwhile."""
        task = asyncio.get_running_loop().create_task(call)
        self.calls.add(task)
        task.add_done_callback(self._call_done)
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.cancelled():
            raise EngineUnreachable(f"replica {self.name} was removed from the pool: {self.problem}")
        return task.result()

    def _call_done(self, task: asyncio.Task[Any]) -> None:
        self.calls.discard(task)
        if not task.cancelled():
            task.exception()

    def cancel_calls(self) -> None:
        """Cancel every call that has not returned; turns continue on other replicas."""
        for task in list(self.calls):
            task.cancel()

    def record(self, sample: Sample) -> None:
        self.counters.turns += 1
        self.counters.tokens += len(sample.ids)
        self.counters.prompt_tokens += sample.prompt_tokens
        self.counters.cached_tokens += sample.cached_tokens


_WEAKEST_LAST = list(CaptureLevel)


def combine_infos(infos: Mapping[str, EngineInfo]) -> EngineInfo:
    """What several replicas are together: the smallest context and the weakest capture level. Raises if they have
    different vocabularies and so are not replicas of one model; an unknown vocabulary (0) matches any."""
    sizes = {info.vocabulary for info in infos.values() if info.vocabulary}
    if len(sizes) > 1:
        listed = ", ".join(f"{name}: {info.vocabulary}" for name, info in infos.items())
        raise EngineError(f"the replicas have different vocabularies ({listed}): a pool is for replicas of one model")
    details: dict[str, str] = {"replicas": str(len(infos))}
    for key in dict.fromkeys(key for info in infos.values() for key in info.details):
        details[key] = _join_distinct(info.details.get(key, "unknown") for info in infos.values())
    return EngineInfo(
        name=_join_distinct(info.name for info in infos.values()),
        capture=max((info.capture for info in infos.values()), key=_WEAKEST_LAST.index),
        context=min(info.context for info in infos.values()),
        vocabulary=max(sizes, default=0),
        details=details,
    )


def _join_distinct(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
