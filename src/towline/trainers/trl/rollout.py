"""`GRPOTrainer(rollout_func=)`: prompts become tasks, and their sessions one row per prompt, in order.

TRL repeats a prompt once per sample; equal prompts are one task with as many sessions. The trainer's weights are loaded
into the engine before the first session starts. An unusable session (failed infrastructure, not scored) must still be a
row: its mask is all 0 and its reward `None`, which TRL excludes from the group's mean. It is counted in `failed`, and is
never a reward of 0.
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
from towline.trainers.packing import (
    Dropped,
    ExtraTraces,
    SplitRow,
    check_temperature,
    one_row,
    report_batch,
    unusable_because,
)
from towline.trainers.trl.weights import TowlineWeights
from towline.trainers.versions import TrainerVersions

log = logging.getLogger("towline.trainers.trl")

Prompt = str | list[dict[str, Any]]
Row = dict[str, Any]
_COLUMNS = ("session_id", "prompt_ids", "completion_ids", "logprobs", "env_mask", "session_reward")


def session_reward(session_reward: list[float | None], **_: object) -> list[float | None]:
    """The reward function for these rollouts: each session's score."""
    return session_reward


class TowlineRollouts:
    """A `rollout_func`. `task_of_prompt` makes the task of a prompt; its id and number of samples are set here.

    `weights` is a folder that the service can read; with `None` no weights are pushed, and the trainer's step is
    announced as
    the version of those that TRL itself puts into its engine (vLLM in server mode). `within` is the timeout of a group in
    seconds.
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
        # Unique by default: the same name would resubmit the same tasks and return sessions of older weights.
        self.run = run or f"trl-{uuid.uuid4().hex[:12]}"
        self.dropped = Dropped()
        self.failed: Counter[str] = Counter()
        """Masked sessions by reason."""
        self.versions = TrainerVersions()
        self._pushed_step: int | None = None
        self._calls = 0
        self._trained: dict[str, SplitRow] = {}
        """The rows of this call, by session."""

    def __call__(self, prompts: Sequence[Prompt], trainer: Any) -> dict[str, list[Any]]:
        self._push(trainer)
        indices: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            indices.setdefault(json.dumps(prompt, sort_keys=True), []).append(index)
        name = f"{self.run}/{trainer.accelerator.process_index}-{self._calls}"
        self._calls += 1
        tasks = [
            self._task(prompts[own[0]], f"{name}-{number}", len(own)) for number, own in enumerate(indices.values())
        ]
        rows: dict[int, Row] = {}
        with self._submitted(tasks):
            for task, own in zip(tasks, indices.values(), strict=True):
                sessions = self.client.wait(task.task_id, self.within).sessions
                trajectories = self.client.trajectories([one.session_id for one in sessions])
                by_id = {one.session_id: one for one in trajectories}
                for index, session in zip(own, sessions, strict=True):
                    rows[index] = self._row(session, by_id.get(session.session_id), trainer)
        report_batch("TRL", list(self._trained.values()))
        self._trained.clear()
        ordered = [rows[index] for index in range(len(prompts))]
        return {field: [row[field] for row in ordered] for field in ordered[0]}

    @contextlib.contextmanager
    def _submitted(self, tasks: Sequence[Task]) -> Iterator[None]:
        """Submit the tasks; cancel them if the block fails."""
        self.client.submit(tasks)
        try:
            yield
        except BaseException:
            for task in tasks:
                with contextlib.suppress(ClientError):
                    self.client.cancel(task.task_id)
            raise

    def _push(self, trainer: Any) -> None:
        """Push the weights if the trainer has stepped since the last push."""
        step = trainer.state.global_step
        if self.weights is not None and step != self._pushed_step:
            self.weights.push_from(trainer)
            self._pushed_step = step
        elif self.weights is None and trainer.accelerator.is_main_process:
            self.versions.announce(self.client, step)

    def _task(self, prompt: Prompt, task_id: str, samples: int) -> Task:
        changes: dict[str, Any] = {"task_id": task_id, "num_samples": samples, "min_samples": 0}
        return Task.model_validate(self.task_of_prompt(prompt).__dict__ | changes)

    def _row(self, session: Session, trajectory: Trajectory | None, trainer: Any) -> Row:
        reason = unusable_because(trajectory) if trajectory else session.error or f"the session was {session.state}"
        row = one_row(trajectory, self.extra_traces, self.dropped) if trajectory and not reason else None
        if row is None:
            reason = reason or "none of its turns is of the main conversation"
            self.failed[reason] += 1
            log.warning("session %s is masked: %s", session.session_id, reason)
            # Placeholder tokens: the mask excludes them from the loss.
            filler = [trainer.processing_class.eos_token_id]
            return dict(zip(_COLUMNS, (session.session_id, filler, filler, [0.0], [0], None), strict=True))
        check_temperature(row, trainer.args.temperature)
        self._trained[session.session_id] = row
        completion = row.response_ids, row.response_logprobs, row.response_mask
        return dict(zip(_COLUMNS, (session.session_id, row.prompt_ids, *completion, row.reward), strict=True))
