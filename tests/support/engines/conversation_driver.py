"""Sessions of a client over HTTP whose replies the model samples by itself, up to their limit."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from towline.engines.vllm import VllmEngine
from towline.gateway.gateway import Gateway
from towline.gateway.server import RunningGateway


async def converse(running: RunningGateway, gateway: Gateway, name: str, turns: int, tokens: int) -> None:
    """A session with a number of turns and tokens per turn."""
    opened = await gateway.create({"id": name})
    headers = {"authorization": f"Bearer {opened.key}"}
    history: list[dict[str, Any]] = []
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(900)) as http:
        for turn in range(turns):
            history.append({"role": "user", "content": f"{name}, question {turn}: what is it?"})
            body = {"model": "m", "messages": history, "max_tokens": tokens}
            async with http.post(f"{running.base_url}/v1/chat/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
            history.append(answer["choices"][0]["message"])


async def sampled(engine: VllmEngine, tokens: int, sessions: asyncio.Future[Any]) -> None:
    """Wait until an engine has produced that many tokens, or the sessions are over."""
    for _ in range(12_000):
        if engine.stats.decoded_tokens >= tokens or sessions.done():
            return
        await asyncio.sleep(0.05)
    raise TimeoutError(f"only {engine.stats.decoded_tokens} tokens arrived")
