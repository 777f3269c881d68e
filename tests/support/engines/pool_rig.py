"""Replicas that die, hang, come back and forget, under a clock that only advances when every task waits.

A `FakeReplica` is an engine and the server behind it in one: what the engine believes (`version`) and what the server has
(`loaded`) are kept apart, so that a token stamped with weights that did not sample it is found. Every token there is has
an id of its own, and `Log` knows where each came from.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from towline.conversation import Finish
from towline.engines.base import (
    CaptureLevel,
    EngineInfo,
    EngineLoad,
    EngineUnreachable,
    Ids,
    PauseMode,
    Sample,
    SampleRequest,
)
from towline.errors import EngineError

T = TypeVar("T")
END = 1
"""The id that ends a turn; sampled ids begin at 1000."""


_LONGEST = 100_000.0
"""Virtual seconds, and iterations at one moment, after which a simulation counts as endless."""


class _Clock(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """A selector that lets time pass instead of waiting."""

    now = 0.0
    rounds = 0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everybody waits for something that nobody does")
        self.rounds += 1
        if not ready and timeout:
            self.now += timeout
            self.rounds = 0
        # The pool checks its replicas for ever: without a limit, a task that waits in vain would do so too.
        if max(self.now, self.rounds) > _LONGEST:
            raise RuntimeError(f"still waiting at {self.now:g} s, {self.rounds} rounds after the clock last moved")
        return ready


def simulate(work: Coroutine[Any, Any, T]) -> T:
    """Run in virtual time: an hour of sleeping takes no time, and the same seed gives the same run."""
    clock = _Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work)


@dataclass
class Origin:
    """How one token was sampled."""

    replica: str
    loaded: int
    before: tuple[int, ...]
    """All tokens that the model saw before it."""
    when: float


class Log:
    def __init__(self) -> None:
        self._ids = itertools.count(1000)
        self.tokens: dict[int, Origin] = {}

    def token(self, origin: Origin) -> int:
        id = next(self._ids)
        self.tokens[id] = origin
        return id


@dataclass(eq=False)
class FakeReplica:
    name: str
    log: Log = field(default_factory=Log)
    pace: float = 0.01
    """Seconds per token."""
    length: int = 20
    """Tokens of a turn, by its whole prompt and sample."""
    streams: bool = True
    """Whether what arrived before its death is known."""
    tells: bool = False
    """Whether it reports its weights with every token: then an unobserved restart is noticed."""
    context: int = 10_000
    vocabulary: int = 2**31 - 1
    capture: CaptureLevel = CaptureLevel.TOKENS
    alive: bool = True
    hangs: bool = False
    loaded: int = 0
    refuses: str = ""
    """Why an update fails, if it does."""
    dies_in_update: bool = False
    poison: str = ""
    """A turn of this id has its connection cut at once."""
    told: EngineLoad | None = None
    """The load that it reports; default: the real one, for a cache of a hundred turns."""
    updates: list[int] = field(default_factory=list)
    seen: list[SampleRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.version = 0
        self.starts = 0
        self.died = 0.0
        self.flying: dict[object, asyncio.Event] = {}
        self._ids: dict[object, str] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._death = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            "fake", self.capture, self.context, self.vocabulary, {"prefix_caching": "on", "at": self.name}
        )

    # Faults

    def die(self) -> None:
        """Everything in memory is lost, the weights too."""
        self.alive, self.loaded, self.died = False, 0, asyncio.get_running_loop().time()
        self._death.set()

    def revive(self) -> None:
        self.alive, self.hangs, self._death = True, False, asyncio.Event()

    # The engine

    def _reach(self) -> None:
        if not self.alive:
            raise EngineUnreachable(f"{self.name} refuses the connection")

    async def start(self) -> None:
        self._reach()
        self.starts += 1

    async def healthy(self) -> bool:
        if self.hangs:
            await asyncio.sleep(1000)
        return self.alive

    async def load(self) -> EngineLoad:
        self._reach()
        return self.told or EngineLoad(len(self.flying), 0, min(1.0, len(self.flying) / 100))

    async def sample(self, request: SampleRequest) -> Sample:
        await self._open.wait()
        self._reach()
        self.seen.append(request)
        if request.id == self.poison:
            raise EngineUnreachable(f"{self.name} cut the connection")
        turn, stop = object(), asyncio.Event()
        self.flying[turn], self._ids[turn] = stop, request.id
        label, death = self.version, self._death
        ids: list[int] = []
        prompt = tuple(int(id) for id in request.prompt)
        try:
            while True:
                await asyncio.sleep(self.pace)
                if self.hangs:
                    await death.wait()
                if death.is_set():
                    partial = self._sample(request, ids, label, Finish.ABORT)
                    raise EngineUnreachable(
                        f"{self.name} cut the connection", partial if self.streams and ids else None
                    )
                if stop.is_set():
                    return self._sample(request, ids, label, Finish.ABORT)
                if len(ids) == request.max_tokens:
                    return self._sample(request, ids, label, Finish.LENGTH)
                if sum(id >= 1000 for id in prompt) + len(ids) >= self.length:
                    return self._sample(request, [*ids, END], label, Finish.STOP)
                if self.tells and self.loaded != label:
                    raise EngineUnreachable(f"{self.name} has weights {self.loaded} in place of {label}")
                now = asyncio.get_running_loop().time()
                ids.append(self.log.token(Origin(self.name, self.loaded, (*prompt, *ids), now)))
        finally:
            del self.flying[turn], self._ids[turn]

    def _sample(self, request: SampleRequest, ids: Sequence[int], label: int, finish: Finish) -> Sample:
        row = np.asarray(ids, np.int32)
        return Sample(
            row,
            -(row % 7).astype(np.float32),
            np.full(len(row), label, np.int32),
            finish,
            len(request.prompt),
            cached_tokens=len(request.prompt) // 2,
        )

    async def abort(self, ids: Sequence[str]) -> None:
        self._reach()
        for turn, stop in self.flying.items():
            if self._ids[turn] in ids:
                stop.set()

    async def pause(self, mode: PauseMode = PauseMode.DRAIN, deadline: float | None = None) -> None:
        self._reach()
        self._open.clear()
        waited = 0.0
        while self.flying:
            if mode is PauseMode.ABORT or (deadline is not None and waited >= deadline):
                for stop in self.flying.values():
                    stop.set()
            await asyncio.sleep(self.pace)
            waited += self.pace

    async def resume(self, version: int | None = None) -> None:
        self._reach()
        self.version = self.version if version is None else version
        self._open.set()

    async def ready(self) -> None:
        await self._open.wait()

    async def update_weights(self, folder: Path, version: int) -> None:
        """The folder's name is the version of the weights in it."""
        paused = not self._open.is_set()
        await self.pause(PauseMode.ABORT)
        await asyncio.sleep(self.pace * 5)
        if self.dies_in_update:
            self.dies_in_update = False
            self.die()
        self._reach()
        if self.refuses:
            if not paused:
                self._open.set()
            raise EngineError(self.refuses)
        self.updates.append(version)
        self.loaded, self.version = int(folder.name), version
        if not paused:
            self._open.set()

    async def close(self) -> None:
        for stop in self.flying.values():
            stop.set()


def ask(id: str = "turn", conversation: str = "", group: str = "", length: int = 4, **fields: Any) -> SampleRequest:
    prompt: Ids = np.arange(2, 2 + length, dtype=np.int32)
    return SampleRequest(
        prompt,
        fields.pop("max_tokens", 1000),
        id=id,
        conversation=conversation,
        group=group,
        stop_ids=frozenset({END}),
        **fields,
    )


def audit(log: Log, request: SampleRequest, sample: Sample) -> list[int]:
    """Check that every token of a turn was sampled after exactly the tokens before it, under the weights of its version."""
    assert sample.finish is Finish.STOP
    assert int(sample.ids[-1]) == END
    assert len(sample.ids) == len(sample.logprobs) == len(sample.versions)
    row = [int(id) for id in request.prompt]
    for id, version in zip(sample.ids[:-1].tolist(), sample.versions[:-1].tolist(), strict=True):
        origin = log.tokens[id]
        assert origin.before == tuple(row), "a token stands behind other tokens than it was sampled behind"
        assert origin.loaded == version, f"stamped {version}, sampled by weights {origin.loaded} on {origin.replica}"
        row.append(id)
    return row[len(request.prompt) :]
