"""Results at the client: a leased result with its trajectories as numpy rows, and the state of loops over results."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from towline.client.calls import Fetched
from towline.client.errors import BadAnswer
from towline.errors import TowlineError
from towline.schema import Event, Result, Results, SessionResult, Trace, Trajectory, TurnSampling
from towline.schema.files import load_json


class Row(TypedDict):
    """One training row. The arrays have one entry per token and are read-only views of the received bytes."""

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
    """Temperature of the last turn, like `top_p` and `top_k`."""
    top_p: float
    top_k: int
    temperatures: npt.NDArray[np.float32]
    """The temperature of each token: 1 for context, 0 for a greedy turn, whose logprobs are those of temperature 1."""
    sampling: list[TurnSampling]
    """The settings of each turn with a token in the row."""
    finish_reason: str
    truncated: bool


@dataclass(frozen=True)
class Delivered:
    """One delivered result, leased until it is acknowledged or its lease expires."""

    result: Result
    trajectories: list[Trajectory]
    """In the order of `sessions`; sessions without a trajectory, or with a damaged one, are left out."""
    version: int
    """The policy version when the result was delivered."""
    dropped: int = 0
    """Stale results that were dropped since the previous result."""

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
        """Sessions whose trajectories are damaged, with the reasons."""
        return {one.session_id: one.damaged for one in self.sessions if one.damaged is not None}

    @property
    def reasons(self) -> dict[str, int]:
        """For a dropped group: why its samples are not usable, counted."""
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
    """The distinct sessions of the results."""
    return list(dict.fromkeys(one.session_id for result in results for one in result.sessions))


def deliver(result: Result, fetched: Fetched, version: int, dropped: int) -> Delivered:
    found = {one.session_id: one for one in fetched.trajectories}
    own = [found[one.session_id] for one in result.sessions if one.session_id in found]
    # The service flags the damage that it knew of; the rest shows when the tokens are fetched.
    return Delivered(result.with_damaged(fetched.damaged), own, version, dropped)


@dataclass
class Polling:
    """Polls that start close together and become rare."""

    within: float | None
    began: float = field(default_factory=time.monotonic)
    polls: int = 0

    def pause(self) -> float | None:
        """Seconds until the next poll; `None` when time is up."""
        self.polls += 1
        wanted = min(2.0, 0.05 * 1.5 ** min(self.polls, 20))
        if self.within is None:
            return wanted
        left = self.began + self.within - time.monotonic()
        return min(wanted, left) if left > 0 else None


@dataclass
class ResultStream:
    """The state of a loop over results."""

    limit: int | None
    idle: float | None
    largest: int
    longest: float
    lease: float | None = None
    """Requested duration of the leases."""
    taken: int = 0
    dropped: int = 0
    latest: float = field(default_factory=time.monotonic)
    """When the last result was delivered, or the loop began."""
    arrived: float = 0.0
    """When the current batch arrived."""
    of_batch: int = 0
    """How many of it were delivered to the loop."""

    empty_pause = 0.05
    """Seconds between two calls without results, for a service that does not wait itself."""

    @property
    def over(self) -> bool:
        if self.limit is not None and self.taken >= self.limit:
            return True
        return self.idle is not None and self._left() <= 0

    @property
    def max(self) -> int:
        return self.largest if self.limit is None else min(self.largest, self.limit - self.taken)

    @property
    def wait(self) -> float:
        return self.longest if self.idle is None else min(self.longest, max(0.0, self._left()))

    def add_batch(self, batch: Results) -> None:
        self.dropped += batch.dropped
        self.arrived, self.of_batch = time.monotonic(), 0

    @property
    def expired(self) -> bool:
        """Whether the leases of the rest of the batch have expired: those results are delivered again.

        The first result of a batch is always delivered: with leases shorter than it takes to fetch the tokens, nothing
        would ever be used.
        """
        return self.of_batch > 0 and self.lease is not None and time.monotonic() - self.arrived >= self.lease

    def take(self) -> int:
        """Deliver one result to the loop; returns how many stale ones were dropped before it."""
        dropped, self.dropped = self.dropped, 0
        self.taken += 1
        self.of_batch += 1
        # Time that the consumer spends on a result does not count as idle.
        self.latest = time.monotonic()
        return dropped

    def _left(self) -> float:
        return self.latest + (self.idle or 0.0) - time.monotonic()


class EventParser:
    """Collects the lines of one server-sent event; a blank line ends it."""

    def __init__(self) -> None:
        self._data: list[str] = []

    def take(self, line: str) -> Event | None:
        """The event that this line completes, if any. Comments, which keep the connection alive, are skipped."""
        if line:
            name, _, value = line.partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
            return None
        text, self._data = "\n".join(self._data), []
        if not text:
            return None
        try:
            return Event.model_validate(load_json(text))
        except (ValidationError, TowlineError) as error:
            raise BadAnswer(f"not an event: {error}") from error
