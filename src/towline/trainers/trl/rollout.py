"""`GRPOTrainer(rollout_func=)`: prompts become tasks, their sessions become rows, one for each prompt, in order.

TRL repeats a prompt as often as it wants samples of it; equal prompts are one task with as many sessions. The trainer's
weights are in the engine before the first session starts. A session that must not be learned from (its machinery failed,
nobody scored it) still has to be a row: its mask is 0 everywhere and its reward `None`, which TRL leaves out of the group's
mean. It is counted in `failed`, and never a reward of 0.
"""

from __future__ import annotations

import contextlib
import json
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from towline.client import Client, ClientError
from towline.schema import Session, Task, Trajectory
from towline.trainers.groups import why_not
from towline.trainers.packing import Dropped, ExtraTraces, check_temperature, one_row
from towline.trainers.trl.weights import TowlineWeights

log = logging.getLogger("towline.trainers.trl")

Prompt = str | list[dict[str, Any]]
Row = dict[str, Any]


def session_reward(session_reward: list[float | None], **_: object) -> list[float | None]:
    """The reward function that goes with the rollouts: what each session's evaluator said."""
    return session_reward


class TowlineRollouts:
    """A `rollout_func`. `task_of_prompt` says what is to be done for a prompt; ids and the number of samples are set here.

    `weights` is a folder that the service sees too; `None` leaves the engine's weights to somebody else. `within` is how
    many seconds a group may take.
    """

    def __init__(
        self,
        client: Client,
        task_of_prompt: Callable[[Any], Task],
        *,
        weights: Path | None,
        extra_traces: ExtraTraces = "error",
        within: float | None = None,
        run: str | None = None,
    ):
        self.client = client
        self.task_of_prompt = task_of_prompt
        self.weights = TowlineWeights(client, weights) if weights is not None else None
        self.extra_traces = extra_traces
        self.within = within
        # A name of its own: the same name again would be the same tasks, and give sessions of older weights.
        self.run = run or f"trl-{uuid.uuid4().hex[:12]}"
        self.dropped = Dropped()
        self.failed: Counter[str] = Counter()
        """Sessions that were masked, by reason."""
        self._pushed_step: int | None = None
        self._calls = 0

    def __call__(self, prompts: Sequence[Prompt], trainer: Any) -> dict[str, list[Any]]:
        self._push(trainer)
        places: dict[str, list[int]] = {}
        for place, prompt in enumerate(prompts):
            places.setdefault(json.dumps(prompt, sort_keys=True), []).append(place)
        name = f"{self.run}/{trainer.accelerator.process_index}-{self._calls}"
        self._calls += 1
        tasks = [
            self._task(prompts[own[0]], f"{name}-{number}", len(own)) for number, own in enumerate(places.values())
        ]
        rows: dict[int, Row] = {}
        with self._submitted(tasks):
            for task, own in zip(tasks, places.values(), strict=True):
                sessions = self.client.wait(task.task_id, self.within).sessions
                found = {one.session_id: one for one in self.client.trajectories([one.session_id for one in sessions])}
                for place, session in zip(own, sessions, strict=True):
                    rows[place] = self._row(session, found.get(session.session_id), trainer)
        ordered = [rows[place] for place in range(len(prompts))]
        return {field: [row[field] for row in ordered] for field in ordered[0]}

    @contextlib.contextmanager
    def _submitted(self, tasks: Sequence[Task]) -> Iterator[None]:
        """Have the tasks run; whoever stops waiting for them ends them."""
        self.client.submit(tasks)
        try:
            yield
        except BaseException:
            for task in tasks:
                with contextlib.suppress(ClientError):
                    self.client.cancel(task.task_id)
            raise

    def _push(self, trainer: Any) -> None:
        """Give the engine the weights, if the trainer has stepped since it got them."""
        step = trainer.state.global_step
        if self.weights is not None and step != self._pushed_step:
            self.weights.push_from(trainer)
            self._pushed_step = step

    def _task(self, prompt: Prompt, task_id: str, samples: int) -> Task:
        changes: dict[str, Any] = {"task_id": task_id, "num_samples": samples, "min_samples": 0}
        return Task.model_validate(self.task_of_prompt(prompt).__dict__ | changes)

    def _row(self, session: Session, trajectory: Trajectory | None, trainer: Any) -> Row:
        reason = why_not(trajectory) if trajectory else session.error or f"the session was {session.state}"
        row = one_row(trajectory, self.extra_traces, self.dropped) if trajectory and not reason else None
        if row is None:
            reason = reason or "none of its turns is of the main conversation"
            self.failed[reason] += 1
            log.warning("session %s is masked: %s", session.session_id, reason)
            # Tokens that nothing is computed from.
            filler = [trainer.processing_class.eos_token_id]
            return _fields(session.session_id, filler, filler, [0.0], [0], None)
        check_temperature(row, trainer.args.temperature)
        return _fields(
            session.session_id, row.prompt_ids, row.response_ids, row.response_logprobs, row.response_mask, row.reward
        )


def _fields(
    session: str,
    prompt: list[int],
    completion: list[int],
    logprobs: list[float],
    mask: list[int],
    reward: float | None,
) -> Row:
    return {
        "prompt_ids": prompt,
        "completion_ids": completion,
        "logprobs": logprobs,
        "env_mask": mask,
        "session_reward": reward,
        "session_id": session,
    }
