"""Moves a session through its stages: INIT, RUN, BUILD, EVALUATE, each with its own worker slots.

Each stage takes an active session and leaves it ready for the next one. Whatever happens, three things hold: the agent's
processes are dead before anything is scored; finished turns are in the trajectory, which is written once; a failure of the
infrastructure is never a reward. Sessions wait for a slot in order of their priority.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from towline.config import NodeSettings
from towline.errors import ConfigError, TowlineError
from towline.evaluators import leak_audit
from towline.evaluators.base import Evaluator
from towline.evaluators.eval_inputs import check_archive
from towline.gateway.gateway import Gateway
from towline.gateway.server import RunningGateway
from towline.harnesses.install import check_libc
from towline.node.active_session import ActiveSession, SessionCancelled, StageTimeout
from towline.node.breakers import CircuitBreakers, ComponentUnavailable
from towline.node.components import NodeComponents
from towline.node.environment import PreparedTask, SetupError, TaskPreparer, setup_environment
from towline.node.evaluation import SessionEvaluation
from towline.node.finished import FinishedSession, failed_trajectory, final_trajectory
from towline.node.harness_run import HarnessRunner, ModelCallFailed, NoModelCalls
from towline.sandboxes.base import Sandbox, SandboxError, SandboxSpec, Unsupported
from towline.sandboxes.files import archives
from towline.schema import EndReason, Reward, SessionState


class WorkerSlots:
    """A semaphore whose queue is ordered by priority, then by arrival."""

    def __init__(self, count: int):
        self.count = count
        self.taken = 0
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @property
    def waiting(self) -> int:
        return sum(not future.done() for _, _, future in self._queue)

    @contextlib.asynccontextmanager
    async def take(self, priority: int = 0) -> AsyncIterator[None]:
        """Hold a slot for the block; higher priorities first."""
        await self.acquire(priority)
        try:
            yield
        finally:
            self.release()

    async def acquire(self, priority: int = 0) -> None:
        if self.taken < self.count and not self.waiting:
            self.taken += 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (-priority, next(self._order), future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                # The slot was handed over at the same moment: pass it on.
                self.release()
            raise

    def release(self) -> None:
        """Hand the slot to the first waiter, or free it."""
        while self._queue:
            _, _, future = heapq.heappop(self._queue)
            if not future.done():
                future.set_result(None)
                return
        self.taken -= 1


log = logging.getLogger("towline.node")
_PERMANENT = (ConfigError, SetupError, NoModelCalls, Unsupported)
"""Errors that a retry does not change."""


class SessionPipeline:
    """Runs sessions through the stages; sessions wait for worker slots in order of their priority."""

    def __init__(
        self,
        gateway: Gateway,
        running: RunningGateway,
        settings: NodeSettings,
        components: NodeComponents,
        preparer: TaskPreparer,
        *,
        stores_trajectories: bool,
    ):
        self._stores_trajectories = stores_trajectories
        self._gateway = gateway
        self._settings = settings
        self._components = components
        self._preparer = preparer
        self._stages = SessionStages(gateway, running, settings, components.breakers)
        self._init = WorkerSlots(settings.init_workers)
        self._run = WorkerSlots(settings.run_workers)
        self._build = WorkerSlots(settings.build_workers)
        self._evaluate = WorkerSlots(settings.evaluate_workers)
        self._ahead = WorkerSlots(settings.run_workers + settings.ahead)
        """Sessions between INIT and the end of RUN: those that run, and `ahead` more."""

    async def run(self, active: ActiveSession) -> FinishedSession:
        """Run a session to its end. Cancelling this cancels the session, which still ends in order."""
        stages = asyncio.ensure_future(self._run_stages(active))
        while not stages.done():
            try:
                await asyncio.shield(stages)
            except asyncio.CancelledError:
                active.cancel()
            except BaseException:
                break
        return stages.result()

    async def _run_stages(self, active: ActiveSession) -> FinishedSession:
        began = time.perf_counter()
        reward: Reward | None = None
        error: BaseException | None = None
        try:
            reward = await self._through_stages(active)
            state = SessionState.DONE
        except SessionCancelled:
            state = SessionState.CANCELLED
            active.end_reason = active.cancel_reason
        except (TowlineError, OSError) as failure:
            # Infrastructure (a full disk, say), not a bug: no traceback.
            state, error = SessionState.FAILED, failure
        except Exception as failure:
            log.exception("session %s failed", active.session.session_id)
            state, error = SessionState.FAILED, failure
        finally:
            await self._release_sandbox(active)
        active.timings["total"] = time.perf_counter() - began
        return await self._session_ended(active, state, error, reward)

    async def _session_ended(
        self, active: ActiveSession, state: SessionState, error: BaseException | None, reward: Reward | None
    ) -> FinishedSession:
        """Complete the trajectory, and store it unless the caller does."""
        blameless = error is not None and await self._in_outage(active, error)
        try:
            if active.trajectory is None and active.gateway_id:
                end_reason = active.end_reason or EndReason.ERROR
                active.trajectory = await self._gateway.end(active.gateway_id, end_reason)
            trajectory = final_trajectory(active, state, error, reward)
            if self._stores_trajectories:
                await self._gateway.store(trajectory)
        except (TowlineError, OSError, ValueError) as failure:
            log.error("the trajectory of session %s cannot be stored: %s", active.session.session_id, failure)
            state, error = SessionState.FAILED, failure
            # What was sampled is returned to the caller, even if it cannot be written here.
            trajectory = failed_trajectory(active, failure)
        failed = state is SessionState.FAILED
        active.advance(state, error=trajectory.error if failed else None, failure=trajectory.failure)
        permanent, held = isinstance(error, _PERMANENT), isinstance(error, ComponentUnavailable)
        return FinishedSession(active.session, trajectory, active.logs, permanent, blameless or held, held)

    async def _release_sandbox(self, active: ActiveSession) -> None:
        sandbox, active.sandbox = active.sandbox, None
        if sandbox is not None:
            try:
                await sandbox.destroy()
            except (TowlineError, OSError) as error:
                log.error("the sandbox of session %s was not destroyed: %s", active.session.session_id, error)

    async def _in_outage(self, active: ActiveSession, error: BaseException) -> bool:
        """Whether the session failed in an outage of a component that it needs."""
        if isinstance(error, _PERMANENT):
            return False
        if isinstance(error, ModelCallFailed):
            if error.call.at_fault:
                return False
            component, at = f"engine:{error.call.engine}", error.call.at
        elif isinstance(error, SandboxError) or (isinstance(error, StageTimeout) and active.gateway_id == ""):
            component, at = self._components.sandbox_of(active.task).component, time.monotonic()
        else:
            return False
        outage = asyncio.ensure_future(self._components.outage(component, at))
        cancelled = asyncio.ensure_future(active.cancelled.wait())
        try:
            await asyncio.wait((outage, cancelled), return_when=asyncio.FIRST_COMPLETED)
            return outage.done() and outage.result()
        finally:
            outage.cancel()
            cancelled.cancel()

    async def _through_stages(self, active: ActiveSession) -> Reward | None:
        """Run all stages in order; the reward, if there is an evaluator."""
        task, seconds = active.task, self._settings.seconds
        budgets = task.timeouts
        priority = task.priority
        sandbox = self._components.sandbox_of(task)
        with active.timed("queued"):
            await active.within(self._wait_for(active, sandbox.component), None, "waiting")
        with active.timed("prepare"):
            await active.within(self._open_runtime(active), seconds.prepare, "opening the sandbox runtime")
            prepared = await active.within(self._preparer.prepare(task), seconds.prepare, "preparing the environment")
            active.prepared = prepared
        active.engines = self._components.engines_of(prepared.harness.settings, task.settings)
        with active.timed("queued"):
            await active.within(self._ahead.acquire(priority), None, "waiting")
        try:
            await self._prepare_sandbox(active, prepared, budgets.init or seconds.init)
            with active.timed("ready"):
                await active.within(self._run.acquire(priority), None, "waiting")
            try:
                with active.timed("ready"):
                    await active.within(self._wait_for(active, *active.engines), None, "waiting")
                active.advance(SessionState.RUNNING)
                with active.timed("run"):
                    await self._stages.run(active, prepared, budgets.run or seconds.run)
            finally:
                self._run.release()
        finally:
            self._ahead.release()
        if active.end_reason is EndReason.CANCELLED:
            raise SessionCancelled("the session was cancelled")
        async with self._build.take(priority):
            active.advance(SessionState.BUILDING)
            with active.timed("build"):
                await self._stages.build(active, prepared, budgets.build or seconds.build)
        trajectory = active.trajectory
        if prepared.evaluator is None or trajectory is None:
            return None
        async with self._evaluate.take(priority):
            active.advance(SessionState.EVALUATING)
            with active.timed("evaluate"):
                return await self._stages.evaluate(active, prepared, trajectory, budgets.evaluate or seconds.evaluate)

    async def _wait_for(self, active: ActiveSession, *components: str) -> None:
        """Wait until the circuit breakers of all these components are closed."""
        breakers, longest = self._components.breakers, self._settings.hold_seconds
        await breakers.wait(components, longest, since_opening=active.since_opening)

    async def _open_runtime(self, active: ActiveSession) -> None:
        """Open the runtime of the session's sandbox."""
        sandbox = self._components.sandbox_of(active.task)
        try:
            await self._components.open_runtime(active.task)
        except (SandboxError, OSError) as error:
            raise ComponentUnavailable(sandbox) from error

    async def _prepare_sandbox(self, active: ActiveSession, prepared: PreparedTask, seconds: float) -> None:
        with active.timed("queued"):
            await active.within(self._init.acquire(active.task.priority), None, "waiting")
        sandbox = self._components.sandbox_of(active.task)
        try:
            with active.timed("queued"):
                await active.within(self._wait_for(active, sandbox.component), None, "waiting")
            active.advance(SessionState.INIT)
            with active.timed("init"):
                await active.within(self._stages.init(active, prepared), seconds, "INIT")
        except StageTimeout as error:
            if active.sandbox is None:
                sandbox.failed(f"no sandbox was created within {seconds:g} s")
            raise error
        finally:
            self._init.release()
        active.advance(SessionState.READY)


class SessionStages:
    """What happens to a session in each stage."""

    def __init__(self, gateway: Gateway, running: RunningGateway, settings: NodeSettings, breakers: CircuitBreakers):
        self._gateway = gateway
        self._settings = settings
        self._evaluation = SessionEvaluation(settings)
        self._runner = HarnessRunner(gateway, running, settings, breakers, self._evaluation)
        self.run = self._runner.run
        self.evaluate = self._evaluation.evaluate
        self._verified: set[SandboxSpec] = set()
        """Specs in whose sandboxes the harness's interpreter is known to start."""

    async def init(self, active: ActiveSession, prepared: PreparedTask) -> None:
        """INIT: a sandbox with the environment and the harness set up, audited for anything that gives the answer away."""
        sandbox = await prepared.pool.acquire(prepared.run)
        active.sandbox = sandbox
        await setup_environment(sandbox, prepared.environment, active.logs / "setup.log")
        if prepared.install and prepared.run not in self._verified:
            await check_libc(sandbox, prepared.harness, prepared.install)
            self._verified.add(prepared.run)
        if prepared.evaluator is not None:
            problems = await leak_audit.audit_before_run(sandbox, active.task, prepared.evaluator)
            if problems:
                raise SandboxError("the environment gives the answer away: " + "; ".join(problems))
            if prepared.evaluator.needs_sandbox:
                prepared.pool.warm(prepared.evaluate, 1)

    async def build(self, active: ActiveSession, prepared: PreparedTask, seconds: float) -> None:
        """BUILD: end the session at the gateway, take what is scored and what is kept out of the sandbox, and destroy it.

        Nothing that the agent left can make this fail: what cannot be kept becomes a note, what cannot be scored is
        attributed to the agent.
        """
        sandbox = active.sandbox
        if active.gateway_id:
            ending = self._gateway.end(active.gateway_id, active.end_reason or EndReason.ERROR)
            active.trajectory = await active.within(ending, seconds, "building")
        if sandbox is None:
            return
        evaluator = prepared.evaluator
        if active.sandbox_ended:
            if evaluator is not None and evaluator.needs_sandbox:
                active.eval_failures = [
                    SandboxError(
                        "sandbox exceeded its memory limit and was killed; its files are lost and cannot be scored"
                    )
                ]
            active.sandbox = None
            return await active.within(sandbox.destroy(), seconds, "building")
        if evaluator is not None:
            await self._evaluation.collect(active, prepared, sandbox, seconds)
        await self._try(active, self._keep_artifacts(active, prepared, sandbox), seconds, "keeping the artifacts")
        if evaluator is not None:
            audit = self._audit(active, sandbox, evaluator)
            await self._try(active, audit, seconds, "auditing the agent's changes")
        if evaluator is None or not evaluator.shared:
            active.sandbox = None
            await active.within(sandbox.destroy(), seconds, "building")

    async def _try(self, active: ActiveSession, work: Coroutine[Any, Any, None], seconds: float, what: str) -> None:
        """Do work that may fail without affecting the score: a failure becomes a note."""
        try:
            await active.within(work, seconds, what)
        except SessionCancelled:
            raise
        except (TowlineError, OSError, ValueError) as error:
            active.notes.append(f"{what} failed: {error}")

    async def _audit(self, active: ActiveSession, sandbox: Sandbox, evaluator: Evaluator) -> None:
        active.notes += await leak_audit.audit_after_run(sandbox, active.task, evaluator, active.findings)

    async def _keep_artifacts(self, active: ActiveSession, prepared: PreparedTask, sandbox: Sandbox) -> None:
        for path in prepared.environment.artifacts:
            folder = active.logs / "artifacts"
            folder.mkdir(exist_ok=True)
            try:
                archive = await sandbox.get(path, max_bytes=self._settings.artifact_bytes)
                await check_archive(archive)
                skipped = await asyncio.to_thread(
                    archives.unpack, archive, folder, max_bytes=self._settings.artifact_bytes
                )
                if skipped:
                    named = ", ".join(skipped[:5]) + (", …" if len(skipped) > 5 else "")
                    active.notes.append(
                        f"artifact {path}: {len(skipped)} skipped (devices, or links that lead out): {named}"
                    )
            except (SandboxError, archives.ArchiveError) as error:
                active.notes.append(f"artifact {path} was not kept: {error}")
