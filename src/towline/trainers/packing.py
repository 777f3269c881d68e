"""What adapters share: a session's traces as rows that are cut in two, a prompt and a response.

A row is one trace. It is cut at its first trained token: what stands before is the prompt, whatever it is made of; what
follows is the response, and its mask says which tokens are trained (tool results, and turns that a sibling row trains, are
not). Nothing is rendered, re-encoded or cut off, so prompt and response together are the trace, token for token.

Trainers that take one row a session get it by an explicit rule, `extra_traces`: `error` refuses a session with several rows,
`main_only` keeps the longest of the main conversation's, and what that leaves out is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from towline.errors import ConfigError, TowlineError
from towline.schema import Trace, Trajectory, TurnRole

ExtraTraces = Literal["error", "main_only"]


class ExtraTracesError(TowlineError):
    """A session has more rows than the trainer takes."""


@dataclass(slots=True)
class Dropped:
    """What did not reach the trainer, in figures; every call that drops adds to it."""

    sessions: int = 0
    """Sessions without a single row: nothing was sampled in them that is trained."""
    traces: int = 0
    """Rows of sessions that had several and could give one."""
    tokens: int = 0
    """Trained tokens of those rows."""
    unscored: int = 0
    """Sessions without a score: infrastructure that failed, or nobody judged them."""
    small_groups: int = 0
    """Groups that were left with fewer than two rows: there is nothing to compare with."""


@dataclass(frozen=True, slots=True)
class SplitRow:
    """A trace, and where its response begins."""

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
        """The session's score; `None` if it has none, which is never to be read as 0."""
        return score_of(self.trajectory)

    @property
    def num_turns(self) -> int:
        """Model calls whose tokens this row trains."""
        return len(np.unique(self.trace.turn_ids[self.trace.loss_mask == 1]))

    @property
    def token_ids(self) -> list[int]:
        return self._listed(self.trace.token_ids, 0)

    @property
    def prompt_ids(self) -> list[int]:
        return self._listed(self.trace.token_ids[: self.start], 0)

    # Of the response, one entry a token.

    @property
    def response_ids(self) -> list[int]:
        return self._listed(self.trace.token_ids, self.start)

    @property
    def response_mask(self) -> list[int]:
        return self._listed(self.trace.loss_mask, self.start)

    @property
    def response_logprobs(self) -> list[float]:
        """As recorded when the token was sampled; 0 where nothing was."""
        values: list[float] = self.trace.logprobs[self.start :].tolist()
        return values

    @property
    def response_versions(self) -> list[int]:
        """The policy version of each sampled token; -1 where nothing was."""
        return self._listed(self.trace.policy_versions, self.start)

    @staticmethod
    def _listed(array: npt.NDArray[np.integer], start: int) -> list[int]:
        values: list[int] = array[start:].tolist()
        return values


def score_of(trajectory: Trajectory) -> float | None:
    """What the session was scored with; `None` if its infrastructure failed or nobody judged it."""
    return trajectory.reward.score if trajectory.reward is not None else None


def split_rows(trajectory: Trajectory) -> list[SplitRow]:
    """Every trace of the session that trains anything."""
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
            f"session {trajectory.session_id} has {len(rows)} traces and this trainer takes one row a session: "
            f'use extra_traces="main_only", which drops and counts the others, or a trainer that takes all of them'
        )
    main = rows if len(rows) == 1 else [row for row in rows if row.trace.role is TurnRole.MAIN]
    kept = max(main, key=lambda row: row.trace.trained_tokens, default=None)
    dropped.sessions += kept is None
    for row in rows:
        if row is not kept:
            dropped.traces += 1
            dropped.tokens += row.trace.trained_tokens
    return kept


def one_row_each(trajectories: Iterable[Trajectory], extra_traces: ExtraTraces, dropped: Dropped) -> list[SplitRow]:
    """One row for each session that has any, in order."""
    rows = (one_row(trajectory, extra_traces, dropped) for trajectory in trajectories)
    return [row for row in rows if row is not None]


def grouped_rows(
    groups: Mapping[str, Sequence[Trajectory]], extra_traces: ExtraTraces, dropped: Dropped
) -> list[SplitRow]:
    """One row for each scored session, of groups in which two or more have one: for trainers that compare rows themselves.

    Such trainers take the only row of a group for its own measure, or a missing score for a 0.
    """
    found: list[SplitRow] = []
    for group in groups.values():
        scored = [trajectory for trajectory in group if score_of(trajectory) is not None]
        dropped.unscored += len(group) - len(scored)
        rows = one_row_each(scored, extra_traces, dropped)
        if len(rows) < 2:
            dropped.small_groups += 1
        else:
            found += rows
    return found


def one_temperature(row: SplitRow) -> float:
    """The temperature that all trained tokens of the row were sampled at, for trainers that take one per row."""
    found = row.trace.trained_temperatures
    if len(found) > 1:
        listed = ", ".join(f"{value:g}" for value in found)
        raise ConfigError(
            f"session {row.session_id} has a row (trace {row.trace.trace_id}) whose turns were sampled at different "
            f'temperatures ({listed}), and this trainer takes one per row: set sampling.mode = "fixed" for training, or '
            f'builder = "per_turn", or use a trainer that takes one per token'
        )
    return found[0]


def check_temperature(row: SplitRow, temperature: float | None) -> None:
    """Refuse a row with a trained token of another distribution than the trainer computes logprobs of.

    `None` where the trainer does not say its temperature: the row may still not mix several.
    """
    own = one_temperature(row)
    if temperature is not None and own != np.float32(temperature):
        raise ConfigError(
            f"session {row.session_id} was sampled at temperature {own:g} and the trainer computes "
            f"logprobs at {temperature:g}: set the service's sampling and the trainer's to the same"
        )


def common_temperature(rows: Sequence[SplitRow]) -> float:
    """The temperature of all rows, for trainers that take one per batch and divide logits by it: never 0."""
    own = one_temperature(rows[0])
    for row in rows:
        check_temperature(row, own)
    if own == 0:
        raise ConfigError(
            f"session {rows[0].session_id} was sampled at temperature 0 (greedy): there is no distribution to learn from. "
            "Set the service's sampling temperature above 0"
        )
    # As it was set, not as 32 bits hold it.
    return next(one.temperature for one in rows[0].trace.sampling if np.float32(one.temperature) == np.float32(own))


def by_group(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    """The sessions by their task, as `group_advantages` takes them."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return groups
