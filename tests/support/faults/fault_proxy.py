"""A proxy between the gateway and an engine that makes the engine fail in named ways.

A model call whose newest message names a fault (`fault:reset`) fails that way; every other request passes unchanged. The
fault thus follows the conversation, not the clock: the same session fails in the same turn at every attempt. `away`
makes the whole engine unreachable, for an outage.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

FAULTS = (
    "status_500",
    "rate_limit",
    "stall",
    "stall_midway",
    "reset",
    "garbage",
    "truncated",
    "wrong_ids",
    "positive_logprob",
    "nan_logprob",
)
SLOW = "slow"
"""Not a failure: tokens arrive, further apart than any one call would like."""
_MARK = re.compile(r"fault:(\w+)")
_SAMPLING = ("/inference/v1/generate", "/v1/completions", "/generate", "/v1/chat/completions")
_HOPS = {"content-length", "transfer-encoding", "connection", "keep-alive", "content-encoding", "host"}


@dataclass
class FaultProxy:
    upstream: str
    decode: Callable[[Sequence[int]], str]
    pace: float = 0.5
    """Seconds between two chunks of a slow turn."""
    away: bool = False
    injected: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    """Connections that were cut while the engine was away."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.away:
            self.refused += 1
            return _cut(request)
        body = await request.read()
        fault = self._fault(request.path, body)
        if fault is not None:
            self.injected[fault] += 1
        if fault == "status_500":
            return web.json_response({"error": {"message": "EngineCore died on purpose", "code": 500}}, status=500)
        if fault == "rate_limit":
            return web.json_response({"error": {"message": "slow down on purpose", "code": 429}}, status=429)
        if fault == "garbage":
            return web.Response(
                text="<html>garbage on purpose</html>\n\ndata: {]\n\n", content_type="text/event-stream"
            )
        if fault == "reset":
            return _cut(request)
        if fault == "stall":
            await asyncio.Event().wait()
        return await self._relayed(request, body, fault)

    def _fault(self, path: str, body: bytes) -> str | None:
        if path not in _SAMPLING:
            return None
        fields = json.loads(body)
        if "messages" in fields:
            text = str(fields["messages"][-1]["content"])
        else:
            ids = fields.get("token_ids") or fields.get("input_ids") or fields.get("prompt")
            # The newest message; what a turn has sampled so far, before it was cut off, comes after it.
            text = self.decode(ids)
        found = _MARK.findall(text)
        if not found or (f"fault:{found[-1]}" not in text[-200:]):
            return None
        return str(found[-1])

    async def _relayed(self, request: web.Request, body: bytes, fault: str | None) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOPS}
        url = self.upstream + request.path_qs
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client,
            client.request(request.method, url, data=body, headers=headers) as answer,
        ):
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOPS}
            response = web.StreamResponse(status=answer.status, headers=kept)
            if fault in (None, SLOW):
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                    if fault == SLOW:
                        await asyncio.sleep(self.pace)
                return response
            data = await answer.read()
            await response.prepare(request)
            if fault == "truncated":
                await response.write(data[: len(data) // 2])
            elif fault == "stall_midway":
                await response.write(data[: data.find(b"\n\n") + 2 or len(data) // 2])
                await asyncio.Event().wait()
            else:
                await response.write(_spoiled(data, str(fault)))
            return response


def _spoiled(data: bytes, fault: str) -> bytes:
    """Every event, or the one JSON body, with its ids or logprobs made wrong."""
    if b"data: " not in data:
        return json.dumps(_changed(json.loads(data), fault)).encode()
    lines = []
    for line in data.split(b"\n"):
        if line.startswith(b"data: {"):
            line = b"data: " + json.dumps(_changed(json.loads(line[6:]), fault)).encode()
        lines.append(line)
    return b"\n".join(lines)


def _changed(value: Any, fault: str, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _changed(one, fault, key) for key, one in value.items()}
    if name == "output_token_logprobs" and value:
        return [[_logprob(lp, fault), _id(id, fault), *rest] for lp, id, *rest in value]
    if isinstance(value, list):
        return [_changed(one, fault, name) for one in value]
    if name in ("logprob", "token_logprobs") and isinstance(value, float | int):
        return _logprob(value, fault)
    if name in ("token_ids", "token_id", "output_ids") and isinstance(value, int):
        return _id(value, fault)
    if name == "tokens" and isinstance(value, str) and value.startswith("token_id:"):
        return f"token_id:{_id(int(value[9:]), fault)}"
    return value


def _logprob(value: float, fault: str) -> float:
    return {"positive_logprob": 1.5, "nan_logprob": float("nan")}.get(fault, value)


def _id(value: int, fault: str) -> int:
    return value + 1_000_000 if fault == "wrong_ids" else value


def _cut(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=503)


@contextlib.asynccontextmanager
async def proxied(proxy: FaultProxy, host: str = "127.0.0.1") -> AsyncIterator[str]:
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, 0)
        await site.start()
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
