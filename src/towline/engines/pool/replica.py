"""One replica: an engine, and what the pool knows of it.

Invariant: a replica that serves has the pool's current weights. One that left, for whatever reason, serves again only
after it was given them anew, because nobody can tell whether it is still the process that it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from towline.engines.base import Engine, EngineGone, EngineInfo, Load, Sample
from towline.engines.pool.pacing import Pace

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Weights:
    """What a replica must have to serve."""

    version: int
    folder: Path | None = None
    """None for the weights that the replicas start with."""
    pushed: bool = False
    """Whether they came by another way than a folder: then nobody here can give them to a replica again."""


@dataclass(slots=True)
class Counts:
    """What a replica has done since the pool began."""

    turns: int = 0
    """Turns, or parts of turns, that it gave an answer for."""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    moved: int = 0
    """Turns that it left unfinished and others went on with."""
    failures: int = 0
    """How often it left the pool."""


@dataclass(slots=True, eq=False)
class Replica:
    name: str
    engine: Engine
    pace: Pace
    serving: bool = False
    trouble: str = "it has not been started"
    """Why it does not serve."""
    epoch: int = 0
    """How often it came into the pool: what began in one epoch says nothing of the next."""
    info: EngineInfo | None = None
    """What it was when it last served."""
    taken: int = 0
    """Slots given out: turns that run here or are about to."""
    work: set[asyncio.Task[Any]] = field(default_factory=set)
    """Calls to its engine under way, turns above all."""
    updating: bool = False
    unsure: bool = False
    """Whether an update failed on it: nobody knows which weights it has, until it takes some."""
    load: Load | None = None
    counts: Counts = field(default_factory=Counts)

    @property
    def free(self) -> bool:
        return self.serving and self.taken < self.pace.limit

    @property
    def fill(self) -> float:
        """The share of its slots that are taken."""
        return self.taken / self.pace.limit

    async def do(self, call: Coroutine[Any, Any, T]) -> T:
        """A call to the engine, which ends with `EngineGone` if the replica is given up meanwhile."""
        task = asyncio.get_running_loop().create_task(call)
        self.work.add(task)
        task.add_done_callback(self._done)
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.cancelled():
            raise EngineGone(f"replica {self.name} was given up: {self.trouble}")
        return task.result()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.work.discard(task)
        if not task.cancelled():
            task.exception()

    def give_up(self) -> None:
        """End every call that is under way; a turn goes on elsewhere."""
        for task in list(self.work):
            task.cancel()

    def count(self, sample: Sample) -> None:
        self.counts.turns += 1
        self.counts.tokens += len(sample.ids)
        self.counts.prompt_tokens += sample.prompt_tokens
        self.counts.cached_tokens += sample.cached_tokens
