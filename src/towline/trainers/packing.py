"""Sessions as rows for adapters: which sessions and groups are usable, and traces split into a prompt and a response.

A session is usable if it was scored and has trained tokens. One whose infrastructure failed, that was cancelled, or that
was not evaluated leaves its group and is never a reward of 0; one that timed out stays, with its finished turns. A group is
complete if enough of its sessions are usable by the task's own rule (`min_samples`, else all of them) and at least two are;
otherwise it is dropped whole.

A row is one trace. It is split at its first trained token: everything before is the prompt; the rest is the response, and
its mask marks the trained tokens (tool results, and turns that a sibling row trains, are not). Nothing is rendered,
re-encoded or truncated, so prompt and response together are the trace, token for token.

Frameworks that take one row per session get it by an explicit rule, `extra_traces`: `error` refuses a session with several
rows; `main_only` keeps the longest row of the main conversation and counts the others as dropped.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from towline.client import AsyncClient, ClientError
from towline.errors import ConfigError, TowlineError
from towline.schema import EndReason, Task, Trace, Trajectory, TurnRole, unusable_reason
from towline.trainers.advantages import reward_spread

log = logging.getLogger("towline.trainers")
_NAMED = 3
"""Groups that a report names."""

ExtraTraces = Literal["error", "main_only"]


class ExtraTracesError(TowlineError):
    """A session has more rows than the framework takes."""


@dataclass(slots=True)
class Dropped:
    """Counters of what did not reach the trainer; calls that drop something add to them."""

    sessions: int = 0
    """Sessions without a row: they have no trained token."""
    traces: int = 0
    """Extra rows of sessions that could give only one."""
    tokens: int = 0
    """Trained tokens of those rows."""
    unscored: int = 0
    """Sessions without a score: failed infrastructure, or no evaluator."""
    too_long: int = 0
    """Sessions whose row is longer than the trainer is configured for."""
    small_groups: int = 0
    """Groups left with fewer than two rows: there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class SplitRow:
    """A trace and the index at which its response starts."""

    trajectory: Trajectory
    trace: Trace
    start: int
    """The first trained token."""

    @property
    def session_id(self) -> str:
        return self.trajectory.session_id

    @property
    def group_id(self) -> str:
        return self.trajectory.group_id

    @property
    def reward(self) -> float | None:
        """The session's score; `None` if it has none, which must never be read as 0."""
        return score_of(self.trajectory)

    @property
    def num_turns(self) -> int:
        """Number of turns that this row trains."""
        return len(np.unique(self.trace.turn_ids[self.trace.loss_mask == 1]))

    @property
    def token_ids(self) -> list[int]:
        return self._listed(self.trace.token_ids, 0)

    @property
    def prompt_ids(self) -> list[int]:
        return self._listed(self.trace.token_ids[: self.start], 0)

    # The response: one entry per token.

    @property
    def response_ids(self) -> list[int]:
        return self._listed(self.trace.token_ids, self.start)

    @property
    def response_mask(self) -> list[int]:
        return self._listed(self.trace.loss_mask, self.start)

    @property
    def response_logprobs(self) -> list[float]:
        """As recorded at sampling time; 0 for tokens that were not sampled."""
        values: list[float] = self.trace.logprobs[self.start :].tolist()
        return values

    @staticmethod
    def _listed(array: npt.NDArray[np.integer], start: int) -> list[int]:
        values: list[int] = array[start:].tolist()
        return values


def score_of(trajectory: Trajectory) -> float | None:
    """The session's score; `None` if its infrastructure failed or it was not evaluated."""
    return trajectory.reward.score if trajectory.reward is not None else None


def split_rows(trajectory: Trajectory) -> list[SplitRow]:
    """Every trace of the session that has trained tokens."""
    return [
        SplitRow(trajectory, trace, int(np.argmax(trace.loss_mask)))
        for trace in trajectory.traces
        if trace.trained_tokens
    ]


def one_row(trajectory: Trajectory, extra_traces: ExtraTraces, dropped: Dropped) -> SplitRow | None:
    """The session's only row, or the one that `extra_traces` keeps; `None` if there is none."""
    rows = split_rows(trajectory)
    if len(rows) > 1 and extra_traces == "error":
        raise ExtraTracesError(
            f"session {trajectory.session_id} has {len(rows)} traces and this trainer takes one row per session: "
            f'use extra_traces="main_only", which drops and counts the others, or a trainer that takes all traces'
        )
    main = rows if len(rows) == 1 else [row for row in rows if row.trace.role is TurnRole.MAIN]
    kept = max(main, key=lambda row: row.trace.trained_tokens, default=None)
    dropped.sessions += kept is None
    for row in rows:
        if row is not kept:
            dropped.traces += 1
            dropped.tokens += row.trace.trained_tokens
    return kept


def one_row_per_session(
    trajectories: Iterable[Trajectory], extra_traces: ExtraTraces, dropped: Dropped
) -> list[SplitRow]:
    """One row per session that has any, in order."""
    rows = (one_row(trajectory, extra_traces, dropped) for trajectory in trajectories)
    return [row for row in rows if row is not None]


def grouped_rows(
    groups: Mapping[str, Sequence[Trajectory]], extra_traces: ExtraTraces, dropped: Dropped
) -> list[SplitRow]:
    """One row per scored session, from groups with at least two such rows: for trainers that compare rows themselves.

    Those trainers would compare the only row of a group with itself, or read a missing score as 0.
    """
    grouped: list[SplitRow] = []
    for group in groups.values():
        scored = [trajectory for trajectory in group if score_of(trajectory) is not None]
        dropped.unscored += len(group) - len(scored)
        rows = one_row_per_session(scored, extra_traces, dropped)
        if len(rows) < 2:
            dropped.small_groups += 1
        else:
            grouped += rows
    return grouped


def report_batch(adapter: str, rows: Sequence[SplitRow], *, grouped: bool = True) -> str:
    """Why a batch teaches nothing, which is also logged under the adapter's name; empty if it teaches something.

    It teaches nothing if it has no trained token, or (`grouped`) if the rewards of every group are equal.
    """
    reason = _teaches_nothing(rows, grouped=grouped)
    if reason:
        log.warning("%s: this batch teaches nothing: %s", adapter, reason)
    return reason


def _teaches_nothing(rows: Sequence[SplitRow], *, grouped: bool) -> str:
    if not any(row.trace.trained_tokens for row in rows):
        return f"none of its {len(rows)} rows has a trained token"
    if not grouped:
        return ""
    rewards: dict[str, dict[str, float]] = {}
    for row in rows:
        rewards.setdefault(row.group_id, {})[row.session_id] = row.reward or 0.0
    if any(reward_spread(list(group.values())) for group in rewards.values()):
        return ""
    shown = ", ".join(
        f"{name}: {len(group)} x {next(iter(group.values())):g}" for name, group in list(rewards.items())[:_NAMED]
    )
    return (
        f"all advantages are 0, since the rewards are equal in each of its {len(rewards)} groups ({shown}): use tasks whose "
        "rewards differ, or more samples per task"
    )


def row_temperature(row: SplitRow) -> float:
    """The temperature of all trained tokens of the row, for trainers that take one per row."""
    temperatures = row.trace.trained_temperatures
    if len(temperatures) > 1:
        listed = ", ".join(f"{value:g}" for value in temperatures)
        raise ConfigError(
            f"session {row.session_id} has a row (trace {row.trace.trace_id}) whose turns were sampled at different "
            f'temperatures ({listed}), and this trainer takes one per row: set sampling.mode = "fixed" for training, or '
            f'builder = "per_turn", or use a trainer that takes one per token'
        )
    return temperatures[0]


def check_temperature(row: SplitRow, temperature: float | None) -> None:
    """Refuse a row that was not sampled at the temperature at which the trainer computes logprobs.

    With `None` the trainer's temperature is unknown; the row must still have a single one.
    """
    own = row_temperature(row)
    if temperature is not None and own != np.float32(temperature):
        raise ConfigError(
            f"session {row.session_id} was sampled at temperature {own:g} and the trainer computes "
            f"logprobs at {temperature:g}: set both to the same temperature"
        )


def batch_temperature(rows: Sequence[SplitRow]) -> float:
    """The temperature of all rows, never 0, for trainers that divide logits by one temperature per batch."""
    own = row_temperature(rows[0])
    for row in rows:
        check_temperature(row, own)
    if own == 0:
        raise ConfigError(
            f"session {rows[0].session_id} was sampled at temperature 0 (greedy), so there is no distribution to learn "
            "from: set the service's sampling temperature above 0"
        )
    # The configured value, not its float32 rounding.
    return next(one.temperature for one in rows[0].trace.sampling if np.float32(one.temperature) == np.float32(own))


def by_group(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    """The sessions by task, as `group_advantages` takes them."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return groups


EARLY_ENDS = (EndReason.TIMEOUT, EndReason.LIMIT, EndReason.LOOPING)
"""End reasons that the harness did not choose."""


class SessionFailed(TowlineError):
    """A session has no usable result, and the framework has no way to leave one out."""


@dataclass(slots=True)
class TrainingGroup:
    task: Task
    sessions: list[Trajectory] = field(default_factory=list)
    """The usable sessions."""
    unusable: dict[str, str] = field(default_factory=dict)
    """Why the others are not usable, by session id."""

    @classmethod
    def of(cls, task: Task, trajectories: Iterable[Trajectory]) -> Self:
        group = cls(task)
        for trajectory in trajectories:
            reason = unusable_because(trajectory)
            if reason is None:
                group.sessions.append(trajectory)
            else:
                group.unusable[trajectory.session_id] = reason
        return group

    @property
    def complete(self) -> bool:
        """Whether there are enough usable sessions. One alone is enough only if the task asked for one: then the caller
        forms the groups."""
        fewest = max(self.task.required_samples, min(2, self.task.num_samples))
        return len(self.sessions) >= fewest


def unusable_because(trajectory: Trajectory) -> str | None:
    """The error of a session that a trainer must not learn from, by `schema.unusable_reason`; `None` if it is usable."""
    reason = unusable_reason(trajectory, need_score=True)
    if reason is None:
        return None
    error = (trajectory.reward and trajectory.reward.error) or trajectory.error
    return error or f"the session is {trajectory.state}: {reason}"


def reward_of(trajectory: Trajectory) -> float:
    """The reward of a usable session."""
    score = score_of(trajectory)
    assert score is not None, "a session without a score is not usable"
    return score


def ended_early(trajectory: Trajectory) -> bool:
    """Whether the session ended before the harness was done. Its finished turns are kept."""
    return trajectory.end_reason in EARLY_ENDS


async def run_group(client: AsyncClient, task: Task, *, within: float | None = None) -> TrainingGroup:
    """Submit a task and wait for its sessions. A timeout (`within` seconds) or a cancellation cancels them."""
    await client.submit(task)
    try:
        status = await client.wait(task.task_id, within)
    except BaseException:
        with contextlib.suppress(ClientError):
            await client.cancel(task.task_id)
        raise
    trajectories = await client.trajectories([session.session_id for session in status.sessions])
    group = TrainingGroup.of(task, trajectories)
    available = {trajectory.session_id for trajectory in trajectories}
    for session in status.sessions:
        if session.session_id not in available:
            group.unusable[session.session_id] = session.error or f"the session was {session.state}"
    return group
