"""Loopback servers that attacks try to reach, and what they were asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

SECRET = "reached-the-canary"


@dataclass
class Canary:
    """A small HTTP server on loopback."""

    port: int = 0
    asked: list[str] = field(default_factory=list)
    """The head of every request."""


@contextlib.asynccontextmanager
async def canary() -> AsyncIterator[Canary]:
    """Answers every request with a secret, several per connection if the client goes on."""
    made = Canary()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                made.asked.append(head)
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(SECRET)}\r\n\r\n{SECRET}".encode())
                await writer.drain()
                if "connection: close" in head.lower():
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
