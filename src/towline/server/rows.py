"""Sessions as rows and as events: how one waits, how one ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row

from towline.schema import EndReason, SessionState
from towline.server import names
from towline.server.segments import Piece
from towline.server.tables import Phase

_ERROR = 4000
"""Characters of an error that are kept."""


@dataclass(slots=True)
class Ending:
    """How a session ended, as the scheduler knows it."""

    session_id: str
    task_id: str
    sample: int
    attempt: int
    epoch: int
    """Whose session it was."""
    state: SessionState
    end_reason: EndReason | None = None
    error: str | None = None
    hopeless: bool = False
    strike: bool = True
    """Whether the attempt counts if the sample is tried again: not when the server itself was told to stop."""
    usable: bool = False
    reward: float | None = None
    reward_status: str | None = None
    turns: int = 0
    trained_tokens: int = 0
    lowest_version: int | None = None
    piece: Piece | None = None
    steps: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Events of its stages that are not written yet."""


def lost_ending(row: Row[Any]) -> Ending:
    """A session that an earlier server left."""
    ending = Ending(row.session_id, row.task_id, row.sample, row.attempt, row.epoch, SessionState.LOST)
    ending.error = "the server that ran it ended"
    return ending


def waiting_row(
    task_id: str, number: int, priority: int, sample: int, attempt: int, strikes: int, at: float
) -> dict[str, Any]:
    """The row of a session that waits for its turn."""
    return {
        "session_id": names.session_id(task_id, sample, attempt),
        "task_id": task_id,
        "number": number,
        "sample": sample,
        "attempt": attempt,
        "strikes": strikes,
        "latest": True,
        "phase": Phase.WAITING,
        "epoch": 0,
        "urgency": -priority,
        "state": SessionState.QUEUED,
        "node": "",
        "created": at,
        "updated": at,
    }


def row_event(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("session_id", "task_id", "sample", "attempt", "state")}


def ended_event(ending: Ending) -> dict[str, Any]:
    return {
        "session_id": ending.session_id,
        "task_id": ending.task_id,
        "sample": ending.sample,
        "attempt": ending.attempt,
        "state": ending.state.value,
        "end_reason": ending.end_reason.value if ending.end_reason else None,
        "reward": ending.reward,
        "error": clean(ending.error),
    }


def clean(text: str | None) -> str | None:
    """What every database can hold: no NUL, no lone surrogates, not without end."""
    if text is None:
        return None
    return text[:_ERROR].replace("\x00", "\ufffd").encode("utf-8", "replace").decode()
