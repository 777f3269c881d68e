"""The rules of retries, groups and staleness, as pure functions.

A sample is retried while its infrastructure fails and attempts are left; then it yields exactly one result. A death of the
node or the server costs no attempt. To keep a task from killing its node forever, a sample that was running at
`server.quarantine_deaths` deaths is a suspect: suspects run without other sessions, half as many at a time as were running
at the last death, so that each further death halves the suspects. The one that was running alone at two deaths in a row is
quarantined: a session that always ran alone after three deaths, one of many after a few more.

A group is complete when enough of its sessions are usable. With samples that have not ended it is published at the end of
the task's grace period, which is at once without one, and these are stopped. When all samples have ended, it is published
at once; without enough usable sessions it is dropped: published without sessions, so that no consumer waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from towline.runs.early_stop import stop_deadline
from towline.runs.retries import is_retried
from towline.schema import SessionState, TaskState

FREE_ATTEMPTS = 50
"""Free attempts of a sample in outages: a limit, since a session may cause the outage itself."""


@dataclass(slots=True)
class GroupProgress:
    """How far the group of a task is."""

    num_samples: int
    required: int
    finished: int
    usable: int
    state: TaskState
    grouped: bool
    """Its group result is published."""
    grace: float = 0.0
    """How long the other samples may continue once enough sessions are usable."""
    grace_until: float | None = None
    """When they are stopped; `None` while they need not hurry."""
    stopped: float | None = None
    """When they were stopped."""
    cut: int = 0
    """How many of them had not ended then."""

    @property
    def open(self) -> bool:
        """Whether a sample's result still matters to the group."""
        return not self.grouped and self.state is not TaskState.CANCELLED


class GroupVerdict(Enum):
    """Whether the group result of a task is due."""

    WAIT = "wait"
    """Not yet, or it was published before."""
    GRACE = "grace"
    """Enough sessions are usable; the other samples have until `stop_at`."""
    COMPLETE = "complete"
    """Enough sessions are usable."""
    DROPPED = "dropped"
    """All samples have ended and too few are usable."""


def should_retry(state: SessionState, *, hopeless: bool, strikes: int, max_attempts: int, group: GroupProgress) -> bool:
    """Whether a sample gets another attempt; `strikes` counts its attempts so far, this one included."""
    return group.open and is_retried(state, hopeless=hopeless, strikes=strikes, max_attempts=max_attempts)


def is_suspect(deaths: int, limit: int) -> bool:
    """Whether a sample that was running at this many deaths may be their cause; a limit of 0 suspects none."""
    return 0 < limit <= deaths


def is_quarantined(deaths: int, limit: int, company: int, before: int) -> bool:
    """Whether a sample that was running at this many deaths is not retried.

    `company` and `before` are the numbers of sessions that were running at the last death and at the one before it.
    """
    return is_suspect(deaths, limit) and company <= 1 and before <= 1


def suspects_at_once(company: int) -> int:
    """How many suspects may run together, given the sessions that were running at the last death."""
    return max(1, company // 2)


def stop_at(group: GroupProgress, now: float) -> float | None:
    """When the samples of the group that have not ended are stopped; `None` while too few sessions are usable."""
    return stop_deadline(
        usable=group.usable, required=group.required, grace=group.grace, since=group.grace_until, now=now
    )


def group_verdict(group: GroupProgress, now: float) -> GroupVerdict:
    if not group.open:
        return GroupVerdict.WAIT
    deadline = stop_at(group, now)
    if group.finished >= group.num_samples:
        return GroupVerdict.DROPPED if deadline is None else GroupVerdict.COMPLETE
    if deadline is None:
        return GroupVerdict.WAIT
    return GroupVerdict.COMPLETE if deadline <= now else GroupVerdict.GRACE


def final_state(state: SessionState, group: GroupProgress) -> SessionState:
    """The state in a sample's result: one that is LOST for good is FAILED, or CANCELLED if its group is already decided."""
    if state is not SessionState.LOST:
        return state
    return SessionState.FAILED if group.open else SessionState.CANCELLED


def is_stale(version: int, lowest: int | None, *wanted: int | None) -> bool:
    """Whether a result exceeds the strictest of the given staleness limits."""
    limits = [limit for limit in wanted if limit is not None]
    return lowest is not None and bool(limits) and version - lowest > min(limits)
