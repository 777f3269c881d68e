"""The sandbox interface: an isolated place for untrusted programs, controlled only by the node.

Contract of every runtime:
- Programs inside see their root, its layers and its mounts, and change none of them outside: every write goes to a
  throw-away layer of bounded size.
- A requested limit is enforced, or the sandbox is not created: a runtime probes what it can enforce when it opens, and fails
  closed.
- `kill` ends every process inside, daemons and orphans too, and keeps the files; `destroy` leaves nothing behind.
- With network `gateway`, `listener` is a socket that listens on loopback *inside* the sandbox; the gateway holds it and
  accepts the connections. Nothing else can be reached.
- With network `open`, the same, and a proxy of the node on another port inside (`egress.py`): it connects to the hosts that
  the operator and the task allow, never to the host's loopback, cloud metadata or private networks. A runtime that cannot
  do this refuses `open`.
- Paths and bytes that come out of a sandbox are hostile: archives are read with `files/archives.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from towline.errors import TowlineError
from towline.sandboxes.files import archives
from towline.schema import Network, Resources

GATEWAY_PORT = 8500
"""Where the gateway listens inside a sandbox with network `gateway`, on 127.0.0.1."""
DEFAULT_RESOURCES = Resources(memory_mb=4096, pids=1024, cpus=None, disk_mb=4096)
MAX_OUTPUT_BYTES = 16 * 1024 * 1024
"""How much of each output stream of a command `execute` keeps."""
MAX_GET_BYTES = 256 * 1024 * 1024
"""Default size limit of `Sandbox.get`."""
_DRAIN_SECONDS = 1.0
"""How long output is still read after the command has exited."""


class SandboxError(TowlineError):
    """A sandbox cannot be created or used: an infrastructure failure, never the harness's fault."""

    failure = "sandbox"


class Unsupported(SandboxError):
    """The runtime cannot enforce or do what the spec requests, and refuses instead of doing less."""


class PathMissing(SandboxError):
    """The path does not exist inside the sandbox."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of the host that is visible inside."""

    source: Path
    target: str
    writable: bool = False
    """Writes go to a throw-away layer over the source, never to the source itself."""

    def existing_source(self) -> Path:
        """The resolved source; `SandboxError` if it does not exist."""
        if not self.source.exists():
            raise SandboxError(f"cannot mount {self.source} at {self.target}: it does not exist")
        return self.source.resolve()


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is made from. Equal specs make interchangeable sandboxes, so the pool is keyed by spec."""

    root: str = ""
    """Empty for an allow-list of the host's own root; else a folder, a tar file or, with docker, an image name."""
    layers: tuple[Path, ...] = ()
    """Folders stacked over the root, lowest first, each with changed files only."""
    mounts: tuple[Mount, ...] = ()
    network: Network = Network.NONE
    allowed_hosts: tuple[str, ...] = ()
    """With network `open`, the hosts that can be reached; empty: all that the operator allows."""
    resources: Resources = field(default_factory=lambda: DEFAULT_RESOURCES, hash=False)
    env: tuple[tuple[str, str], ...] = ()
    """Environment of every command inside."""
    workdir: str = "/work"
    """Where commands start; created if it does not exist."""
    user: str = ""
    """Empty for root as seen from inside, else a name or number in the root's /etc/passwd."""
    seconds: float | None = None
    """Lifetime: the sandbox then ends by itself, even if the node is gone."""


@dataclass(slots=True)
class CommandResult:
    """A command that has exited."""

    code: int
    """Exit code; 128 plus the number of a signal."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    """The command wrote more than was kept."""

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """Both streams, for error messages."""
        return (self.stdout + self.stderr).decode("utf-8", "replace")


class ChangeKind(StrEnum):
    """How a path differs from the root."""

    ADDED = "added"
    """The root has no such path."""
    CHANGED = "changed"
    """Content, type, mode or owner differ from the root's."""
    DELETED = "deleted"
    """The root has it, the sandbox does not."""


@dataclass(frozen=True, slots=True)
class PathChange:
    """A path inside that differs from the root."""

    path: str
    kind: ChangeKind


class SandboxProcess(Protocol):
    """A live command inside a sandbox. Its output must be read, or it blocks when the pipes are full."""

    @property
    def stdin(self) -> asyncio.StreamWriter: ...

    @property
    def stdout(self) -> asyncio.StreamReader: ...

    @property
    def stderr(self) -> asyncio.StreamReader: ...

    async def wait(self) -> int:
        """The exit code; 128 plus the number of a signal."""
        ...

    async def kill(self) -> None:
        """Kill this command and its process group; only `Sandbox.kill` reaches daemons too."""
        ...


class Sandbox(Protocol):
    """One sandbox. Created by a `Runtime`, ended by `destroy`."""

    @property
    def id(self) -> str: ...

    @property
    def spec(self) -> SandboxSpec: ...

    @property
    def listener(self) -> socket.socket | None:
        """Listens on 127.0.0.1:`GATEWAY_PORT` inside; set with network `gateway` or `open` where the runtime isolates."""
        ...

    async def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> SandboxProcess:
        """Start a command. It inherits nothing of the node's own environment."""
        ...

    async def put(self, archive: bytes | Path, target: str) -> None:
        """Unpack a tar (`files.archives.pack`) under `target`, which is created. The sandbox's user owns the files."""
        ...

    async def get(self, path: str, *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        """A file or folder as a tar whose names start at its own name.

        `PathMissing` if it does not exist, `SandboxError` if it is larger than `max_bytes` or cannot be read.
        """
        ...

    async def diff(self) -> list[PathChange]:
        """What differs from the root and its layers, ordered by path. Mounts are excluded."""
        ...

    async def kill(self) -> None:
        """Kill every process inside. Files stay readable, and new commands can be started."""
        ...

    async def destroy(self) -> None:
        """Kill everything and leave nothing behind. Idempotent."""
        ...


@runtime_checkable
class GetsWithout(Protocol):
    """A sandbox that can leave entries of a folder out of its archive."""

    async def get_without(self, path: str, skip: Sequence[str], *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        """`Sandbox.get` without the entries of the folder itself that are named in `skip`; they do not count."""
        ...


@dataclass(frozen=True, slots=True)
class SandboxHealth:
    """What happened to a sandbox without the node's doing."""

    ended: bool = False
    """The sandbox ended, and the node did not destroy it."""
    oom_kills: int = 0
    """Processes inside that were killed by the sandbox's own memory limit so far."""
    other_kills: int = 0
    """Processes inside that were killed because all sandboxes together had no memory left."""


@runtime_checkable
class ReportsSandboxHealth(Protocol):
    """A sandbox that can report its health."""

    async def health(self) -> SandboxHealth: ...


async def sandbox_health(sandbox: Sandbox, *, killed: bool) -> SandboxHealth:
    """The health of a sandbox in which a command has exited; `killed` if the command died by SIGKILL.

    The first process of a sandbox takes all others with it, and is the last to be seen dead. So after a SIGKILL the sandbox
    is used once, which succeeds only while its first process lives, whatever the agent did to its files: `/` cannot be
    removed or replaced.
    """
    if not isinstance(sandbox, ReportsSandboxHealth):
        return SandboxHealth()
    health = await sandbox.health()
    if not killed or health.ended:
        return health
    ended = False
    try:
        await sandbox.put(archives.pack({}), "/")
    except SandboxError:
        ended = True
    health = await sandbox.health()
    return SandboxHealth(health.ended or ended, health.oom_kills, health.other_kills)


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    """What a runtime found out about itself and this machine when it opened."""

    version: str
    isolated: bool
    """Whether programs inside are isolated from the host."""
    enforced: frozenset[str]
    """Which of memory_mb, pids, cpus, disk_mb, seconds it can enforce."""
    networks: frozenset[Network]
    notes: tuple[str, ...] = ()
    """What the operator should know, and what to do about it."""


def unenforced_limits(resources: Resources, enforced: Collection[str], waived: Resources | None) -> dict[str, float]:
    """The requested limits that a runtime does not enforce, except those equal to a `waived` default."""
    return {
        name: value
        for name, value in resources
        if value is not None and name not in enforced and (waived is None or value != getattr(waived, name))
    }


class Runtime(Protocol):
    """One way to make sandboxes."""

    name: str

    @property
    def facts(self) -> RuntimeFacts: ...

    async def open(self) -> None:
        """Probe the machine and remove leftovers of a crash; `SandboxError` with what to do if it cannot work here."""
        ...

    async def prepare(self, spec: SandboxSpec) -> None:
        """Fetch and unpack what the spec's root needs, ahead of `create`. A no-op the second time."""
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox: ...

    async def close(self) -> None:
        """Destroy every remaining sandbox."""
        ...


@runtime_checkable
class NeedsRoot(Protocol):
    """A runtime that makes no sandbox without its own root, so it cannot be probed without a task."""

    async def ping(self) -> None:
        """Raise `SandboxError` unless the runtime answers."""
        ...


def live_listener(sandbox: Sandbox) -> socket.socket | None:
    """The listener of a sandbox. `SandboxError` if the sandbox has ended: that closes its listener."""
    listener = sandbox.listener
    if listener is not None and listener.fileno() < 0:
        raise SandboxError(f"sandbox {sandbox.id} ended before its harness started: destroyed, expired, or killed")
    return listener


async def execute(
    sandbox: Sandbox,
    command: Sequence[str],
    *,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    user: str | None = None,
    seconds: float | None = None,
    max_bytes: int = MAX_OUTPUT_BYTES,
) -> CommandResult:
    """Run a command until it exits, or kill it after `seconds`; its output until then is kept."""
    process = await sandbox.start(command, env=env, cwd=cwd, user=user)
    stdout, stderr = _CappedOutput(max_bytes), _CappedOutput(max_bytes)
    reading = asyncio.gather(stdout.read(process.stdout), stderr.read(process.stderr), _feed(process, stdin))
    timed_out = False
    try:
        try:
            code = await asyncio.wait_for(process.wait(), seconds)
        except TimeoutError:
            timed_out = True
            await process.kill()
            code = await process.wait()
        # A daemon may hold the streams open forever; everything that the command itself wrote is in them by now.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(reading), _DRAIN_SECONDS)
    except BaseException:
        await asyncio.shield(process.kill())
        raise
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    truncated = stdout.truncated or stderr.truncated
    return CommandResult(code, bytes(stdout.data), bytes(stderr.data), timed_out, truncated)


@dataclass(slots=True)
class _CappedOutput:
    """The first `max_bytes` of a stream."""

    max_bytes: int
    data: bytearray = field(default_factory=bytearray)
    truncated: bool = False

    async def read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(65_536):
            room = self.max_bytes - len(self.data)
            self.data += chunk[:room]
            self.truncated = self.truncated or len(chunk) > room


async def _feed(process: SandboxProcess, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        if data:
            process.stdin.write(data)
            await process.stdin.drain()
        process.stdin.close()
