"""One sandbox, as the node holds it: commands and files go through its spawner's socket, its end through the keeper's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from towline.sandboxes import wire
from towline.sandboxes.base import Change, ChangeKind, Fate, PathMissing, SandboxError, Spec, Unsupported
from towline.sandboxes.channel import Channel
from towline.sandboxes.helping import SECONDS, within
from towline.sandboxes.streams import LiveProcess, collect, open_streams

_MOST_PUT = 8 * 1024 * 1024 * 1024
_MOST_CHANGES = 256 * 1024 * 1024


class BubblewrapSandbox:
    """Made by `BubblewrapRuntime.create`."""

    def __init__(
        self,
        identifier: str,
        spec: Spec,
        keeper: Channel,
        connection: socket.socket,
        listener: socket.socket | None,
        owner: int,
        gone: Callable[[str], None],
    ):
        self._id, self._spec, self._keeper, self._listener = identifier, spec, keeper, listener
        self._owner, self._forget = owner, gone
        self._processes: dict[int, LiveProcess] = {}
        self._ended_early: dict[int, int] = {}
        self._spawner = Channel(connection, self._event, f"the sandbox {identifier} has ended")
        self._destroying: asyncio.Task[None] | None = None
        self._memory_kills = 0

    @property
    def id(self) -> str:
        return self._id

    @property
    def spec(self) -> Spec:
        return self._spec

    @property
    def listener(self) -> socket.socket | None:
        return self._listener

    @property
    def alive(self) -> bool:
        """Whether it can be used: not destroyed, and not ended by its own time or by the loss of its keeper."""
        return not self._spawner.closed

    async def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> LiveProcess:
        if not command or any("\x00" in part for part in command):
            raise SandboxError("a command has at least one word, and none with a zero byte")
        streams = await open_streams(self._owner)
        try:
            message = {"do": "start", "command": list(command), "env": dict(env or {}), "cwd": cwd, "user": user}
            answer, _ = await self._spawner.ask(message, streams.inner)
        except BaseException:
            streams.close()
            raise
        finally:
            streams.close_inner()
        if "error" in answer:
            streams.close()
            kind = Unsupported if answer["kind"] == "LookupError" else SandboxError
            raise kind(f"{command[0]!r} cannot be started: {answer['error']}")
        pid = answer["pid"]
        process = LiveProcess(
            streams, lambda number: self._spawner.tell({"do": "signal", "pid": pid, "signal": number})
        )
        if pid in self._ended_early:
            process.ended(self._ended_early.pop(pid))
        else:
            self._processes[pid] = process
        return process

    def _event(self, message: wire.Message) -> None:
        if "ended" in message:
            process = self._processes.pop(message["ended"], None)
            if process is None:
                self._ended_early[message["ended"]] = message["code"]
            else:
                process.ended(message["code"])
        # The spawner's own end is no event: its processes have ended when the keeper says so.

    async def put(self, archive: bytes | Path, target: str) -> None:
        _inside(target)
        if isinstance(archive, Path):
            source = await asyncio.to_thread(os.open, archive, os.O_RDONLY | os.O_CLOEXEC)
        else:
            source = os.memfd_create("towline-put")
            await asyncio.to_thread(_fill, source, archive)
        try:
            answer, _ = await self._spawner.ask({"do": "put", "target": target, "most": _MOST_PUT}, [source])
        finally:
            os.close(source)
        _check(answer, f"files cannot be put to {target}")

    async def get(self, path: str, *, most: int = 256 * 1024 * 1024) -> bytes:
        _inside(path)
        # Headers and padding come on top of what the files hold.
        data, answer = await collect(
            self._spawner, {"do": "get", "path": path, "most": most}, most + (most >> 2) + (1 << 20)
        )
        if answer.get("kind") in ("FileNotFoundError", "NotADirectoryError"):
            raise PathMissing(f"{path} cannot be read: {answer['error']}")
        _check(answer, f"{path} cannot be read")
        return data

    async def diff(self) -> list[Change]:
        data, answer = await collect(self._spawner, {"do": "diff"}, _MOST_CHANGES)
        _check(answer, "the changes cannot be listed")
        return sorted(
            (Change(path, ChangeKind(kind)) for path, kind in json.loads(data)), key=lambda change: change.path
        )

    async def fate(self) -> Fate:
        if self.alive:
            with contextlib.suppress(SandboxError):
                asking = self._keeper.ask({"do": "fate", "id": self._id})
                answer, _ = await within(SECONDS, asking, f"the keeper says nothing of sandbox {self._id}")
                self._memory_kills = answer.get("memory_kills", self._memory_kills)
        return Fate(not self.alive and self._destroying is None, self._memory_kills)

    async def kill(self) -> None:
        asking = self._keeper.ask({"do": "kill", "id": self._id})
        answer, _ = await within(SECONDS, asking, f"the processes of sandbox {self._id} did not end")
        _check(answer, "the sandbox's processes cannot be ended")

    async def destroy(self) -> None:
        if self._destroying is None:
            self._destroying = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._destroying)

    async def _destroy(self) -> None:
        answer = None
        if not self._keeper.closed:
            asking = self._keeper.ask({"do": "destroy", "id": self._id})
            answer, _ = await within(SECONDS, asking, f"sandbox {self._id} did not end")
        self._forget(self._id)
        if answer is not None:
            _check(answer, "the sandbox cannot be removed")

    def ended(self, memory_kills: int = 0) -> None:
        """Nothing of it runs any more: tell whoever waits, and let go of what this process holds of it."""
        self._memory_kills = max(self._memory_kills, memory_kills)
        self._spawner.close()
        for process in self._processes.values():
            process.ended(128 + signal.SIGKILL)
        self._processes.clear()
        if self._listener is not None:
            self._listener.close()


def _check(answer: wire.Message, what: str) -> None:
    if "error" in answer:
        raise SandboxError(f"{what}: {answer['error']}")
    if answer.get("code"):
        raise SandboxError(f"{what}: the helper inside ended with {answer['code']}")


def _inside(path: str) -> None:
    if not path.startswith("/") or "\x00" in path:
        raise SandboxError(f"{path!r} is not an absolute path inside the sandbox")


def _fill(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
