"""The engine under an audited gateway: a script chooses the ids, the embedded engine's model scores them.

A request finds its line by the seed that the harness sent with it, or by the top-k where the dialect has no seed.
Everything that reaches the model is logged as it is, prompt and sampled ids of every single call: the log is the
evidence that rows are compared with, and it knows nothing of graphs, turns that continue each other, or builders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from towline.audit import models
from towline.audit.formats import Format
from towline.audit.oracle import Oracle
from towline.audit.script import Line, write
from towline.conversation import Finish
from towline.engines.base import Engine, EngineInfo, Floats, Ids, PauseMode, Sample, SampleRequest
from towline.errors import EngineError

UNSCORED = ".as_sent"
"""Ends the names of sessions whose prompts alone are looked at: what the script chose is not scored by the model."""
_TAIL = 64
"""Prompt ids that tell whether the prompt has opened the reasoning."""


@dataclass(slots=True)
class Call:
    """What the model was given and what it gave, in one call of the engine."""

    session: str
    turn: int
    prompt: Ids
    sampled: Ids
    logprobs: Floats
    versions: Ids
    number: int = 0
    """What tells the requests of a session apart: the harness chose it."""


class Counted(Protocol):
    @property
    def decoded_tokens(self) -> int: ...


class ScoringCapable(Engine, Protocol):
    """An engine that scores forced ids and counts what it samples."""

    @property
    def stats(self) -> Counted: ...


class Weights:
    """The weights that an engine runs on, and their updates."""

    def __init__(self, engine: ScoringCapable, folder: Path):
        self.engine = engine
        self.folder = folder
        self._alone = asyncio.Lock()

    async def update(self, *, pause: bool = False) -> None:
        """Go to the next version; with `pause`, turns in flight are aborted first and go on afterwards."""
        async with self._alone:
            version = self.engine.version + 1
            models.note_versions(self.folder, version)
            if pause:
                await self.engine.pause(PauseMode.ABORT)
            await self.engine.update_weights(models.weights(self.folder, version), version)
            if pause:
                await self.engine.resume()


class ScoringEngine:
    """One target's view of the engine that its vocabulary shares."""

    def __init__(self, weights: Weights, oracle: Oracle, format: Format, stop_ids: frozenset[int]):
        self.weights = weights
        self.calls: list[Call] = []
        self._oracle = oracle
        self._format = format
        self._stop_ids = stop_ids
        self._inner = weights.engine
        self._lines: dict[tuple[str, int], Line] = {}
        self._begun: dict[str, tuple[int, Ids | None]] = {}
        """By turn: the length of its prompt and the ids chosen for it, `None` if the model chooses."""
        self._by_number: dict[tuple[str, int], list[Call]] = {}

    def teach(self, session: str, seed: int, lines: Sequence[Line]) -> None:
        """The samples of the session's request that carries `seed` say these lines.

        Samples of one request have seeds that count from the one that was sent.
        """
        self._lines.update({(session, seed + place): line for place, line in enumerate(lines)})

    @property
    def info(self) -> EngineInfo:
        return self._inner.info

    @property
    def version(self) -> int:
        return self._inner.version

    async def start(self) -> None:
        await self._inner.start()

    async def sample(self, request: SampleRequest) -> Sample:
        if request.id in self._begun:
            length, chosen = self._begun[request.id]
        else:
            chosen = await self._choose(request)
            length = len(request.prompt)
            self._begun[request.id] = length, chosen
        forced = None if chosen is None else chosen[len(request.prompt) - length :]
        prompt = np.array(request.prompt, np.int32)
        session, _, turn = request.id.rpartition("-")
        if forced is not None and session.endswith(UNSCORED) and _fits(forced, request):
            sample = _unscored(forced, len(prompt), self._inner.version)
        else:
            sample = await self._inner.sample(replace(request, forced=forced))
        number = _number(request)
        call = Call(session, int(turn), prompt, sample.ids, sample.logprobs, sample.versions, number)
        self.calls.append(call)
        self._by_number.setdefault((session, number), []).append(call)
        return sample

    def answered(self, session: str, number: int) -> Sequence[Call]:
        """The calls for a request: one, or several if the turn was interrupted and went on."""
        return self._by_number.get((session, number), ())

    async def _choose(self, request: SampleRequest) -> Ids | None:
        session = request.id.rpartition("-")[0]
        line = self._lines.pop((session, _number(request)), None)
        if line is None:
            raise EngineError("the script has no line for this request: it should not have been sampled")
        line.begun.set()
        if line.hold is not None:
            await line.hold.wait()
        if line.free:
            return None
        tail = request.prompt[-_TAIL:].tolist()
        return np.asarray(write(self._oracle, self._format, self._stop_ids, line, tail), np.int32)

    async def abort(self, ids: Sequence[str]) -> None:
        await self._inner.abort(ids)

    async def pause(self, mode: PauseMode = PauseMode.DRAIN, deadline: float | None = None) -> None:
        await self._inner.pause(mode, deadline)

    async def resume(self, version: int | None = None) -> None:
        await self._inner.resume(version)

    async def ready(self) -> None:
        await self._inner.ready()

    async def update_weights(self, folder: Path, version: int) -> None:
        await self._inner.update_weights(folder, version)

    async def close(self) -> None:
        """The engine is shared, and closed by whoever made it."""


def _fits(forced: Ids, request: SampleRequest) -> bool:
    """Whether the model would give all the ids as they are: nothing cuts them short."""
    return len(forced) <= request.max_tokens and not request.stop_strings


def _unscored(forced: Ids, prompt_tokens: int, version: int) -> Sample:
    logprobs = np.full(len(forced), -1.0, np.float32)
    versions = np.full(len(forced), version, np.int32)
    return Sample(forced, logprobs, versions, Finish.STOP, prompt_tokens)


def _number(request: SampleRequest) -> int:
    """What tells the requests of a session apart."""
    if request.seed is None and request.request is not None:
        return request.request.sampling.top_k or 0
    return request.seed or 0
