"""A client of the Engine API of docker and podman, as far as sandboxes need it, and the tar streams that it uploads.

Requests and replies are JSON or byte streams by aiohttp. `attach` is the one call that leaves HTTP behind: the
connection becomes a raw stream both ways, on which stdout and stderr arrive in frames.

Why our own client: sandboxes need a dozen endpoints, and attached streams with backpressure and a stdin that can be
half-closed. On aiohttp, which Towline uses anyway, that is less code than adapting a full docker client, and it works
the same with podman.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import struct
import tarfile
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlencode, urlsplit

import aiohttp

from towline.sandboxes.base import SandboxError
from towline.sandboxes.files import archives
from towline.sandboxes.subprocesses import with_timeout

_FRAME = struct.Struct(">BxxxL")
_CHUNK = 65_536
_UPGRADED = (101, 200)
REQUEST_TIMEOUT = 600.0
"""Seconds for requests without a body to stream; stopping many containers at once takes a while."""


class DockerError(SandboxError):
    """The engine refused a request or cannot be reached."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class DockerClient:
    """One engine by its URL: `unix:///var/run/docker.sock`, podman's socket, or `tcp://host:port`."""

    def __init__(self, url: str):
        self.url = url
        parts = urlsplit(url)
        if parts.scheme == "unix" and parts.path:
            self._socket, self._host, self._port = parts.path, "engine", 0
        elif parts.scheme in ("tcp", "http") and parts.hostname:
            self._socket, self._host, self._port = "", parts.hostname, parts.port or 2375
        else:
            raise SandboxError(f"{url!r} is not the URL of a container engine: use unix:///path or tcp://host:port")
        self._session: aiohttp.ClientSession | None = None
        self._version = ""

    async def open(self) -> dict[str, Any]:
        """Connect; returns the engine's version."""
        connector = aiohttp.UnixConnector(path=self._socket, limit=0) if self._socket else aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        # An engine's socket is never behind a proxy, so the environment's proxy settings are ignored.
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
        """The JSON of the response, or None if it is empty."""
        # `data` may be gigabytes; everything else is quick.
        seconds = None if data is not None else REQUEST_TIMEOUT
        response = self._read(method, path, body, query, data)
        text = await with_timeout(seconds, response, f"the container engine did not answer {method} {path}")
        return json.loads(text) if text.strip() else None

    async def _read(self, method: str, path: str, body: object, query: Mapping[str, str] | None, data: Any) -> bytes:
        async with self.request(method, path, body, query=query, data=data) as response:
            return await response.read()

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: object = None, *, query: Mapping[str, str] | None = None, data: Any = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response to stream. `body` is sent as JSON, `data` as a tar stream."""
        if self._session is None:
            raise DockerError("the docker runtime is not open: call `open` first")
        headers = {"Content-Type": "application/x-tar"} if data is not None else {}
        sent = {"json": body} if body is not None else {"data": data}
        url = self._host if not self._port else f"{self._host}:{self._port}"
        try:
            async with self._session.request(
                method, f"http://{url}{self._version}{path}", params=query, headers=headers, **sent
            ) as response:
                if response.status >= 400:
                    raise DockerError(_refusal(method, path, response.status, await response.read()), response.status)
                yield response
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise DockerError(
                f"the container engine at {self.url} does not answer: {error}; check that it runs and that "
                "this user may use its socket"
            ) from error

    async def stream(self, path: str, *, query: Mapping[str, str], data: Any = None) -> AsyncIterator[dict[str, Any]]:
        """The messages of a long POST (pull, import, build), one JSON object per line; an error message is raised."""
        async with self.request("POST", path, query=query, data=data) as response:
            buffer = b""
            async for chunk in response.content.iter_chunked(_CHUNK):
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield _parse_message(path, line)
            if buffer.strip():
                yield _parse_message(path, buffer)

    async def attach(self, path: str, body: object, *, query: Mapping[str, str] | None = None) -> AttachedStream:
        """Take over the connection of a POST as a raw stream."""
        try:
            if self._socket:
                reader, writer = await asyncio.open_unix_connection(self._socket)
            else:
                reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError as error:
            raise DockerError(f"the container engine at {self.url} does not answer: {error}") from error
        data = json.dumps(body).encode()
        target = self._version + path + ("?" + urlencode(query) if query else "")
        writer.write(
            f"POST {target} HTTP/1.1\r\nHost: {self._host}\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        try:
            head_bytes = reader.readuntil(b"\r\n\r\n")
            head = (
                await with_timeout(REQUEST_TIMEOUT, head_bytes, f"the container engine did not answer {path}")
            ).decode("latin-1")
            status = int(head.split(" ", 2)[1])
            if status not in _UPGRADED:
                raise DockerError(_refusal("POST", path, status, await _error_body(reader, head)), status)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError, OSError) as error:
            writer.close()
            raise DockerError(f"the container engine aborted {path}: {error}") from error
        except BaseException:
            writer.close()
            raise
        return AttachedStream(reader, writer)


class _Stdin(asyncio.StreamWriter):
    """Closing it closes this direction only; the command's remaining output is still read."""

    def close(self) -> None:
        if not self.transport.is_closing() and self.can_write_eof():
            self.write_eof()

    async def wait_closed(self) -> None:
        return


class AttachedStream:
    """A raw connection to a process: its stdin, and its demultiplexed stdout and stderr."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        transport = writer.transport
        self.stdin: asyncio.StreamWriter = _Stdin(transport, transport.get_protocol(), None, asyncio.get_running_loop())
        self.stdout = asyncio.StreamReader()
        self.stderr = asyncio.StreamReader()
        self._gates = {1: _ReadGate(), 2: _ReadGate()}
        for number, stream in ((1, self.stdout), (2, self.stderr)):
            # A full reader pauses its transport; here that is a gate before the next frame.
            stream.set_transport(self._gates[number])
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
                # Streams 0 and 1 are stdout; 3 is the engine's own error message.
                target, stream = (1, self.stdout) if number < 2 else (2, self.stderr)
                while length:
                    chunk = await self._reader.read(min(length, _CHUNK))
                    if not chunk:
                        return
                    length -= len(chunk)
                    await self._gates[target].wait()
                    stream.feed_data(chunk)
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            for stream in (self.stdout, self.stderr):
                stream.feed_eof()


class _ReadGate(asyncio.ReadTransport):
    """Backpressure of a stream: closed while its reader is full."""

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


def quote_segment(name: str) -> str:
    """A name as one segment of a path."""
    return quote(name, safe="")


async def _error_body(reader: asyncio.StreamReader, head: str) -> bytes:
    for line in head.lower().split("\r\n"):
        if line.startswith("content-length:"):
            return await reader.readexactly(min(int(line.split(":", 1)[1]), _CHUNK))
    return await reader.read(_CHUNK)


def _parse_message(path: str, line: bytes) -> dict[str, Any]:
    try:
        message: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise DockerError(f"the container engine answered {path} with something that is not JSON") from error
    if "error" in message:
        raise DockerError(str(message["error"]).strip())
    return message


def _refusal(method: str, path: str, status: int, body: bytes) -> str:
    try:
        reason = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        reason = body[:500].decode("utf-8", "replace")
    return f"the container engine refused {method} {path} ({status}): {reason.strip()}"


_MODES = 0o777


def write_owned_tar(archive: bytes | Path, below: list[str], owner: tuple[int, int], out: IO[bytes]) -> None:
    """Write the same archive with an owner, its names below new folders. Names that lead out are errors."""
    archives.member_names(archive)
    with (
        tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as to,
        tarfile.open(fileobj=io.BytesIO(archive), mode="r:")
        if isinstance(archive, bytes)
        else tarfile.open(archive, mode="r:") as source,
    ):
        for depth in range(1, len(below) + 1):
            folder = tarfile.TarInfo("/".join(below[:depth]))
            folder.type, folder.mode, folder.uid, folder.gid = tarfile.DIRTYPE, 0o755, *owner
            to.addfile(folder)
        prefix = "".join(part + "/" for part in below)
        for member in source:
            if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                continue
            if not member.name.strip("./"):
                continue
            content = source.extractfile(member) if member.isreg() else None
            member.name = prefix + member.name
            if member.islnk():
                member.linkname = prefix + member.linkname
            member.uid, member.gid, member.uname, member.gname = *owner, "", ""
            member.mode &= _MODES
            member.pax_headers = {}
            to.addfile(member, content)
    out.seek(0)


async def read_chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    """A file's content from its current position, read in threads."""
    while chunk := await asyncio.to_thread(file.read, 1 << 20):
        yield chunk


def user_ids(user: str, passwd: bytes) -> tuple[int, int]:
    """The uid and gid of `name`, `uid` or `uid:gid`, by the content of /etc/passwd."""
    name, _, group = user.partition(":")
    for line in passwd.decode("utf-8", "replace").splitlines():
        fields = line.split(":")
        if len(fields) > 3 and name in (fields[0], fields[2]) and fields[2].isdecimal() and fields[3].isdecimal():
            return int(fields[2]), int(group) if group.isdecimal() else int(fields[3])
    if not name.isdecimal():
        raise SandboxError(f"the sandbox's root has no user {name!r}")
    return int(name), int(group) if group.isdecimal() else 0


async def file_chunks(path: Path) -> AsyncIterator[bytes]:
    with contextlib.closing(await asyncio.to_thread(open, path, "rb")) as file:
        async for chunk in read_chunks(file):
            yield chunk


async def folder_tar(folder: Path) -> AsyncIterator[bytes]:
    """A folder as a tar stream with its owners, packed by a thread while it is sent. Devices are skipped."""
    reading, writing = os.pipe()
    failed: list[BaseException] = []

    def without_devices(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if member.ischr() or member.isblk() or member.isfifo() else member

    def pack() -> None:
        try:
            with (
                os.fdopen(writing, "wb") as out,
                tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar,
            ):
                for name in sorted(os.listdir(folder)):
                    tar.add(folder / name, arcname=name, filter=without_devices)
        except (OSError, tarfile.TarError) as error:
            failed.append(error)

    packing = threading.Thread(target=pack, daemon=True)
    packing.start()
    with contextlib.closing(os.fdopen(reading, "rb", 0)) as file:
        async for chunk in read_chunks(file):
            yield chunk
    await asyncio.to_thread(packing.join)
    if failed:
        raise SandboxError(f"cannot read {folder} completely: {failed[0]}") from failed[0]
