"""The sandbox interface: a place for what is not trusted, with a door that only the node opens.

Contract of every runtime:
- What runs inside sees its root, its layers and its mounts, and changes none of them outside: every write goes to a
  throw-away layer of bounded size.
- A limit that is asked for is enforced, or the sandbox is not made: a runtime probes what it can do when it opens and
  fails closed.
- `kill` ends every process inside, daemons and orphans too, and leaves the files; `destroy` leaves nothing.
- With network `gateway`, `listener` is a socket that listens on loopback *inside* the sandbox; whoever holds it accepts
  the connections. Nothing else can be reached.
- Paths and bytes that come out of a sandbox are hostile: archives are read with `towline.sandboxes.archives`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from towline.errors import TowlineError
from towline.sandboxes import archives
from towline.schema import Network, Resources

GATEWAY_PORT = 8500
"""Where the gateway listens inside a sandbox with network `gateway`, on 127.0.0.1."""
DEFAULT_RESOURCES = Resources(memory_mb=4096, pids=1024, cpus=None, disk_mb=4096)
OUTPUT_BYTES = 16 * 1024 * 1024
"""Most that `execute` keeps of each of a command's streams."""
_LINGER = 1.0
"""Seconds that streams are read on after their command has ended."""


class SandboxError(TowlineError):
    """A sandbox that cannot be made or used: an infrastructure failure, never the harness's."""

    failure = "sandbox"


class Unsupported(SandboxError):
    """The runtime cannot enforce or do what the spec asks; it says so rather than do less."""


class PathMissing(SandboxError):
    """There is nothing at a path inside."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of the host shown inside."""

    source: Path
    target: str
    writable: bool = False
    """Writes go to a throw-away layer over the source, never to the source itself."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a sandbox is made from. Two equal specs make interchangeable sandboxes: a pool is kept by spec."""

    root: str = ""
    """Empty for an allow-list of the host's own root; a folder; a tar file; or an image's name, where there are images."""
    layers: tuple[Path, ...] = ()
    """Folders laid over the root, lowest first, each holding changed files only."""
    mounts: tuple[Mount, ...] = ()
    network: Network = Network.NONE
    resources: Resources = field(default_factory=lambda: DEFAULT_RESOURCES, hash=False)
    env: tuple[tuple[str, str], ...] = ()
    """Of every command inside."""
    workdir: str = "/work"
    """Made if it is not there; where commands start."""
    user: str = ""
    """Empty for root as seen from inside, else a name or number that the root's /etc/passwd knows."""
    seconds: float | None = None
    """After so long the sandbox ends itself, whatever became of the node."""


@dataclass(slots=True)
class Done:
    """A command that has ended."""

    code: int
    """Exit code; a signal is 128 plus its number."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    """More came out than was kept."""

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """Both streams, for a person."""
        return (self.stdout + self.stderr).decode("utf-8", "replace")


class ChangeKind(StrEnum):
    ADDED = "added"
    CHANGED = "changed"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Change:
    """A path inside that is not as the root had it."""

    path: str
    kind: ChangeKind


class Process(Protocol):
    """A live command inside a sandbox. Its streams must be read, or it stops when they are full."""

    @property
    def stdin(self) -> asyncio.StreamWriter: ...

    @property
    def stdout(self) -> asyncio.StreamReader: ...

    @property
    def stderr(self) -> asyncio.StreamReader: ...

    async def wait(self) -> int:
        """The exit code; a signal is 128 plus its number."""
        ...

    async def kill(self) -> None:
        """End this command and its process group; `Sandbox.kill` is what ends daemons too."""
        ...


class Sandbox(Protocol):
    """One place. Made by a `Runtime`, ended by `destroy`, both exactly once."""

    @property
    def id(self) -> str: ...

    @property
    def spec(self) -> Spec: ...

    @property
    def listener(self) -> socket.socket | None:
        """Listens on 127.0.0.1:`GATEWAY_PORT` inside; set with network `gateway` where the runtime isolates."""
        ...

    async def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> Process:
        """Start a command; nothing of the node's own environment reaches it."""
        ...

    async def put(self, archive: bytes | Path, target: str) -> None:
        """Unpack a tar (`towline.sandboxes.archives.pack`) under `target`, which is made. Owned by the sandbox's user."""
        ...

    async def get(self, path: str, *, most: int = 256 * 1024 * 1024) -> bytes:
        """A file or folder as a tar whose names start at its own; `PathMissing` if it is not there, `SandboxError` if it is
        larger or cannot be read."""
        ...

    async def diff(self) -> list[Change]:
        """What is not as the root and its layers had it, by path. Mounts are not looked at."""
        ...

    async def kill(self) -> None:
        """End every process inside; the files stay and can be read, and commands can be started again."""
        ...

    async def destroy(self) -> None:
        """End everything and leave nothing behind. May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a sandbox by other hands than its node's."""

    ended: bool = False
    """It has ended, and its node did not end it."""
    memory_kills: int = 0
    """Processes inside that its own memory limit has ended so far."""


@runtime_checkable
class Fated(Protocol):
    """A sandbox that knows its fate."""

    async def fate(self) -> Fate: ...


async def fate_of(sandbox: Sandbox, *, killed: bool) -> Fate:
    """The fate of a sandbox in which a command has ended; `killed` says that it was by SIGKILL.

    The first process of a sandbox takes all others with it, and is the last to be seen dead: after a SIGKILL the sandbox is
    therefore used once, which works as long as its first process lives.
    """
    if not isinstance(sandbox, Fated):
        return Fate()
    fate = await sandbox.fate()
    if not killed or fate.ended:
        return fate
    ended = False
    try:
        await sandbox.put(archives.pack({}), sandbox.spec.workdir)
    except SandboxError:
        ended = True
    fate = await sandbox.fate()
    return Fate(fate.ended or ended, fate.memory_kills)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a runtime found out about itself and this machine."""

    version: str
    isolated: bool
    """Whether what runs inside is kept from the host."""
    enforced: frozenset[str]
    """Which of memory_mb, pids, cpus, disk_mb, seconds it can enforce."""
    networks: frozenset[Network]
    notes: tuple[str, ...] = ()
    """What a person should know, and what to do about it."""


class Runtime(Protocol):
    """One way to make sandboxes."""

    name: str

    @property
    def facts(self) -> Facts: ...

    async def open(self) -> None:
        """Probe, and end what an earlier crash left; `SandboxError` with what to do if it cannot work here."""
        ...

    async def prepare(self, spec: Spec) -> None:
        """Fetch and unpack what the spec's root needs, ahead of `create`. A second call costs nothing."""
        ...

    async def create(self, spec: Spec) -> Sandbox: ...

    async def close(self) -> None:
        """Destroy every sandbox that is left."""
        ...


@runtime_checkable
class NeedsRoot(Protocol):
    """A runtime that makes no sandbox without a root of its own, and so cannot be tried without a task."""

    async def ping(self) -> None:
        """Raise `SandboxError` unless the runtime answers."""
        ...


async def execute(
    sandbox: Sandbox,
    command: Sequence[str],
    *,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    user: str | None = None,
    seconds: float | None = None,
    most: int = OUTPUT_BYTES,
) -> Done:
    """Run a command to its end, or kill it after `seconds`; what came out until then is kept."""
    process = await sandbox.start(command, env=env, cwd=cwd, user=user)
    out, errors = _Kept(most), _Kept(most)
    reading = asyncio.gather(out.read(process.stdout), errors.read(process.stderr), _feed(process, stdin))
    timed_out = False
    try:
        try:
            code = await asyncio.wait_for(process.wait(), seconds)
        except TimeoutError:
            timed_out = True
            await process.kill()
            code = await process.wait()
        # A daemon may hold the streams open for ever; what the command itself wrote is in them by now.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(reading), _LINGER)
    except BaseException:
        await asyncio.shield(process.kill())
        raise
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    return Done(code, bytes(out.data), bytes(errors.data), timed_out, out.cut or errors.cut)


@dataclass(slots=True)
class _Kept:
    """The beginning of a stream."""

    most: int
    data: bytearray = field(default_factory=bytearray)
    cut: bool = False

    async def read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(65_536):
            room = self.most - len(self.data)
            self.data += chunk[:room]
            self.cut = self.cut or len(chunk) > room


async def _feed(process: Process, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        if data:
            process.stdin.write(data)
            await process.stdin.drain()
        process.stdin.close()
