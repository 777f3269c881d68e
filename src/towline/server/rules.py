"""The rules of attempts and groups, as functions of figures.

A sample is tried again while its infrastructure fails and attempts are left; then it yields one result, whatever that is.
A group is complete when enough of its sessions are usable, and published at once; when all samples have ended without
that, it is dropped whole: published without sessions, so that whoever waits for it waits no longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from towline.schema import SessionState, TaskState

_BROKEN = (SessionState.FAILED, SessionState.LOST)


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


def tried_again(state: SessionState, *, hopeless: bool, strikes: int, max_attempts: int, group: Group) -> bool:
    """Whether a sample gets another attempt; `strikes` counts the attempts that are used up, this one included."""
    return state in _BROKEN and not hopeless and strikes < max_attempts and group.open


def verdict(group: Group) -> Verdict:
    if not group.open:
        return Verdict.WAIT
    if group.usable >= group.required:
        return Verdict.COMPLETE
    return Verdict.DROPPED if group.finished >= group.num_samples else Verdict.WAIT


def final_state(state: SessionState, group: Group) -> SessionState:
    """What a sample's result says: a sample that was lost for good failed, unless nobody wanted it any more."""
    if state is not SessionState.LOST:
        return state
    return SessionState.FAILED if group.open else SessionState.CANCELLED


def stale(version: int, lowest: int | None, *wanted: int | None) -> bool:
    """Whether a result is older than the strictest of those who say how old it may be."""
    limits = [limit for limit in wanted if limit is not None]
    return lowest is not None and bool(limits) and version - lowest > min(limits)
