"""One bubblewrap sandbox on the node's side: commands and files go to its spawner, kill and destroy to the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from towline.sandboxes import wire
from towline.sandboxes.base import (
    MAX_GET_BYTES,
    ChangeKind,
    PathChange,
    PathMissing,
    SandboxError,
    SandboxHealth,
    SandboxSpec,
    Unsupported,
)
from towline.sandboxes.egress import EgressProxy
from towline.sandboxes.subprocesses import STEP_TIMEOUT, Channel, PipedProcess, ProcessPipes, ProcessTable, with_timeout

_MAX_PUT_BYTES = 8 * 1024 * 1024 * 1024
_MAX_DIFF_BYTES = 256 * 1024 * 1024


class BubblewrapSandbox:
    """Made by `BubblewrapRuntime.create`."""

    def __init__(
        self,
        identifier: str,
        spec: SandboxSpec,
        supervisor: Channel,
        connection: socket.socket,
        listener: socket.socket | None,
        owner: int,
        on_gone: Callable[[str], None],
        proxy: EgressProxy | None = None,
    ):
        self._id, self._spec, self._supervisor, self._listener = identifier, spec, supervisor, listener
        self._owner, self._on_gone, self._proxy = owner, on_gone, proxy
        self._processes = ProcessTable()
        self._spawner = Channel(connection, self._on_event, f"the sandbox {identifier} has ended")
        self._destroying: asyncio.Task[None] | None = None
        self._oom_kills = 0
        self._other_kills = 0

    @property
    def id(self) -> str:
        return self._id

    @property
    def spec(self) -> SandboxSpec:
        return self._spec

    @property
    def listener(self) -> socket.socket | None:
        return self._listener

    @property
    def alive(self) -> bool:
        """Whether it can be used: not destroyed, not expired, and its supervisor lives."""
        return not self._spawner.closed

    async def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> PipedProcess:
        if not command or any("\x00" in part for part in command):
            raise SandboxError("a command needs at least a program, and no argument may contain a NUL byte")
        pipes = await ProcessPipes.open(self._owner)
        try:
            message = {"do": "start", "command": list(command), "env": dict(env or {}), "cwd": cwd, "user": user}
            answer, _ = await self._spawner.request(message, pipes.inner)
        except BaseException:
            pipes.close()
            raise
        finally:
            pipes.close_inner()
        if "error" in answer:
            pipes.close()
            kind = Unsupported if answer["kind"] == "LookupError" else SandboxError
            raise kind(f"cannot start {command[0]!r}: {answer['error']}")
        pid = answer["pid"]
        process = PipedProcess(
            pipes, lambda number: self._spawner.notify({"do": "signal", "pid": pid, "signal": number})
        )
        self._processes.add(pid, process)
        return process

    def _on_event(self, message: wire.WireMessage) -> None:
        if "ended" in message:
            self._processes.ended(message["ended"], message["code"])
        # The spawner's own exit is not an event: its processes are gone when the supervisor says so.

    async def put(self, archive: bytes | Path, target: str) -> None:
        _check_path(target)
        if isinstance(archive, Path):
            source = await asyncio.to_thread(os.open, archive, os.O_RDONLY | os.O_CLOEXEC)
        else:
            source = os.memfd_create("towline-put")
            await asyncio.to_thread(_fill, source, archive)
        try:
            answer, _ = await self._spawner.request(
                {"do": "put", "target": target, "max_bytes": _MAX_PUT_BYTES}, [source]
            )
        finally:
            os.close(source)
        _check(answer, f"cannot put files at {target}")

    async def get(self, path: str, *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        return await self.get_without(path, (), max_bytes=max_bytes)

    async def get_without(self, path: str, skip: Sequence[str], *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        _check_path(path)
        # Headers and padding come on top of the files' content.
        data, answer = await self._spawner.request_data(
            {"do": "get", "path": path, "max_bytes": max_bytes, "skip": list(skip)},
            max_bytes + (max_bytes >> 2) + (1 << 20),
        )
        if answer.get("kind") in ("FileNotFoundError", "NotADirectoryError"):
            raise PathMissing(f"cannot get {path}: {answer['error']}")
        _check(answer, f"cannot get {path}")
        return data

    async def diff(self) -> list[PathChange]:
        data, answer = await self._spawner.request_data({"do": "diff"}, _MAX_DIFF_BYTES)
        _check(answer, "cannot list the changes")
        return sorted(
            (PathChange(path, ChangeKind(kind)) for path, kind in json.loads(data)), key=lambda change: change.path
        )

    async def health(self) -> SandboxHealth:
        if self.alive:
            with contextlib.suppress(SandboxError):
                reply = self._supervisor.request({"do": "health", "id": self._id})
                answer, _ = await with_timeout(STEP_TIMEOUT, reply, f"no health report of sandbox {self._id}")
                self._oom_kills = answer.get("oom_kills", self._oom_kills)
                self._other_kills = answer.get("other_kills", self._other_kills)
        return SandboxHealth(not self.alive and self._destroying is None, self._oom_kills, self._other_kills)

    async def kill(self) -> None:
        reply = self._supervisor.request({"do": "kill", "id": self._id})
        answer, _ = await with_timeout(STEP_TIMEOUT, reply, f"the processes of sandbox {self._id} did not die")
        _check(answer, "cannot kill the sandbox's processes")

    async def destroy(self) -> None:
        if self._destroying is None:
            self._destroying = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._destroying)

    async def _destroy(self) -> None:
        answer = None
        if not self._supervisor.closed:
            reply = self._supervisor.request({"do": "destroy", "id": self._id})
            answer, _ = await with_timeout(STEP_TIMEOUT, reply, f"sandbox {self._id} did not end")
        self._on_gone(self._id)
        if answer is not None:
            _check(answer, "cannot remove the sandbox")

    def ended(self, oom_kills: int = 0, other_kills: int = 0) -> None:
        """The sandbox is gone: notify waiters and release what this process holds of it."""
        self._oom_kills = max(self._oom_kills, oom_kills)
        self._other_kills = max(self._other_kills, other_kills)
        self._spawner.close()
        self._processes.close()
        if self._listener is not None:
            self._listener.close()
        if self._proxy is not None:
            self._proxy.close()


def _check(answer: wire.WireMessage, what: str) -> None:
    if "error" in answer:
        raise SandboxError(f"{what}: {answer['error']}")
    if answer.get("code"):
        raise SandboxError(f"{what}: the helper inside exited with code {answer['code']}")


def _check_path(path: str) -> None:
    if not path.startswith("/") or "\x00" in path:
        raise SandboxError(f"{path!r} is not an absolute path inside the sandbox")


def _fill(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
