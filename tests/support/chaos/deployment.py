"""What a storm rages against: a server that is started again whenever it ends, its node hosts, its sandboxes and its disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from support.chaos import processes

_START_SECONDS = 240
CLOCK = Path(__file__).parent / "clock"


class Deployment(Protocol):
    """A server with its nodes. `children` runs them as child processes; another one may spread them over machines."""

    name: str
    url: str
    starts: int

    async def start(self) -> None:
        """Start the server, and keep it running until `stop`."""
        ...

    async def stop(self) -> None:
        """Shut the server down as an operator does."""
        ...

    async def serving(self, seconds: float) -> None:
        """Wait until the server answers, but not longer than this."""
        ...

    def server(self) -> list[int]:
        """The process of the server, if there is one."""
        ...

    def hosts(self) -> list[int]:
        """The processes of the node hosts."""
        ...

    def supervisors(self) -> list[int]:
        """The processes that start sandboxes."""
        ...

    def others(self) -> list[int]:
        """Processes that outlive the server and its hosts, such as those of Ray."""
        ...

    def mount_tables(self) -> list[Path]:
        """`mountinfo` files of the namespaces in which hosts run."""
        ...


@dataclass
class Children:
    """`towline serve --nodes N` on this machine."""

    data: Path
    database: str
    options: Sequence[str]
    log: Path
    nodes: int = 2
    environment: dict[str, str] = field(default_factory=dict)
    name: str = "children"
    url: str = ""
    starts: int = 0
    _port: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _keeper: asyncio.Task[None] | None = None
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _started: bool = False

    async def start(self) -> None:
        self.url = self._choose_url()
        self._ready.clear()
        self._keeper = asyncio.create_task(self._keep_running())
        waiting = asyncio.create_task(self._ready.wait())
        done, _ = await asyncio.wait(
            [waiting, self._keeper], timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        waiting.cancel()
        assert waiting in done, f"the server did not start:\n{self.log.read_text()[-3000:]}"

    def _choose_url(self) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        return f"http://127.0.0.1:{self._port}"

    async def _keep_running(self) -> None:
        while True:
            self._launch()
            process = self._process
            assert process is not None
            assert process.stdout is not None
            line = await asyncio.to_thread(process.stdout.readline)
            if line:
                self._ready.set()
                self._started = True
            code = await asyncio.to_thread(process.wait)
            process.stdout.close()
            self._ready.clear()
            if not self._started and code >= 0:
                return  # it does not start even undisturbed
            await asyncio.sleep(0.3)

    def _launch(self) -> None:
        fixed = ["--port", str(self._port), "--data", str(self.data), "--nodes", str(self.nodes), "--json"]
        fixed += ["--no-auth", "--trust"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "towline", "serve", *fixed, *self.options],
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"TOWLINE_SERVER__DATABASE": self.database, "COLUMNS": "300"} | self.environment,
            )
        self.starts += 1

    async def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            self._keeper = None
        for pid in self.server():
            processes.send(pid, signal.SIGTERM)
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, _START_SECONDS)
            finally:
                self._process.kill()

    async def serving(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ready.wait()

    def kill(self) -> None:
        """End everything at once, so that a failed test leaves nothing behind."""
        if self._keeper is not None:
            self._keeper.cancel()
        for pid in [*self.server(), *self.hosts()]:
            processes.send(pid, signal.SIGKILL)

    def server(self) -> list[int]:
        running = self._process is not None and self._process.poll() is None
        return [self._process.pid] if running and self._process is not None else []

    def hosts(self) -> list[int]:
        return [
            pid for pid in processes.descendants(*self.server()) if "towline node-host" in processes.command_line(pid)
        ]

    def supervisors(self) -> list[int]:
        hosts = self.hosts()
        below = processes.descendants(*hosts) if hosts else []
        return [pid for pid in below if "supervisor import main" in processes.command_line(pid)]

    def others(self) -> list[int]:
        return []

    def mount_tables(self) -> list[Path]:
        return [Path("/proc/self/mountinfo")]


@dataclass
class SmallDisk:
    """A file system of its own that can be filled. Without the right to mount, a plain folder that cannot."""

    folder: Path
    size: str
    mounted: bool = False

    @property
    def _ballast(self) -> Path:
        return self.folder / "ballast"

    def fill(self) -> None:
        with contextlib.suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        with contextlib.suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(256))

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "192m") -> Iterator[SmallDisk]:
    folder.mkdir(parents=True)
    disk = SmallDisk(folder, size)
    command = ["mount", "-t", "tmpfs", "-o", f"size={disk.size}", "tmpfs", str(folder)]
    disk.mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield disk
    finally:
        if disk.mounted:
            _unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _unmount(folder: Path) -> None:
    for _ in range(100):
        if subprocess.run(["umount", str(folder)], check=False, capture_output=True).returncode == 0:
            return
        time.sleep(0.1)
    subprocess.run(["umount", "-l", str(folder)], check=True)
