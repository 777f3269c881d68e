"""The Engine API of docker and podman over its socket, as far as sandboxes need it. Knows nothing of sandboxes.

Requests and answers are JSON or byte streams by aiohttp. `attach` is the one call that leaves HTTP behind: the
connection becomes a raw stream both ways, on which standard output and standard error come in frames.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import aiohttp

from towline.sandboxes.base import SandboxError
from towline.sandboxes.helping import within

_FRAME = struct.Struct(">BxxxL")
_CHUNK = 65_536
_UPGRADED = (101, 200)
SECONDS = 600.0
"""Longest answer of an engine that is asked for short work; a stop of many containers at once takes a while."""


class EngineFailure(SandboxError):
    """The engine refused a request, or cannot be reached."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class Engine:
    """One engine by its address: `unix:///var/run/docker.sock`, podman's socket, or `tcp://host:port`."""

    def __init__(self, url: str):
        self.url = url
        parts = urlsplit(url)
        if parts.scheme == "unix" and parts.path:
            self._socket, self._host, self._port = parts.path, "engine", 0
        elif parts.scheme in ("tcp", "http") and parts.hostname:
            self._socket, self._host, self._port = "", parts.hostname, parts.port or 2375
        else:
            raise SandboxError(f"{url!r} is no address of a container engine: use unix:///path or tcp://host:port")
        self._session: aiohttp.ClientSession | None = None
        self._version = ""

    async def open(self) -> dict[str, Any]:
        """Connect, and say what version it is."""
        connector = aiohttp.UnixConnector(path=self._socket, limit=0) if self._socket else aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        # An engine's socket is never behind a proxy, so none of the environment's settings count.
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
        version: dict[str, Any] = await self.json("GET", "/version")
        self._version = "/v" + str(version["ApiVersion"])
        return version

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def json(
        self, method: str, path: str, body: object = None, *, query: Mapping[str, str] | None = None, data: Any = None
    ) -> Any:
        """The answer's JSON, or None where there is none."""
        # Data may be gigabytes; everything else is short work.
        seconds = None if data is not None else SECONDS
        answering = self._text(method, path, body, query, data)
        text = await within(seconds, answering, f"the container engine did not answer {method} {path}")
        return json.loads(text) if text.strip() else None

    async def _text(self, method: str, path: str, body: object, query: Mapping[str, str] | None, data: Any) -> bytes:
        async with self.request(method, path, body, query=query, data=data) as answer:
            return await answer.read()

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: object = None, *, query: Mapping[str, str] | None = None, data: Any = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer to be read as it comes. `body` is sent as JSON, `data` as a tar stream."""
        if self._session is None:
            raise EngineFailure("the docker runtime is not open")
        headers = {"Content-Type": "application/x-tar"} if data is not None else {}
        sent = {"json": body} if body is not None else {"data": data}
        url = self._host if not self._port else f"{self._host}:{self._port}"
        try:
            async with self._session.request(
                method, f"http://{url}{self._version}{path}", params=query, headers=headers, **sent
            ) as answer:
                if answer.status >= 400:
                    raise EngineFailure(_reason(method, path, answer.status, await answer.read()), answer.status)
                yield answer
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineFailure(
                f"the container engine at {self.url} does not answer: {error}; is it running, and may you use it?"
            ) from error

    async def stream(self, path: str, *, query: Mapping[str, str], data: Any = None) -> AsyncIterator[dict[str, Any]]:
        """The messages of a long POST (a pull, an import, a build), one JSON object a line; an error in them is raised."""
        async with self.request("POST", path, query=query, data=data) as answer:
            buffer = b""
            async for chunk in answer.content.iter_chunked(_CHUNK):
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield _message(path, line)
            if buffer.strip():
                yield _message(path, buffer)

    async def attach(self, path: str, body: object, *, query: Mapping[str, str] | None = None) -> Attached:
        """Take over the connection of a POST."""
        try:
            if self._socket:
                reader, writer = await asyncio.open_unix_connection(self._socket)
            else:
                reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError as error:
            raise EngineFailure(f"the container engine at {self.url} does not answer: {error}") from error
        data = json.dumps(body).encode()
        target = self._version + path + ("?" + urlencode(query) if query else "")
        writer.write(
            f"POST {target} HTTP/1.1\r\nHost: {self._host}\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        try:
            answering = reader.readuntil(b"\r\n\r\n")
            head = (await within(SECONDS, answering, f"the container engine did not answer {path}")).decode("latin-1")
            status = int(head.split(" ", 2)[1])
            if status not in _UPGRADED:
                raise EngineFailure(_reason("POST", path, status, await _rest(reader, head)), status)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError, OSError) as error:
            writer.close()
            raise EngineFailure(f"the container engine broke off {path}: {error}") from error
        except BaseException:
            writer.close()
            raise
        return Attached(reader, writer)


class _Stdin(asyncio.StreamWriter):
    """Closing it closes this direction only: what the command still says is read to its end."""

    def close(self) -> None:
        if not self.transport.is_closing() and self.can_write_eof():
            self.write_eof()

    async def wait_closed(self) -> None:
        return


class Attached:
    """A raw connection to a process: its standard input, and its two outputs taken apart."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        transport = writer.transport
        self.stdin: asyncio.StreamWriter = _Stdin(transport, transport.get_protocol(), None, asyncio.get_running_loop())
        self.stdout = asyncio.StreamReader()
        self.stderr = asyncio.StreamReader()
        self._room = {1: _Room(), 2: _Room()}
        for number, stream in ((1, self.stdout), (2, self.stderr)):
            # A reader that is full asks its transport to wait; here that is a gate before the next frame.
            stream.set_transport(self._room[number])
        self.ended = asyncio.ensure_future(self._read())

    def close(self) -> None:
        self.ended.cancel()
        self._writer.close()
        for stream in (self.stdout, self.stderr):
            if not stream.at_eof():
                stream.feed_eof()

    async def _read(self) -> None:
        try:
            while True:
                number, length = _FRAME.unpack(await self._reader.readexactly(_FRAME.size))
                # Streams 0 and 1 are its output; 3 is the engine's own word about a failure.
                target, stream = (1, self.stdout) if number < 2 else (2, self.stderr)
                while length:
                    chunk = await self._reader.read(min(length, _CHUNK))
                    if not chunk:
                        return
                    length -= len(chunk)
                    await self._room[target].wait()
                    stream.feed_data(chunk)
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            for stream in (self.stdout, self.stderr):
                stream.feed_eof()


class _Room(asyncio.ReadTransport):
    """The gate of a stream: shut while its reader has more than it wants."""

    def __init__(self) -> None:
        super().__init__()
        self._open = asyncio.Event()
        self._open.set()

    def pause_reading(self) -> None:
        self._open.clear()

    def resume_reading(self) -> None:
        self._open.set()

    async def wait(self) -> None:
        await self._open.wait()


def segment(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="")


async def _rest(reader: asyncio.StreamReader, head: str) -> bytes:
    for line in head.lower().split("\r\n"):
        if line.startswith("content-length:"):
            return await reader.readexactly(min(int(line.split(":", 1)[1]), _CHUNK))
    return await reader.read(_CHUNK)


def _message(path: str, line: bytes) -> dict[str, Any]:
    try:
        message: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise EngineFailure(f"the container engine answered {path} with something else than JSON") from error
    if "error" in message:
        raise EngineFailure(str(message["error"]).strip())
    return message


def _reason(method: str, path: str, status: int, body: bytes) -> str:
    try:
        said = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        said = body[:500].decode("utf-8", "replace")
    return f"the container engine refused {method} {path} ({status}): {said.strip()}"
