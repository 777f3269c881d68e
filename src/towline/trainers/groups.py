"""A task's sessions as a trainer may learn from them.

A session counts if it was scored and something in it is trained. One whose machinery failed, that was cancelled, or that
nobody judged leaves the group and is never a 0; one that ran out of time is there with its finished turns. A group counts
if enough of its sessions do, by the task's own rule (`min_samples`, else all of them) and two at least, or it is dropped
whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from towline.client import AsyncClient, ClientError
from towline.schema import EndReason, SessionState, Task, Trajectory
from towline.trainers.packing import score_of, split_rows

CUT_SHORT = (EndReason.TIMEOUT, EndReason.LIMIT, EndReason.LOOPING)
"""Ends that the harness did not choose."""


@dataclass(slots=True)
class Group:
    task: Task
    sessions: list[Trajectory] = field(default_factory=list)
    """Those that count."""
    left: dict[str, str] = field(default_factory=dict)
    """Why the others do not, by session id."""

    @classmethod
    def of(cls, task: Task, trajectories: Iterable[Trajectory]) -> Self:
        group = cls(task)
        for trajectory in trajectories:
            reason = why_not(trajectory)
            if reason is None:
                group.sessions.append(trajectory)
            else:
                group.left[trajectory.session_id] = reason
        return group

    @property
    def complete(self) -> bool:
        """Enough to learn from. One session alone is not, unless whoever asked for one makes the groups."""
        fewest = max(self.task.required_samples, min(2, self.task.num_samples))
        return len(self.sessions) >= fewest


def why_not(trajectory: Trajectory) -> str | None:
    """Why a trainer must not learn from a session; `None` if it may."""
    if trajectory.state is not SessionState.DONE:
        return trajectory.error or f"the session was {trajectory.state}"
    if score_of(trajectory) is None:
        return (trajectory.reward and trajectory.reward.error) or "nobody scored the session"
    if not split_rows(trajectory):
        return trajectory.error or "nothing in the session is trained"
    return None


def reward_of(trajectory: Trajectory) -> float:
    """The reward of a session that counts."""
    score = score_of(trajectory)
    assert score is not None, "a session without a score does not count"
    return score


def cut_short(trajectory: Trajectory) -> bool:
    """Whether the session ended before the harness was done. Its finished turns are there; a trainer may want to know."""
    return trajectory.end_reason in CUT_SHORT


async def run_group(client: AsyncClient, task: Task, *, within: float | None = None) -> Group:
    """Submit a task and wait for its sessions. Whoever stops waiting, by `within` or by cancelling, ends them."""
    await client.submit(task)
    try:
        status = await client.wait(task.task_id, within)
    except BaseException:
        with contextlib.suppress(ClientError):
            await client.cancel(task.task_id)
        raise
    found = await client.trajectories([session.session_id for session in status.sessions])
    group = Group.of(task, found)
    there = {trajectory.session_id for trajectory in found}
    for session in status.sessions:
        if session.session_id not in there:
            group.left[session.session_id] = session.error or f"the session was {session.state}"
    return group
