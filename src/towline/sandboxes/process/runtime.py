"""The process runtime: sandboxes without isolation, plain processes of the node's user in their own folder.

For trusted programs, and for machines that allow nothing better. Nothing is isolated from the host: a command sees
every file and address that the node sees. What does hold: commands inherit none of the node's environment, each sandbox
has its own folder, and `kill` ends every descendant of every command.

There is no separate root, so inside paths are mapped: `/work/a` is `<folder>/root/work/a`, and `TOWLINE_ROOT` is
`<folder>/root`. `put`, `get`, `diff` and `cwd` map their paths. In commands and variables, a whole word (between the
colons of a variable) is mapped if it names a path that exists in the sandbox's folder, or a new path in one of its
folders that does not exist on the host; other words are left alone. So `["cat", "/work/a"]` and `HOME=/home/agent` are
the sandbox's, `["/bin/sh", …]` is the host's, and a script uses `"$TOWLINE_ROOT/work/a"` or, since commands start in
the working folder, `a`. `ProcessSandbox.outside` returns the mapped path, for configuration files that contain paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import platform
import pwd
import secrets
import shutil
import socket
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from towline.sandboxes import wire
from towline.sandboxes.base import (
    DEFAULT_RESOURCES,
    MAX_GET_BYTES,
    ChangeKind,
    PathChange,
    PathMissing,
    RuntimeFacts,
    SandboxError,
    SandboxHealth,
    SandboxSpec,
    Unsupported,
    unenforced_limits,
)
from towline.sandboxes.files import archives, folders
from towline.sandboxes.subprocesses import (
    STEP_TIMEOUT,
    Channel,
    PipedProcess,
    ProcessPipes,
    ProcessTable,
    isolated_python,
    with_timeout,
)
from towline.schema import Network, Resources

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FOLDERS = ("/root", "/tmp")
"""Created in every sandbox."""
_SUPERVISOR_PROGRAM = (
    "from towline.sandboxes.process.supervisor import main; main(int(sys.argv[1]), float(sys.argv[2]))"
)


class ProcessSandbox:
    """One folder and one supervisor process. Made by `ProcessRuntime.create`."""

    def __init__(self, name: str, spec: SandboxSpec, folder: Path, lock: int):
        """`lock` is the node's; the supervisor inherits it, so that the next node waits until it has exited."""
        self.id = name
        self.spec = spec
        self.listener: socket.socket | None = None
        """None: the gateway is reached by its own address."""
        self.folder = folder
        self.root = folder / "root"
        self.gone = False
        self._lock = lock
        self._processes = ProcessTable()
        self._supervisor: asyncio.subprocess.Process | None = None
        self._channel: Channel | None = None

    @property
    def alive(self) -> bool:
        """Whether it can be used: not destroyed, and its supervisor lives."""
        return not self.gone and self._channel is not None and not self._channel.closed

    async def health(self) -> SandboxHealth:
        return SandboxHealth(ended=not self.gone and not self.alive)

    def outside(self, path: str) -> str:
        """Where an inside path is on the host."""
        return str(self.root / _relative(path))

    async def open(self) -> None:
        ours, theirs = wire.pair()
        try:
            self._supervisor = await asyncio.create_subprocess_exec(
                *isolated_python(_SUPERVISOR_PROGRAM, theirs.fileno(), self.spec.seconds or 0),
                pass_fds=(theirs.fileno(), self._lock),
                env={},
                cwd="/",
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise SandboxError(f"cannot start the supervisor of a process sandbox: {error}") from error
        finally:
            theirs.close()
        closed = f"sandbox {self.id} has ended: destroyed, expired, or its supervisor was killed"
        self._channel = Channel(ours, self._on_event, closed)

    async def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> PipedProcess:
        check_user(user or "")
        if not command:
            raise SandboxError("a command needs at least a program")
        message = {
            "do": "start",
            "command": [self._mapped(word) for word in command],
            "env": self._environment(dict(env or {})),
            "cwd": self.outside(cwd or self.spec.workdir),
        }
        pipes = await ProcessPipes.open()
        try:
            reply, _ = await self._open_channel().request(message, pipes.inner)
            if "error" in reply:
                raise SandboxError(f"cannot start {command[0]!r} in sandbox {self.id}: {reply['error']}")
        except BaseException:
            pipes.close()
            raise
        finally:
            pipes.close_inner()
        pid = reply["pid"]
        process = PipedProcess(pipes, lambda number: self._signal(pid, number))
        self._processes.add(pid, process)
        return process

    async def put(self, archive: bytes | Path, target: str) -> None:
        try:
            # Symlinks may lead anywhere and are followed: commands here can write everywhere anyway.
            await asyncio.to_thread(archives.unpack, archive, self.outside(target), links="any", follow=True)
        except OSError as error:
            raise SandboxError(f"cannot put files at {target}: {error}") from error

    async def get(self, path: str, *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        return await asyncio.to_thread(self._pack, path, max_bytes)

    async def get_without(self, path: str, skip: Sequence[str], *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        return await asyncio.to_thread(self._pack, path, max_bytes, skip)

    async def diff(self) -> list[PathChange]:
        """Everything in the folder but mounts: the root was empty, so all of it was added."""
        return await asyncio.to_thread(self._changes)

    async def kill(self) -> None:
        if not self.alive:
            return
        channel = self._open_channel()
        dying = channel.request({"do": "kill"})
        try:
            reply, _ = await with_timeout(STEP_TIMEOUT, dying, f"the processes of sandbox {self.id} did not die")
        except SandboxError:
            if channel.closed:
                return  # the sandbox has ended meanwhile, and its processes with it
            raise
        if reply["left"]:
            raise SandboxError(
                f"{reply['left']} processes of sandbox {self.id} did not die: look for processes in state D with ps"
            )

    async def destroy(self) -> None:
        if self.gone:
            return
        self.gone = True
        if self._channel is not None:
            self._channel.close()
        if self._supervisor is not None:
            exited = self._supervisor.wait()
            await with_timeout(STEP_TIMEOUT, exited, f"the supervisor of sandbox {self.id} did not exit")
        await asyncio.to_thread(folders.remove, self.folder)

    def _open_channel(self) -> Channel:
        if self._channel is None:
            raise SandboxError(f"sandbox {self.id} is not open")
        return self._channel

    def _signal(self, pid: int, number: int) -> None:
        self._open_channel().notify({"do": "signal", "pid": pid, "signal": number})

    def _on_event(self, message: wire.WireMessage) -> None:
        if "ended" in message:
            self._processes.ended(message["ended"], message["code"])
        elif "closed" in message:  # the end of the supervisor is the end of every command
            self._processes.close()

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        base = {"PATH": PATH, "HOME": "/root", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
        merged = base | dict(self.spec.env) | dict(env)
        mapped = {name: ":".join(self._mapped(word) for word in value.split(":")) for name, value in merged.items()}
        return mapped | {"TOWLINE_ROOT": str(self.root)}

    def _mapped(self, word: str) -> str:
        if not word.startswith("/") or len(word) > 4096 or "\x00" in word:
            return word
        inside = self.root / _relative(word)
        try:
            if os.path.lexists(inside):
                return str(inside)
            new = not os.path.lexists(word) and inside.parent != self.root and inside.parent.is_dir()
            return str(inside) if new else word
        except OSError:
            return word

    def _pack(self, path: str, max_bytes: int, skip: Sequence[str] = ()) -> bytes:
        outside = self.outside(path)
        buffer = io.BytesIO()
        try:
            with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
                archives.add_tree(tar, os.path.basename(_relative(path)) or ".", outside, max_bytes, skip)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise PathMissing(f"cannot get {path}: {error}") from error
        except (OSError, archives.ArchiveError) as error:
            raise SandboxError(f"cannot get {path}: {error}") from error
        return buffer.getvalue()

    def _changes(self) -> list[PathChange]:
        mounts = {_relative(mount.target) for mount in self.spec.mounts}
        existing = {_relative(path) for path in (*FOLDERS, self.spec.workdir)} | mounts
        known = {"/".join(path.split("/")[:depth]) for path in existing for depth in range(1, path.count("/") + 2)}
        changes: list[PathChange] = []
        for folder, subfolders, files in os.walk(self.root):
            inside = os.path.relpath(folder, self.root)
            at = "" if inside == "." else inside + "/"
            new = [at + name for name in subfolders + files if at + name not in known]
            changes += [PathChange("/" + path, ChangeKind.ADDED) for path in new]
            subfolders[:] = [name for name in subfolders if at + name not in mounts]
        return sorted(changes, key=lambda change: change.path)


def check_user(user: str) -> None:
    uid = os.getuid()
    names = {"", str(uid)}
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(uid).pw_name)
    if user not in names:
        raise Unsupported(f"process sandboxes run as the node's own user, not as {user!r}: use another sandbox runtime")


def _relative(path: str) -> str:
    """An absolute inside path without its leading slash; `..` cannot lead out."""
    if not path.startswith("/"):
        raise SandboxError(f"{path!r} is not an absolute path inside the sandbox")
    parts: list[str] = []
    for part in PurePosixPath(path).parts[1:]:
        if part == "..":
            del parts[-1:]
        else:
            parts.append(part)
    return "/".join(parts)


_NOTES = (
    "no isolation: programs inside can read and change everything that the node's user can; run trusted programs only",
    "only the time limit is enforced, and the network is not restricted: with network `gateway`, other addresses stay "
    "reachable",
    "kill ends all descendants, but not what another service started for them (cron, at, systemd-run) nor, if a command "
    "kills its own supervisor, detached daemons",
)


class ProcessRuntime:
    """Sandboxes that are folders below `data` with plain processes."""

    name = "process"

    def __init__(self, data: Path, *, defaults: Resources = DEFAULT_RESOURCES):
        self._data = data
        self._defaults = defaults
        """The node's default limits: waived here, unlike any others."""
        self._sandboxes: dict[str, ProcessSandbox] = {}
        self._lock: int | None = None

    @property
    def facts(self) -> RuntimeFacts:
        networks = frozenset({Network.OPEN, Network.GATEWAY})
        return RuntimeFacts(
            platform.release(), isolated=False, enforced=frozenset({"seconds"}), networks=networks, notes=_NOTES
        )

    async def open(self) -> None:
        if sys.platform != "linux":
            raise SandboxError("process sandboxes need Linux: they use child subreapers and /proc")
        self._lock = await asyncio.to_thread(folders.lock_data_folder, self._data)
        # The supervisors of an earlier node have exited, or the lock would not be free; only folders are left.
        for left in self._data.glob("sandbox-*"):
            await asyncio.to_thread(folders.remove, left)

    async def prepare(self, spec: SandboxSpec) -> None:
        self._check(spec)

    async def create(self, spec: SandboxSpec) -> ProcessSandbox:
        self._check(spec)
        if self._lock is None:
            raise SandboxError("the process runtime is not open: call `open` first")
        name = "sandbox-" + secrets.token_hex(6)
        sandbox = ProcessSandbox(name, spec, self._data / name, self._lock)
        self._sandboxes = {name: left for name, left in self._sandboxes.items() if not left.gone}
        self._sandboxes[name] = sandbox
        try:
            await asyncio.to_thread(_fill_folder, sandbox)
            await sandbox.open()
        except BaseException:
            await asyncio.shield(sandbox.destroy())
            raise
        return sandbox

    async def close(self) -> None:
        left, self._sandboxes = list(self._sandboxes.values()), {}
        await asyncio.gather(*(sandbox.destroy() for sandbox in left))
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check(self, spec: SandboxSpec) -> None:
        if spec.root or spec.layers:
            raise Unsupported("process sandboxes have no root file system: use bubblewrap, docker or apptainer")
        if spec.network is Network.NONE:
            raise Unsupported("process sandboxes cannot restrict the network: use bubblewrap, docker or apptainer")
        check_user(spec.user)
        for limit, value in unenforced_limits(spec.resources, self.facts.enforced, self._defaults).items():
            raise Unsupported(f"process sandboxes cannot enforce {limit}={value}: use bubblewrap or docker, or omit it")


def _fill_folder(sandbox: ProcessSandbox) -> None:
    """Create the folders of a spec: a read-only mount is a symlink to its source, a writable one a copy."""
    for path in (*FOLDERS, sandbox.spec.workdir):
        Path(sandbox.outside(path)).mkdir(parents=True, exist_ok=True)
    for mount in sandbox.spec.mounts:
        source, target = mount.existing_source(), Path(sandbox.outside(mount.target))
        target.parent.mkdir(parents=True, exist_ok=True)
        if not mount.writable:
            target.symlink_to(source)
        elif source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy2(source, target)
