"""A live command in a container: an `exec` of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any, Protocol

from towline.sandboxes.docker_api import Attached

_KILLED = 128 + signal.SIGKILL


class Container(Protocol):
    """What a command needs of its sandbox."""

    @property
    def signals(self) -> bool: ...

    def owns(self, pid: int) -> bool: ...

    async def look_at(self, execution: str) -> dict[str, Any] | None: ...

    async def kill(self) -> None: ...


class DockerProcess:
    """A live command: an `exec`."""

    def __init__(self, sandbox: Container, name: str, attached: Attached):
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
        about = await self._sandbox.look_at(self.name)
        if about is None or not about.get("Running"):
            return
        pid = int(about.get("Pid") or 0)
        if self._sandbox.signals and pid and self._sandbox.owns(pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        else:
            await self._sandbox.kill()

    def close(self) -> None:
        self._attached.close()

    async def _wait(self) -> int:
        """Streams end with the last process that holds them, which may be a daemon; so the engine is asked as well."""
        pause = 0.1
        while True:
            await asyncio.wait([self._attached.ended], timeout=pause)
            about = await self._sandbox.look_at(self.name)
            if about is None:
                return _KILLED
            if not about.get("Running") and about.get("ExitCode") is not None:
                return int(about["ExitCode"])
            if self._attached.ended.done():
                await asyncio.sleep(0.02)
            pause = min(pause * 1.5, 1.0)
