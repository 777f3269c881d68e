"""Stragglers: the slowest of the sessions that are being worked on, compared with sessions that have finished.

A session is compared within its stage: a running one with the finished samples of its own task, if two or more are there,
and any other with the sessions that finished last, whatever their tasks. One that is in its stage for more than three times
the median is a straggler. Sessions that wait for a slot are not compared: their time says nothing about them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from sqlalchemy import select

from towline.cluster.runner import SessionOutcome
from towline.schema import Compared, Session, SessionState, SlowSession
from towline.server.store import names, tables
from towline.server.store.database import Store
from towline.server.store.tables import chunks

STRAGGLER = 3.0
"""How many times the median makes a straggler."""
_SIBLINGS, _OTHERS = 2, 5
"""Fewest finished sessions to compare with."""
_RECENT = 500
"""Finished sessions that are remembered."""
_TIMINGS = {
    SessionState.INIT: "init",
    SessionState.RUNNING: "run",
    SessionState.BUILDING: "build",
    SessionState.EVALUATING: "evaluate",
}
"""The stages in which a session is worked on, and their names among its timings."""


class StageDurations:
    """How long the sessions that finished last were in each stage, since the server started."""

    def __init__(self) -> None:
        self._recent = {stage: deque[float](maxlen=_RECENT) for stage in _TIMINGS}

    def add(self, ended: SessionOutcome) -> None:
        """Take note of an ended session; only those that finished say how long a stage takes."""
        if ended.session.state is SessionState.DONE:
            for stage, name in _TIMINGS.items():
                if name in ended.timings:
                    self._recent[stage].append(ended.timings[name])

    def of(self, stage: SessionState) -> Sequence[float]:
        return self._recent[stage]


async def slowest_sessions(
    store: Store, active: Iterable[Session], durations: StageDurations, nodes: Iterable[Mapping[str, Any]], limit: int
) -> list[SlowSession]:
    """Stragglers first, then by their time in the stage. `active` has each session as it was when it reached its stage."""
    busy = [session for session in active if session.state in _TIMINGS]
    siblings = await _sibling_seconds(store, {_key(one) for one in busy if one.state is SessionState.RUNNING})
    turns = {one["session_id"]: one.get("turns") for node in nodes for one in node.get("sessions", ())}
    now = store.clock.now()
    found = [
        compare(
            session,
            max(0.0, now - session.updated),
            turns.get(session.session_id),
            siblings.get(_key(session), ()) if session.state is SessionState.RUNNING else (),
            durations.of(session.state),
        )
        for session in busy
    ]
    return sorted(found, key=lambda one: (not one.straggler, -one.seconds, one.session_id))[:limit]


def compare(
    session: Session, seconds: float, turns: int | None, siblings: Sequence[float], others: Sequence[float]
) -> SlowSession:
    """A session that is in its stage for so many seconds, compared with durations of finished ones."""
    basis, compared = None, None
    if len(siblings) >= _SIBLINGS:
        basis, compared = median(siblings), Compared.SIBLINGS
    elif len(others) >= _OTHERS:
        basis, compared = median(others), Compared.ALL
    return SlowSession(
        session_id=session.session_id,
        task_id=session.task_id,
        tenant=session.tenant,
        sample=session.sample,
        attempt=session.attempt,
        state=session.state,
        seconds=seconds,
        turns=turns,
        median_seconds=basis,
        compared_with=compared,
        straggler=basis is not None and seconds > STRAGGLER * basis,
    )


def _key(session: Session) -> str:
    """The stored id of its task."""
    return names.qualify(session.tenant, session.task_id)


async def _sibling_seconds(store: Store, task_ids: set[str]) -> dict[str, list[float]]:
    """The run times of the finished sessions of each task."""
    table, found = tables.sessions, dict[str, list[float]]()
    async with store.read() as tx:
        for some in chunks(sorted(task_ids)):
            query = select(table.c.task_id, table.c.seconds).where(
                table.c.task_id.in_(some), table.c.state == SessionState.DONE.value, table.c.seconds.is_not(None)
            )
            for row in await tx.execute(query):
                found.setdefault(row.task_id, []).append(row.seconds)
    return found
