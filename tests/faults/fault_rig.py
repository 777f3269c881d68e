"""An engine of each kind behind a proxy that injects faults."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import chat_standin
import sglang_standin
import tokenizers
import vllm_standin
from fault_proxy import FaultProxy, proxied

CONTEXT = 1024
ENGINES = ("openai", "vllm", "sglang")


@dataclass
class FaultyEngine:
    proxy: FaultProxy
    options: list[str]
    """What a command is given to use it."""


@contextlib.asynccontextmanager
async def faulty_engine(kind: str, model: Path) -> AsyncIterator[FaultyEngine]:
    """An engine of this kind that passes through a proxy."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    async with contextlib.AsyncExitStack() as stack:
        if kind == "vllm":
            upstream = await stack.enter_async_context(
                vllm_standin.served(vllm_standin.VllmStandIn(model, context=CONTEXT))
            )
        elif kind == "sglang":
            upstream = await stack.enter_async_context(
                sglang_standin.served(sglang_standin.SglangStandIn(model, context=CONTEXT, chunk=2))
            )
        else:
            upstream = await stack.enter_async_context(chat_standin.served(chat_standin.ChatStandIn(tokenizer)))
        proxy = FaultProxy(upstream, lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)))
        url = await stack.enter_async_context(proxied(proxy))
        suffix = "/v1" if kind == "openai" else ""
        options = ["--engine", kind, "--upstream", url + suffix, "--upstream-model", "tiny", "--model", str(model)]
        yield FaultyEngine(proxy, options)
