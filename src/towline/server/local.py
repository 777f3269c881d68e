"""The node in this process as a runner."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

from towline.engines.base import PauseMode
from towline.errors import TowlineError
from towline.node.checking import problems, reaches
from towline.node.pipeline import Node
from towline.schema import EndReason, SandboxKind, Session, Task, Trajectory
from towline.server.runner import InvalidTask, Outcome

log = logging.getLogger("towline.server")


class NodeRunner:
    """One node with its gateway. Whoever made the node closes it."""

    name = "local"

    def __init__(self, node: Node):
        self.node = node
        self._tasks: dict[str, Task] = {}

    @property
    def capacity(self) -> int:
        """Those that are made ready, run, are built and judged; with more, the queue's order would be the node's."""
        settings = self.node.settings
        return settings.run_workers + settings.ahead + settings.build_workers + settings.evaluate_workers

    @property
    def version(self) -> int:
        return self.node.gateway.engine.version

    @property
    def trouble(self) -> str:
        return self.node.gateway.journal.trouble

    def watch(self, changed: Callable[[Session], None]) -> None:
        self.node.changed = changed

    # Tasks

    def check(self, task: Task) -> None:
        for field, reason in problems(
            task, self.node.gateway.defaults, [lane.name for lane in self.node.gateway.lanes if not lane.trained]
        ):
            raise InvalidTask(field, reason)

    def reaches(self, task: Task) -> list[str]:
        found = list(reaches(task))
        by_default = self.node.settings.sandbox
        if task.environment.sandbox is None and by_default is SandboxKind.PROCESS:
            found.append("environment.sandbox")
        return found

    def submit(self, task: Task, session: Session) -> Awaitable[Outcome]:
        self._tasks[task.task_id] = task
        return self.node.submit(task, session)

    def cancel(self, session_id: str) -> None:
        self.node.cancel(session_id)

    def forget(self, task_id: str) -> None:
        task = self._tasks.pop(task_id, None)
        if task is not None:
            self.node.preparer.forget(task)

    # After a crash

    async def recover(self, lost: Collection[str]) -> AsyncIterator[Trajectory]:
        """Sandboxes of an earlier server are ended by their runtimes; its sessions at the gateway are sealed."""
        await self._reap()
        gateway = self.node.gateway
        for session_id in list(gateway.sessions):
            await gateway.seal(session_id, EndReason.ERROR)
        for path in await asyncio.to_thread(lambda: sorted(gateway.trajectories.glob("*.arrow"))):
            if path.stem in lost:
                try:
                    trajectory = await asyncio.to_thread(Trajectory.read, path)
                except (TowlineError, OSError, ValueError) as error:
                    log.error("what there was of session %s cannot be read: %s", path.stem, error)
                    continue
                yield trajectory
            await self.discard(path.stem)

    async def _reap(self) -> None:
        runtimes = self.node.runtimes
        for kind in SandboxKind:
            if await asyncio.to_thread((runtimes.data / kind.value).exists):
                try:
                    await runtimes.get(kind)
                except (TowlineError, OSError) as error:
                    log.error("what was left of %s sandboxes could not be ended: %s", kind.value, error)

    async def discard(self, session_id: str) -> None:
        path = self.node.gateway.trajectories / f"{session_id}.arrow"
        await asyncio.to_thread(path.unlink, missing_ok=True)

    async def erase(self, session_ids: Collection[str]) -> None:
        for session_id in session_ids:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(shutil.rmtree, self.node.data / "sessions" / session_id)

    # The rest

    def nodes(self) -> list[dict[str, Any]]:
        flights = list(self.node.flights.values())
        engine = self.node.gateway.engine
        return [
            {
                "name": self.name,
                "capacity": self.capacity,
                "active": len(flights),
                "states": dict(Counter(flight.session.state.value for flight in flights)),
                "sandbox": self.node.settings.sandbox.value,
                "engine": engine.info.name,
                "model": self.node.gateway.model,
                "version": engine.version,
                "sessions": [self._progress(flight.session) for flight in flights],
            }
        ]

    def _progress(self, session: Session) -> dict[str, Any]:
        """Where a session is, and what it has sampled so far."""
        opened = self.node.gateway.sessions.get(session.session_id)
        return {
            "session_id": session.session_id,
            "task_id": session.task_id,
            "state": session.state.value,
            "turns": len(opened.graph.nodes) if opened is not None else 0,
            "sampled_tokens": opened.sampled_tokens if opened is not None else 0,
        }

    async def pause(self, mode: PauseMode, deadline: float | None) -> None:
        await self.node.gateway.engine.pause(mode, deadline)

    async def resume(self, version: int | None) -> None:
        await self.node.gateway.engine.resume(version)

    async def update_weights(self, folder: Path, version: int) -> None:
        await self.node.gateway.engine.update_weights(folder, version)

    async def close(self) -> None:
        return None
