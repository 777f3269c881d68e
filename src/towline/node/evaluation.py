"""Scores sessions, and decides who caused a failed evaluation: the agent, which is scored, or the infrastructure.

A failed evaluation is repeated once. If it fails again, the same evaluator scores the untouched environment: an agent that
did nothing and said nothing (the control run). If the control run yields a score, the agent caused the failure and gets the
evaluator's lowest score, with the cause in the reward. If not, the session is FAILED and retried.

Three failures are never the agent's: a clean sandbox that cannot be created in time, one that is ended from outside while
it is used, and an agent's sandbox ended from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from towline.common.budget import run_within
from towline.config import NodeSettings
from towline.errors import TowlineError
from towline.evaluators.base import AgentCaused, EvaluationError, Evaluator, RunOutcome, StepEvaluator
from towline.evaluators.suspicion import suspicions
from towline.node.active_session import ActiveSession, SessionCancelled
from towline.node.environment import PreparedTask, setup_environment
from towline.node.failure_kinds import CAME_TO_AN_END, failure_kind, finding_of
from towline.sandboxes.base import (
    ReportsSandboxHealth,
    Sandbox,
    SandboxError,
    SandboxHealth,
    SandboxSpec,
    sandbox_health,
)
from towline.schema import EndReason, Reward, RewardStatus, Task, Trajectory
from towline.tokens.graph.roles import last_answer

log = logging.getLogger("towline.node")


class CleanSandboxError(SandboxError):
    """A clean sandbox for an evaluation cannot be created, or is ended from outside: never caused by the agent."""


class NodeEvalContext:
    """The `EvalContext` of one evaluation: clean sandboxes, the task, and a folder for logs."""

    def __init__(self, active: ActiveSession, prepared: PreparedTask, settings: NodeSettings):
        self._active = active
        self._prepared = prepared
        self._seconds = active.task.timeouts.init or settings.seconds.init
        """Time limit of creating and setting up one sandbox."""

    @property
    def task(self) -> Task:
        return self._active.task

    @property
    def logs(self) -> Path:
        return self._folder("verifier")

    @property
    def findings(self) -> list[tuple[str, str]]:
        return self._active.findings

    def _folder(self, name: str) -> Path:
        folder = self._active.logs / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextlib.asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        created = await self._clean(self._prepared.evaluate, "verifier-setup.log")
        try:
            try:
                yield created
            except Exception as error:
                await _check_not_ended(created, error)
                raise
            # A command in a sandbox that ends has an exit code and perhaps half its output: neither is a score.
            await _check_not_ended(created)
        finally:
            await self._destroy(created)

    async def _destroy(self, created: Sandbox) -> None:
        """Destroy a sandbox; a failure does not affect the score."""
        try:
            await created.destroy()
        except (TowlineError, OSError) as error:
            log.error("a sandbox of session %s was not destroyed: %s", self._active.session.session_id, error)

    async def _clean(self, spec: SandboxSpec, log: str) -> Sandbox:
        try:
            return await run_within(self._create(spec, log), self._seconds)
        except TimeoutError as error:
            reason = f"it was not ready within {self._seconds:g} s"
            raise CleanSandboxError(f"a clean sandbox for the evaluation cannot be created: {reason}") from error

    async def _create(self, spec: SandboxSpec, log: str) -> Sandbox:
        try:
            created = await self._prepared.pool.acquire(spec)
        except (TowlineError, OSError) as error:
            raise CleanSandboxError(f"a clean sandbox for the evaluation cannot be created: {error}") from error
        try:
            await setup_environment(created, self._prepared.environment, self._active.logs / log)
        except (TowlineError, OSError) as error:
            await self._destroy(created)
            raise CleanSandboxError(f"a clean sandbox for the evaluation cannot be set up: {error}") from error
        except BaseException:
            await self._destroy(created)
            raise
        return created

    def agent_sandbox(self) -> Sandbox | None:
        return self._active.sandbox


class ControlEvalContext(NodeEvalContext):
    """The `EvalContext` of a control run: an untouched sandbox takes the place of the agent's."""

    def __init__(self, active: ActiveSession, prepared: PreparedTask, settings: NodeSettings):
        super().__init__(active, prepared, settings)
        self._untouched: Sandbox | None = None

    @property
    def logs(self) -> Path:
        return self._folder("control")

    @property
    def findings(self) -> list[tuple[str, str]]:
        return []  # nothing of the agent's is in a control run

    async def open(self) -> None:
        """Create the sandbox that takes the place of the agent's, with the files of each step that was started."""
        self._untouched = created = await self._clean(self._prepared.run, "control-setup.log")
        for step in self.task.steps[: self._active.steps_given]:
            await setup_environment(created, step, self._active.logs / "control-setup.log")

    def agent_sandbox(self) -> Sandbox | None:
        return self._untouched

    async def close(self) -> None:
        created, self._untouched = self._untouched, None
        if created is not None:
            await self._destroy(created)


def run_outcome(active: ActiveSession, trajectory: Trajectory) -> RunOutcome:
    return RunOutcome(
        exit_code=active.exit_code,
        end_reason=str(active.end_reason or ""),
        answer=last_answer(trajectory),
        trajectory=trajectory,
        steps_given=active.steps_given if active.task.steps else None,
        judged=tuple(active.step_scores),
    )


def empty_run_outcome(active: ActiveSession, trajectory: Trajectory) -> RunOutcome:
    """The outcome of an agent that exited successfully after one empty turn."""
    turns = [turn.model_copy(update={"reply": {"text": ""}, "messages": []}) for turn in trajectory.turns[:1]]
    empty = trajectory.model_copy(update={"turns": turns, "traces": [], "end_reason": EndReason.EXITED})
    return RunOutcome(
        exit_code=0,
        end_reason=EndReason.EXITED.value,
        answer="",
        trajectory=empty,
        steps_given=active.steps_given if active.task.steps else None,
        judged=tuple(active.step_scores),
    )


T = TypeVar("T")
_TRIES = 2
_QUOTED = 1000
"""Characters of one failure that are quoted in a note or an error."""
_MAX_CONTROLS = 256


class EvaluationFailed(TowlineError):
    """The evaluation failed twice, and so did the control run: an infrastructure failure, never a reward."""

    failure = "evaluator"


@dataclass(slots=True)
class _Control:
    """The last control run of a task that yielded a score."""

    running: asyncio.Lock = field(default_factory=asyncio.Lock)
    began: float = -1.0
    score: float = 0.0


@dataclass(slots=True)
class SessionEvaluation:
    """Evaluates the sessions of one node."""

    settings: NodeSettings
    _controls: OrderedDict[str, _Control] = field(default_factory=OrderedDict)
    _scored: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Verifiers that have given a score on this node."""

    async def collect(self, active: ActiveSession, prepared: PreparedTask, sandbox: Sandbox, seconds: float) -> None:
        """Take what is scored out of the agent's sandbox, or record why that failed."""
        evaluator = _evaluator(prepared)

        async def collecting() -> None:
            inputs = await evaluator.collect(sandbox, active.task)
            # What cannot be read is left out with a note; in a sandbox that has ended that would be everything.
            await _check_alive(sandbox)
            active.inputs = inputs
            active.notes += inputs.notes

        await self._twice(active, collecting, seconds, "collecting the evaluation's inputs", sandbox)

    async def evaluate_step(self, active: ActiveSession, prepared: PreparedTask, index: int, seconds: float) -> bool:
        """Score a step at its end; returns whether the next one may begin."""
        evaluator, context = _evaluator(prepared), NodeEvalContext(active, prepared, self.settings)
        assert isinstance(evaluator, StepEvaluator)
        found = await self._twice(
            active, lambda: evaluator.evaluate_step(context, index), seconds, "the evaluation of a step", active.sandbox
        )
        if found is None:
            active.unscored_step = index
            return False
        active.step_scores.append(found[0])
        return found[1]

    async def evaluate(
        self, active: ActiveSession, prepared: PreparedTask, trajectory: Trajectory, seconds: float
    ) -> Reward:
        """The reward of a session. A failed evaluation is scored if the agent caused it, else raises `EvaluationFailed`."""
        evaluator = _evaluator(prepared)
        if not active.eval_failures:
            outcome = run_outcome(active, trajectory)

            context = NodeEvalContext(active, prepared, self.settings)

            async def evaluating() -> Reward:
                return _scored(await evaluator.evaluate(context, outcome, active.inputs))

            used = active.sandbox if evaluator.shared else None
            reward = await self._twice(active, evaluating, seconds, "evaluation", used)
            if reward is not None:
                self._remember_scored(active)
                return _reported(reward, active)
        return _reported(await self._blame(active, prepared, trajectory, seconds), active)

    async def _twice(
        self, active: ActiveSession, work: Callable[[], Awaitable[T]], seconds: float, what: str, used: Sandbox | None
    ) -> T | None:
        """The result of the work, which is tried twice; `None` if both failed, with the errors in `eval_failures`.

        Raises errors that are known to be the infrastructure's: no clean sandbox in one of the tries, or an agent's sandbox
        (`used`) that has ended.
        """
        failures: list[Exception] = []
        while len(failures) < _TRIES:
            try:
                return await active.within(_awaited(work), seconds, what)
            except SessionCancelled:
                raise
            except AgentCaused as error:
                failures = [error]
                break
            except Exception as error:  # whatever hostile input makes an evaluator raise is a failed evaluation
                failures.append(error)
                if not isinstance(error, TowlineError | OSError):
                    log.exception("session %s: %s failed", active.session.session_id, what)
            if used is not None:
                await _kill_processes(used)
        if unavailable := [error for error in failures if isinstance(error, CleanSandboxError)]:
            raise unavailable[-1]
        active.eval_failures = failures
        return None

    async def _blame(
        self, active: ActiveSession, prepared: PreparedTask, trajectory: Trajectory, seconds: float
    ) -> Reward:
        """The lowest score if the control run yields a score, else `EvaluationFailed`."""
        failed = _summary(active.eval_failures)
        active.findings.append((finding_of(active.eval_failures[-1]), failed))
        evaluator = _evaluator(prepared)
        if any(isinstance(error, AgentCaused) for error in active.eval_failures):
            active.notes.append(f"the agent caused its evaluation to fail and gets the lowest score: {failed}")
            return Reward(value=evaluator.lowest, evaluator=evaluator.kind, cause=failed)
        since = time.monotonic()
        try:
            score = await active.within(self._control(active, prepared, trajectory, seconds, since), None, "control")
        except SessionCancelled:
            raise
        except Exception as error:  # as above: no score, whatever the reason
            if self._differs(active, error):
                active.notes.append(
                    f"the agent caused its evaluation to fail and gets the lowest score: {failed}; on an untouched "
                    f"environment the verifier runs to its end: {_text(error)}"
                )
                return Reward(value=evaluator.lowest, evaluator=evaluator.kind, cause=failed)
            raise EvaluationFailed(
                f"the evaluation failed twice: {failed}; the control run on an untouched environment failed too: "
                f"{_text(error)}"
            ) from error
        active.notes.append(
            f"the agent caused its evaluation to fail and gets the lowest score: {failed}; the control run on an "
            f"untouched environment scored {score:g}"
        )
        return Reward(value=min(evaluator.lowest, score), evaluator=evaluator.kind, cause=failed)

    def _differs(self, active: ActiveSession, control: Exception) -> bool:
        """Whether a control run that gave no score still proves that the agent caused the failure.

        The control run must have come to its own end: the verifier ran, and had nothing to score or to run. A failure of
        another kind is then the agent's doing; one of the same kind is, if the same verifier has scored a session before.
        """
        untouched = failure_kind(control)
        if not isinstance(control, EvaluationError) or untouched not in CAME_TO_AN_END:
            return False
        return failure_kind(active.eval_failures[-1]) != untouched or _verifier_key(active) in self._scored

    def _remember_scored(self, active: ActiveSession) -> None:
        self._scored[_verifier_key(active)] = None
        while len(self._scored) > _MAX_CONTROLS:
            self._scored.popitem(last=False)

    async def _control(
        self, active: ActiveSession, prepared: PreparedTask, trajectory: Trajectory, seconds: float, since: float
    ) -> float:
        """The score of the untouched environment, from a control run that began after the failure it explains.

        Sessions that failed together share one run. An older run would say nothing about the current infrastructure.
        """
        known = self._control_of(active)
        async with known.running:
            if known.began < since:
                began = time.monotonic()
                known.score = await self._run_control(active, prepared, trajectory, seconds)
                known.began = began
            return known.score

    def _control_of(self, active: ActiveSession) -> _Control:
        task = active.task
        about = task.model_dump(mode="json", include={"task_id", "environment", "evaluator", "steps"})
        about |= {
            "step": active.unscored_step,
            "given": active.steps_given,
            "judged": [dict(one) for one in active.step_scores],
        }
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        known = self._controls.setdefault(key, _Control())
        self._controls.move_to_end(key)
        while len(self._controls) > _MAX_CONTROLS:
            self._controls.popitem(last=False)
        return known

    async def _run_control(
        self, active: ActiveSession, prepared: PreparedTask, trajectory: Trajectory, seconds: float
    ) -> float:
        """Score an agent that did nothing, within the time limits of a real session."""
        evaluator, budgets = _evaluator(prepared), active.task.timeouts
        context = ControlEvalContext(active, prepared, self.settings)
        try:
            await run_within(context.open(), budgets.init or self.settings.seconds.init)
            sandbox = context.agent_sandbox()
            assert sandbox is not None
            if active.unscored_step is not None:
                assert isinstance(evaluator, StepEvaluator)
                found, _ = await run_within(evaluator.evaluate_step(context, active.unscored_step), seconds)
                return min(found.values(), default=0.0)
            collecting = evaluator.collect(sandbox, active.task)
            inputs = await run_within(collecting, budgets.build or self.settings.seconds.build)
            judging = evaluator.evaluate(context, empty_run_outcome(active, trajectory), inputs)
            return _scored(await run_within(judging, seconds)).value
        except TimeoutError as error:
            raise EvaluationError("it timed out") from error
        finally:
            await context.close()


def _verifier_key(active: ActiveSession) -> str:
    about = active.task.model_dump(mode="json", include={"environment", "evaluator"})
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _reported(reward: Reward, active: ActiveSession) -> Reward:
    """The reward with the session's suspicion report."""
    found = suspicions([*active.inputs.findings, *active.findings])
    return reward.model_copy(update={"suspicion": found}) if found else reward


def _evaluator(prepared: PreparedTask) -> Evaluator:
    assert prepared.evaluator is not None
    return prepared.evaluator


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


def _scored(reward: Reward) -> Reward:
    if reward.status is not RewardStatus.SCORED:
        raise EvaluationError(reward.error or "the evaluator returned no score")
    return reward


async def _kill_processes(used: Sandbox) -> None:
    """Kill what a failed evaluation left running in the agent's sandbox; raises if the sandbox itself has ended."""
    try:
        await used.kill()
    except (TowlineError, OSError) as error:
        raise SandboxError(f"the agent's sandbox ended before it was evaluated: {error}") from error
    await _check_alive(used)


async def _check_not_ended(created: Sandbox, failure: Exception | None = None) -> None:
    """Raise if a sandbox that an evaluation used has ended: from outside, or at its memory limit by what ran in it."""
    health = await sandbox_health(created, killed=True)
    if not health.ended:
        return
    if health.oom_kills:
        raise EvaluationError("the sandbox of the evaluation was killed at its memory limit") from failure
    raise CleanSandboxError(f"sandbox {created.id} of the evaluation was killed from outside") from failure


async def _check_alive(used: Sandbox) -> None:
    health = await used.health() if isinstance(used, ReportsSandboxHealth) else SandboxHealth()
    if health.ended or not getattr(used, "alive", True):
        raise SandboxError("the agent's sandbox ended before it was evaluated")


def _summary(failures: list[Exception]) -> str:
    """Both failures as one text."""
    said = list(dict.fromkeys(map(_text, failures)))
    return "; then: ".join(said)


def _text(error: Exception) -> str:
    text = str(error) or repr(error)
    # It may quote names and output of the agent, and is stored as UTF-8.
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"
