"""The node: sessions on their way through the stages, each stage with worker slots of its own.

While some sessions run, others are made ready and others judged, so that the engine never waits for a sandbox. A session
that is ready waits for room to run; its budget starts with its run. Every session ends with a trajectory on disk, whatever
became of it, and every sandbox is destroyed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from towline.config import NodeSettings
from towline.errors import ConfigError, TowlineError
from towline.gateway.gateway import Gateway
from towline.gateway.server import Running
from towline.node.breakers import HeldTooLong
from towline.node.components import Components
from towline.node.flight import Cancelled, Flight, StageTimeout
from towline.node.furnish import FurnishError
from towline.node.judging import EvaluationFailed
from towline.node.lifecycle import Lifecycle, NothingCaptured, TurnFailed
from towline.node.preparing import InstallsLike, Prepared, Preparer
from towline.node.runtimes import Runtimes
from towline.node.slots import Slots
from towline.sandboxes.base import SandboxError, Unsupported
from towline.schema import (
    BreakerStatus,
    EndReason,
    FailureReason,
    Reward,
    RewardStatus,
    Session,
    SessionState,
    Task,
    Trajectory,
)

log = logging.getLogger("towline.node")
_PARDONED = 10
"""Outages that a sample may end in without using up an attempt: after so many it is likely their cause."""
_HOPELESS = (ConfigError, FurnishError, NothingCaptured, Unsupported)
"""What would fail again in the same way."""


@dataclass(slots=True)
class Finished:
    """A session at its end."""

    session: Session
    trajectory: Trajectory
    logs: Path
    hopeless: bool = False
    """It failed for a reason that trying again does not change."""
    blameless: bool = False
    """It failed in an outage of an engine or a sandbox runtime: trying again uses up no attempt."""
    held: bool = False
    """It waited in vain for an engine or a sandbox runtime that cannot be used: this node does not try again by itself."""

    @property
    def usable(self) -> bool:
        """Whether a trainer can learn from it."""
        reward = self.trajectory.reward
        scored = reward is None or reward.score is not None
        return self.session.state is SessionState.DONE and self.trajectory.report.trained_tokens > 0 and scored


def new_session(task: Task, sample: int = 0, attempt: int = 1) -> Session:
    """A session of the task under a fresh id that begins with the task's name."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", task.task_id).strip("-._")[:60] or "session"
    now = time.time()
    session_id = f"{slug}-{sample}-{secrets.token_hex(4)}"
    return Session(
        session_id=session_id, task_id=task.task_id, sample=sample, attempt=attempt, created=now, updated=now
    )


class Node:
    def __init__(
        self,
        gateway: Gateway,
        running: Running,
        settings: NodeSettings,
        data: Path,
        installs: InstallsLike,
        cache: Path,
        *,
        changed: Callable[[Session], None] | None = None,
    ):
        self.gateway = gateway
        self.settings = settings
        # Sandboxes have other working folders than the node.
        self.data = data.absolute()
        self.components = Components(gateway, settings)
        self.runtimes = Runtimes(settings, self.data / "sandboxes", cache, self.components.sandbox_made)
        self.components.open(self.runtimes)
        self.preparer = Preparer(settings, self.runtimes, installs)
        self.lifecycle = Lifecycle(gateway, running, settings, self.components.breakers)
        self.changed = changed or (lambda session: None)
        self.flights: dict[str, Flight] = {}
        self._tasks: set[asyncio.Task[Finished]] = set()
        self._init = Slots(settings.init_workers)
        self._run = Slots(settings.run_workers)
        self._build = Slots(settings.build_workers)
        self._evaluate = Slots(settings.evaluate_workers)
        self._ahead = Slots(settings.run_workers + settings.ahead)
        """Sessions between INIT and the end of RUN: those that run, and so many more."""

    async def close(self) -> None:
        """Cancel what is under way, keep its turns, and leave nothing behind."""
        for flight in list(self.flights.values()):
            flight.cancelled.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.components.close()
        await self.runtimes.close()

    # Circuit breakers

    @property
    def breakers(self) -> list[BreakerStatus]:
        """Of every engine, and of every sandbox runtime that was asked for."""
        return self.components.breakers.statuses

    @property
    def on_breaker(self) -> Callable[[BreakerStatus], None]:
        """Told of every change of a breaker."""
        return self.components.breakers.on_breaker

    @on_breaker.setter
    def on_breaker(self, tell: Callable[[BreakerStatus], None]) -> None:
        self.components.breakers.on_breaker = tell

    async def breaker_changed(self) -> BreakerStatus:
        """Wait for the next change of a breaker."""
        return await self.components.breakers.changed()

    async def probe(self) -> list[str]:
        """Use every engine and the default sandbox once; one line per problem, with which its breaker opens."""
        return await self.components.probe()

    # Groups

    async def run_group(self, task: Task, finished: Callable[[Finished], None] | None = None) -> list[Finished]:
        """All sessions of the task. When `min_samples` of them are usable, the rest are cancelled."""
        enough = task.min_samples or task.num_samples
        usable = 0
        done: list[Finished] = []
        attempts = [asyncio.ensure_future(self.attempts(task, sample)) for sample in range(task.num_samples)]
        try:
            for each in asyncio.as_completed(attempts):
                one = await each
                done.append(one)
                if finished is not None:
                    finished(one)
                usable += one.usable
                if usable >= enough:
                    self.cancel_task(task.task_id)
        finally:
            for attempt in attempts:
                attempt.cancel()
            for cut in await asyncio.gather(*attempts, return_exceptions=True):
                # Sessions that were cut short have kept their turns.
                if isinstance(cut, Finished) and finished is not None and not any(cut is other for other in done):
                    finished(cut)
            self.preparer.forget(task)
        return sorted(done, key=lambda one: one.session.sample)

    async def attempts(self, task: Task, sample: int) -> Finished:
        """One sample, tried again while its infrastructure fails."""
        strikes = pardoned = attempt = 0
        while True:
            attempt += 1
            # Nobody tends this queue: once a component has been away for too long, the sessions behind do not wait as long
            # again, one after the other.
            one = await self.submit(task, new_session(task, sample, attempt), since_opening=True)
            if one.session.state is not SessionState.FAILED or one.hopeless or one.held:
                return one
            if one.blameless and pardoned < _PARDONED:
                pardoned += 1
            else:
                strikes += 1
            if strikes >= task.max_attempts:
                return one

    # Sessions

    def submit(self, task: Task, session: Session, *, since_opening: bool = False) -> asyncio.Task[Finished]:
        """Send a session on its way. Cancelling the returned task cancels the session; its turns are kept all the same.

        It waits up to `hold_seconds` for a component that cannot be used; with `since_opening`, counted from the moment at
        which the component was found unusable.
        """
        logs = self.data / "sessions" / session.session_id
        logs.mkdir(parents=True, exist_ok=True)
        flight = Flight(task, session, logs, self.changed, since_opening=since_opening)
        self.flights[session.session_id] = flight
        work = asyncio.get_running_loop().create_task(self._fly(flight))
        self._tasks.add(work)
        work.add_done_callback(self._tasks.discard)
        self.changed(session)
        return work

    def cancel(self, session_id: str) -> None:
        if session_id in self.flights:
            self.flights[session_id].cancelled.set()

    def cancel_task(self, task_id: str) -> None:
        for flight in self.flights.values():
            if flight.task.task_id == task_id:
                flight.cancelled.set()

    async def _fly(self, flight: Flight) -> Finished:
        stages = asyncio.ensure_future(self._stages(flight))
        while not stages.done():
            try:
                await asyncio.shield(stages)
            except asyncio.CancelledError:
                # The session is led to its end in order; whoever cancelled it waits for that.
                flight.cancelled.set()
            except BaseException:
                break
        return stages.result()

    async def _stages(self, flight: Flight) -> Finished:
        began = time.perf_counter()
        reward: Reward | None = None
        error: BaseException | None = None
        try:
            reward = await self._through(flight)
            state = SessionState.DONE
        except Cancelled:
            state = SessionState.CANCELLED
            flight.end_reason = EndReason.CANCELLED
        except (TowlineError, OSError) as failure:
            # The machine's doing, a full disk say: a reason, and no fault of this program's to trace.
            state, error = SessionState.FAILED, failure
        except Exception as failure:
            log.exception("session %s failed", flight.session.session_id)
            state, error = SessionState.FAILED, failure
        finally:
            self.flights.pop(flight.session.session_id, None)
            await self._let_go(flight)
        blameless = error is not None and await self._in_outage(flight, error)
        flight.timings["total"] = time.perf_counter() - began
        try:
            trajectory = await self._conclude(flight, state, error, reward)
        except (TowlineError, OSError, ValueError) as failure:
            log.error("session %s cannot be concluded: %s", flight.session.session_id, failure)
            state, error = SessionState.FAILED, failure
            # What was sampled goes to whoever waits for it, even if it cannot be written here.
            kept = flight.trajectory or self._bare(flight, state, str(failure))
            changes = {"state": state, "end_reason": flight.end_reason, "error": str(failure) or repr(failure)}
            changes |= {"failure": _reason(failure)}
            trajectory = Trajectory.model_validate(kept.__dict__ | changes)
        failed = state is SessionState.FAILED
        flight.advance(state, error=trajectory.error if failed else None, failure=trajectory.failure)
        hopeless, held = isinstance(error, _HOPELESS), isinstance(error, HeldTooLong)
        return Finished(flight.session, trajectory, flight.logs, hopeless, blameless or held, held)

    async def _in_outage(self, flight: Flight, error: BaseException) -> bool:
        """Whether the session failed in an outage of a component that it needs."""
        if isinstance(error, _HOPELESS):
            return False
        if isinstance(error, TurnFailed):
            if error.call.at_fault:
                return False
            component, at = f"engine:{error.call.engine}", error.call.at
        elif isinstance(error, SandboxError) or (isinstance(error, StageTimeout) and flight.gateway_id == ""):
            component, at = self.components.sandbox_of(flight.task).component, time.monotonic()
        else:
            return False
        asking = asyncio.ensure_future(self.components.outage(component, at))
        cancelled = asyncio.ensure_future(flight.cancelled.wait())
        try:
            await asyncio.wait((asking, cancelled), return_when=asyncio.FIRST_COMPLETED)
            return asking.done() and asking.result()
        finally:
            asking.cancel()
            cancelled.cancel()

    async def _through(self, flight: Flight) -> Reward | None:
        """All stages in order; the reward, if there is an evaluator."""
        task, seconds = flight.task, self.settings.seconds
        budgets = task.timeouts
        priority = task.priority
        sandbox = self.components.sandbox_of(task)
        with flight.timed("queued"):
            await flight.within(self._usable(flight, sandbox.component), None, "waiting")
        with flight.timed("prepare"):
            await flight.within(self._opened(flight), seconds.prepare, "opening the sandbox runtime")
            prepared = await flight.within(self.preparer.prepare(task), seconds.prepare, "preparing the environment")
            flight.prepared = prepared
        flight.engines = self.components.engines_of(prepared.harness.settings, task.settings)
        with flight.timed("queued"):
            await flight.within(self._ahead.acquire(priority), None, "waiting")
        try:
            await self._made_ready(flight, prepared, budgets.init or seconds.init)
            with flight.timed("ready"):
                await flight.within(self._run.acquire(priority), None, "waiting")
            try:
                with flight.timed("ready"):
                    await flight.within(self._usable(flight, *flight.engines), None, "waiting")
                flight.advance(SessionState.RUNNING)
                with flight.timed("run"):
                    await self.lifecycle.run(flight, prepared, budgets.run or seconds.run)
            finally:
                self._run.release()
        finally:
            self._ahead.release()
        if flight.end_reason is EndReason.CANCELLED:
            raise Cancelled("cancelled")
        async with self._build.take(priority):
            flight.advance(SessionState.BUILDING)
            with flight.timed("build"):
                await self.lifecycle.build(flight, prepared, budgets.build or seconds.build)
        trajectory = flight.trajectory
        if prepared.evaluator is None or trajectory is None:
            return None
        async with self._evaluate.take(priority):
            flight.advance(SessionState.EVALUATING)
            with flight.timed("evaluate"):
                return await self.lifecycle.evaluate(flight, prepared, trajectory, budgets.evaluate or seconds.evaluate)

    async def _usable(self, flight: Flight, *components: str) -> None:
        """Wait until the circuit breakers of all of them are closed."""
        breakers, longest = self.components.breakers, self.settings.hold_seconds
        await breakers.wait(components, longest, since_opening=flight.since_opening)

    async def _opened(self, flight: Flight) -> None:
        """Have the runtime of the session's sandbox opened."""
        sandbox = self.components.sandbox_of(flight.task)
        try:
            await self.components.usable_runtime(flight.task)
        except (SandboxError, OSError) as error:
            raise HeldTooLong(sandbox) from error

    async def _made_ready(self, flight: Flight, prepared: Prepared, seconds: float) -> None:
        with flight.timed("queued"):
            await flight.within(self._init.acquire(flight.task.priority), None, "waiting")
        sandbox = self.components.sandbox_of(flight.task)
        try:
            with flight.timed("queued"):
                await flight.within(self._usable(flight, sandbox.component), None, "waiting")
            flight.advance(SessionState.INIT)
            with flight.timed("init"):
                await flight.within(self.lifecycle.init(flight, prepared), seconds, "INIT")
        except StageTimeout as error:
            if flight.sandbox is None:
                sandbox.failed(f"no sandbox was made within {seconds:g} s")
            raise error
        finally:
            self._init.release()
        flight.advance(SessionState.READY)

    # The end

    async def _let_go(self, flight: Flight) -> None:
        sandbox, flight.sandbox = flight.sandbox, None
        if sandbox is not None:
            try:
                await sandbox.destroy()
            except (TowlineError, OSError) as error:
                log.error("the sandbox of session %s was not destroyed: %s", flight.session.session_id, error)

    async def _conclude(
        self, flight: Flight, state: SessionState, error: BaseException | None, reward: Reward | None
    ) -> Trajectory:
        """The trajectory with all that is known of the session, durably on disk."""
        if flight.trajectory is None and flight.gateway_id:
            flight.trajectory = await self.gateway.seal(flight.gateway_id, flight.end_reason or EndReason.ERROR)
        said = None if error is None else str(error) or repr(error)
        built = flight.trajectory or self._bare(flight, state, said)
        if flight.prepared is not None and flight.prepared.evaluator is not None and reward is None:
            broken = isinstance(error, EvaluationFailed)
            status = RewardStatus.FAILED if broken else RewardStatus.MISSING
            kind = flight.prepared.evaluator.kind
            reward = Reward(value=0.0, evaluator=kind, status=status, error=said if broken else None)
        fields = {
            "state": state,
            "end_reason": flight.end_reason,
            "error": said or built.error,
            "failure": _reason(error) if state is SessionState.FAILED else None,
            "timings": flight.timings,
            "metadata": {
                **built.metadata,
                **self._metadata(flight),
                "notes": [*built.metadata.get("notes", []), *flight.notes],
            },
        }
        trajectory = Trajectory.model_validate(built.__dict__ | fields)
        if reward is not None:
            trajectory = trajectory.with_reward(reward)
        path = self.gateway.trajectories / f"{flight.session.session_id}.arrow"
        await asyncio.to_thread(trajectory.write, path)
        return trajectory

    def _bare(self, flight: Flight, state: SessionState, error: str | None) -> Trajectory:
        """Of a session that never reached the gateway."""
        if state is SessionState.FAILED and not error:
            error = "unknown"
        return Trajectory(
            session_id=flight.session.session_id,
            group_id=flight.task.task_id,
            state=state,
            end_reason=flight.end_reason,
            error=error,
            created=flight.session.created,
        )

    def _metadata(self, flight: Flight) -> dict[str, object]:
        known: dict[str, object] = {
            "task_id": flight.task.task_id,
            "harness": flight.task.harness,
            "sample": flight.session.sample,
            "attempt": flight.session.attempt,
            "exit_code": flight.exit_code,
            # File names of the agent's are in them, and they are stored as UTF-8.
            "notes": [note.encode("utf-8", "backslashreplace").decode() for note in flight.notes],
            **({"task": flight.task.metadata} if flight.task.metadata else {}),
        }
        if flight.prepared is not None:
            known["harness_version"] = flight.prepared.harness.version
            known["sandbox"] = flight.prepared.runtime.name
        return known


def _reason(error: BaseException | None) -> FailureReason:
    """Which part of the infrastructure an error stands for."""
    if isinstance(error, TowlineError):
        return FailureReason(error.failure)
    return FailureReason.STORAGE if isinstance(error, OSError) else FailureReason.INTERNAL
