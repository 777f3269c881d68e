"""The node in this process as a runner."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from towline.engines.base import ContextExceeded, PauseMode
from towline.errors import EngineError, TowlineError
from towline.gateway.gateway import SessionError
from towline.gateway.lanes import Lane
from towline.node.checking import problems, reaches, root_problems
from towline.node.pipeline import Node
from towline.schema import (
    POLICY,
    BreakerStatus,
    EndReason,
    FailureReason,
    SandboxKind,
    SchemaError,
    Session,
    Task,
    Trajectory,
)
from towline.server.runner import InvalidTask, NoLog, Outcome, SessionLog

log = logging.getLogger("towline.server")
_LOOK_AGAIN = 30.0
"""Seconds until a runtime that was not there is looked for again."""


class NodeRunner:
    """One node with its gateway. Whoever made the node closes it."""

    name = "local"

    def __init__(self, node: Node):
        self.node = node
        self._tasks: dict[str, Task] = {}
        self._runtimes: dict[SandboxKind, tuple[float, str]] = {}
        """When each was looked for, and why it cannot be used."""

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

    # Circuit breakers

    @property
    def breakers(self) -> Sequence[BreakerStatus]:
        return self.node.breakers

    def needs(self, component: str) -> bool:
        return component in (f"engine:{POLICY}", f"sandbox:{self.node.settings.sandbox.value}")

    def watch_breakers(self, changed: Callable[[BreakerStatus], None]) -> None:
        self.node.on_breaker = changed

    def watch_engines(self, failed: Callable[[str, FailureReason], None]) -> None:
        def watch(lane: Lane) -> None:
            def turn_ended(error: EngineError | None) -> None:
                if error is not None and not isinstance(error, ContextExceeded):
                    failed(lane.name, FailureReason(error.failure))

            lane.watchers.append(turn_ended)

        for lane in self.node.gateway.lanes:
            watch(lane)

    async def probe(self) -> list[str]:
        return await self.node.probe()

    # Tasks

    async def check(self, task: Task) -> None:
        for field, reason in problems(
            task, self.node.gateway.defaults, [lane.name for lane in self.node.gateway.lanes if not lane.trained]
        ):
            raise InvalidTask(field, reason)
        named = task.environment.sandbox
        if named is not None and (missing := await self._missing(named)):
            raise InvalidTask("environment.sandbox", f"{named.value} sandboxes do not work on this node: {missing}")
        for reason in root_problems(task.environment, named or self.node.settings.sandbox):
            raise InvalidTask("environment.root", reason)

    async def _missing(self, kind: SandboxKind) -> str:
        """Why a runtime cannot be used at all; empty if it can. One that worked once is taken to be back some time."""
        at, problem = self._runtimes.get(kind, (0.0, ""))
        if not at or (problem and time.monotonic() - at > _LOOK_AGAIN):
            try:
                await self.node.runtimes.get(kind)
                problem = ""
            except (TowlineError, OSError) as error:
                problem = str(error)
            self._runtimes[kind] = (time.monotonic(), problem)
        return problem

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
            await self._seal(session_id)
        for path in await asyncio.to_thread(lambda: sorted(gateway.trajectories.glob("*.arrow"))):
            if path.stem in lost:
                trajectory = await asyncio.to_thread(self._read, path)
                if trajectory is None:
                    continue
                yield trajectory
            elif await asyncio.to_thread(path.is_dir):
                await asyncio.to_thread(gateway.quarantine.move, path, "a file should be there")
            await self.discard(path.stem)

    async def _seal(self, session_id: str) -> None:
        gateway = self.node.gateway
        try:
            await gateway.seal(session_id, EndReason.ERROR)
        except Exception as error:  # Whatever it holds, it is tried again as a whole.
            if isinstance(error, SessionError) and error.failure == FailureReason.STORAGE:
                log.error("%s; the session is tried again", error)
                return
            reason = f"it cannot be built: {type(error).__name__}: {error}"
            try:
                await gateway.set_aside(session_id, reason)
            except (TowlineError, OSError) as failure:
                log.error("session %s cannot be kept elsewhere, and stays in the journal: %s", session_id, failure)

    def _read(self, path: Path) -> Trajectory | None:
        """What there is of a lost session; what cannot be read is kept elsewhere."""
        try:
            trajectory = Trajectory.read(path)
            if trajectory.session_id != path.stem:
                raise SchemaError(f"it is of session {trajectory.session_id}")
        except (TowlineError, OSError, ValueError) as error:
            with contextlib.suppress(OSError):
                self.node.gateway.quarantine.move(path, str(error))
            return None
        return trajectory

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

    # Logs

    async def read_log(self, session_id: str, name: str, most: int) -> SessionLog:
        return await asyncio.to_thread(_read_log, self.node.data / "sessions" / session_id, name, most)

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


def _read_log(folder: Path, name: str, most: int) -> SessionLog:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    except FileNotFoundError:
        names = []
    if name not in names:
        raise NoLog(names)
    with open(os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        left_out = max(0, os.fstat(file.fileno()).st_size - most)
        file.seek(left_out)
        return SessionLog(file.read(most), left_out, names)
