"""One Apptainer instance as a sandbox, and the command lines that drive it. Made by `ApptainerRuntime.create`.

Every instance has a user namespace with one id (root inside is the user outside), a PID and a network namespace, no
capabilities, no_new_privs, none of the host's folders and its own environment. Variables are passed by the
environment and never by arguments, which every user of the machine can read. The command lines are pure functions of
a spec.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from towline.sandboxes.apptainer import namespaces
from towline.sandboxes.base import (
    MAX_GET_BYTES,
    ChangeKind,
    PathChange,
    SandboxError,
    SandboxHealth,
    SandboxSpec,
    Unsupported,
)
from towline.sandboxes.egress import EgressProxy, EgressRules, environment
from towline.sandboxes.files import folders, overlay
from towline.sandboxes.images.root_cache import FolderLease
from towline.sandboxes.subprocesses import (
    KILL_TIMEOUT,
    PipedProcess,
    ProcessPipes,
    communicate,
    kill_processes,
    with_timeout,
)
from towline.schema import Network

ISOLATION = (
    "--userns",
    "--fakeroot",
    # One id and no preloaded library: the same on every machine, and this user owns all files outside.
    "--ignore-subuid",
    "--ignore-fakeroot-command",
    "--containall",
    "--cleanenv",
    "--no-privs",
    "--no-home",
    "--no-mount",
    "tmp,home,cwd,hostfs,bind-paths,sys",
)
START = ".singularity.d/actions/start"
"""What an instance runs first, in its root; a root that is not an Apptainer image has none."""
_PASSED_VARIABLES = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
"""What Apptainer needs of the node's environment to reach systemd, for control groups."""


@dataclass(frozen=True, slots=True)
class InstancePaths:
    """The files of one instance on the host."""

    name: str
    root: Path
    overlay: Path
    """Its `upper` receives what is written."""
    layers: tuple[Path, ...]
    """Each has an `upper`; lowest first."""
    writable: tuple[Path, ...]
    """Copies of the sources of writable mounts, in order."""
    pid_file: Path


def start_command(spec: SandboxSpec, paths: InstancePaths, *, unfiltered: bool = False) -> list[str]:
    """`instance start` for a spec. `unfiltered`: network `open` is the host's own."""
    command = ["instance", "start", *ISOLATION]
    if not (unfiltered and spec.network is Network.OPEN):
        command += ["--net", "--network", "none"]
    limits = spec.resources
    if limits.memory_mb is not None:
        command += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"]
    if limits.pids is not None:
        command += ["--pids-limit", str(limits.pids)]
    if limits.cpus is not None:
        command += ["--cpus", f"{limits.cpus:g}"]
    for layer in paths.layers:
        command += ["--overlay", f"{layer}:ro"]
    command += ["--overlay", str(paths.overlay)]
    copies = iter(paths.writable)
    for mount in spec.mounts:
        source = next(copies) if mount.writable else mount.source.resolve()
        command += [
            "--mount",
            f"type=bind,src={_quoted(str(source))},dst={_quoted(mount.target)}" + ("" if mount.writable else ",ro"),
        ]
    return [*command, "--pid-file", str(paths.pid_file), str(paths.root), paths.name]


def exec_command(name: str, command: Sequence[str], *, cwd: str, home: str | None) -> list[str]:
    """`exec` in an instance. HOME is the one variable that Apptainer does not pass on."""
    program = ["env", f"HOME={home}", *command] if home is not None else list(command)
    return ["exec", "--cleanenv", "--no-eval", "--pwd", cwd, f"instance://{name}", *program]


def inside_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of a command inside, as Apptainer expects them in its own environment."""
    return {f"APPTAINERENV_{name}": value for name, value in variables.items() if name != "HOME"}


def _quoted(value: str) -> str:
    """A quoted field of `--mount`, which is comma-separated."""
    return '"' + value.replace('"', '""') + '"' if any(mark in value for mark in ',"') else value


class ApptainerCli:
    """The `apptainer` program, with the node's own state folder."""

    def __init__(self, program: str, data: Path):
        self.program = program
        self._data = data

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        base = {
            "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
            "HOME": str(self._data),
            "APPTAINER_CONFIGDIR": str(self._data / "config"),
            "APPTAINER_CACHEDIR": str(self._data / "cache"),
            "APPTAINER_TMPDIR": str(self._data),
        }
        passed = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
        return base | passed | dict(more or {})

    async def run(self, arguments: Sequence[str]) -> str:
        """Run a command to its end; `SandboxError` with its stderr if it fails."""
        process = await asyncio.create_subprocess_exec(
            *(self.program, "-q", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.environment(),
            cwd="/",
            start_new_session=True,
        )
        stdout, stderr = await communicate(process, f"`apptainer {' '.join(arguments[:2])}`")
        if process.returncode != 0:
            reason = stderr.decode("utf-8", "replace").strip()[-2000:]
            raise SandboxError(f"`apptainer {' '.join(arguments[:2])}` failed with code {process.returncode}: {reason}")
        return stdout.decode("utf-8", "replace")


_MAX_PUT_BYTES = 8 << 30


class ApptainerSandbox:
    """An instance and its folder on the host."""

    def __init__(
        self,
        program: ApptainerCli,
        spec: SandboxSpec,
        folder: Path,
        paths: InstancePaths,
        lease: FolderLease,
        egress: EgressRules,
    ):
        self.id = paths.name
        self.spec = spec
        self.listener: socket.socket | None = None
        self.proxy: EgressProxy | None = None
        self._egress = egress
        self.pid = 0
        self.gone = False
        self._program = program
        self._folder = folder
        self._paths = paths
        self._lease = lease
        self._guard: asyncio.subprocess.Process | None = None
        self._destroying: asyncio.Future[None] | None = None
        self._known: frozenset[str] = frozenset()
        self._live: list[PipedProcess] = []

    async def open(self) -> None:
        """Start it, tie its lifetime to this process, and create its working folder."""
        await self._program.run(start_command(self.spec, self._paths, unfiltered=self._egress.unfiltered))
        self.pid = int(await asyncio.to_thread(self._paths.pid_file.read_text))
        self._guard = await namespaces.guard(self.pid, self.spec.seconds)
        empty = bytes(1024)
        await namespaces.put(self.pid, empty, self.spec.workdir, _MAX_PUT_BYTES)
        self._known = frozenset(path for path, _ in await asyncio.to_thread(self._changes))

    async def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> PipedProcess:
        check_user(user or "")
        if self.gone or not namespaces.is_namespace_init(self.pid):
            raise SandboxError(f"instance {self.id} has ended: destroyed or expired")
        variables = environment(self.spec, self._egress) | dict(env or {})
        arguments = exec_command(self.id, command, cwd=cwd or self.spec.workdir, home=variables.get("HOME"))
        pipes = await ProcessPipes.open()
        try:
            process = await asyncio.to_thread(
                subprocess.Popen,
                [self._program.program, "-q", *arguments],
                stdin=pipes.inner[0],
                stdout=pipes.inner[1],
                stderr=pipes.inner[2],
                env=self._program.environment(inside_environment(variables)),
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            pipes.close()
            raise
        finally:
            pipes.close_inner()
        live = _watched(process, pipes)
        self._live = [known for known in self._live if not known.exited] + [live]
        return live

    async def put(self, archive: bytes | Path, target: str) -> None:
        await namespaces.put(self.pid, archive, target, _MAX_PUT_BYTES)

    async def get(self, path: str, *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        return await namespaces.get(self.pid, path, max_bytes)

    async def diff(self) -> list[PathChange]:
        found = await asyncio.to_thread(self._changes)
        changes = [PathChange(path, ChangeKind(kind)) for path, kind in found if path not in self._known]
        return sorted(changes, key=lambda change: change.path)

    @property
    def alive(self) -> bool:
        return not self.gone and namespaces.is_namespace_init(self.pid)

    async def health(self) -> SandboxHealth:
        return SandboxHealth(not self.gone and not self.alive)

    async def kill(self) -> None:
        """Kill all but the init of the instance; outside, this user owns them, whichever user they have inside.

        First the `apptainer exec`s outside: one that is still entering would otherwise arrive later.
        """
        for live in self._live:
            await live.kill()
        await kill_processes(
            lambda: namespaces.processes(self.pid),
            lambda pid: namespaces.shares_namespace(pid, self.pid),
            f"instance {self.id}",
        )
        ends = asyncio.gather(*(live.wait() for live in self._live))
        await with_timeout(KILL_TIMEOUT, ends, f"the commands of instance {self.id} did not exit")

    async def destroy(self) -> None:
        if self._destroying is None:
            self._destroying = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._destroying)

    async def _destroy(self) -> None:
        self.gone = True
        if self.listener is not None:
            self.listener.close()
        if self.proxy is not None:
            self.proxy.close()
        if self.pid:
            await self.kill()
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            await with_timeout(KILL_TIMEOUT, self._guard.wait(), f"the guard of instance {self.id} did not exit")
        if self.pid and not await asyncio.to_thread(namespaces.wait_gone, self.pid, KILL_TIMEOUT):
            raise SandboxError(f"instance {self.id} did not end within {KILL_TIMEOUT:g} seconds")
        await asyncio.to_thread(folders.remove, self._folder)
        self._lease.release()

    def _changes(self) -> list[tuple[str, str]]:
        with contextlib.ExitStack() as stack:

            def opened(path: Path) -> int:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                return descriptor

            lowers = (opened(self._paths.root), *(opened(layer / "upper") for layer in self._paths.layers))
            tree = overlay.OverlayTree("/", opened(self._paths.overlay / "upper"), lowers)
            return overlay.changes(tree, frozenset())


def check_user(user: str) -> None:
    if user not in ("", "root", "0"):
        raise Unsupported(f"apptainer sandboxes have only root inside, not {user!r}: use bubblewrap or docker")


def _watched(process: subprocess.Popen[bytes], pipes: ProcessPipes) -> PipedProcess:
    """A live `apptainer exec`; its exit is seen by its pidfd, whichever process still holds its pipes."""
    handle = os.pidfd_open(process.pid)
    loop = asyncio.get_running_loop()

    def kill(number: int) -> None:
        # Its group: the command and its children, which are in a nested namespace but in the same session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    live = PipedProcess(pipes, kill)

    def ended() -> None:
        loop.remove_reader(handle)
        os.close(handle)
        code = process.wait()
        live.ended(code if code >= 0 else 128 - code)

    loop.add_reader(handle, ended)
    return live
