"""A service in a process of its own, to be killed with SIGKILL.

Run as a program it imports what is heavy once, and then forks a fresh process for every server that it is told to start,
before anything of the server is imported: so a crash point is set as anywhere else, by the environment. `Nursery` and
`Process` are the test's side of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PATIENCE = 60


class Process:
    """One server process."""

    def __init__(self, pid: int, ready: Path, log: Path):
        self.pid = pid
        self._ready = ready
        self.log = log
        self.url = ""

    async def listening(self) -> bool:
        """Whether it came to listen; a crash point may be on the way."""
        while not await asyncio.to_thread(self._ready.exists):
            if not self.alive():
                return False
            await asyncio.sleep(0.005)
        self.url = await asyncio.to_thread(self._ready.read_text)
        return True

    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    async def dead(self) -> None:
        until = time.monotonic() + _PATIENCE
        while self.alive():
            assert time.monotonic() < until, "the server did not die\n" + self.log.read_text()
            await asyncio.sleep(0.005)


class Nursery:
    """Starts server processes."""

    def __init__(self, scratch: Path):
        self._scratch = scratch
        self._forker = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, data: Path, database: str, crash_at: str = "") -> Process:
        name = secrets.token_hex(4)
        ready, log = self._scratch / f"{name}.ready", self._scratch / f"{name}.log"
        order = {"data": str(data), "database": database, "crash_at": crash_at, "ready": str(ready), "log": str(log)}
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        self._forker.stdin.write(json.dumps(order) + "\n")
        self._forker.stdin.flush()
        return Process(int(self._forker.stdout.readline()), ready, log)

    def close(self) -> None:
        """Ends every process that it started, too."""
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        self._forker.stdin.close()
        self._forker.wait(_PATIENCE)
        self._forker.stdout.close()


def _fork_servers() -> None:
    # Everything heavy, but nothing of the server.
    import aiohttp  # noqa: F401
    import aiosqlite  # noqa: F401
    import alembic.command  # noqa: F401
    import asyncpg  # noqa: F401
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import pyarrow.ipc  # noqa: F401
    import sqlalchemy.ext.asyncio  # noqa: F401
    import uvicorn  # noqa: F401
    import uvloop  # noqa: F401

    import towline.config  # noqa: F401

    assert "towline.crashpoints" not in sys.modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are not kept
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            # It dies with its parent.
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run_server(json.loads(line))
            os._exit(0)
        print(pid, flush=True)


def _run_server(order: dict[str, Any]) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["TOWLINE_CRASH_AT"] = order["crash_at"]

    import logging

    import uvloop

    from towline.benchmarks.fake_runner import FakeRunner
    from towline.config import ServerSettings
    from towline.server.serving import serving

    async def serve() -> None:
        settings = ServerSettings(port=0, data=Path(order["data"]), database=order["database"])
        async with serving(settings, FakeRunner(capacity=16)) as running:
            ready = Path(order["ready"])
            draft = ready.with_suffix(".draft")
            draft.write_text(running.url)
            draft.rename(ready)
            await asyncio.Event().wait()

    logging.basicConfig(level=logging.INFO)
    uvloop.run(serve())


if __name__ == "__main__":
    _fork_servers()
