"""A live command's three pipes, as asyncio streams on the node's side."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

from towline.sandboxes import wire
from towline.sandboxes.base import SandboxError
from towline.sandboxes.channel import Channel
from towline.sandboxes.pipes import given_to

_LIMIT = 1 << 18


class Streams:
    """The pipes: `inner` goes to the command, the rest stays here."""

    def __init__(self) -> None:
        self.inner: list[int] = []
        self.stdin: asyncio.StreamWriter
        self.readers: list[asyncio.StreamReader] = []
        self._transports: list[asyncio.BaseTransport] = []

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            theirs, ours = os.pipe2(os.O_CLOEXEC)
            self.inner.append(theirs)
            transport, protocol = await loop.connect_write_pipe(_Drained, given_to(loop, ours, "wb"))
            self._transports.append(transport)
            self.stdin = asyncio.StreamWriter(transport, protocol, None, loop)
            for _ in range(2):
                ours, theirs = os.pipe2(os.O_CLOEXEC)
                self.inner.append(theirs)
                reader = await read_pipe(ours, self._transports)
                self.readers.append(reader)
        except BaseException:
            self.close_inner()
            self.close()
            raise

    def close_inner(self) -> None:
        for descriptor in self.inner:
            os.close(descriptor)
        self.inner = []

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


class _Drained(asyncio.streams.FlowControlMixin):
    """Flow control for a writer whose other end may go at any time."""

    def __init__(self) -> None:
        super().__init__()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self._closed.done():
            self._closed.set_result(None)

    def _get_close_waiter(self, stream: Any) -> asyncio.Future[None]:
        return self._closed


async def read_pipe(descriptor: int, transports: list[asyncio.BaseTransport]) -> asyncio.StreamReader:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_LIMIT, loop=loop)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader, loop=loop), given_to(loop, descriptor, "rb")
    )
    transports.append(transport)
    return reader


async def open_streams(owner: int) -> Streams:
    """New pipes whose inner ends belong to `owner`: programs open /dev/stdout by name, and must be allowed to."""
    streams = Streams()
    await streams.open()
    if owner != os.geteuid():
        for descriptor in streams.inner:
            os.fchown(descriptor, owner, owner)
    return streams


class LiveProcess:
    """A command inside a sandbox."""

    def __init__(self, streams: Streams, send_signal: Callable[[int], None]):
        self._streams, self._signal = streams, send_signal
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def stdin(self) -> asyncio.StreamWriter:
        return self._streams.stdin

    @property
    def stdout(self) -> asyncio.StreamReader:
        return self._streams.readers[0]

    @property
    def stderr(self) -> asyncio.StreamReader:
        return self._streams.readers[1]

    def ended(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)
        self._streams.stdin.close()

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    async def kill(self) -> None:
        if not self._code.done():
            self._signal(signal.SIGKILL)
            await asyncio.shield(self._code)


async def collect(channel: Channel, message: dict[str, Any], most: int) -> tuple[bytes, wire.Message]:
    """Ask for something that comes through a pipe; what came, and the answer. `SandboxError` if it is more than `most`."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    transports: list[asyncio.BaseTransport] = []
    try:
        try:
            reader = await read_pipe(ours, transports)
            asking = asyncio.ensure_future(channel.ask(message, [theirs]))
            await asyncio.sleep(0)  # the request is on its way, with a copy of the descriptor
        finally:
            os.close(theirs)
        data = bytearray()
        try:
            while chunk := await reader.read(1 << 18):
                data += chunk
                if len(data) > most:
                    raise SandboxError(f"more than the {most} bytes allowed came out of the sandbox")
            return bytes(data), (await asking)[0]
        finally:
            asking.cancel()
    finally:
        for transport in transports:
            transport.close()
