"""`towline serve --cluster auto` on a real Ray cluster, for storms: nodes lose power, links are cut, raylets die.

The server runs on the head, which Ray cannot lose; every other node may be killed and is started again after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.chaos import processes
from support.chaos.deployment import Children
from support.cluster.ray_rig import RayRig

_RAY = re.compile(r"site-packages/ray/|^ray::|ray\.scripts|ray\._private")
_CHECK_SECONDS = 2.0


class OnRay(Children):
    """The server of a rig, started again whenever it ends, and the nodes of the rig, started again when they die."""

    def __init__(self, rig: RayRig, options: Sequence[str], database: str, environment: dict[str, str]):
        super().__init__(rig.place / "data", database, options, rig.place / "log/server.log", environment=environment)
        self.name = "ray"
        self.rig = rig
        self._boots: set[asyncio.Task[None]] = set()
        self._down: set[int] = set()
        """Nodes without power, which are not started yet."""
        self._nodes: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._nodes = asyncio.create_task(self._keep_nodes())
        await super().start()

    async def stop(self) -> None:
        await asyncio.gather(*self._boots)
        await super().stop()
        if self._nodes is not None:
            self._nodes.cancel()
            await asyncio.wait([self._nodes])
            self._nodes = None

    def _choose_url(self) -> str:
        return self.rig.url

    def _launch(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.rig.serve_command(engine=self.options), "--log-format=json"],
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                cwd=self.rig.place,
                env=self.rig.serve_environment(TOWLINE_SERVER__DATABASE=self.database) | self.environment,
            )
        self.starts += 1

    def server(self) -> list[int]:
        """Its parent enters the namespaces of the head."""
        return processes.children(super().server())

    def hosts(self) -> list[int]:
        below = processes.descendants(*self._node_pids())
        return [pid for pid in below if "towline node-host" in processes.command_line(pid)]

    def _node_pids(self) -> list[int]:
        return [process.pid for process in self.rig.nodes.values()]

    def others(self) -> list[int]:
        """Processes that belong to Ray itself: they stay when the server and its hosts have ended."""
        below = processes.descendants(*self._node_pids())
        return [*self._node_pids(), *(pid for pid in below if _RAY.search(processes.command_line(pid)))]

    def mount_tables(self) -> list[Path]:
        """The mounts as each node sees them."""
        inside = processes.children(self._node_pids())
        return [Path(f"/proc/{pid}/mountinfo") for pid in inside]

    # Faults

    async def kill_node(self, choice: float, seconds: float) -> None:
        """Power fails on a node; it boots after that many seconds."""
        for node in self._victim(choice):
            self._down.add(node)
            await asyncio.to_thread(self.rig.kill_node, node)
            self._later(node, seconds)

    async def kill_raylet(self, choice: float, seconds: float) -> None:
        """Ray's process on a node dies, and all others of that node with it."""
        for node in self._victim(choice):
            with contextlib.suppress(ProcessLookupError, ValueError):
                self.rig.kill_raylet(node)

    async def cut_network(self, choice: float, seconds: float) -> None:
        for node in self._victim(choice):
            self.rig.cut(node)
            try:
                await asyncio.sleep(seconds)
            finally:
                self.rig.heal(node)

    def _victim(self, choice: float) -> list[int]:
        among = sorted(node for node in self.rig.nodes if node)
        return [among[int(choice * len(among))]] if among else []

    def _later(self, node: int, seconds: float) -> None:
        async def boot() -> None:
            await asyncio.sleep(seconds)
            self.rig.start_node(node)
            self._down.discard(node)

        task = asyncio.create_task(boot())
        self._boots.add(task)
        task.add_done_callback(self._boots.discard)

    async def _keep_nodes(self) -> None:
        """Start nodes again that ended by themselves: without a raylet, or because `ray start` gave up."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            for entered in super().server():
                # `nsenter` stops with the process that it started, and is not continued with it.
                processes.send(entered, signal.SIGCONT)
            for node, process in list(self.rig.nodes.items()):
                if process.poll() is not None and node not in self._down:
                    self.rig.start_node(node)
