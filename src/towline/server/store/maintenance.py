"""Maintenance of a store without a running server: verify every trajectory, or move to another database or location.

A move copies, verifies the copy, and only then switches over; nothing is removed from the source. An interrupted move can
be repeated: the database is copied in one transaction, and files that already exist are kept. The old database names its
successor and cannot be served again, so that no two servers own the same files.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Table, delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.cluster.segments import Segments, SegmentSlice
from towline.common.progress import OnCount
from towline.errors import ConfigError, DamagedData
from towline.server.store import ownership, tables
from towline.server.store.database import Store
from towline.server.store.tables import CHUNK, chunks, get_meta, put_meta


@dataclass
class Verification:
    """The state of the segments of a store."""

    sessions: int = 0
    """Sessions whose rows name a trajectory."""
    segments: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    """Sessions whose trajectory cannot be read, with the reasons."""
    orphans: int = 0
    """Files that no row names: a crash left them, and the next server removes them."""

    def as_json(self) -> dict[str, Any]:
        return {
            "sessions": self.sessions,
            "segments": self.segments,
            "damaged": self.damaged,
            "orphans": self.orphans,
        }


async def verify(store: Store, segments: Segments, on_progress: OnCount = lambda *_: None) -> Verification:
    """Read every trajectory and verify its hash. Raises `OSError` if the location is down."""
    found, names = Verification(), set[str]()
    async with store.read() as tx:
        ids = await ownership.store_ids(tx)
        query = select(func.count()).where(tables.sessions.c.segment.is_not(None))
        total = int(await tx.scalar(query.select_from(tables.sessions)) or 0)
    after = ""
    while rows := await _named(store, after):
        after = rows[-1].session_id
        pieces: dict[SegmentSlice, str] = {}
        for row in rows:
            names.add(row.segment)
            try:
                pieces[SegmentSlice.at(row.segment, row.place, row.sha256)] = row.session_id
            except DamagedData as error:
                found.damaged[row.session_id] = str(error)
        for piece, reason in (await segments.check(list(pieces))).items():
            found.damaged[pieces[piece]] = reason
        found.sessions += len(rows)
        on_progress(found.sessions, total, "trajectories")
    found.segments = len(names)
    found.orphans = await asyncio.to_thread(_orphans, segments, ids, names)
    return found


async def _named(store: Store, after: str) -> list[Any]:
    """The next sessions, by id, whose rows name a trajectory."""
    table = tables.sessions
    query = (
        select(table.c.session_id, table.c.segment, table.c.place, table.c.sha256)
        .where(table.c.segment.is_not(None), table.c.session_id > after)
        .order_by(table.c.session_id)
        .limit(CHUNK)
    )
    async with store.read() as tx:
        return list(await tx.execute(query))


def _orphans(segments: Segments, ids: list[str], known: set[str]) -> int:
    found = (name for id in ids for name in segments.location.find(id))
    return sum(name.endswith(".arrow") and name not in known for name in found)


# Moving to another database


async def move_database(source: Store, target: Store, on_progress: OnCount = lambda *_: None) -> dict[str, int]:
    """Copy every row to an empty database, which then is the store; returns rows per table. Both must be open."""
    async with source.read() as tx:
        token, moved = await get_meta(tx, "token"), await get_meta(tx, ownership.MOVED_TO)
    if moved == target.display_url:
        return await _counts(target)
    if moved is not None:
        raise ConfigError(f"this store was already moved to {moved}: move it from there")
    async with target.read() as tx:
        arrived = await get_meta(tx, ownership.MOVED_FROM)
        taken = await tx.scalar(select(func.count()).select_from(tables.tasks))
    if arrived != token:
        if taken:
            raise ConfigError(f"{target.display_url} holds {taken} tasks of another store: use an empty database")
        async with target.write() as tx:
            await _copy_rows(source, tx, on_progress)
            await put_meta(tx, ownership.MOVED_FROM, str(token))
            await put_meta(tx, ownership.IDENTITY, await ownership.identity(target, tx))
    # An earlier copy that was committed, but not yet recorded in the source, is used as it is.
    counts, expected = await _counts(target), await _counts(source)
    different = [name for name in expected if counts[name] != expected[name]]
    if different:
        raise ConfigError(
            f"{target.display_url} holds an earlier copy of this store, which has changed since in {', '.join(different)}: "
            "empty that database and repeat the move"
        )
    async with source.write() as tx:
        await put_meta(tx, ownership.MOVED_TO, target.display_url)
    return counts


async def _copy_rows(source: Store, tx: AsyncConnection, on_progress: OnCount) -> None:
    total, done = sum((await _counts(source)).values()), 0
    async with source.read() as reading:
        for table in tables.metadata.sorted_tables:
            await tx.execute(delete(table))
            rows = await reading.stream(select(table))
            async for some in rows.mappings().partitions(CHUNK):
                await tx.execute(insert(table), [dict(row) for row in some])
                done += len(some)
                on_progress(done, total, table.name)


async def _counts(store: Store) -> dict[str, int]:
    """Rows per table, without `meta`, which differs between the copies."""
    counted = [table for table in tables.metadata.sorted_tables if table is not tables.meta]
    async with store.read() as tx:
        return {table.name: await _count(tx, table) for table in counted}


async def _count(tx: AsyncConnection, table: Table) -> int:
    return int(await tx.scalar(select(func.count()).select_from(table)) or 0)


# Moving to another location


async def move_segments(
    store: Store, source: Segments, target: Segments, on_progress: OnCount = lambda *_: None
) -> Verification:
    """Copy every segment that a row names, verify the copies, and record the location. Damaged ones stay damaged."""
    if source.location.name == target.location.name:
        raise ConfigError(f"the segments are already in {source.location.name}")
    async with store.read() as tx:
        table = tables.sessions
        found = await tx.execute(select(table.c.segment).where(table.c.segment.is_not(None)).distinct())
        names = sorted(str(name) for name in found.scalars())
    for done, some in enumerate(chunks(names)):
        await asyncio.to_thread(_copy, source, target, some)
        on_progress(done * CHUNK + len(some), len(names), "segments")
    await ownership.mark_absent(store, target)
    before, after = await verify(store, source), await verify(store, target, on_progress)
    worse = sorted(set(after.damaged) - set(before.damaged))
    if worse:
        raise ConfigError(
            f"{len(worse)} trajectories are damaged in {target.location.name}, for example {worse[0]}: "
            f"{after.damaged[worse[0]]}; the store stays at {source.location.name}"
        )
    await ownership.record_location(store, target)
    return after


def _copy(source: Segments, target: Segments, names: Any) -> None:
    for name in names:
        try:
            with source.location.open(name) as file:
                data = file.read_buffer()
        except OSError as error:
            source.check_location(name, error)
            continue  # It was damaged before: `verify` reports it.
        if target.location.exists(name):
            with target.location.open(name) as there:
                if there.read_buffer().equals(data):
                    continue
        target.location.write(name, data)
