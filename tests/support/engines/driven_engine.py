"""A random model that behaves: a script says what a reply is, the engine below samples its thoughts and scores the rest.

A tiny random model never calls a tool by itself. So each reply is the script's, written in the model's own format, but its
reasoning is what the engine really samples there: ids that no encoder would choose. Everything else is given to the engine
as forced ids. What comes out is one turn whose every token has a logprob of the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from towline.conversation import Finish
from towline.engines.base import EngineInfo, Ids, PauseMode, Sample, SampleRequest
from towline.engines.scripted import Script
from towline.engines.vllm import VllmEngine
from towline.tokens.codec import RenderContext
from towline.tokens.templates.sentinel import SentinelCodec

THOUGHT = 16
"""Tokens of reasoning that are sampled."""
MARK = "§"
"""Placeholder for the sampled reasoning."""


class DrivenEngine:
    def __init__(self, below: VllmEngine, codec: SentinelCodec, script: Script):
        self.below = below
        self.codec = codec
        self.script = script
        self.requests: list[SampleRequest] = []

    @property
    def info(self) -> EngineInfo:
        return self.below.info

    @property
    def version(self) -> int:
        return self.below.version

    async def start(self) -> None:
        """`engine` is already started, and closed by its owner."""

    async def close(self) -> None:
        pass

    async def sample(self, request: SampleRequest) -> Sample:
        self.requests.append(request)
        assert request.request is not None
        said = self.script(request.request)
        frame = RenderContext(request.request.tools, request.request.template_args)
        written = self.codec.write(said.text, MARK if said.reasoning else None, said.calls, frame)
        parts = []
        mark = self.codec.tokenizer.encode(MARK)
        if said.reasoning:
            place = next(n for n in range(len(written)) if list(written[n : n + len(mark)]) == mark)
            parts.append(await self._forced(request, written[:place]))
            thought = await self._thought(request, parts[0].ids)
            parts.append(thought)
            written = written[place + len(mark) :]
        before = np.concatenate([part.ids for part in parts]) if parts else np.empty(0, np.int32)
        parts.append(await self._forced(request, written, before))
        assert parts[-1].finish is Finish.STOP
        return Sample(
            ids=np.concatenate([part.ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            versions=np.concatenate([part.versions for part in parts]),
            finish=Finish.STOP,
            prompt_tokens=parts[0].prompt_tokens,
            cached_tokens=parts[0].cached_tokens,
        )

    async def _forced(self, request: SampleRequest, ids: Sequence[int], before: Ids | None = None) -> Sample:
        prompt = request.prompt if before is None else np.concatenate([request.prompt, before])
        forced = np.asarray(ids, np.int32)
        return await self.below.sample(
            replace(request, prompt=prompt, forced=forced, max_tokens=len(forced), seed=None)
        )

    async def _thought(self, request: SampleRequest, before: Ids) -> Sample:
        """Really sampled. One token in ten thousand is special and would end the reasoning: then it is sampled again."""
        prompt = np.concatenate([request.prompt, before])
        special = set(self.codec.tokenizer.added.values())
        for seed in range(20):
            asked = replace(request, prompt=prompt, max_tokens=THOUGHT, stop_strings=(), seed=seed)
            sample = await self.below.sample(asked)
            if len(sample.ids) == THOUGHT and not special & set(sample.ids.tolist()):
                return sample
        raise AssertionError("the model samples nothing but special tokens")

    async def abort(self, ids: Sequence[str]) -> None:
        await self.below.abort(ids)

    async def pause(self, mode: PauseMode = PauseMode.DRAIN, deadline: float | None = None) -> None:
        await self.below.pause(mode, deadline)

    async def resume(self, version: int | None = None) -> None:
        await self.below.resume(version)

    async def ready(self) -> None:
        await self.below.ready()

    async def update_weights(self, folder: Path, version: int) -> None:
        await self.below.update_weights(folder, version)
