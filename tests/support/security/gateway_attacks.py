"""What attacks on the gateway are made with: bodies of every dialect, and connections that are not ended."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

from support.gateway.gateway_rig import Opened, Rig, running_gateway
from towline.config.budgets import SessionBudgets
from towline.gateway.server import SessionListener

DIALECTS = ("chat", "responses", "messages", "google")
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "google": "/v1beta/models/m:generateContent",
}
COUNTS = {"messages": "/v1/messages/count_tokens", "google": "/v1beta/models/m:countTokens"}


def body(dialect: str, texts: list[str], tools: int = 0, **fields: Any) -> dict[str, Any]:
    """A request of a dialect with these user messages and a number of tools."""
    schema = {"type": "object", "properties": {}}
    if dialect == "google":
        declared = [{"name": f"t{n}", "description": "x", "parameters": schema} for n in range(tools)]
        made: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": text}]} for text in texts]}
        return made | ({"tools": [{"functionDeclarations": declared}]} if tools else {}) | fields
    if dialect == "responses":
        items = [{"type": "message", "role": "user", "content": text} for text in texts]
        named = [{"type": "function", "name": f"t{n}", "parameters": schema} for n in range(tools)]
        return {"model": "m", "input": items, "tools": named, **fields}
    messages = [{"role": "user", "content": text} for text in texts]
    if dialect == "messages":
        named = [{"name": f"t{n}", "input_schema": schema} for n in range(tools)]
        return {"model": "m", "max_tokens": 16, "messages": messages, "tools": named, **fields}
    named = [{"type": "function", "function": {"name": f"t{n}", "parameters": schema}} for n in range(tools)]
    return {"model": "m", "messages": messages, **({"tools": named} if tools else {}), **fields}


def with_image(dialect: str, url: str) -> dict[str, Any]:
    """A request that shows an image by its URL, which may be a data URL."""
    data = url.partition(",")[2]
    inline = url.startswith("data:")
    if dialect == "google":
        part: dict[str, Any] = {"fileData": {"mimeType": "image/png", "fileUri": url}}
        part = {"inlineData": {"mimeType": "image/png", "data": data}} if inline else part
        return {"contents": [{"role": "user", "parts": [{"text": "look"}, part]}]}
    if dialect == "responses":
        content = [{"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": url}]
        return {"model": "m", "input": [{"type": "message", "role": "user", "content": content}]}
    if dialect == "messages":
        source: dict[str, Any] = {"type": "url", "url": url}
        source = {"type": "base64", "media_type": "image/png", "data": data} if inline else source
        shown = [{"type": "text", "text": "look"}, {"type": "image", "source": source}]
        return {"model": "m", "max_tokens": 16, "messages": [{"role": "user", "content": shown}]}
    shown = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"model": "m", "messages": [{"role": "user", "content": shown}]}


def data_url(seed: int, size: int) -> str:
    """An image of about that many bytes, different for each seed."""
    content = seed.to_bytes(4, "big") * (size // 4)
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


async def send(rig: Rig, session: Opened, path: str, request: Any) -> tuple[int, Any]:
    """A request of any dialect: status and JSON."""
    async with rig.web.post(rig.running.base_url + path, json=request, headers=session.headers) as answer:
        data = await answer.read()
        return answer.status, json.loads(data)


@contextlib.asynccontextmanager
async def attacked(codec: Any, data: Any, script: Any = None, **budgets: Any) -> AsyncIterator[tuple[Rig, Opened]]:
    """A gateway with small budgets, and one session."""
    settings = budgets.pop("settings", {})
    async with running_gateway(codec, data, script, budgets=SessionBudgets(**budgets), **settings) as rig:
        yield rig, await rig.open()


@contextlib.asynccontextmanager
async def own_listener(rig: Rig, session: Opened) -> AsyncIterator[int]:
    """A listener of one session, as a sandbox has it; yields its port."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        listener: SessionListener = await rig.running.serve_session(listening, session.id)
        try:
            yield listening.getsockname()[1]
        finally:
            await listener.close()


class Held:
    """Connections that send something and never end."""

    def __init__(self, port: int):
        self.port = port
        self.streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def open(self, count: int, sends: bytes = b"") -> None:
        for _ in range(count):
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                self.streams.append((reader, writer))
                if sends:
                    writer.write(sends)

    async def still_open(self, seconds: float) -> int:
        """How many connections the gateway has not ended after that long."""
        ended = await asyncio.gather(*(_ended(reader, seconds) for reader, _ in self.streams))
        return sum(not one for one in ended)

    def close(self) -> None:
        for _, writer in self.streams:
            writer.transport.abort()


async def _ended(reader: asyncio.StreamReader, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await reader.read()
    except TimeoutError:
        return False
    except OSError:
        pass
    return True
