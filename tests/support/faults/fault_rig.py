"""An engine of each kind behind a proxy that injects faults."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from support.engines import chat_stand_in, sglang_stand_in, vllm_stand_in
from support.faults.fault_proxy import FaultProxy, proxied

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
                vllm_stand_in.served(vllm_stand_in.VllmStandIn(model, context=CONTEXT))
            )
        elif kind == "sglang":
            upstream = await stack.enter_async_context(
                sglang_stand_in.served(sglang_stand_in.SglangStandIn(model, context=CONTEXT, chunk=2))
            )
        else:
            upstream = await stack.enter_async_context(chat_stand_in.served(chat_stand_in.ChatStandIn(tokenizer)))
        proxy = FaultProxy(upstream, lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)))
        url = await stack.enter_async_context(proxied(proxy))
        suffix = "/v1" if kind == "openai" else ""
        options = ["--engine", kind, "--upstream", url + suffix, "--upstream-model", "tiny", "--model", str(model)]
        yield FaultyEngine(proxy, options)
