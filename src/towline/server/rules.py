"""The rules of attempts and groups, as functions of figures.

A sample is retried while its infrastructure fails and attempts are left; then it yields one result, whatever that is. A
death of the node or the server costs no attempt. So that a task that kills its node cannot do so for ever, a sample that
was running at `server.quarantine_deaths` deaths is a suspect: suspects run without other sessions, half as many at a time
as were running at the last death, so that each further death halves the suspects. The one that was running alone at two
deaths in a row is quarantined: a session that always ran alone after three deaths, one of many after a few more.

A group is complete when enough of its sessions are usable, and published at once; when all samples have ended without
that, it is dropped whole: published without sessions, so that no consumer waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from towline.schema import SessionState, TaskState

_BROKEN = (SessionState.FAILED, SessionState.LOST)
BLAMELESS = 50
"""Attempts that an outage may cost a sample for free: an outage that its own session causes ends some time, too."""


@dataclass(slots=True)
class Group:
    """A task's standing."""

    num_samples: int
    required: int
    finished: int
    usable: int
    state: TaskState
    grouped: bool
    """Its result is published."""

    @property
    def open(self) -> bool:
        """Whether a sample's result still matters to the group."""
        return not self.grouped and self.state is not TaskState.CANCELLED


class Verdict(Enum):
    """What a group comes to."""

    WAIT = "wait"
    COMPLETE = "complete"
    DROPPED = "dropped"


def strikes_after(state: SessionState, strikes: int, *, attempt: int, deaths: int, blameless: bool) -> int:
    """The attempts of a sample that count against `max_attempts`, once an attempt has ended in `state`.

    A node that died and an outage that its circuit breaker saw are not the task's doing.
    """
    free = attempt - 1 - strikes - deaths
    if state is SessionState.LOST or (blameless and free < BLAMELESS):
        return strikes
    return strikes + 1


def tried_again(state: SessionState, *, hopeless: bool, strikes: int, max_attempts: int, group: Group) -> bool:
    """Whether a sample gets another attempt; `strikes` counts the attempts that are used up, this one included."""
    return state in _BROKEN and not hopeless and strikes < max_attempts and group.open


def suspect(deaths: int, limit: int) -> bool:
    """Whether a sample that was running at so many deaths may be their cause; a limit of 0 suspects none."""
    return 0 < limit <= deaths


def quarantined(deaths: int, limit: int, company: int, before: int) -> bool:
    """Whether a sample that was running at so many deaths is not tried again.

    `company` and `before` are the sessions that were running at the last death and at the one before it.
    """
    return suspect(deaths, limit) and company <= 1 and before <= 1


def suspects_at_once(company: int) -> int:
    """How many suspects may run together, if so many sessions were running at the last death."""
    return max(1, company // 2)


def verdict(group: Group) -> Verdict:
    if not group.open:
        return Verdict.WAIT
    if group.usable >= group.required:
        return Verdict.COMPLETE
    return Verdict.DROPPED if group.finished >= group.num_samples else Verdict.WAIT


def final_state(state: SessionState, group: Group) -> SessionState:
    """What a sample's result says: a sample that was lost for good failed, unless its group needed it no more."""
    if state is not SessionState.LOST:
        return state
    return SessionState.FAILED if group.open else SessionState.CANCELLED


def stale(version: int, lowest: int | None, *wanted: int | None) -> bool:
    """Whether a result is older than the strictest of those who say how old it may be."""
    limits = [limit for limit in wanted if limit is not None]
    return lowest is not None and bool(limits) and version - lowest > min(limits)
