"""The transaction in which sessions end: attempts, results, groups, callbacks and events, all or nothing.

Every sample of a task yields exactly one session result, and every task exactly one group result, whatever happens. The
end of a session that another epoch has ended changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Row, bindparam, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.runs.retries import strikes_after
from towline.schema import (
    EndReason,
    FailureReason,
    SchemaError,
    SessionResult,
    SessionState,
    SessionSummary,
    TaskState,
    Unit,
)
from towline.schema.files import dump_json, load_json
from towline.server.scheduling.ending import SessionEnd, session_event, storable_text, waiting_row
from towline.server.scheduling.rules import (
    FREE_ATTEMPTS,
    GroupProgress,
    GroupVerdict,
    final_state,
    group_verdict,
    should_retry,
    stop_at,
)
from towline.server.store import names, tables
from towline.server.store.database import Store
from towline.server.store.tables import NewEvent, Phase, add_events, chunks, result_id, take_numbers

_LENGTH = ("turns", "trained_tokens", "seconds")
_FIELDS = (
    "state",
    "node",
    "end_reason",
    "failure",
    "stage",
    "error",
    "segment",
    "place",
    "sha256",
    "bytes",
    "updated",
    *_LENGTH,
)
_PROGRESS = ("finished", "usable", "grouped", "state", "grace_until", "stopped", "cut")
"""Columns of a task that the ends of its sessions change."""
_DUE = 100
"""Most groups that are stopped in one transaction."""
_RESULT_FIELDS = (*SessionSummary.model_fields, "lowest_version", "notes")
_END_SESSION = (
    update(tables.sessions)
    .where(tables.sessions.c.session_id == bindparam("id"))
    .values(phase=Phase.ENDED.value, **{name: bindparam(f"to_{name}") for name in _FIELDS})
)


@dataclass(slots=True)
class Effects:
    """What has to be done once the transaction is committed."""

    stop: list[str] = field(default_factory=list)
    """Running sessions that their group no longer needs."""
    stop_reason: EndReason = EndReason.EARLY_STOP
    """Why."""
    deadlines: int = 0
    """Groups whose grace period began."""
    lengths: list[SessionEnd] = field(default_factory=list)
    """Ends for good in groups that may be stopped early."""
    finished_tasks: list[str] = field(default_factory=list)
    """Tasks whose last session has ended."""
    fenced: list[SessionEnd] = field(default_factory=list)
    """Ends that came after another epoch had ended the session."""
    ended: list[SessionEnd] = field(default_factory=list)
    waiting: Counter[str] = field(default_factory=Counter)
    """Change in the number of waiting sessions of each tenant."""
    published: int = 0
    callbacks: int = 0


class EndSessions:
    """The ends that one transaction writes."""

    def __init__(self, store: Store, tx: AsyncConnection, at: float, *, quarantine_deaths: int = 0):
        self.store = store
        self.tx = tx
        self.at = at
        self._quarantine_deaths = quarantine_deaths
        self.effects = Effects()
        self._tasks: dict[str, Row[Any]] = {}
        self._groups: dict[str, GroupProgress] = {}
        self._results: list[dict[str, Any]] = []
        self._events: list[NewEvent] = []

    async def conclude(self, endings: Sequence[SessionEnd]) -> Effects:
        await self._lock({ending.key for ending in endings})
        strikes = await self._take(endings)
        for ending in endings:
            if ending.session_id in strikes:
                await self._end(ending, strikes[ending.session_id])
            else:
                self.effects.fenced.append(ending)
        return await self._commit()

    async def cancel(self, task_id: str) -> Effects | None:
        """Cancel the task with this stored id; `None` if it does not exist."""
        await self._lock({task_id})
        group = self._groups.get(task_id)
        if group is None:
            return None
        if group.open:
            group.state, group.grace_until = TaskState.CANCELLED, None
            self.effects.stop_reason = EndReason.CANCELLED
            self._publish_group(task_id, complete=False)
            await self._stop_rest(task_id, EndReason.CANCELLED)
        return await self._commit()

    async def stop_due(self) -> Effects:
        """Stop the groups whose grace period is over, and publish them."""
        table = tables.tasks
        due = select(table.c.task_id).where(table.c.grace_until <= self.at).order_by(table.c.grace_until).limit(_DUE)
        await self._lock(set((await self.tx.execute(due)).scalars()))
        for task_id, group in self._groups.items():
            await self._decide(task_id)
            group.grace_until = None
        return await self._commit()

    # Rows

    async def _lock(self, ids: set[str]) -> None:
        table = tables.tasks
        for some in chunks(sorted(ids)):
            query = select(table).where(table.c.task_id.in_(some)).order_by(table.c.task_id).with_for_update()
            for row in await self.tx.execute(query):
                self._tasks[row.task_id] = row
                self._groups[row.task_id] = GroupProgress(
                    row.num_samples,
                    row.required,
                    row.finished,
                    row.usable,
                    TaskState(row.state),
                    row.grouped,
                    row.grace,
                    row.grace_until,
                    row.stopped,
                    row.cut,
                )

    async def _take(self, endings: Sequence[SessionEnd]) -> dict[str, int]:
        """End the rows of the sessions of this epoch; returns how many earlier attempts of each count."""
        table = tables.sessions
        found: dict[str, int] = {}
        nodes: dict[str, str] = {}
        epochs = {ending.session_id: ending.epoch for ending in endings}
        for some in chunks(sorted(epochs)):
            query = (
                select(table.c.session_id, table.c.strikes, table.c.epoch, table.c.node)
                .where(table.c.session_id.in_(some), table.c.phase == Phase.ACTIVE)
                .order_by(table.c.session_id)
                .with_for_update()
            )
            rows = [row for row in await self.tx.execute(query) if row.epoch == epochs[row.session_id]]
            found |= {row.session_id: row.strikes for row in rows}
            nodes |= {row.session_id: row.node for row in rows}
        mine = [self._row(one, one.node or nodes[one.session_id]) for one in endings if one.session_id in found]
        if mine:
            await self.tx.execute(_END_SESSION, mine)
        return found

    def _row(self, ending: SessionEnd, node: str) -> dict[str, Any]:
        error = storable_text(ending.error)
        if ending.state is SessionState.FAILED and not error:
            error = "unknown"
        if self._was_cut(ending):
            ending.end_reason = EndReason.EARLY_STOP
        piece = ending.piece
        return {
            "id": ending.session_id,
            "to_state": ending.state.value,
            "to_end_reason": ending.end_reason.value if ending.end_reason else None,
            "to_failure": ending.failure.value if ending.failure else None,
            "to_stage": ending.stage.value,
            "to_error": error,
            "to_segment": piece.segment if piece else None,
            "to_place": piece.place if piece else None,
            "to_sha256": piece.sha256 if piece else None,
            "to_bytes": piece.length if piece else None,
            "to_updated": self.at,
            "to_node": node,
            **{f"to_{name}": getattr(ending, name) for name in _LENGTH},
        }

    def _was_cut(self, ending: SessionEnd) -> bool:
        """Whether the session ended, or will not be retried, because its group was complete without it."""
        unfinished = ending.state in (SessionState.CANCELLED, SessionState.LOST)
        return unfinished and self._groups[ending.key].state is TaskState.DONE

    # Samples

    async def _end(self, ending: SessionEnd, strikes: int) -> None:
        task, group = self._tasks[ending.key], self._groups[ending.key]
        self._events += ending.steps
        self._events.append(ending.event())
        self.effects.ended.append(ending)
        strikes = strikes_after(
            ending.state,
            strikes,
            attempt=ending.attempt,
            deaths=ending.deaths,
            blameless=ending.blameless,
            free=FREE_ATTEMPTS,
        )
        hopeless = ending.hopeless or ending.failure is FailureReason.QUARANTINED
        ending.retried = should_retry(
            ending.state, hopeless=hopeless, strikes=strikes, max_attempts=task.max_attempts, group=group
        )
        if ending.retried:
            await self._retry(ending, task, strikes)
            return
        group.finished += 1
        group.usable += ending.usable
        self._publish_session(ending, task, final_state(ending.state, group))
        if ending.failure is FailureReason.QUARANTINED:
            await self._quarantine_suspects(ending)
        await self._decide(ending.key)

    async def _decide(self, task_id: str) -> None:
        """Publish the group if that is due, and stop the samples that it does not need."""
        group = self._groups[task_id]
        found = group_verdict(group, self.at)
        if found is GroupVerdict.WAIT:
            return
        if found is GroupVerdict.GRACE:
            self.effects.deadlines += group.grace_until is None
            group.grace_until = stop_at(group, self.at)
            return
        group.state, group.grace_until = TaskState.DONE, None
        self._publish_group(task_id, complete=found is GroupVerdict.COMPLETE)
        if group.finished < group.num_samples:
            group.stopped, group.cut = self.at, group.num_samples - group.finished
            await self._stop_rest(task_id, EndReason.EARLY_STOP)

    async def _retry(self, ending: SessionEnd, task: Row[Any], strikes: int) -> None:
        table = tables.sessions
        await self.tx.execute(
            update(table).where(table.c.session_id == ending.session_id).values(latest=False, updated=self.at)
        )
        fresh = waiting_row(
            task.task_id,
            task.number,
            task.priority,
            ending.sample,
            self.at,
            attempt=ending.attempt + 1,
            strikes=strikes,
            deaths=ending.deaths,
            company=ending.company,
        )
        await self.tx.execute(insert(table), [fresh])
        self._events.append(session_event(fresh, ending.tenant))
        self.effects.waiting[ending.tenant] += 1

    async def _stop_rest(self, task_id: str, reason: EndReason) -> None:
        """End the waiting sessions of a task and ask the running ones to stop."""
        table = tables.sessions
        await self._end_waiting(task_id, (), state=SessionState.CANCELLED, end_reason=reason)
        active = select(table.c.session_id).where(table.c.task_id == task_id, table.c.phase == Phase.ACTIVE)
        self.effects.stop += list((await self.tx.execute(active)).scalars())

    async def _quarantine_suspects(self, found: SessionEnd) -> None:
        """End the waiting samples of the task that are suspected of the same, so that they do not kill a node too."""
        suspected = (tables.sessions.c.deaths >= self._quarantine_deaths,)
        reason = FailureReason.QUARANTINED
        await self._end_waiting(
            found.key, suspected, state=SessionState.FAILED, failure=reason, error=storable_text(found.error)
        )

    async def _end_waiting(self, task_id: str, which: Sequence[ColumnElement[bool]], **end: Any) -> None:
        """End waiting sessions of the task, which no node has seen."""
        table, task, group = tables.sessions, self._tasks[task_id], self._groups[task_id]
        ended = await self.tx.execute(
            update(table)
            .where(table.c.task_id == task_id, table.c.phase == Phase.WAITING, *which)
            .values(phase=Phase.ENDED, updated=self.at, **end)
            .returning(table.c.session_id, table.c.task_id, table.c.sample, table.c.attempt, table.c.epoch)
        )
        for row in sorted(ended, key=lambda row: row.sample):
            ending = SessionEnd.of_row(row, **end)
            group.finished += 1
            self.effects.waiting[ending.tenant] -= 1
            self.effects.ended.append(ending)
            self._events.append(ending.event())
            self._publish_session(ending, task, ending.state)

    # Results

    def _publish_session(self, ending: SessionEnd, task: Row[Any], state: SessionState) -> None:
        if task.required < task.num_samples:
            self.effects.lengths.append(ending)
        lost_in_stop = ending.state is SessionState.LOST and ending.end_reason is EndReason.EARLY_STOP
        body = SessionResult(
            **{name: getattr(ending, name) for name in _RESULT_FIELDS}
            | {"state": state, "error": storable_text(ending.error)}
            | ({"failure": None} if lost_in_stop else {}),
            finished=self.at,
            metadata=_metadata(task.body),
        )
        self._results.append(
            {
                "unit": Unit.SESSION.value,
                "task_id": ending.key,
                "owner": ending.tenant,
                "session_id": ending.session_id,
                "body": dump_json(body),
                "usable": ending.usable,
                "lowest_version": ending.lowest_version,
                "max_staleness": task.max_staleness,
                "created": self.at,
            }
        )

    def _publish_group(self, task_id: str, *, complete: bool) -> None:
        self._groups[task_id].grouped = True
        self._results.append(
            {
                "unit": Unit.GROUP.value,
                "task_id": task_id,
                "owner": names.tenant_of(task_id),
                "session_id": None,
                "body": None,
                "usable": complete,
                "lowest_version": None,
                "max_staleness": self._tasks[task_id].max_staleness,
                "created": self.at,
            }
        )

    # The end of the transaction

    async def _commit(self) -> Effects:
        for task_id, group in self._groups.items():
            await self._write_task(task_id, group)
        if self._results:
            await self._write_results()
        await add_events(self.tx, self._events, self.at)
        return self.effects

    async def _write_task(self, task_id: str, group: GroupProgress) -> None:
        was = self._tasks[task_id]
        now = {name: getattr(group, name) for name in _PROGRESS}
        if all(getattr(was, name) == value for name, value in now.items()):
            return
        table = tables.tasks
        await self.tx.execute(update(table).where(table.c.task_id == task_id).values(**now, updated=self.at))
        if was.state != group.state:
            body = {"task_id": names.plain(task_id), "state": group.state.value}
            self._events.append((names.tenant_of(task_id), "task", body))
        if group.finished >= group.num_samples:
            self.effects.finished_tasks.append(task_id)

    async def _write_results(self) -> None:
        count = len(self._results)
        first = await take_numbers(self.tx, "results", count) - count + 1
        callbacks = []
        for seq, row in enumerate(self._results, first):
            row["seq"] = seq
            event = {"result_id": result_id(row["unit"], seq, self.store.token), "unit": row["unit"]}
            event |= {"task_id": names.plain(row["task_id"]), "session_id": row["session_id"], "usable": row["usable"]}
            self._events.append((row["owner"], "result", event))
            url = self._tasks[row["task_id"]].callback
            if row["unit"] == Unit.GROUP and url:
                sent = {"seq": seq, "url": url, "body": dump_json(event), "tries": 0, "due": self.at}
                callbacks.append(sent | {"owner": row["owner"]})
        for row in self._results:
            if row["unit"] == Unit.GROUP and row["usable"]:
                row["lowest_version"] = await self._lowest(row["task_id"], row["seq"])
        await self.tx.execute(insert(tables.results), self._results)
        if callbacks:
            await self.tx.execute(insert(tables.callbacks), callbacks)
        self.effects.published += count
        self.effects.callbacks += len(callbacks)

    async def _lowest(self, task_id: str, before: int) -> int | None:
        """The oldest version of a group, over members that are stored and those about to be."""
        table = tables.results
        query = select(table.c.lowest_version).where(
            table.c.task_id == task_id, table.c.unit == Unit.SESSION.value, table.c.usable
        )
        found = list((await self.tx.execute(query)).scalars())
        found += [
            row["lowest_version"]
            for row in self._results
            if row["task_id"] == task_id and row["session_id"] and row["usable"] and row["seq"] < before
        ]
        return min((version for version in found if version is not None), default=None)


def _metadata(body: bytes) -> dict[str, Any]:
    """The metadata of a task; empty if the task cannot be read, since its sessions must end all the same."""
    try:
        found = load_json(body).get("metadata", {})
    except (SchemaError, AttributeError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}
