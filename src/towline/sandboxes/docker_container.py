"""One container as a sandbox: its commands, its files and its end. Made by `DockerRuntime.create`."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import socket
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from towline.sandboxes import archives, cgroups, docker_files, trees
from towline.sandboxes.base import Change, ChangeKind, Fate, PathMissing, SandboxError, Spec
from towline.sandboxes.docker_api import Attached, Engine, EngineFailure
from towline.sandboxes.docker_process import DockerProcess

INIT = "/.towline-init"
"""The first process's program, inside."""
_KINDS = {0: ChangeKind.CHANGED, 1: ChangeKind.ADDED, 2: ChangeKind.DELETED}
_GIVEN = {INIT, "/.dockerenv", "/run/.containerenv", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab"}
"""What is there in every container because it is one."""
_SYSTEM = ("/dev", "/proc", "/sys")
_IN_MEMORY = 16 * 1024 * 1024
_PATIENCE = 10.0
"""Seconds that killed processes may take to be gone."""


class DockerSandbox:
    """A container. What it holds on the host is `scratch` and `volumes`, for writable mounts."""

    def __init__(self, engine: Engine, name: str, spec: Spec, *, local: bool, scratch: Path, volumes: Sequence[str]):
        self.id = name
        self.spec = spec
        self.listener: socket.socket | None = None
        self.container = ""
        self.pid = 0
        self.gone = False
        self._engine = engine
        self._local = local
        self._scratch = scratch
        self._volumes = volumes
        self._init: Attached | None = None
        self._program = b""
        self._processes: list[DockerProcess] = []
        self._alarm: asyncio.TimerHandle | None = None
        self._ending: asyncio.Future[None] | None = None
        self._memory_kills = 0

    @property
    def signals(self) -> bool:
        """Whether processes inside can be signalled from here."""
        return self._local and os.geteuid() == 0

    def sees_inside(self) -> bool:
        """Whether the first process is one of this machine that we may enter."""
        try:
            os.close(os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return False
        return self.owns(self.pid)

    def owns(self, pid: int) -> bool:
        """Whether a process of this machine is one of this container's: its control group names it."""
        try:
            with open(f"/proc/{pid}/cgroup") as file:
                return self.container in file.read()
        except OSError:
            return False

    async def put_init(self, program: bytes) -> None:
        self._program = program
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w") as tar:
            info = tarfile.TarInfo(INIT.lstrip("/"))
            info.mode, info.size = 0o555, len(program)
            tar.addfile(info, io.BytesIO(program))
        await self._engine.json("PUT", self._path("archive"), query={"path": "/"}, data=made.getvalue())

    async def furnish(self) -> None:
        """The working folder, which belongs to the sandbox's user."""
        await self.put(archives.pack({}), self.spec.workdir)

    async def run(self) -> None:
        """Start the first process and wait until it says that it runs."""
        self._init = await self._engine.attach(
            self._path("attach"), {}, query={"stream": "1", "stdin": "1", "stdout": "1"}
        )
        await self._engine.json("POST", self._path("start"))
        try:
            await asyncio.wait_for(self._init.stdout.readexactly(1), 30)
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            raise SandboxError(f"container {self.id} does not run: {await self._last_words()}") from error
        about = await self._engine.json("GET", self._path("json"))
        self.pid = int(about["State"]["Pid"])
        if self.spec.seconds is not None and self._alarm is None:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(self.spec.seconds, self._out_of_time)

    async def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> DockerProcess:
        asked = {
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Cmd": list(command),
            "Env": [f"{name}={value}" for name, value in (env or {}).items()],
            "WorkingDir": cwd or self.spec.workdir,
            "User": user or self.spec.user or "0",
        }
        try:
            made = await self._engine.json("POST", self._path("exec"), asked)
            attached = await self._engine.attach(f"/exec/{made['Id']}/start", {"Detach": False, "Tty": False})
        except EngineFailure as failure:
            raise SandboxError(
                f"cannot start {command[0] if command else ''!r} in container {self.id}: {failure}"
            ) from failure
        process = DockerProcess(self, str(made["Id"]), attached)
        await self._begun(process)
        self._processes = [known for known in self._processes if not known.stdout.at_eof()] + [process]
        return process

    async def put(self, archive: bytes | Path, target: str) -> None:
        owner = await self._owner()
        there = await self._there(target)
        rest = [part for part in target.split("/") if part not in ("", ".")][there.rstrip("/").count("/") :]
        with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY) as tar:
            await asyncio.to_thread(docker_files.owned, archive, rest, owner, tar)
            await self._engine.json(
                "PUT",
                self._path("archive"),
                query={"path": there, "noOverwriteDirNonDir": "1"},
                data=docker_files.chunks(tar),
            )

    async def get(self, path: str, *, most: int = 256 * 1024 * 1024) -> bytes:
        made = bytearray()
        try:
            async with self._engine.request("GET", self._path("archive"), query={"path": path}) as answer:
                async for chunk in answer.content.iter_chunked(1 << 20):
                    made += chunk
                    if len(made) > most:
                        raise SandboxError(f"{path} is larger than {most:,} bytes")
        except EngineFailure as failure:
            gone = "no such container" in str(failure).lower()
            if not gone and (failure.status == 404 or str(failure).endswith("not a directory")):
                raise PathMissing(f"there is no {path} in container {self.id}") from failure
            raise
        return bytes(made)

    async def diff(self) -> list[Change]:
        """As the engine has it, without folders that it names only because something in them changed."""
        listed = await self._engine.json("GET", self._path("changes")) or []
        mounts = tuple(mount.target.rstrip("/") for mount in self.spec.mounts)
        given = _GIVEN | set(_above(*mounts)) | set(_above(self.spec.workdir)) | {self.spec.workdir, *mounts, *_SYSTEM}
        found = {change["Path"]: _KINDS[change["Kind"]] for change in listed}
        above = _above(*found)
        changes = [
            Change(path, kind)
            for path, kind in sorted(found.items())
            if not (path in given and kind is not ChangeKind.DELETED)
            and not (kind is ChangeKind.CHANGED and path in above)
            and not path.startswith(tuple(known + "/" for known in (*mounts, *_SYSTEM)))
        ]
        return changes

    async def fate(self) -> Fate:
        if self.gone:
            return Fate()
        try:
            state = (await self._engine.json("GET", self._path("json")))["State"]
        except EngineFailure as failure:
            if failure.status != 404:
                raise
            return Fate(True, self._memory_kills)
        counted = await asyncio.to_thread(self._count_kills) if self._local else 0
        self._memory_kills = max(self._memory_kills, counted, int(bool(state.get("OOMKilled"))))
        return Fate(not state.get("Running"), self._memory_kills)

    def _count_kills(self) -> int:
        return cgroups.memory_kills(cgroups.folders_of(self.pid)) if self.owns(self.pid) else 0

    async def kill(self) -> None:
        if self.gone:
            return
        if self.signals:
            await self._kill_from_outside()
        else:
            await self._restart()

    async def destroy(self) -> None:
        """One ending, whoever asks for it and however often."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._ending)

    async def _begun(self, process: DockerProcess) -> None:
        """Wait until a command runs or has failed to: one that is still on its way would escape a `kill`."""
        while about := await self.look_at(process.name):
            if about.get("Pid") or about.get("ExitCode") is not None or process.stdout.at_eof():
                return
            await asyncio.sleep(0.005)

    async def look_at(self, execution: str) -> dict[str, Any] | None:
        """What the engine says of an `exec`; None when it or its container is gone."""
        try:
            about: dict[str, Any] = await self._engine.json("GET", f"/exec/{execution}/json")
        except EngineFailure:
            return None
        return about

    async def _destroy(self) -> None:
        self.gone = True
        if self._alarm is not None:
            self._alarm.cancel()
        if self.listener is not None:
            self.listener.close()
        if self.container:
            with _gone_already():
                await self._engine.json("DELETE", self._path(), query={"force": "1", "v": "1"})
        for volume in self._volumes:
            with _gone_already():
                await self._engine.json("DELETE", f"/volumes/{volume}", query={"force": "1"})
        for process in self._processes:
            process.close()
        if self._init is not None:
            self._init.close()
        if await asyncio.to_thread(self._scratch.exists):
            await asyncio.to_thread(trees.remove, self._scratch)

    async def _kill_from_outside(self) -> None:
        """Everything but the first process: stopped first, so that nothing forks away between being seen and killed.

        The engine's own `pause` would freeze better, but for ever if it meets a command that is just being started.
        """
        until = asyncio.get_running_loop().time() + _PATIENCE
        while left := await asyncio.to_thread(self._others):
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in left:
                    self._signal(pid, number)
            if asyncio.get_running_loop().time() > until:
                raise SandboxError(f"{len(left)} processes of container {self.id} would not die")
            await asyncio.sleep(0.005)

    def _signal(self, pid: int, number: signal.Signals) -> None:
        """Signal a process of this container; one that has its number by now is left alone."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                if self.owns(pid):
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)

    def _others(self) -> list[int]:
        """Processes of the container but the first; the dead are left out."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdecimal() and int(name) != self.pid and self.owns(int(name)):
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    if file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
                        found.append(int(name))
        return found

    async def _restart(self) -> None:
        """The first process takes all others with it; the files stay, and it is started anew."""
        with _gone_already():
            await self._engine.json("POST", self._path("kill"))
        await self._engine.json("POST", self._path("wait"), query={"condition": "not-running"})
        if self._init is not None:
            self._init.close()
        await self.put_init(self._program)
        await self.run()

    async def _owner(self) -> tuple[int, int]:
        """The ids of the sandbox's user, by the image's own list of users."""
        if not self.spec.user or self.spec.user == "root":
            return 0, 0
        try:
            passwd = archives.read_file(await self.get("/etc/passwd", most=1 << 20), "")
        except SandboxError:
            passwd = b""
        return docker_files.ids(self.spec.user, passwd)

    async def _there(self, target: str) -> str:
        """The part of a path that is there already."""
        path = "/" + "/".join(part for part in target.split("/") if part not in ("", "."))
        if "/../" in path + "/":
            raise SandboxError(f"{target!r} is not a plain path inside the sandbox")
        while path != "/":
            try:
                async with self._engine.request("HEAD", self._path("archive"), query={"path": path}):
                    return path
            except EngineFailure as failure:
                if failure.status != 404:
                    raise
            path = path.rpartition("/")[0] or "/"
        return path

    async def _last_words(self) -> str:
        with contextlib.suppress(EngineFailure):
            state = (await self._engine.json("GET", self._path("json")))["State"]
            return f"{state.get('Status')}, exit code {state.get('ExitCode')} {state.get('Error', '')}"
        return "it is gone"

    def _out_of_time(self) -> None:
        # Kept on the object, or it could be collected before it is done.
        self._ending = self._ending or asyncio.ensure_future(self._destroy())

    def _path(self, what: str = "") -> str:
        if not self.container:
            raise SandboxError(f"container {self.id} was not made")
        return f"/containers/{self.container}" + ("/" + what if what else "")


@contextlib.contextmanager
def _gone_already() -> Any:
    try:
        yield
    except EngineFailure as failure:
        # 404: it is not there; 409: it is on its way, or not running.
        if failure.status not in (404, 409):
            raise


def _above(*paths: str) -> set[str]:
    """Every folder above some paths, but the root."""
    return {path[:at] for path in paths for at in range(1, len(path)) if path[at] == "/"}
