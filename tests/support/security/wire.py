"""A client that speaks HTTP byte by byte, as attackers do."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from urllib.parse import urlsplit

PATIENCE = 60.0


@dataclass
class Wire:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, url: str) -> Wire:
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port))

    async def send(self, data: bytes) -> bool:
        """Whether the service still takes bytes."""
        try:
            self.writer.write(data)
            await asyncio.wait_for(self.writer.drain(), PATIENCE)
        except (OSError, TimeoutError):
            return False
        return True

    async def status(self, patience: float = PATIENCE) -> int:
        """The status of the next response, whose body is read too; 0 if the connection is closed without one."""
        try:
            async with asyncio.timeout(patience):
                head = await self.reader.readuntil(b"\r\n\r\n")
                status = int(head.split()[1])
                if status != 100:
                    for line in head.lower().split(b"\r\n"):
                        if line.startswith(b"content-length:"):
                            await self.reader.readexactly(int(line.partition(b":")[2]))
                return status
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            return 0
        except TimeoutError:
            return -1

    async def closed(self, patience: float = PATIENCE) -> bool:
        """Whether the service closes the connection within the time; what it sends is dropped."""
        try:
            async with asyncio.timeout(patience):
                while await self.reader.read(1 << 16):
                    pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


def request(
    path: str = "/healthz", *headers: str, method: str = "GET", host: str = "localhost", body: bytes = b""
) -> bytes:
    """The bytes of a request."""
    lines = [f"{method} {path} HTTP/1.1", *([f"Host: {host}"] if host else []), *headers]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
