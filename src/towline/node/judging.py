"""Who caused a failed evaluation: the agent, which is then scored, or the infrastructure, which never is.

An evaluation that fails is repeated once. If it fails again, the same evaluator judges the untouched environment: an agent
that did nothing and said nothing (the control run). If that gives a score, the agent caused the failure and gets the
evaluator's lowest score, with the cause in the reward. If it gives none, the session is FAILED and tried again.

Two failures are never the agent's: a clean sandbox that cannot be made, and an agent's sandbox that was ended from outside.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from towline.config import NodeSettings
from towline.errors import TowlineError
from towline.evaluators.base import EvaluationError, Evaluator, JudgesSteps
from towline.node.evaluation import CleanSandboxError, ControlBench, NodeBench, outcome_of, outcome_of_nothing
from towline.node.flight import Cancelled, Flight
from towline.node.preparing import Prepared
from towline.sandboxes.base import Fate, Fated, Sandbox, SandboxError
from towline.schema import Reward, RewardStatus, Trajectory

log = logging.getLogger("towline.node")
T = TypeVar("T")
_TRIES = 2
_SAID = 1000
"""Characters of one failure that reach a note or an error."""
_REMEMBERED = 256


class EvaluationFailed(TowlineError):
    """The evaluation failed twice, and so did the control run: infrastructure, never a reward."""

    failure = "evaluator"


@dataclass(slots=True)
class _Control:
    """The last control run of one task that gave a score."""

    running: asyncio.Lock = field(default_factory=asyncio.Lock)
    began: float = -1.0
    score: float = 0.0


@dataclass(slots=True)
class Judging:
    """Scores the sessions of one node."""

    settings: NodeSettings
    _controls: OrderedDict[str, _Control] = field(default_factory=OrderedDict)

    async def collect(self, flight: Flight, prepared: Prepared, sandbox: Sandbox, seconds: float) -> None:
        """Take what is judged out of the agent's sandbox, or remember why that cannot be done."""
        evaluator = _of(prepared)

        async def collecting() -> None:
            carried = await evaluator.collect(sandbox, flight.task)
            # What cannot be read is left out with a note; of a sandbox that has ended that would be everything.
            await _check_alive(sandbox)
            flight.carried = carried
            flight.notes += carried.notes

        await self._twice(flight, collecting, seconds, "collecting what is judged", sandbox)

    async def judge_step(self, flight: Flight, prepared: Prepared, index: int, seconds: float) -> bool:
        """Score a step at its end; whether the next one may begin."""
        evaluator, bench = _of(prepared), NodeBench(flight, prepared)
        assert isinstance(evaluator, JudgesSteps)
        found = await self._twice(
            flight, lambda: evaluator.judge_step(bench, index), seconds, "the evaluation of a step", flight.sandbox
        )
        if found is None:
            flight.unjudged = index
            return False
        flight.judged.append(found[0])
        return found[1]

    async def evaluate(self, flight: Flight, prepared: Prepared, trajectory: Trajectory, seconds: float) -> Reward:
        """The reward of a session that was collected; `EvaluationFailed` if the infrastructure kept it from a score."""
        evaluator = _of(prepared)
        if not flight.failures:
            outcome = outcome_of(flight, trajectory)

            async def evaluating() -> Reward:
                return _scored(await evaluator.evaluate(NodeBench(flight, prepared), outcome, flight.carried))

            used = flight.sandbox if evaluator.shared else None
            reward = await self._twice(flight, evaluating, seconds, "evaluation", used)
            if reward is not None:
                return reward
        return await self._blame(flight, prepared, trajectory, seconds)

    async def _twice(
        self, flight: Flight, work: Callable[[], Awaitable[T]], seconds: float, what: str, used: Sandbox | None
    ) -> T | None:
        """The result of the work, which is tried twice; `None` if both failed, with the reasons in the flight.

        Raises what is known to be the infrastructure's: no clean sandbox, or an agent's sandbox (`used`) that has ended.
        """
        failures: list[Exception] = []
        while len(failures) < _TRIES:
            try:
                return await flight.within(_awaited(work), seconds, what)
            except Cancelled:
                raise
            except Exception as error:  # whatever hostile input makes an evaluator raise is a failed evaluation
                failures.append(error)
                if not isinstance(error, TowlineError | OSError):
                    log.exception("session %s: %s failed", flight.session.session_id, what)
            if used is not None:
                await _quiet(used)
        if isinstance(failures[-1], CleanSandboxError):
            raise failures[-1]
        flight.failures = failures
        return None

    async def _blame(self, flight: Flight, prepared: Prepared, trajectory: Trajectory, seconds: float) -> Reward:
        """The lowest score if the control run gives one, else `EvaluationFailed`."""
        failed = _told(flight.failures)
        since = time.monotonic()
        try:
            score = await flight.within(self._control(flight, prepared, trajectory, seconds, since), None, "control")
        except Cancelled:
            raise
        except Exception as error:  # as above: no score, whatever the reason
            raise EvaluationFailed(
                f"the evaluation failed twice: {failed}; the control run on an untouched environment failed too: "
                f"{_text(error)}"
            ) from error
        evaluator = _of(prepared)
        flight.notes.append(
            f"the agent caused its evaluation to fail and gets the lowest score: {failed}; the control run on an "
            f"untouched environment scored {score:g}"
        )
        return Reward(value=min(evaluator.lowest, score), evaluator=evaluator.kind, cause=failed)

    async def _control(
        self, flight: Flight, prepared: Prepared, trajectory: Trajectory, seconds: float, since: float
    ) -> float:
        """The score of the untouched environment, from a control run that began after the failure it explains.

        Sessions that failed together share one run. An older one would say nothing of the infrastructure as it is.
        """
        known = self._known(flight)
        async with known.running:
            if known.began < since:
                began = time.monotonic()
                known.score = await self._untouched(flight, prepared, trajectory, seconds)
                known.began = began
            return known.score

    def _known(self, flight: Flight) -> _Control:
        task = flight.task
        about = task.model_dump(mode="json", include={"task_id", "environment", "evaluator", "steps"})
        about |= {"step": flight.unjudged, "given": flight.steps_given, "judged": [dict(one) for one in flight.judged]}
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        known = self._controls.setdefault(key, _Control())
        self._controls.move_to_end(key)
        while len(self._controls) > _REMEMBERED:
            self._controls.popitem(last=False)
        return known

    async def _untouched(self, flight: Flight, prepared: Prepared, trajectory: Trajectory, seconds: float) -> float:
        """Judge an agent that did nothing, within the budgets of a real session."""
        evaluator, budgets = _of(prepared), flight.task.timeouts
        bench = ControlBench(flight, prepared)
        try:
            await asyncio.wait_for(bench.open(), budgets.init or self.settings.seconds.init)
            sandbox = bench.used()
            assert sandbox is not None
            if flight.unjudged is not None:
                assert isinstance(evaluator, JudgesSteps)
                found, _ = await asyncio.wait_for(evaluator.judge_step(bench, flight.unjudged), seconds)
                return min(found.values(), default=0.0)
            collecting = evaluator.collect(sandbox, flight.task)
            carried = await asyncio.wait_for(collecting, budgets.build or self.settings.seconds.build)
            judging = evaluator.evaluate(bench, outcome_of_nothing(flight, trajectory), carried)
            return _scored(await asyncio.wait_for(judging, seconds)).value
        except TimeoutError as error:
            raise EvaluationError("it did not end within its budget") from error
        finally:
            await bench.close()


def _of(prepared: Prepared) -> Evaluator:
    assert prepared.evaluator is not None
    return prepared.evaluator


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


def _scored(reward: Reward) -> Reward:
    if reward.status is not RewardStatus.SCORED:
        raise EvaluationError(reward.error or "the evaluator gave no score")
    return reward


async def _quiet(used: Sandbox) -> None:
    """End what a failed evaluation left running in the agent's sandbox; raises if the sandbox itself has ended."""
    try:
        await used.kill()
    except (TowlineError, OSError) as error:
        raise SandboxError(f"the agent's sandbox ended before it was judged: {error}") from error
    await _check_alive(used)


async def _check_alive(used: Sandbox) -> None:
    fate = await used.fate() if isinstance(used, Fated) else Fate()
    if fate.ended or not getattr(used, "alive", True):
        raise SandboxError("the agent's sandbox ended before it was judged")


def _told(failures: list[Exception]) -> str:
    """Both failures in one text."""
    said = list(dict.fromkeys(map(_text, failures)))
    return "; then: ".join(said)


def _text(error: Exception) -> str:
    text = str(error) or repr(error)
    # Names and output of the agent's are in it, and it is stored as UTF-8.
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _SAID else f"{text[:_SAID]}…"
