"""One Apptainer instance as a sandbox. Made by `ApptainerRuntime.create`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from towline.sandboxes import namespaces, overlay, trees
from towline.sandboxes.apptainer_cli import Apptainer, Place, exec_command, inside_environment, start_command
from towline.sandboxes.base import Change, ChangeKind, Fate, SandboxError, Spec, Unsupported
from towline.sandboxes.folder_cache import Lease
from towline.sandboxes.helping import within
from towline.sandboxes.streams import LiveProcess, Streams

_MOST_PUT = 8 << 30
_PATIENCE = 10.0
"""Seconds that killed processes may take to be gone."""


class ApptainerSandbox:
    """An instance and its folder."""

    def __init__(self, program: Apptainer, spec: Spec, folder: Path, place: Place, lease: Lease):
        self.id = place.name
        self.spec = spec
        self.listener: socket.socket | None = None
        self.pid = 0
        self.gone = False
        self._program = program
        self._folder = folder
        self._place = place
        self._lease = lease
        self._guard: asyncio.subprocess.Process | None = None
        self._ending: asyncio.Future[None] | None = None
        self._known: frozenset[str] = frozenset()
        self._live: list[_Live] = []

    async def open(self) -> None:
        """Start it, tie its life to ours, and make its working folder."""
        await self._program.run(start_command(self.spec, self._place))
        self.pid = int(await asyncio.to_thread(self._place.pid_file.read_text))
        self._guard = await namespaces.guard(self.pid, self.spec.seconds)
        empty = bytes(1024)
        await namespaces.put(self.pid, empty, self.spec.workdir, _MOST_PUT)
        self._known = frozenset(path for path, _ in await asyncio.to_thread(self._changes))

    async def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> LiveProcess:
        check_user(user or "")
        if self.gone or not namespaces.is_apart(self.pid):
            raise SandboxError(f"instance {self.id} has ended: destroyed, or out of time")
        variables = dict(self.spec.env) | dict(env or {})
        arguments = exec_command(self.id, command, cwd=cwd or self.spec.workdir, home=variables.get("HOME"))
        streams = Streams()
        await streams.open()
        try:
            process = await asyncio.to_thread(
                subprocess.Popen,
                [self._program.program, "-q", *arguments],
                stdin=streams.inner[0],
                stdout=streams.inner[1],
                stderr=streams.inner[2],
                env=self._program.environment(inside_environment(variables)),
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            streams.close()
            raise
        finally:
            streams.close_inner()
        live = _watched(process, streams)
        self._live = [known for known in self._live if not known.done] + [live]
        return live

    async def put(self, archive: bytes | Path, target: str) -> None:
        await namespaces.put(self.pid, archive, target, _MOST_PUT)

    async def get(self, path: str, *, most: int = 256 * 1024 * 1024) -> bytes:
        return await namespaces.get(self.pid, path, most)

    async def diff(self) -> list[Change]:
        found = await asyncio.to_thread(self._changes)
        changes = [Change(path, ChangeKind(kind)) for path, kind in found if path not in self._known]
        return sorted(changes, key=lambda change: change.path)

    @property
    def alive(self) -> bool:
        return not self.gone and namespaces.is_apart(self.pid)

    async def fate(self) -> Fate:
        return Fate(not self.gone and not self.alive)

    async def kill(self) -> None:
        """All but the first process of the instance; they are this user's, whoever they are inside.

        First the commands' own ends out here: one that is still on its way in would otherwise arrive later.
        """
        for live in self._live:
            await live.kill()
        until = asyncio.get_running_loop().time() + _PATIENCE
        while left := await asyncio.to_thread(namespaces.processes, self.pid):
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in left:
                    namespaces.signal_inside(pid, self.pid, number)
            if asyncio.get_running_loop().time() > until:
                raise SandboxError(f"{len(left)} processes of instance {self.id} would not die")
            await asyncio.sleep(0.005)
        ends = asyncio.gather(*(live.wait() for live in self._live))
        await within(_PATIENCE, ends, f"the commands of instance {self.id} did not end")

    async def destroy(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._ending)

    async def _destroy(self) -> None:
        self.gone = True
        if self.listener is not None:
            self.listener.close()
        if self.pid:
            await self.kill()
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            await within(_PATIENCE, self._guard.wait(), f"the guard of instance {self.id} did not end")
        if self.pid and not await asyncio.to_thread(namespaces.wait_gone, self.pid, _PATIENCE):
            raise SandboxError(f"instance {self.id} would not end")
        await asyncio.to_thread(trees.remove, self._folder)
        self._lease.release()

    def _changes(self) -> list[tuple[str, str]]:
        with contextlib.ExitStack() as stack:

            def opened(path: Path) -> int:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                return descriptor

            lowers = (opened(self._place.root), *(opened(layer / "upper") for layer in self._place.layers))
            tree = overlay.Tree("/", opened(self._place.overlay / "upper"), lowers)
            return overlay.changes(tree, frozenset())


def check_user(user: str) -> None:
    if user not in ("", "root", "0"):
        raise Unsupported(f"apptainer sandboxes have one user, root inside: {user!r} needs bubblewrap or docker")


class _Live(LiveProcess):
    @property
    def done(self) -> bool:
        return self._code.done()


def _watched(process: subprocess.Popen[bytes], streams: Streams) -> _Live:
    """A live process of a plain one: its end is seen by its descriptor, whoever else holds its streams."""
    handle = os.pidfd_open(process.pid)
    loop = asyncio.get_running_loop()

    def kill(number: int) -> None:
        # Its group: the command and its children, which are in a namespace below but in no other session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    live = _Live(streams, kill)

    def ended() -> None:
        loop.remove_reader(handle)
        os.close(handle)
        code = process.wait()
        live.ended(code if code >= 0 else 128 - code)

    loop.add_reader(handle, ended)
    return live
