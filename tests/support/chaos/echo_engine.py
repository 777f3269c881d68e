"""An engine that answers with the mark of its prompt, behind a proxy that makes it fail for a while.

With the mark in every sampled token, a token that is attributed to another session is seen in the stored trajectory.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from aiohttp import web

from support.engines.vllm_stand_in import Step, VllmStandIn, served
from support.faults.fault_proxy import FaultProxy, proxied

MARK = re.compile(r"M\d{12}M")
_CHUNK = 4


class EchoStandIn(VllmStandIn):
    """The vLLM protocol; answers are the first mark of the prompt. A prompt without a mark is sampled from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokenizer = tokenizers.Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    async def _steps(self, ids: list[int], params: dict[str, Any]) -> AsyncIterator[Step]:
        text = str(self.tokenizer.decode(list(ids), skip_special_tokens=False))
        found = MARK.search(text)
        if found is None:  # a probe, which looks at the logprobs
            async for step in super()._steps(ids, params):
                yield step
            return
        answer = list(self.tokenizer.encode(found.group(), add_special_tokens=False).ids)
        stops = params.get("stop_token_ids") or []
        row, aborts = [*answer, *stops[:1]][: params["max_tokens"]], self._aborts
        for start in range(0, len(row), _CHUNK):
            await asyncio.sleep(0.01)
            if aborts.is_set():
                yield Step([], [], "abort", None, [(self.label, 0, start)])
                return
            some, last = row[start : start + _CHUNK], start + _CHUNK >= len(row)
            stopped = last and bool(stops) and some[-1] == stops[0]
            finish = None if not last else "stop" if stopped else "length"
            spans = [(self.label, 0, len(row))] if last else None
            yield Step(some, [self._logprobs(one) for one in some], finish, some[-1] if stopped else None, spans)

    def _logprobs(self, chosen: int) -> Any:
        count = self.decoder.config.vocab_size
        found = np.full(count, np.log(0.5 / (count - 1)))
        found[chosen] = np.log(0.5)
        return found


@dataclass
class StormProxy(FaultProxy):
    """Fails a share of the model calls in one way, while `fault` names it."""

    fault: str = ""
    share: float = 0.7
    draws: random.Random = field(default_factory=random.Random)

    def set_fault(self, fault: str) -> None:
        self.away = fault == "away"
        self.fault = "" if self.away else fault

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.away:
            self.injected["away"] += 1
        return await super().handle(request)

    def _fault(self, path: str, body: bytes) -> str | None:
        if path != "/inference/v1/generate" or not self.fault or self.draws.random() > self.share:
            return None
        return self.fault


@contextlib.asynccontextmanager
async def echo_engine(
    model: Path, draws: random.Random, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[StormProxy, list[str]]]:
    """The proxy, which listens on `host`, and the options of a command that uses the engine behind it."""
    engine = EchoStandIn(model, context=1024)
    decode = engine.tokenizer.decode
    async with served(engine) as upstream:
        proxy = StormProxy(upstream, lambda ids: str(decode(list(ids))), draws=draws)
        async with proxied(proxy, host) as url:
            yield proxy, ["--engine=vllm", f"--upstream={url}", "--upstream-model=tiny", f"--model={model}"]
