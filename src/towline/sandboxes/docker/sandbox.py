"""One container as a sandbox: its commands (`exec`s of the engine), its files and its end.

Made by `DockerRuntime.create`.
"""

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

from towline.sandboxes import cgroups, linux
from towline.sandboxes.base import (
    MAX_GET_BYTES,
    ChangeKind,
    PathChange,
    PathMissing,
    SandboxError,
    SandboxHealth,
    SandboxSpec,
)
from towline.sandboxes.docker.client import (
    AttachedStream,
    DockerClient,
    DockerError,
    read_chunks,
    user_ids,
    write_owned_tar,
)
from towline.sandboxes.egress import EgressProxy
from towline.sandboxes.files import archives, folders
from towline.sandboxes.subprocesses import kill_processes

_KILLED = 128 + signal.SIGKILL


class DockerProcess:
    """A live command: an `exec` of the engine."""

    def __init__(self, sandbox: DockerSandbox, name: str, attached: AttachedStream):
        self._sandbox = sandbox
        self.name = name
        self._attached = attached
        self.stdin, self.stdout, self.stderr = attached.stdin, attached.stdout, attached.stderr
        self._waiting: asyncio.Future[int] | None = None

    async def wait(self) -> int:
        if self._waiting is None:
            self._waiting = asyncio.ensure_future(self._wait())
        return await asyncio.shield(self._waiting)

    async def kill(self) -> None:
        about = await self._sandbox.inspect_exec(self.name)
        if about is None or not about.get("Running"):
            return
        pid = int(about.get("Pid") or 0)
        if self._sandbox.can_signal and pid and self._sandbox.owns(pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        else:
            await self._sandbox.kill()

    def close(self) -> None:
        self._attached.close()

    async def _wait(self) -> int:
        """Streams end with the last process that holds them, which may be a daemon; so the engine is polled as well."""
        pause = 0.1
        while True:
            await asyncio.wait([self._attached.ended], timeout=pause)
            about = await self._sandbox.inspect_exec(self.name)
            if about is None:
                return _KILLED
            if not about.get("Running") and about.get("ExitCode") is not None:
                return int(about["ExitCode"])
            if self._attached.ended.done():
                await asyncio.sleep(0.02)
            pause = min(pause * 1.5, 1.0)


INIT = "/.towline-init"
"""Where the init program is, inside."""
_KINDS = {0: ChangeKind.CHANGED, 1: ChangeKind.ADDED, 2: ChangeKind.DELETED}
_ENGINE_PATHS = {
    INIT,
    "/.dockerenv",
    "/run/.containerenv",
    "/etc/hosts",
    "/etc/hostname",
    "/etc/resolv.conf",
    "/etc/mtab",
}
"""Paths that the engine creates in every container."""
_SYSTEM = ("/dev", "/proc", "/sys")
_SPOOL_BYTES = 16 * 1024 * 1024


class DockerSandbox:
    """A container. On the host it has `scratch` and `volumes`, for writable mounts."""

    def __init__(
        self, client: DockerClient, name: str, spec: SandboxSpec, *, local: bool, scratch: Path, volumes: Sequence[str]
    ):
        self.id = name
        self.spec = spec
        self.listener: socket.socket | None = None
        self.proxy: EgressProxy | None = None
        self.container = ""
        self.pid = 0
        self.gone = False
        self._client = client
        self._local = local
        self._scratch = scratch
        self._volumes = volumes
        self._init: AttachedStream | None = None
        self._program = b""
        self._processes: list[DockerProcess] = []
        self._expiry: asyncio.TimerHandle | None = None
        self._destroying: asyncio.Future[None] | None = None
        self._oom_kills = 0

    @property
    def can_signal(self) -> bool:
        """Whether this process may signal processes inside."""
        return self._local and os.geteuid() == 0

    def sees_inside(self) -> bool:
        """Whether the first process is on this machine and its namespaces may be entered."""
        try:
            os.close(os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return False
        return self.owns(self.pid)

    def owns(self, pid: int) -> bool:
        """Whether a process of this machine belongs to this container, by its control group."""
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
        await self._client.json("PUT", self._path("archive"), query={"path": "/"}, data=made.getvalue())

    async def make_workdir(self) -> None:
        """Create the working folder, owned by the sandbox's user."""
        await self.put(archives.pack({}), self.spec.workdir)

    async def run(self) -> None:
        """Start the container and wait until its first process reports that it runs."""
        self._init = await self._client.attach(
            self._path("attach"), {}, query={"stream": "1", "stdin": "1", "stdout": "1"}
        )
        await self._client.json("POST", self._path("start"))
        try:
            await asyncio.wait_for(self._init.stdout.readexactly(1), 30)
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            raise SandboxError(f"container {self.id} does not run: {await self._last_state()}") from error
        about = await self._client.json("GET", self._path("json"))
        self.pid = int(about["State"]["Pid"])
        if self.spec.seconds is not None and self._expiry is None:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(self.spec.seconds, self._on_expiry)

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
            made = await self._client.json("POST", self._path("exec"), asked)
            attached = await self._client.attach(f"/exec/{made['Id']}/start", {"Detach": False, "Tty": False})
        except DockerError as failure:
            raise SandboxError(
                f"cannot start {command[0] if command else ''!r} in container {self.id}: {failure}"
            ) from failure
        process = DockerProcess(self, str(made["Id"]), attached)
        await self._wait_started(process)
        self._processes = [known for known in self._processes if not known.stdout.at_eof()] + [process]
        return process

    async def put(self, archive: bytes | Path, target: str) -> None:
        owner = await self._owner()
        existing = await self._existing_part(target)
        rest = [part for part in target.split("/") if part not in ("", ".")][existing.rstrip("/").count("/") :]
        with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as tar:
            await asyncio.to_thread(write_owned_tar, archive, rest, owner, tar)
            await self._client.json(
                "PUT",
                self._path("archive"),
                query={"path": existing, "noOverwriteDirNonDir": "1"},
                data=read_chunks(tar),
            )

    async def get(self, path: str, *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        data = bytearray()
        try:
            async with self._client.request("GET", self._path("archive"), query={"path": path}) as answer:
                async for chunk in answer.content.iter_chunked(1 << 20):
                    data += chunk
                    if len(data) > max_bytes:
                        raise SandboxError(f"{path} is larger than {max_bytes:,} bytes")
        except DockerError as failure:
            gone = "no such container" in str(failure).lower()
            if not gone and (failure.status == 404 or str(failure).endswith("not a directory")):
                raise PathMissing(f"{path} does not exist in container {self.id}") from failure
            raise
        return bytes(data)

    async def diff(self) -> list[PathChange]:
        """The engine's list, without folders that it lists only because something in them changed."""
        listed = await self._client.json("GET", self._path("changes")) or []
        mounts = tuple(mount.target.rstrip("/") for mount in self.spec.mounts)
        known = _ENGINE_PATHS | _above(self.spec.workdir, *mounts) | {self.spec.workdir, *mounts, *_SYSTEM}

        found = {change["Path"]: _KINDS[change["Kind"]] for change in listed}
        above = _above(*found)
        changes = [
            PathChange(path, kind)
            for path, kind in sorted(found.items())
            if not (path in known and kind is not ChangeKind.DELETED)
            and not (kind is ChangeKind.CHANGED and path in above)
            and not path.startswith(tuple(folder + "/" for folder in (*mounts, *_SYSTEM)))
        ]
        return changes

    async def health(self) -> SandboxHealth:
        if self.gone:
            return SandboxHealth()
        try:
            state = (await self._client.json("GET", self._path("json")))["State"]
        except DockerError as failure:
            if failure.status != 404:
                raise
            return SandboxHealth(True, self._oom_kills)
        counted = await asyncio.to_thread(self._count_oom_kills) if self._local else 0
        self._oom_kills = max(self._oom_kills, counted, int(bool(state.get("OOMKilled"))))
        return SandboxHealth(not state.get("Running"), self._oom_kills)

    def _count_oom_kills(self) -> int:
        return cgroups.oom_kills(cgroups.folders_of(self.pid)) if self.owns(self.pid) else 0

    async def kill(self) -> None:
        if self.gone:
            return
        if self.can_signal:
            await self._kill_from_outside()
        else:
            await self._restart()

    async def destroy(self) -> None:
        if self._destroying is None:
            self._destroying = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._destroying)

    async def _wait_started(self, process: DockerProcess) -> None:
        """Wait until a command runs or has failed: one that is still starting would escape a `kill`."""
        while about := await self.inspect_exec(process.name):
            if about.get("Pid") or about.get("ExitCode") is not None or process.stdout.at_eof():
                return
            await asyncio.sleep(0.005)

    async def inspect_exec(self, execution: str) -> dict[str, Any] | None:
        """The engine's state of an `exec`; None when it or its container is gone."""
        try:
            about: dict[str, Any] = await self._client.json("GET", f"/exec/{execution}/json")
        except DockerError:
            return None
        return about

    async def _destroy(self) -> None:
        self.gone = True
        if self._expiry is not None:
            self._expiry.cancel()
        if self.listener is not None:
            self.listener.close()
        if self.proxy is not None:
            self.proxy.close()
        if self.container:
            with _ignore_gone():
                await self._client.json("DELETE", self._path(), query={"force": "1", "v": "1"})
        for volume in self._volumes:
            with _ignore_gone():
                await self._client.json("DELETE", f"/volumes/{volume}", query={"force": "1"})
        for process in self._processes:
            process.close()
        if self._init is not None:
            self._init.close()
        if await asyncio.to_thread(self._scratch.exists):
            await asyncio.to_thread(folders.remove, self._scratch)

    async def _kill_from_outside(self) -> None:
        """Kill everything but the first process.

        Not by the engine's own `pause`, which blocks forever if it meets a command that is just being started.
        """
        await kill_processes(
            lambda: [pid for pid, _ in linux.live_processes() if pid != self.pid and self.owns(pid)],
            self.owns,
            f"container {self.id}",
        )

    async def _restart(self) -> None:
        """Restart the container: the first process takes all others with it, and the files stay."""
        with _ignore_gone():
            await self._client.json("POST", self._path("kill"))
        await self._client.json("POST", self._path("wait"), query={"condition": "not-running"})
        if self._init is not None:
            self._init.close()
        await self.put_init(self._program)
        await self.run()

    async def _owner(self) -> tuple[int, int]:
        """The ids of the sandbox's user, by the image's /etc/passwd."""
        if not self.spec.user or self.spec.user == "root":
            return 0, 0
        try:
            passwd = archives.read_file(await self.get("/etc/passwd", max_bytes=1 << 20), "")
        except SandboxError:
            passwd = b""
        return user_ids(self.spec.user, passwd)

    async def _existing_part(self, target: str) -> str:
        """The part of a path that already exists."""
        path = "/" + "/".join(part for part in target.split("/") if part not in ("", "."))
        if "/../" in path + "/":
            raise SandboxError(f"{target!r} must not contain `..`")
        while path != "/":
            try:
                async with self._client.request("HEAD", self._path("archive"), query={"path": path}):
                    return path
            except DockerError as failure:
                if failure.status != 404:
                    raise
            path = path.rpartition("/")[0] or "/"
        return path

    async def _last_state(self) -> str:
        with contextlib.suppress(DockerError):
            state = (await self._client.json("GET", self._path("json")))["State"]
            return f"{state.get('Status')}, exit code {state.get('ExitCode')} {state.get('Error', '')}"
        return "the container is gone"

    def _on_expiry(self) -> None:
        # Stored on the object, or it could be garbage-collected before it is done.
        self._destroying = self._destroying or asyncio.ensure_future(self._destroy())

    def _path(self, what: str = "") -> str:
        if not self.container:
            raise SandboxError(f"container {self.id} was not created")
        return f"/containers/{self.container}" + ("/" + what if what else "")


@contextlib.contextmanager
def _ignore_gone() -> Any:
    try:
        yield
    except DockerError as failure:
        # 404: it does not exist; 409: it is being removed, or not running.
        if failure.status not in (404, 409):
            raise


def _above(*paths: str) -> set[str]:
    """Every folder above some paths, except the root."""
    return {path[:at] for path in paths for at in range(1, len(path)) if path[at] == "/"}
