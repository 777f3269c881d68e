"""How a simulated harness reaches the gateway: in process through the real ASGI application, or over a real socket.

Both post the bytes of a request and give back those of its answer, whole or streamed; behind either the request takes the
very path of a harness's.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import aiohttp
import orjson
from starlette.types import ASGIApp, Message

from towline.audit.tongues import Refused, Told
from towline.errors import TowlineError


class Left(TowlineError):
    """The harness closed its connection before the answer came, as it wanted to."""


class Wire(Protocol):
    """One session's connection to the gateway."""

    name: str

    async def post(self, told: Told, headers: dict[str, str], leave: asyncio.Event | None = None) -> bytes:
        """The body of the answer. The connection is closed when `leave` is set before the answer."""
        ...


class InProcess:
    """Calls the provider application directly."""

    name = "process"

    def __init__(self, app: ASGIApp, credentials: dict[str, str]):
        self._app = app
        self._headers = {**credentials, "content-type": "application/json"}

    async def post(self, told: Told, headers: dict[str, str], leave: asyncio.Event | None = None) -> bytes:
        pending = [{"type": "http.request", "body": orjson.dumps(told.body), "more_body": False}]
        left = leave or asyncio.Event()
        status = 0
        received: list[bytes] = []

        async def receive() -> Message:
            if pending:
                return pending.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            received.append(message.get("body", b""))

        named = {**self._headers, **headers}
        scope = {
            "type": "http",
            "method": "POST",
            "path": told.path,
            "query_string": told.query.encode("latin-1"),
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()],
        }
        await self._app(scope, receive, send)
        if left.is_set():
            raise Left
        return _answered(status, b"".join(received))


class Sockets:
    """Posts over loopback."""

    name = "socket"

    def __init__(self, client: aiohttp.ClientSession, base_url: str, credentials: dict[str, str]):
        self._client = client
        self._base_url = base_url
        self._headers = {**credentials, "content-type": "application/json"}

    async def post(self, told: Told, headers: dict[str, str], leave: asyncio.Event | None = None) -> bytes:
        posting = asyncio.create_task(self._exchange(told, headers))
        if leave is not None:
            leaving = asyncio.create_task(leave.wait())
            await asyncio.wait((posting, leaving), return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if leave.is_set():
                posting.cancel()
                await asyncio.wait((posting,))
                raise Left
        return await posting

    async def _exchange(self, told: Told, headers: dict[str, str]) -> bytes:
        url = f"{self._base_url}{told.path}?{told.query}"
        named = {**self._headers, **headers}
        async with self._client.post(url, data=orjson.dumps(told.body), headers=named) as response:
            return _answered(response.status, await response.read())


def _answered(status: int, data: bytes) -> bytes:
    if status != 200:
        raise Refused(f"status {status}: {data[:400].decode('utf-8', 'replace')}")
    return data
