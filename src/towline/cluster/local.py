"""`NodeRunner`: one node with its gateway in this process. A node host wraps one; benchmarks and tests use it directly."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import Metric

from towline.cluster.ended import EndedTrajectories
from towline.cluster.runner import (
    InvalidTask,
    LogNotFound,
    NodeNotFound,
    SessionLog,
    SessionOutcome,
    Stored,
    StoreRequest,
)
from towline.cluster.segments import Segments
from towline.engines.base import PauseMode
from towline.node.node import RolloutNode
from towline.schema import BreakerStatus, EndReason, FailureReason, SandboxKind, Session, SessionState, Task


class NodeRunner:
    """Runs sessions on one node. The caller that created the node closes it."""

    def __init__(self, node: RolloutNode, name: str = "local"):
        self.name = name
        self.node = node
        self._ended = EndedTrajectories()

    @property
    def capacity(self) -> int:
        return self.node.capacity

    @property
    def room(self) -> int:
        return self.node.capacity - len(self.node.active)

    @property
    def version(self) -> int:
        return self.node.policy_version

    @property
    def trouble(self) -> str:
        return self.node.storage_problem

    def watch_sessions(self, changed: Callable[[Session], None]) -> None:
        self.node.changed = changed

    def watch_room(self, changed: Callable[[], None]) -> None:
        """The capacity of a node is constant."""

    async def use_store(self, segments: Segments, epoch: int) -> None:
        self._ended.segments = segments

    # Circuit breakers

    @property
    def breakers(self) -> Sequence[BreakerStatus]:
        return self.node.breakers

    def needs(self, component: str) -> bool:
        return self.node.needs(component)

    def watch_breakers(self, changed: Callable[[BreakerStatus], None]) -> None:
        self.node.on_breaker = changed

    def watch_engines(self, failed: Callable[[str, FailureReason], None]) -> None:
        self.node.watch_engines(failed)

    async def probe(self) -> list[str]:
        return await self.node.probe()

    # Tasks and sessions

    async def check(self, task: Task) -> None:
        for field, reason in await self.node.task_problems(task):
            raise InvalidTask(field, reason)

    @property
    def default_sandbox(self) -> SandboxKind:
        return self.node.settings.sandbox

    async def prefetch(self, tasks: Sequence[Task], seconds: float) -> list[str]:
        return await self.node.prefetch(tasks, seconds)

    def forget(self, task_id: str) -> None:
        self.node.forget_task(task_id)

    def submit(self, task: Task, session: Session) -> Awaitable[SessionOutcome]:
        return self._outcome(self.node.submit(task, session.model_copy(update={"node": self.name})))

    async def _outcome(self, running: asyncio.Task[Any]) -> SessionOutcome:
        finished = await running
        self._ended.add(finished.trajectory)
        trouble = self.trouble if finished.session.state is SessionState.FAILED else ""
        return SessionOutcome.of(
            finished.session,
            finished.trajectory,
            hopeless=finished.hopeless,
            blameless=finished.blameless,
            lost=trouble,
        )

    def cancel(self, session_id: str, reason: EndReason = EndReason.CANCELLED) -> None:
        self.node.cancel(session_id, reason)

    async def adopt(self, session_ids: Collection[str]) -> Mapping[str, Awaitable[SessionOutcome]]:
        return {}

    async def recover(self, lost: Collection[str]) -> AsyncIterator[SessionOutcome]:
        async for trajectory in self.node.recover(lost):
            self._ended.add(trajectory)
            session = Session(
                session_id=trajectory.session_id,
                task_id=trajectory.group_id,
                state=SessionState.LOST,
                failure=FailureReason.NODE,
                created=trajectory.created,
            )
            yield SessionOutcome.of(session, trajectory)

    async def store(self, requests: Sequence[StoreRequest]) -> list[Stored]:
        return await self._ended.store(requests)

    async def discard(self, session_id: str) -> None:
        self._ended.discard(session_id)
        await self.node.discard(session_id)

    async def erase(self, session_ids: Collection[str]) -> None:
        await self.node.erase(session_ids)

    async def read_log(self, session_id: str, name: str, most: int) -> SessionLog:
        return await asyncio.to_thread(_read_log, self.node.session_folder(session_id), name, most)

    # Status and policy

    async def nodes(self) -> list[dict[str, Any]]:
        return [{"name": self.name, **self.node.status()}]

    def drain(self, name: str, drained: bool) -> None:
        raise NodeNotFound("the only node cannot be drained")

    async def metrics(self) -> Iterable[Metric]:
        return self.node.engine_metrics()

    async def pause(self, mode: PauseMode, deadline: float | None) -> None:
        await self.node.pause(mode, deadline)

    async def resume(self, version: int | None) -> None:
        await self.node.resume(version)

    async def announce(self, version: int | None) -> int:
        return await self.node.announce(version)

    async def update_weights(self, folder: Path, version: int) -> None:
        await self.node.update_weights(folder, version)

    def report_demand(self, waiting: int) -> None:
        """The capacity of a node is constant."""

    async def close(self) -> None:
        return None


def _read_log(folder: Path, name: str, most: int) -> SessionLog:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    except FileNotFoundError:
        names = []
    if name not in names:
        raise LogNotFound(names)
    with open(os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        left_out = max(0, os.fstat(file.fileno()).st_size - most)
        file.seek(left_out)
        return SessionLog(file.read(most), left_out, names)
