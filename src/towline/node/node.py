"""The node: runs sessions on one machine.

While some sessions run, others are prepared and others evaluated, so that the engine never waits for a sandbox. A prepared
session waits for a slot to run; its time limit starts with its run. Every session ends with a trajectory, which is written
to disk once: here, or by a caller that stores it elsewhere and then discards it here. Every sandbox is destroyed.

`RolloutNode` is the interface of the node: servers, runners and commands use nothing behind it. After a crash, `recover`
ends what an earlier process left: its sandboxes, and its sessions at the gateway, which are sealed. What cannot be read is
quarantined and stops nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import Metric

from towline.common.text import slug
from towline.config import NodeSettings
from towline.config.images import ImageSettings
from towline.engines.base import AnnouncesVersions, ContextExceeded, PauseMode
from towline.engines.pool import EnginePool
from towline.errors import EngineError, TowlineError
from towline.gateway.gateway import Gateway
from towline.gateway.model_routes import ModelRoute
from towline.gateway.server import RunningGateway
from towline.node import task_check
from towline.node.active_session import ActiveSession
from towline.node.components import NodeComponents
from towline.node.environment import HarnessInstalls, SandboxRuntimes, TaskPreparer
from towline.node.finished import FinishedSession
from towline.node.pipeline import SessionPipeline
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

log = logging.getLogger("towline.node")


async def recover_sessions(
    gateway: Gateway, runtimes: SandboxRuntimes, lost: Collection[str]
) -> AsyncIterator[Trajectory]:
    """End what an earlier process left; the trajectories of the `lost` sessions."""
    await _reap_sandboxes(runtimes)
    for session_id in list(gateway.sessions):
        ended = await _end(gateway, session_id)
        if ended is not None and session_id in lost:
            yield ended
        elif ended is not None:
            await gateway.release(session_id)
    for path in await asyncio.to_thread(lambda: sorted(gateway.trajectories.glob("*.arrow"))):
        if path.stem in lost:
            trajectory = await asyncio.to_thread(_read, gateway, path)
            if trajectory is None:
                continue
            yield trajectory
        elif await asyncio.to_thread(path.is_dir):
            await asyncio.to_thread(gateway.quarantine.move, path, "expected a file")
        await asyncio.to_thread(path.unlink, missing_ok=True)


async def _reap_sandboxes(runtimes: SandboxRuntimes) -> None:
    for kind in SandboxKind:
        if await asyncio.to_thread((runtimes.data / kind.value).exists):
            try:
                await runtimes.get(kind)
            except (TowlineError, OSError) as error:
                log.error("leftover %s sandboxes could not be ended: %s", kind.value, error)


async def _end(gateway: Gateway, session_id: str) -> Trajectory | None:
    """The trajectory of a session that was open; one whose trajectory cannot be built is quarantined."""
    try:
        return await gateway.end(session_id, EndReason.ERROR)
    except Exception as error:  # whatever the session contains, it is retried as a whole
        reason = f"its trajectory cannot be built: {type(error).__name__}: {error}"
        try:
            await gateway.quarantine_session(session_id, reason)
        except Exception as failure:  # recovery is total: what cannot be moved stays, and the start succeeds
            log.error("session %s cannot be quarantined, and stays in the journal: %s", session_id, failure)
        return None


def _read(gateway: Gateway, path: Path) -> Trajectory | None:
    """The trajectory of a lost session; an unreadable one is quarantined."""
    try:
        trajectory = Trajectory.read(path)
        if trajectory.session_id != path.stem:
            raise SchemaError(f"it belongs to session {trajectory.session_id}")
    except (TowlineError, OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            gateway.quarantine.move(path, str(error))
        return None
    return trajectory


def new_session(task: Task, sample: int = 0, attempt: int = 1) -> Session:
    """A session of the task with a new id that begins with the task's name."""
    now = time.time()
    session_id = f"{slug(task.task_id)}-{sample}-{secrets.token_hex(4)}"
    return Session(
        session_id=session_id, task_id=task.task_id, sample=sample, attempt=attempt, created=now, updated=now
    )


class RolloutNode:
    """Runs sessions on one machine."""

    def __init__(
        self,
        gateway: Gateway,
        running: RunningGateway,
        settings: NodeSettings,
        data: Path,
        installs: HarnessInstalls,
        cache: Path,
        *,
        images: ImageSettings | None = None,
        changed: Callable[[Session], None] | None = None,
        stores_trajectories: bool = True,
    ):
        """Without `stores_trajectories`, the caller stores the trajectory of every session, and then calls `discard`."""
        self.settings = settings
        # Sandboxes have other working folders than the node.
        self.data = data.absolute()
        self.changed = changed or (lambda session: None)
        """Called with every change of a session's state."""
        self.active: dict[str, ActiveSession] = {}
        self._gateway = gateway
        self._components = NodeComponents(gateway, settings)
        self._images = images or ImageSettings()
        self._runtimes = SandboxRuntimes(
            settings, self.data / "sandboxes", cache, self._components.sandbox_created, self._images
        )
        self._components.open(self._runtimes)
        self._preparer = TaskPreparer(settings, self._runtimes, installs)
        self._pipeline = SessionPipeline(
            gateway,
            running,
            settings,
            self._components,
            self._preparer,
            stores_trajectories=stores_trajectories,
        )
        self._tasks: set[asyncio.Task[FinishedSession]] = set()

    async def close(self) -> None:
        """Cancel active sessions, keep their turns, and leave nothing behind."""
        for active in list(self.active.values()):
            active.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._components.close()
        await self._runtimes.close()

    # Status

    @property
    def capacity(self) -> int:
        """Sessions that can be active at once, over all stages; with more, they would be queued here."""
        settings = self.settings
        return settings.run_workers + settings.ahead + settings.build_workers + settings.evaluate_workers

    @property
    def policy_version(self) -> int:
        return self._gateway.engine.version

    @property
    def storage_problem(self) -> str:
        """Why the node cannot record turns; empty if it can."""
        return self._gateway.journal.trouble

    def status(self) -> dict[str, Any]:
        """The active sessions with their progress, and what they run on."""
        sessions = [active.session for active in self.active.values()]
        return {
            "capacity": self.capacity,
            "active": len(sessions),
            "states": dict(Counter(session.state.value for session in sessions)),
            "sandbox": self.settings.sandbox.value,
            "starts": self._runtimes.starts.status(),
            "engine": self._gateway.engine.info.name,
            "model": self._gateway.model,
            "version": self.policy_version,
            "sessions": [self._progress(session) for session in sessions],
        }

    def _progress(self, session: Session) -> dict[str, Any]:
        opened = self._gateway.sessions.get(session.session_id)
        return {
            "session_id": session.session_id,
            "task_id": session.task_id,
            "state": session.state.value,
            "turns": len(opened.graph.nodes) if opened is not None else 0,
            "sampled_tokens": opened.sampled_tokens if opened is not None else 0,
        }

    def engine_metrics(self) -> Iterable[Metric]:
        """Prometheus metrics of the policy's replicas and of the gateway."""
        engine = self._gateway.engine
        return [*(engine.collect() if isinstance(engine, EnginePool) else ()), *self._gateway.collect()]

    # The policy

    async def pause(self, mode: PauseMode, deadline: float | None = None) -> None:
        await self._gateway.engine.pause(mode, deadline)

    async def resume(self, version: int | None = None) -> None:
        await self._gateway.engine.resume(version)

    async def announce(self, version: int | None) -> int:
        """Note that the policy's weights were replaced by other means; returns their version."""
        engine = self._gateway.engine
        if isinstance(engine, AnnouncesVersions):
            return await engine.announce(version)
        if version in (None, engine.version):
            return engine.version
        raise EngineError(f"the weights of engine {engine.info.name} are replaced through update_weights only")

    async def update_weights(self, folder: Path, version: int) -> None:
        await self._gateway.engine.update_weights(folder, version)

    # Circuit breakers

    @property
    def breakers(self) -> list[BreakerStatus]:
        """The circuit breakers of every engine, and of every sandbox runtime that was used."""
        return self._components.breakers.statuses

    @property
    def on_breaker(self) -> Callable[[BreakerStatus], None]:
        """Called with every change of a breaker."""
        return self._components.breakers.on_breaker

    @on_breaker.setter
    def on_breaker(self, callback: Callable[[BreakerStatus], None]) -> None:
        self._components.breakers.on_breaker = callback

    def needs(self, component: str) -> bool:
        """Whether tasks need the component (`engine:NAME`, `sandbox:KIND`) by default."""
        return component in (f"engine:{POLICY}", f"sandbox:{self.settings.sandbox.value}")

    def watch_engines(self, failed: Callable[[str, FailureReason], None]) -> None:
        """Call `failed` with the engine's name and the reason for every turn that an engine fails."""

        def watch(route: ModelRoute) -> None:
            def turn_ended(error: EngineError | None, began: float) -> None:
                if error is not None and not isinstance(error, ContextExceeded):
                    failed(route.name, FailureReason(error.failure))

            route.watchers.append(turn_ended)

        for route in self._gateway.routes:
            watch(route)

    async def probe(self) -> list[str]:
        """Use every engine and the default sandbox once; one line per problem, which also opens its breaker."""
        return await self._components.probe()

    # Tasks

    async def task_problems(self, task: Task) -> list[tuple[str, str]]:
        """Fields of the task that cannot be honored on this node, each with the reason."""
        others = [route.name for route in self._gateway.routes if not route.trained]
        problems = list(task_check.task_problems(task, self._gateway.defaults, others))
        named = task.environment.sandbox
        if named is not None and (problem := await self._runtimes.problem(named)):
            problems.append(("environment.sandbox", f"{named.value} sandboxes do not work on this node: {problem}"))
        kind = named or self.settings.sandbox
        reasons = task_check.root_problems(task.environment, kind, self._images.base, self.settings.bases)
        problems += [("environment.root", reason) for reason in reasons]
        return problems

    async def prefetch(self, tasks: Sequence[Task], seconds: float) -> list[str]:
        """Prepare installs, images and environments of tasks before their sessions come; returns the errors.

        What takes longer than `seconds` continues in the background.
        """
        preparing = {asyncio.ensure_future(self._preparer.prepare(task)): task for task in tasks}
        if not preparing:
            return []
        done, late = await asyncio.wait(preparing, timeout=seconds)
        for one in late:
            one.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        failed = [(preparing[one].task_id, one.exception()) for one in done]
        return [f"{task_id}: {error}" for task_id, error in failed if error is not None]

    def forget_task(self, task_id: str) -> None:
        """No more sessions of this task will be submitted."""
        self._preparer.forget(task_id)

    # Sessions

    def submit(self, task: Task, session: Session, *, since_opening: bool = False) -> asyncio.Task[FinishedSession]:
        """Start a session. Cancelling the returned task cancels the session; its turns are kept all the same.

        It waits up to `hold_seconds` for an unavailable component; with `since_opening`, counted from the moment at which
        the component became unavailable.
        """
        logs = self.session_folder(session.session_id)
        logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        active = ActiveSession(task, session, logs, self.changed, since_opening=since_opening)
        self.active[session.session_id] = active
        work = asyncio.get_running_loop().create_task(self._run_session(active))
        self._tasks.add(work)
        work.add_done_callback(self._tasks.discard)
        self.changed(session)
        return work

    def cancel(self, session_id: str, reason: EndReason = EndReason.CANCELLED) -> None:
        """Cancel a session; `reason` is its end reason."""
        if session_id in self.active:
            self.active[session_id].cancel(reason)

    def cancel_task(self, task_id: str, reason: EndReason = EndReason.CANCELLED) -> None:
        for active in self.active.values():
            if active.task.task_id == task_id:
                active.cancel(reason)

    async def recover(self, lost: Collection[str]) -> AsyncIterator[Trajectory]:
        """End what an earlier process left on this node; the trajectories of the `lost` sessions."""
        async for trajectory in recover_sessions(self._gateway, self._runtimes, lost):
            yield trajectory

    def session_folder(self, session_id: str) -> Path:
        """The folder of a session's logs and artifacts."""
        return self.data / "sessions" / session_id

    async def discard(self, session_id: str) -> None:
        """Forget the trajectory of a session, which is stored elsewhere."""
        try:
            await self._gateway.release(session_id)
        except (TowlineError, OSError) as error:
            log.error("session %s stays in the journal, and is removed at the next start: %s", session_id, error)
        await asyncio.to_thread(self._gateway.trajectory_file(session_id).unlink, missing_ok=True)

    async def erase(self, session_ids: Iterable[str]) -> None:
        """Delete the folders of sessions."""
        for session_id in session_ids:
            await asyncio.to_thread(shutil.rmtree, self.session_folder(session_id), ignore_errors=True)

    async def _run_session(self, active: ActiveSession) -> FinishedSession:
        try:
            return await self._pipeline.run(active)
        finally:
            del self.active[active.session.session_id]
