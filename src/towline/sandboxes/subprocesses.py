"""Subprocesses of the node: run to their end, piped to asyncio streams, or serving requests through a `Channel`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from towline.sandboxes import wire
from towline.sandboxes.base import SandboxError

STEP_TIMEOUT = 120.0
"""More than any step needs on a busy machine; a process that hangs in the kernel never exits."""
KILL_TIMEOUT = 10.0
"""Seconds for killed processes to disappear."""
_BUFFER_BYTES = 1 << 18
_PACKAGES = str(Path(__file__).parents[2])

T = TypeVar("T")


async def with_timeout(seconds: float | None, work: Awaitable[T], what: str) -> T:
    """The result of the work; `SandboxError` if it takes longer. `what` says what did not happen."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise SandboxError(f"{what} within {seconds:g} seconds") from None


async def communicate(
    process: asyncio.subprocess.Process, what: str, stdin: bytes | None = None, *, seconds: float = STEP_TIMEOUT
) -> tuple[bytes, bytes]:
    """The output of a process, stdout and stderr. It is killed on timeout and when the caller is cancelled."""
    try:
        return await with_timeout(seconds, process.communicate(stdin), f"{what} did not finish")
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def isolated_python(program: str, *arguments: object) -> list[str]:
    """The command line of a Python program that sees no site packages and no environment, only Towline's own modules.

    The program finds its arguments in `sys.argv[1:]`.
    """
    start = "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    return [sys.executable, "-I", "-S", "-c", start + program, _PACKAGES, *map(str, arguments)]


async def kill_processes(find: Callable[[], list[int]], belongs: Callable[[int], bool], what: str) -> None:
    """Kill the processes that `find` lists until none is left; `SandboxError` if they do not die.

    Each is stopped first, so that nothing forks between being listed and being killed. `belongs` is checked again once the
    process cannot be replaced: a reused process id is never signalled.
    """
    deadline = asyncio.get_running_loop().time() + KILL_TIMEOUT
    while left := await asyncio.to_thread(find):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in left:
                with contextlib.suppress(OSError), open_pidfd(pid) as pidfd:
                    if belongs(pid):
                        signal.pidfd_send_signal(pidfd, number)
        if asyncio.get_running_loop().time() > deadline:
            raise SandboxError(f"{len(left)} processes of {what} did not die within {KILL_TIMEOUT:g} seconds")
        await asyncio.sleep(0.005)


@contextlib.contextmanager
def open_pidfd(pid: int) -> Iterator[int]:
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


class ProcessPipes:
    """The three pipes of a command: `inner` are the command's ends, the rest are the node's."""

    def __init__(self) -> None:
        self.inner: list[int] = []
        self.stdin: asyncio.StreamWriter
        self.readers: list[asyncio.StreamReader] = []
        self._transports: list[asyncio.BaseTransport] = []

    @classmethod
    async def open(cls, owner: int | None = None) -> ProcessPipes:
        """New pipes. `owner` gets the inner ends: programs open /dev/stdout by name, and must be allowed to."""
        pipes = cls()
        try:
            await pipes._open()
            if owner is not None and owner != os.geteuid():
                for descriptor in pipes.inner:
                    os.fchown(descriptor, owner, owner)
        except BaseException:
            pipes.close_inner()
            pipes.close()
            raise
        return pipes

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        self.inner.append(theirs)
        transport, protocol = await loop.connect_write_pipe(_PipeWriterProtocol, pipe_for_loop(loop, ours, "wb"))
        self._transports.append(transport)
        self.stdin = asyncio.StreamWriter(transport, protocol, None, loop)
        for _ in range(2):
            ours, theirs = os.pipe2(os.O_CLOEXEC)
            self.inner.append(theirs)
            self.readers.append(await read_pipe(ours, self._transports))

    def close_inner(self) -> None:
        for descriptor in self.inner:
            os.close(descriptor)
        self.inner = []

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


_KILLED = 128 + signal.SIGKILL


class PipedProcess:
    """A live command inside a sandbox, read and written through pipes. Its runtime reports its exit with `ended`."""

    def __init__(self, pipes: ProcessPipes, send_signal: Callable[[int], None]):
        self._pipes, self._send_signal = pipes, send_signal
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def stdin(self) -> asyncio.StreamWriter:
        return self._pipes.stdin

    @property
    def stdout(self) -> asyncio.StreamReader:
        return self._pipes.readers[0]

    @property
    def stderr(self) -> asyncio.StreamReader:
        return self._pipes.readers[1]

    @property
    def exited(self) -> bool:
        return self._code.done()

    def ended(self, code: int) -> None:
        if not self.exited:
            self._code.set_result(code)
        self._pipes.stdin.close()

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    async def kill(self) -> None:
        if not self.exited:
            self._send_signal(signal.SIGKILL)
            await asyncio.shield(self._code)


class ProcessTable:
    """The commands of one sandbox by pid. The exit of a command, or the end of the sandbox, can be reported before the
    answer to the request that started it has been handled; every command ends all the same."""

    def __init__(self) -> None:
        self._live: dict[int, PipedProcess] = {}
        self._early: dict[int, int] = {}
        """Exit codes of commands that ended before they were added."""
        self._closed = False

    def add(self, pid: int, process: PipedProcess) -> None:
        if pid in self._early:
            process.ended(self._early.pop(pid))
        elif self._closed:
            process.ended(_KILLED)
        else:
            self._live[pid] = process

    def ended(self, pid: int, code: int) -> None:
        process = self._live.pop(pid, None)
        if process is None:
            self._early[pid] = code
        else:
            process.ended(code)

    def close(self) -> None:
        """The sandbox is gone, and every command with it."""
        self._closed = True
        for process in self._live.values():
            process.ended(_KILLED)
        self._live.clear()


async def read_pipe(descriptor: int, transports: list[asyncio.BaseTransport]) -> asyncio.StreamReader:
    """A stream of a pipe's reading end; its transport is added to `transports`, for the caller to close."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_BUFFER_BYTES, loop=loop)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader, loop=loop), pipe_for_loop(loop, descriptor, "rb")
    )
    transports.append(transport)
    return reader


def pipe_for_loop(loop: asyncio.AbstractEventLoop, descriptor: int, mode: str) -> Any:
    """The argument for `connect_read_pipe` or `connect_write_pipe` of a loop, which then owns the descriptor.

    uvloop closes a pipe twice: the descriptor itself, then the file object around it, whose number may by then belong to a
    file that another thread has just opened. So uvloop gets an object that has a number and closes nothing.
    """
    if type(loop).__module__.partition(".")[0] == "uvloop":
        return _BorrowedDescriptor(descriptor)
    return os.fdopen(descriptor, mode, 0)


class _BorrowedDescriptor:
    """A descriptor that the event loop closes."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        return None


class _PipeWriterProtocol(asyncio.streams.FlowControlMixin):
    """Flow control for a writer whose reader may disappear at any time."""

    def __init__(self) -> None:
        super().__init__()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self._closed.done():
            self._closed.set_result(None)

    def _get_close_waiter(self, stream: Any) -> asyncio.Future[None]:
        return self._closed


WireReply = tuple[wire.WireMessage, list[int]]


class Channel:
    """Requests are numbered; a reply carries its request's number, an event none."""

    def __init__(self, connection: socket.socket, on_event: Callable[[wire.WireMessage], None], closed_error: str):
        self._connection, self._on_event, self._closed_error = connection, on_event, closed_error
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[WireReply]] = {}
        self._outgoing: list[tuple[wire.WireMessage, list[int]]] = []
        self._loop = asyncio.get_running_loop()
        self.closed = False
        connection.setblocking(False)
        self._loop.add_reader(connection.fileno(), self._readable)

    async def request(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> WireReply:
        """Send a request and wait for its reply; the caller keeps its descriptors."""
        if self.closed:
            raise SandboxError(self._closed_error)
        number = next(self._numbers)
        reply: asyncio.Future[WireReply] = self._loop.create_future()
        self._waiting[number] = reply
        try:
            self._send({**message, "n": number}, descriptors)
            return await reply
        except asyncio.CancelledError:
            # A reply that was already received must not leak its descriptors.
            if reply.done() and not reply.cancelled() and reply.exception() is None:
                for descriptor in reply.result()[1]:
                    os.close(descriptor)
            raise
        finally:
            self._waiting.pop(number, None)

    async def request_data(self, message: dict[str, Any], max_bytes: int) -> tuple[bytes, wire.WireMessage]:
        """Send a request whose data comes through a pipe; returns data and reply. `SandboxError` beyond `max_bytes`."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        transports: list[asyncio.BaseTransport] = []
        try:
            try:
                reader = await read_pipe(ours, transports)
                reply = asyncio.ensure_future(self.request(message, [theirs]))
                await asyncio.sleep(0)  # the request is sent, with a copy of the descriptor
            finally:
                os.close(theirs)
            data = bytearray()
            try:
                while chunk := await reader.read(1 << 18):
                    data += chunk
                    if len(data) > max_bytes:
                        raise SandboxError(f"the sandbox sent more than the limit of {max_bytes} bytes")
                return bytes(data), (await reply)[0]
            finally:
                reply.cancel()
        finally:
            for transport in transports:
                transport.close()

    def notify(self, message: dict[str, Any]) -> None:
        """Send a message that gets no reply."""
        if not self.closed:
            self._send({**message, "n": 0}, ())

    def _send(self, message: wire.WireMessage, descriptors: Sequence[int]) -> None:
        if self._outgoing:
            self._outgoing.append((message, [os.dup(descriptor) for descriptor in descriptors]))
            return
        try:
            wire.send(self._connection, message, descriptors)
        except BlockingIOError:
            self._outgoing.append((message, [os.dup(descriptor) for descriptor in descriptors]))
            self._loop.add_writer(self._connection.fileno(), self._writable)
        except OSError as error:
            self.close()
            raise SandboxError(self._closed_error) from error

    def _writable(self) -> None:
        while self._outgoing:
            message, descriptors = self._outgoing[0]
            try:
                wire.send(self._connection, message, descriptors)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            self._outgoing.pop(0)
            for descriptor in descriptors:
                os.close(descriptor)
        self._loop.remove_writer(self._connection.fileno())

    def _readable(self) -> None:
        while True:
            try:
                received = wire.receive(self._connection)
            except BlockingIOError:
                return
            if received is None:
                self.close()
                return
            message, descriptors = received
            reply = self._waiting.get(message["n"]) if "n" in message else None
            if reply is not None and not reply.done():
                reply.set_result((message, descriptors))
                continue
            for descriptor in descriptors:
                os.close(descriptor)
            if "n" not in message:
                self._on_event(message)
            if self.closed:
                return

    def close(self) -> None:
        """Close the connection; pending requests fail."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_writer(self._connection.fileno())
        self._connection.close()
        for _, descriptors in self._outgoing:
            for descriptor in descriptors:
                os.close(descriptor)
        self._outgoing.clear()
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(SandboxError(self._closed_error))
        self._on_event({"closed": True})
