"""Retention: removes tasks with their sessions, results and segments when they are old and no consumer needs them.

A task is kept for `keep_seconds` after its end, and longer while a live consumer has not acknowledged its results. A
consumer that was silent for `silent_seconds` keeps nothing; when it returns, it continues with what still exists. Rows are
removed first, with their files' names put into the trash in the same transaction; then the files.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import delete, func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.cluster.runner import Runner
from towline.cluster.segments import Segments
from towline.server.events import Events
from towline.server.store import ownership, tables
from towline.server.store.database import Store
from towline.server.store.tables import chunks, get_meta, insert_new, put_meta

log = logging.getLogger("towline.server")
_TASKS = 200
"""Maximum number of tasks removed per pass."""
_SWEEP_SECONDS = 60.0
_SWEPT = "swept_epoch"


class _Floor(NamedTuple):
    """The result up to which a consumer has acknowledged everything of the tasks it follows."""

    owner: str
    unit: str
    prefix: str
    seq: int

    def keeps(self, result: Any) -> bool:
        """Whether the consumer still needs the result: one of its own tenant, of a task that it follows."""
        mine = (self.owner, self.unit) == (result.owner, result.unit)
        return mine and str(result.task_id).startswith(self.prefix) and int(result.last) > self.seq


class Retention:
    """Removes old tasks, their files, and old events."""

    def __init__(self, store: Store, segments: Segments, events: Events, runner: Runner, *, keep: float, silent: float):
        self.store = store
        self.segments = segments
        self.events = events
        self.runner = runner
        self.keep = keep
        self.silent = silent

    async def run(self) -> None:
        """Remove what is no longer needed, forever."""
        while True:
            try:
                while await self.sweep(self.store.clock.now()) >= _TASKS:
                    continue
                await self.events.prune()
            except (SQLAlchemyError, OSError) as error:
                log.warning("old results could not be removed: %s", error)
            await asyncio.sleep(_SWEEP_SECONDS)

    async def sweep(self, now: float) -> int:
        """Remove tasks that are no longer needed; returns how many."""
        async with self.store.write() as tx:
            gone = await self._removable(tx, now)
            sessions = [name for some in chunks(gone) for name in await self._remove(tx, some)]
        await self.runner.erase(sessions)
        await self.empty_trash()
        return len(gone)

    async def _removable(self, tx: AsyncConnection, now: float) -> list[str]:
        tasks, results = tables.tasks, tables.results
        old = (
            select(tasks.c.task_id)
            .where(tasks.c.updated <= now - self.keep, tasks.c.grouped, tasks.c.finished >= tasks.c.num_samples)
            .order_by(tasks.c.updated)
            .limit(_TASKS)
            .with_for_update()
        )
        ids = list((await tx.execute(old)).scalars())
        floors = await self._floors(tx, now)
        needed: set[str] = set()
        for some in chunks(ids):
            query = (
                select(results.c.task_id, results.c.owner, results.c.unit, func.max(results.c.seq).label("last"))
                .where(results.c.task_id.in_(some))
                .group_by(results.c.task_id, results.c.owner, results.c.unit)
            )
            needed |= {row.task_id for row in await tx.execute(query) if any(floor.keeps(row) for floor in floors)}
        return [name for name in ids if name not in needed]

    async def _floors(self, tx: AsyncConnection, now: float) -> list[_Floor]:
        """The floor of each live consumer."""
        consumers, leases = tables.consumers, tables.leases
        first = (
            select(leases.c.consumer, leases.c.unit, func.min(leases.c.seq).label("first"))
            .group_by(leases.c.consumer, leases.c.unit)
            .subquery()
        )
        same = (first.c.consumer == consumers.c.name) & (first.c.unit == consumers.c.unit)
        query = (
            select(consumers.c.owner, consumers.c.unit, consumers.c.prefix, consumers.c.cursor, first.c.first)
            .outerjoin(first, same)
            .where(consumers.c.seen > now - self.silent)
        )
        return [
            _Floor(row.owner, row.unit, row.prefix, row.cursor if row.first is None else row.first - 1)
            for row in await tx.execute(query)
        ]

    async def _remove(self, tx: AsyncConnection, ids: Sequence[str]) -> list[str]:
        """Remove the rows of tasks; returns the ids of their sessions."""
        sessions, results, leases = tables.sessions, tables.results, tables.leases
        mine = select(sessions.c.session_id, sessions.c.segment, sessions.c.owner).where(sessions.c.task_id.in_(ids))
        found = list(await tx.execute(mine))
        files = {row.segment: row.owner for row in found if row.segment}
        seqs = select(results.c.seq).where(results.c.task_id.in_(ids))
        await tx.execute(delete(leases).where(leases.c.seq.in_(seqs)))
        await tx.execute(delete(tables.callbacks).where(tables.callbacks.c.seq.in_(seqs)))
        for table in (results, sessions, tables.tasks):
            await tx.execute(delete(table).where(table.c.task_id.in_(ids)))
        # A segment is removed with the last of its sessions.
        for some in chunks(sorted(files)):
            still = await tx.execute(select(sessions.c.segment).where(sessions.c.segment.in_(some)).distinct())
            left = set(still.scalars())
            rows = [{"segment": name, "owner": files[name]} for name in some if name not in left]
            if rows:
                await tx.execute(insert_new(tx, tables.trash), rows)
        return [row.session_id for row in found]

    async def empty_trash(self) -> None:
        table = tables.trash
        while True:
            async with self.store.read() as tx:
                some = list((await tx.execute(select(table.c.segment).limit(500))).scalars())
            if not some:
                return
            await self.segments.delete(some)
            async with self.store.write() as tx:
                await tx.execute(delete(table).where(table.c.segment.in_(some)))

    async def collect_orphans(self) -> int:
        """Remove segments of earlier runs of this store that no row names; returns how many. Checks each run once."""
        sessions = tables.sessions
        async with self.store.read() as tx:
            stored = await get_meta(tx, _SWEPT) or "0"
            swept = int(stored) if stored.isdecimal() else 0
        removed = 0
        for epoch, folder in (await ownership.runs(self.store, swept + 1)).items():
            for some in chunks(await self.segments.names(folder)):
                async with self.store.read() as tx:
                    found = await tx.execute(select(sessions.c.segment).where(sessions.c.segment.in_(some)))
                    known = set(found.scalars())
                orphans = [name for name in some if name not in known]
                await self.segments.delete(orphans)
                removed += len(orphans)
            async with self.store.write() as tx:
                await put_meta(tx, _SWEPT, str(epoch))
                await ownership.forget_run(self.store, tx, epoch)
        return removed
