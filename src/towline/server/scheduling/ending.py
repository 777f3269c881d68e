"""How one session ended: `SessionEnd`, filled from what a runner returns, and its rows, events and log line."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field
from sqlalchemy import Row

from towline.cluster.runner import SessionOutcome, StoreRequest
from towline.cluster.segments import SegmentSlice
from towline.common.text import one_line
from towline.errors import TowlineError
from towline.schema import DEFAULT_TENANT, EndReason, FailureReason, SessionState, SessionSummary
from towline.server.scheduling import rules
from towline.server.store import names
from towline.server.store.tables import NewEvent, Phase, session_id

_ERROR_CHARS = 4000
"""Longest error that is stored."""
_LINE_CHARS = 500
"""Longest error in a log line."""


class SessionEnd(SessionSummary):
    """How a session ended, as the scheduler knows it."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    tenant: str = DEFAULT_TENANT
    epoch: int
    """The server run that the session belongs to; no other may end it."""
    state: SessionState = SessionState.FAILED
    usable: bool = False
    turns: int = 0
    trained_tokens: int = 0
    lowest_version: int | None = None
    """Oldest policy version among its trained tokens."""
    stage: SessionState = SessionState.QUEUED
    """The last stage before the end."""
    node: str = ""
    """The node that ran it, if that is known."""
    hopeless: bool = False
    """A retry would fail in the same way."""
    blameless: bool = False
    """It failed in an outage that a circuit breaker saw: the attempt does not count."""
    deaths: int = 0
    """Node deaths at which the sample was running, this attempt's included."""
    company: int = 0
    """Sessions that were running at the last of them."""
    retried: bool = False
    """Whether the sample gets another attempt; known once the end is written."""
    notes: list[str] = Field(default_factory=list)
    piece: SegmentSlice | None = None
    """Where its trajectory is stored."""
    steps: list[NewEvent] = Field(default_factory=list)
    """Events of its stages that are not written yet."""

    @property
    def key(self) -> str:
        """The stored id of its task."""
        return names.qualify(self.tenant, self.task_id)

    @classmethod
    def of_row(cls, row: Row[Any], **fields: Any) -> SessionEnd:
        """The end of a session that only its row tells of. Not validated: a damaged row must not stop a start."""
        identity = {name: getattr(row, name) for name in ("session_id", "sample", "attempt", "epoch")}
        identity |= {"task_id": names.plain(row.task_id), "tenant": names.tenant_of(row.task_id)}
        return cls.model_construct(**identity, **fields)

    def died(self, error: str, *, company: int, limit: int) -> None:
        """Its node died while running `company` sessions: LOST, or quarantined if this session is the cause."""
        self.state, self.failure, self.error = SessionState.LOST, FailureReason.NODE, error
        before, self.company = self.company, company
        self.deaths += 1
        if rules.is_quarantined(self.deaths, limit, company, before):
            self.state, self.failure = SessionState.FAILED, FailureReason.QUARANTINED
            self.error = (
                f"quarantined: its sample was running at {self.deaths} node deaths, at the last one alone. Find out what "
                f"the task does to the node, then submit it under another task_id ({error})"
            )

    def log_fields(self) -> dict[str, Any]:
        """The failure as fields of a structured log line."""
        return {
            "session_id": self.session_id,
            "task_id": self.task_id,
            "tenant": self.tenant,
            "sample": self.sample,
            "attempt": self.attempt,
            "state": self.state.value,
            "reason": self.failure.value if self.failure else None,
            "stage": self.stage.value,
            "retried": self.retried,
        }

    def log_line(self) -> str:
        """The failure in one line of the log."""
        whose = "" if self.tenant == DEFAULT_TENANT else f" of tenant {self.tenant}"
        where = f"task {self.task_id}{whose}, sample {self.sample}, attempt {self.attempt}"
        reason = self.failure.value if self.failure else "unknown"
        retried = "retried" if self.retried else "not retried"
        error = log_text(self.error or "unknown")
        stage = self.stage.value
        return (
            f"session {self.session_id} {self.state.value}: {where}, reason {reason}, stage {stage}, {retried}: {error}"
        )

    def event(self) -> NewEvent:
        """The event that the session ended."""
        body = {
            "session_id": self.session_id,
            "task_id": self.task_id,
            "sample": self.sample,
            "attempt": self.attempt,
            "state": self.state.value,
            "end_reason": self.end_reason.value if self.end_reason else None,
            "failure": self.failure.value if self.failure else None,
            "stage": self.stage.value,
            "reward": self.reward,
            "error": storable_text(self.error),
        }
        return self.tenant, "session", body


def lost_session_end(row: Row[Any], *, company: int, limit: int) -> SessionEnd:
    """The end of a session that an earlier server left running."""
    known = row.state in [state.value for state in SessionState]
    stage = SessionState(row.state) if known else SessionState.RUNNING
    ending = SessionEnd.of_row(row, stage=stage, deaths=row.deaths, company=row.company)
    ending.died("the server that ran it died", company=company, limit=limit)
    return ending


def fill_session_end(
    ending: SessionEnd, outcome: SessionOutcome, *, lost: str = "", why: FailureReason = FailureReason.NODE
) -> StoreRequest:
    """Fill in the end; returns what to store. With `lost` the session is LOST for that reason in any case."""
    session, summary = outcome.session, outcome.summary
    if lost:
        ending.state, ending.error, ending.failure = SessionState.LOST, lost, why
    else:
        ending.state, ending.error = session.state, summary.error or session.error
        if session.state is SessionState.FAILED:
            ending.failure = session.failure or summary.failure or FailureReason.INTERNAL
            ending.hopeless, ending.blameless = outcome.hopeless, outcome.blameless
    for name in ("end_reason", "reward", "reward_status", "turns", "trained_tokens", "seconds"):
        setattr(ending, name, getattr(summary, name))
    if lost:
        ending.end_reason = summary.end_reason or EndReason.ERROR
    ending.error = ending.error or summary.error
    ending.usable = ending.state is SessionState.DONE and summary.usable
    ending.lowest_version, ending.node = outcome.lowest_version, session.node
    ending.notes = [storable_text(note) or "" for note in outcome.notes]
    return ended_otherwise(ending) if lost else StoreRequest(ending.session_id)


def ended_otherwise(ending: SessionEnd) -> StoreRequest:
    """The request to store the trajectory of a session that did not end by itself."""
    return StoreRequest(ending.session_id, ending.state, ending.failure, ending.error)


def failure_of(error: BaseException) -> FailureReason:
    """The part of the infrastructure that an error of a runner is attributed to."""
    return FailureReason(error.failure) if isinstance(error, TowlineError) else FailureReason.INTERNAL


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
    """The row of a session that waits in the queue, of the task with this stored id."""
    return {
        "session_id": session_id(task_id, sample, attempt),
        "task_id": task_id,
        "owner": names.tenant_of(task_id),
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


def session_event(row: dict[str, Any], tenant: str) -> NewEvent:
    """The event that a session reached a stage."""
    body = {name: row[name] for name in ("session_id", "task_id", "sample", "attempt", "state")}
    return tenant, "session", body | {"task_id": names.plain(body["task_id"])}


def storable_text(text: str | None) -> str | None:
    """Text that every database can hold: no NUL, no lone surrogates, bounded length."""
    if text is None:
        return None
    return text[:_ERROR_CHARS].replace("\x00", "\ufffd").encode("utf-8", "replace").decode()


def log_text(text: str) -> str:
    """The text on one line of bounded length; no byte of it can move a cursor or forge another line."""
    flat = one_line(storable_text(text) or "", most=_ERROR_CHARS)
    shown = "".join(char if char.isprintable() else "\ufffd" for char in flat)
    return shown if len(shown) <= _LINE_CHARS else shown[: _LINE_CHARS - 1] + "…"
