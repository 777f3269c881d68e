"""Servers in separate processes, to be killed with SIGKILL, and the processes they leave behind.

Run as a program, it imports everything once and forks a process per server: with the fake runner, or `towline serve` with
user options; without keys. It is the subreaper of its children, so it sees every process that a server has started. `Nursery` and
`Process` are the test's side of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PATIENCE = 120
_PDEATHSIG, _SUBREAPER = 1, 36
"""Of prctl(2)."""


def _parents(*pids: int) -> dict[int, tuple[int, str]]:
    """Parent and state of these processes, or of all."""
    found = {}
    for pid in pids or (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError):
            state, parent, *_ = Path("/proc", str(pid), "stat").read_text().rsplit(")", 1)[1].split()
            found[pid] = (int(parent), state)
    return found


class Process:
    """One server process."""

    def __init__(self, pid: int, parent: int, said: Path, log: Path):
        self.pid = pid
        self._parent = parent
        self._said = said
        self.log = log
        self.url = ""

    async def listening(self) -> bool:
        """Whether it started to listen; it may crash before."""
        until = time.monotonic() + _PATIENCE
        while not self.url:
            line, end, _ = self._said.read_text().partition("\n") if self._said.exists() else ("", "", "")
            if end:
                self.url = str(json.loads(line)["url"])
            elif not self.alive():
                return False
            else:
                assert time.monotonic() < until, "the server did not come to listen\n" + self.log.read_text()
                await asyncio.sleep(0.005)
        return True

    def alive(self) -> bool:
        # A number that another process has by now is not this one.
        return _parents(self.pid).get(self.pid, (0, ""))[0] == self._parent

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, how)

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

    def start(
        self, data: Path, database: str, crash_at: str = "", serve: Sequence[str] = (), **settings: Any
    ) -> Process:
        """Start a server that dies at the named crash point; with options, start `towline serve`."""
        name = secrets.token_hex(4)
        said, log = self._scratch / f"{name}.said", self._scratch / f"{name}.log"
        places = {"data": str(data), "database": database, "said": str(said), "log": str(log)}
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        self._forker.stdin.write(
            json.dumps(places | {"crash_at": crash_at, "serve": list(serve), "settings": settings}) + "\n"
        )
        self._forker.stdin.flush()
        # The first answer comes when everything is imported, which takes its time on a busy machine.
        assert select.select([self._forker.stdout], [], [], 2 * _PATIENCE)[0], "the forker does not answer"
        return Process(int(self._forker.stdout.readline()), self._forker.pid, said, log)

    def strays(self, alive: Process | None = None) -> list[str]:
        """Processes that servers started and that are not descendants of the live one."""
        parents = _parents()
        known, found = {self._forker.pid}, []
        while fresh := [pid for pid, (parent, _) in parents.items() if parent in known and pid not in known]:
            known |= set(fresh) - {alive.pid if alive else 0}
            parents = {pid: one for pid, one in parents.items() if alive is None or pid != alive.pid}
            found += [pid for pid in fresh if pid in parents and parents[pid][1] not in "ZX"]
        told = []
        for pid in found:
            with contextlib.suppress(OSError):
                told.append(f"{pid} {Path('/proc', str(pid), 'cmdline').read_bytes()[:200]!r}")
        return told

    def close(self) -> None:
        """Also ends every server it started."""
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        self._forker.stdin.close()
        try:
            self._forker.wait(_PATIENCE)
        finally:
            self._forker.kill()
            self._forker.wait(_PATIENCE)
            self._forker.stdout.close()


def _fork_servers() -> None:
    # All that a server needs, so that each is there in a moment.
    import asyncpg  # noqa: F401

    import towline.benchmarks.fake_runner
    import towline.cli.serve.command
    import towline.cluster.fleet
    import towline.engines.scripted
    import towline.runs.run
    import towline.server.api.app  # noqa: F401

    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are not kept
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            prctl(_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = 1
            try:
                _run_server(json.loads(line))
            except SystemExit as ended:
                code = int(ended.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(pid, flush=True)


def in_host(point: str) -> bool:
    """Whether `towline serve` reaches the crash point in a node host, which dies without the server."""
    return point.startswith(("gateway.", "journal.")) or "_segment" in point


def _run_server(order: dict[str, Any]) -> None:
    for number, name in ((1, "said"), (2, "log")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)

    from towline.common import crashpoints

    if order["serve"] and in_host(order["crash_at"]):
        os.environ[crashpoints.VARIABLE] = order["crash_at"]
    else:
        # As the variable does for a program that has imported nothing yet.
        crashpoints._name, crashpoints._left = crashpoints._parse(order["crash_at"])
    if order["serve"]:
        from towline.cli.serve.command import app

        for name, value in (
            {"database": order["database"], "auth": False, "trust_tasks": True} | order["settings"]
        ).items():
            os.environ[f"TOWLINE_SERVER__{name.upper()}"] = str(value)
        app([*order["serve"], "--port", "0", "--data", order["data"], "--json"])
        return

    import logging

    import uvloop

    from towline.benchmarks.fake_runner import FakeRunner
    from towline.config import ServerSettings
    from towline.server.api.app import serving

    async def serve() -> None:
        places = {"port": 0, "data": order["data"], "database": order["database"], "auth": False, "trust_tasks": True}
        settings = ServerSettings.model_validate(places | order["settings"])
        async with serving(settings, FakeRunner(capacity=16)) as running:
            print(json.dumps({"url": running.url}), flush=True)
            await asyncio.Event().wait()

    logging.basicConfig(level=logging.INFO)
    uvloop.run(serve())


if __name__ == "__main__":
    _fork_servers()
