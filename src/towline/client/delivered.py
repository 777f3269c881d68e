"""A leased result with its trajectories: numpy rows for a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from towline.client.calls import Fetched
from towline.schema import FailureReason, Result, SessionResult, Trace, Trajectory, TurnSampling


class Row(TypedDict):
    """One training row. The arrays have one entry a token and are read-only views of what came over the wire."""

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    policy_versions: npt.NDArray[np.int32]
    turn_ids: npt.NDArray[np.int32]
    rollout_id: str
    group_id: str
    trace_id: str
    role: str
    reward: float | None
    """`None` while there is no score: never to be read as 0."""
    turn_rewards: dict[str, float]
    temperature: float
    """The last turn's, as `top_p` and `top_k` are."""
    top_p: float
    top_k: int
    temperatures: npt.NDArray[np.float32]
    """What each token was sampled at: 1 for context, 0 for a greedy turn, whose logprobs are those of temperature 1."""
    sampling: list[TurnSampling]
    """The settings of each turn with a token in the row."""
    finish_reason: str
    truncated: bool


@dataclass(frozen=True)
class Delivered:
    """One result in a consumer's hands, until it is acknowledged or its lease runs out."""

    result: Result
    trajectories: list[Trajectory]
    """In the order of `sessions`; without those of sessions that ended before they had one, and those that are damaged."""
    version: int
    """The policy version when the result was handed out."""
    dropped: int = 0
    """Stale results that were passed over, for good, since the result before."""

    @property
    def result_id(self) -> str:
        return self.result.result_id

    @property
    def task_id(self) -> str:
        return self.result.task_id

    @property
    def sessions(self) -> list[SessionResult]:
        return self.result.sessions

    @property
    def damaged(self) -> dict[str, str]:
        """Sessions whose trajectories the service has and cannot read, with the reason of each."""
        return {one.session_id: one.damaged for one in self.sessions if one.damaged is not None}

    @property
    def reasons(self) -> dict[str, int]:
        """Of a group that was dropped: why its samples are not usable, counted."""
        return dict(self.result.reasons)

    @property
    def rewards(self) -> dict[str, float]:
        """Rewards of the sessions that were scored, by session id."""
        return {one.session_id: one.reward for one in self.sessions if one.reward is not None}

    @property
    def traces(self) -> list[Trace]:
        """The training rows of all sessions."""
        return [trace for trajectory in self.trajectories for trace in trajectory.traces]

    def rows(self) -> list[Row]:
        """The training rows as plain dictionaries of arrays."""
        return [row_of(trace) for trace in self.traces]


def row_of(trace: Trace) -> Row:
    return Row(
        token_ids=trace.token_ids,
        loss_mask=trace.loss_mask,
        logprobs=trace.logprobs,
        policy_versions=trace.policy_versions,
        turn_ids=trace.turn_ids,
        rollout_id=trace.rollout_id,
        group_id=trace.group_id,
        trace_id=trace.trace_id,
        role=trace.role.value,
        reward=trace.reward,
        turn_rewards=dict(trace.turn_rewards),
        temperature=trace.temperature,
        top_p=trace.top_p,
        top_k=trace.top_k,
        temperatures=trace.temperatures,
        sampling=list(trace.sampling),
        finish_reason=trace.finish_reason,
        truncated=trace.truncated,
    )


def session_ids(results: Iterable[Result]) -> list[str]:
    """Every session of the results, once."""
    return list(dict.fromkeys(one.session_id for result in results for one in result.sessions))


def deliver(result: Result, fetched: Fetched, version: int, dropped: int) -> Delivered:
    found = {one.session_id: one for one in fetched.trajectories}
    own = [found[one.session_id] for one in result.sessions if one.session_id in found]
    return Delivered(_flagged(result, fetched.damaged), own, version, dropped)


def _flagged(result: Result, damaged: Mapping[str, str]) -> Result:
    """With what was found only when the tokens were fetched: the service flags what it knew before."""
    if not any(one.session_id in damaged for one in result.sessions):
        return result
    known = {"usable": False, "failure": FailureReason.STORAGE}
    sessions = [
        one.model_copy(update=known | {"damaged": damaged[one.session_id]}) if one.session_id in damaged else one
        for one in result.sessions
    ]
    return result.model_copy(update={"sessions": sessions})
