"""How a simulated harness reaches the gateway: in process through the real ASGI application, or over a real socket.

Both post the bytes of a chat completion and read the bytes of its answer, whole or streamed; behind either the request
takes the very path of a harness's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol

import aiohttp
import orjson
from starlette.types import ASGIApp, Message

from towline.errors import TowlineError

PATH = "/v1/chat/completions"


class Refused(TowlineError):
    """The gateway answered with an error."""


class Left(TowlineError):
    """The harness closed its connection before the answer came, as it wanted to."""


class Wire(Protocol):
    """One session's connection to the gateway."""

    name: str

    async def post(self, body: dict[str, Any], headers: dict[str, str], leave: asyncio.Event | None = None) -> Any:
        """The completion that answers `body`. The connection is closed when `leave` is set before the answer."""
        ...


class InProcess:
    """Calls the provider application directly."""

    name = "process"

    def __init__(self, app: ASGIApp, key: str):
        self._app = app
        self._key = key

    async def post(self, body: dict[str, Any], headers: dict[str, str], leave: asyncio.Event | None = None) -> Any:
        pending = [{"type": "http.request", "body": orjson.dumps(body), "more_body": False}]
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

        named = {"authorization": f"Bearer {self._key}", "content-type": "application/json", **headers}
        scope = {
            "type": "http",
            "method": "POST",
            "path": PATH,
            "query_string": b"",
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()],
        }
        await self._app(scope, receive, send)
        if left.is_set():
            raise Left
        return _read(status, b"".join(received), stream=bool(body.get("stream")))


class Sockets:
    """Posts over loopback."""

    name = "socket"

    def __init__(self, client: aiohttp.ClientSession, base_url: str, key: str):
        self._client = client
        self._url = base_url + PATH
        self._key = key

    async def post(self, body: dict[str, Any], headers: dict[str, str], leave: asyncio.Event | None = None) -> Any:
        posting = asyncio.create_task(self._exchange(body, headers))
        if leave is not None:
            leaving = asyncio.create_task(leave.wait())
            await asyncio.wait((posting, leaving), return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if leave.is_set():
                posting.cancel()
                await asyncio.wait((posting,))
                raise Left
        return await posting

    async def _exchange(self, body: dict[str, Any], headers: dict[str, str]) -> Any:
        named = {"authorization": f"Bearer {self._key}", "content-type": "application/json", **headers}
        async with self._client.post(self._url, data=orjson.dumps(body), headers=named) as response:
            return _read(response.status, await response.read(), stream=bool(body.get("stream")))


def _read(status: int, data: bytes, *, stream: bool) -> Any:
    if status != 200:
        raise Refused(f"status {status}: {data[:400].decode('utf-8', 'replace')}")
    if not stream:
        return orjson.loads(data)
    lines = (line[6:] for line in data.split(b"\n") if line.startswith(b"data: "))
    return assembled(orjson.loads(line) for line in lines if line != b"[DONE]")


def assembled(chunks: Iterable[Any]) -> dict[str, Any]:
    """The completion that a client puts together from the chunks of a stream."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        if "error" in chunk:
            raise Refused(f"error in the stream: {chunk['error']}")
        for part in chunk["choices"]:
            message = {"role": "assistant", "content": None}
            choice = choices.setdefault(part["index"], {"index": part["index"], "message": message})
            choice["finish_reason"] = part["finish_reason"]
            _add(choice["message"], part["delta"])
    return {"choices": [choices[index] for index in sorted(choices)]}


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        if delta.get(name) is not None:
            message[name] = (message.get(name) or "") + delta[name]
    for piece in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
