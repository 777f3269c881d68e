"""Transports from a simulated harness to the gateway: in process through the real ASGI app, or over a real socket.

Both post the bytes of a request and return those of the answer, streamed or not. Past either one a request takes the same
path as a real harness's.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import aiohttp
import orjson
from starlette.types import ASGIApp, Message

from towline.audit.clients import GatewayRefused, WireRequest
from towline.errors import TowlineError


class ClientDisconnected(TowlineError):
    """The simulated harness closed its connection before the answer, as scripted."""


class Transport(Protocol):
    """One session's connection to the gateway."""

    name: str

    async def post(self, request: WireRequest, headers: dict[str, str], leave: asyncio.Event | None = None) -> bytes:
        """The body of the answer. Setting `leave` before the answer closes the connection."""
        ...


class InProcessTransport:
    """Calls the gateway's provider app directly."""

    name = "process"

    def __init__(self, app: ASGIApp, credentials: dict[str, str]):
        self._app = app
        self._headers = {**credentials, "content-type": "application/json"}

    async def post(self, request: WireRequest, headers: dict[str, str], leave: asyncio.Event | None = None) -> bytes:
        pending = [{"type": "http.request", "body": orjson.dumps(request.body), "more_body": False}]
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
            "path": request.path,
            "query_string": request.query.encode("latin-1"),
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()],
        }
        await self._app(scope, receive, send)
        if left.is_set():
            raise ClientDisconnected
        return _checked(status, b"".join(received))


class SocketTransport:
    """Posts over loopback."""

    name = "socket"

    def __init__(self, client: aiohttp.ClientSession, base_url: str, credentials: dict[str, str]):
        self._client = client
        self._base_url = base_url
        self._headers = {**credentials, "content-type": "application/json"}

    async def post(self, request: WireRequest, headers: dict[str, str], leave: asyncio.Event | None = None) -> bytes:
        posting = asyncio.create_task(self._exchange(request, headers))
        if leave is not None:
            leaving = asyncio.create_task(leave.wait())
            await asyncio.wait((posting, leaving), return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if leave.is_set():
                posting.cancel()
                await asyncio.wait((posting,))
                raise ClientDisconnected
        return await posting

    async def _exchange(self, request: WireRequest, headers: dict[str, str]) -> bytes:
        url = f"{self._base_url}{request.path}?{request.query}"
        named = {**self._headers, **headers}
        async with self._client.post(url, data=orjson.dumps(request.body), headers=named) as response:
            return _checked(response.status, await response.read())


def _checked(status: int, data: bytes) -> bytes:
    if status != 200:
        raise GatewayRefused(f"status {status}: {data[:400].decode('utf-8', 'replace')}")
    return data
