"""Sessions as rows and as events: how one waits, how one ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row

from towline.schema import EndReason, FailureReason, SessionState
from towline.server import names, rules
from towline.server.segments import Piece
from towline.server.tables import Phase

_ERROR = 4000
"""Characters of an error that are kept."""
_LINE = 500
"""Characters of an error in a log line."""


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
    failure: FailureReason | None = None
    stage: SessionState = SessionState.QUEUED
    """The last one before the end."""
    error: str | None = None
    hopeless: bool = False
    blameless: bool = False
    """It failed in an outage that a circuit breaker saw: the attempt does not count."""
    deaths: int = 0
    """Node deaths at which the sample was running, this attempt's included."""
    company: int = 0
    """Sessions that were running at the last of them."""
    retried: bool = False
    """Whether the sample gets another attempt; known once the end is written."""
    usable: bool = False
    reward: float | None = None
    reward_status: str | None = None
    turns: int = 0
    trained_tokens: int = 0
    lowest_version: int | None = None
    notes: list[str] = field(default_factory=list)
    piece: Piece | None = None
    steps: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Events of its stages that are not written yet."""

    def died(self, error: str, *, company: int, limit: int) -> None:
        """Its node is gone, and was running so many sessions: LOST, or quarantined if it is found to be the cause."""
        self.state, self.failure, self.error = SessionState.LOST, FailureReason.NODE, error
        before, self.company = self.company, company
        self.deaths += 1
        if rules.quarantined(self.deaths, limit, company, before):
            self.state, self.failure = SessionState.FAILED, FailureReason.QUARANTINED
            self.error = (
                f"quarantined: its sample was running at {self.deaths} node deaths, at the last of them alone; find "
                f"out what the task does to the node, then submit it under another id ({error})"
            )

    def fields(self) -> dict[str, Any]:
        """The failure as fields of a structured log line."""
        return {
            "session_id": self.session_id,
            "task_id": self.task_id,
            "sample": self.sample,
            "attempt": self.attempt,
            "state": self.state.value,
            "reason": self.failure.value if self.failure else None,
            "stage": self.stage.value,
            "retried": self.retried,
        }

    def line(self) -> str:
        """The failure in one line, for the log."""
        what = f"session {self.session_id} {self.state.value}: task {self.task_id}, sample {self.sample}, attempt"
        reason = self.failure.value if self.failure else "unknown"
        then = "retried" if self.retried else "not retried"
        said = one_line(self.error or "unknown")
        return f"{what} {self.attempt}, reason {reason}, stage {self.stage.value}, {then}: {said}"


def lost_ending(row: Row[Any], *, company: int, limit: int) -> Ending:
    """A session that an earlier server left."""
    ending = Ending(row.session_id, row.task_id, row.sample, row.attempt, row.epoch, SessionState.LOST)
    known = row.state in [state.value for state in SessionState]
    ending.stage = SessionState(row.state) if known else SessionState.RUNNING
    ending.deaths, ending.company = row.deaths, row.company
    ending.died("the server that ran it ended", company=company, limit=limit)
    return ending


def waiting_row(
    task_id: str,
    number: int,
    priority: int,
    sample: int,
    at: float,
    *,
    attempt: int = 1,
    strikes: int = 0,
    deaths: int = 0,
    company: int = 0,
) -> dict[str, Any]:
    """The row of a session that waits for its turn."""
    return {
        "session_id": names.session_id(task_id, sample, attempt),
        "task_id": task_id,
        "number": number,
        "sample": sample,
        "attempt": attempt,
        "strikes": strikes,
        "deaths": deaths,
        "company": company,
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
        "failure": ending.failure.value if ending.failure else None,
        "stage": ending.stage.value,
        "reward": ending.reward,
        "error": clean(ending.error),
    }


def clean(text: str | None) -> str | None:
    """What every database can hold: no NUL, no lone surrogates, not without end."""
    if text is None:
        return None
    return text[:_ERROR].replace("\x00", "\ufffd").encode("utf-8", "replace").decode()


def one_line(text: str) -> str:
    """The text on one line of bounded length; no byte of it can move a cursor or forge another line."""
    flat = " ".join((clean(text) or "").split())
    shown = "".join(char if char.isprintable() else "\ufffd" for char in flat)
    return shown if len(shown) <= _LINE else shown[: _LINE - 1] + "…"
