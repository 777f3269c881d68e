"""An engine that answers at once with fixed ids, so that what is measured is the gateway.

It writes the prompt's ids as JSON, which every engine behind HTTP needs, and says how much CPU that took: the one part of
sending that grows with the history whatever a gateway does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson

from towline.arrays import Ids
from towline.conversation import Finish
from towline.engines.base import Capture, EngineInfo, PauseMode, Sample, SampleRequest

_CONTEXT = 1 << 20


class InstantEngine:
    def __init__(self, replies: Sequence[Ids], vocabulary: int):
        self._samples = [
            (ids, np.linspace(-0.01, -2.0, len(ids), dtype=np.float32), np.zeros(len(ids), np.int32)) for ids in replies
        ]
        self._info = EngineInfo("instant", Capture.TOKENS, _CONTEXT, vocabulary)
        self.sent_ns = 0
        """CPU spent on writing ids so far."""
        self.sent_bytes = 0

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def version(self) -> int:
        return 0

    async def start(self) -> None:
        return None

    async def sample(self, request: SampleRequest) -> Sample:
        began = time.thread_time_ns()
        self.sent_bytes += len(orjson.dumps(request.prompt, option=orjson.OPT_SERIALIZE_NUMPY))
        self.sent_ns += time.thread_time_ns() - began
        turn = int(request.id.rpartition("-")[2])
        ids, logprobs, versions = self._samples[turn % len(self._samples)]
        return Sample(ids, logprobs, versions, Finish.STOP, len(request.prompt))

    async def abort(self, ids: Sequence[str]) -> None:
        return None

    async def pause(self, mode: PauseMode = PauseMode.DRAIN, deadline: float | None = None) -> None:
        return None

    async def resume(self, version: int | None = None) -> None:
        return None

    async def ready(self) -> None:
        return None

    async def update_weights(self, folder: Path, version: int) -> None:
        return None

    async def close(self) -> None:
        return None
