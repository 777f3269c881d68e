"""The gate of the queue: which sessions may be taken from it, by the paces of the consumers that declared one.

A group is admitted when its first session is taken. Every paced consumer that follows its task has to agree, so the
strictest one decides. Further sessions of an admitted group, and retries, pass freely: a group that waits for itself would
hold up everything.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Row, Select, func
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.schema import TaskState
from towline.server import tables
from towline.server.paced import PacedConsumer
from towline.server.pacing import Slack
from towline.server.store import chunks

log = logging.getLogger("towline.server")
_ROUNDS = 4
"""How often one claim looks past groups that were refused."""


class PaceGate:
    """The paces at the moment of one claim."""

    def __init__(
        self,
        consumers: Sequence[PacedConsumer],
        started: Sequence[str],
        starved: Collection[str] = (),
        barren: set[frozenset[str]] | None = None,
    ):
        self.consumers = consumers
        self.started = started
        """Tasks whose groups were admitted and have not come to their end."""
        self.holds = False
        """Some consumer has no room for another group."""
        self._starved = {one.name for one in consumers if one.name in starved and not one.running + one.finished}
        self._barren = set() if barren is None else barren
        """Prefixes besides which no task waits to be started, as far as is known: looking past all that wait takes long."""

    async def choose(self, tx: AsyncConnection, waiting: Select[Any], count: int) -> list[Row[Any]]:
        """The most urgent of the sessions that `waiting` selects and that may be taken."""
        sessions = tables.sessions
        known = waiting.add_columns(sessions.c.urgency, sessions.c.number, sessions.c.sample).limit(count)
        found: list[Row[Any]] = []
        for some in chunks(self.started):
            found += await tx.execute(known.where(sessions.c.task_id.in_(some)))
        found += await self._admitted(tx, known, count)
        found.sort(key=lambda row: (row.urgency, row.number, row.sample))
        return found[:count]

    async def _admitted(self, tx: AsyncConnection, known: Select[Any], count: int) -> list[Row[Any]]:
        """Sessions of groups that may start."""
        sessions, tasks = tables.sessions, tables.tasks
        queued = known.add_columns(tasks.c.max_staleness).join(tasks, tasks.c.task_id == sessions.c.task_id)
        queued = queued.where(tasks.c.state == TaskState.QUEUED.value)
        admitted: list[Row[Any]] = []
        decided: dict[str, bool] = {}
        for _ in range(_ROUNDS):
            closed = frozenset(one.prefix for one in self.consumers if not self._admits(one, one.slack_of(None)))
            self.holds = self.holds or bool(closed)
            if "" in closed or closed in self._barren:
                break
            fresh = list(await tx.execute(_past(queued, closed, decided)))
            if not fresh and not decided:
                self._barren.add(closed)
            for row in fresh:
                if row.task_id not in decided:
                    decided[row.task_id] = self._admit(row.task_id, row.max_staleness)
                if decided[row.task_id]:
                    admitted.append(row)
            if len(fresh) < count or len(admitted) >= count:
                break
        return admitted

    def _admit(self, task_id: str, max_staleness: int | None) -> bool:
        """Whether every consumer of the task has room for its group; it is counted if so."""
        concerned = [(one, one.slack_of(max_staleness)) for one in self.consumers if one.follows(task_id)]
        if not all(self._admits(one, slack) for one, slack in concerned):
            self.holds = True
            return False
        for one, slack in concerned:
            if not one.pace.admits(slack):
                log.warning(
                    "consumer %r asks for more groups than its groups_per_update of %d before the policy version advances: "
                    "one more is started. Declare as many groups as one version is trained on",
                    one.name,
                    one.groups_per_update,
                )
            self._starved.discard(one.name)
            one.pace.admit(slack)
        return True

    def _admits(self, consumer: PacedConsumer, slack: Slack) -> bool:
        return consumer.pace.admits(slack) or consumer.name in self._starved


def _past(queued: Select[Any], closed: Collection[str], decided: Collection[str]) -> Select[Any]:
    """Sessions of other groups than those that are decided on, or that no room is left for."""
    task_id = tables.sessions.c.task_id
    query = queued.where(*(func.substr(task_id, 1, len(prefix)) != prefix for prefix in closed))
    return query.where(task_id.not_in(sorted(decided))) if decided else query
