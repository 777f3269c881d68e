"""Which segments are whose: the store's id, the runs of its servers, and the location that it writes to.

A store has an id of its own, made with its database. A database that was copied is noticed (its file, or the place of it in
its cluster, is another) and gets a new id: both copies still read what their rows name, and neither removes or overwrites
what the other has written since. `towline store move` keeps the id.

The location is recorded. A server that is given another one, where nothing of this store is, is refused: it would find
every trajectory missing.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets

from sqlalchemy import delete, func, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.errors import ConfigError
from towline.server import tables
from towline.server.segments import Segments
from towline.server.store import Store

log = logging.getLogger("towline.server")
_IDS, IDENTITY, LOCATION, _RUN = "stores", "identity", "segments", "run."
_MARKS = "marks"
MOVED_FROM, MOVED_TO = "moved_from", "moved_to"
"""In a database that a store was moved to, the token of that store; in the one it was moved from, where it is."""
_PREFIX = "store-"
_ID = re.compile(_PREFIX + "[0-9a-f]{16}")


async def get(tx: AsyncConnection, name: str) -> str | None:
    found = await tx.scalar(select(tables.meta.c.value).where(tables.meta.c.name == name))
    return None if found is None else str(found)


async def put(store: Store, tx: AsyncConnection, name: str, value: str) -> None:
    table = tables.meta
    await tx.execute(store.insert_new(table).values(name=name, value=value))
    await tx.execute(update(table).where(table.c.name == name).values(value=value))


async def store_ids(tx: AsyncConnection) -> list[str]:
    """Every id that this store has had; the last is its own."""
    found = await get(tx, _IDS)
    try:
        ids = json.loads(found or "[]")
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not all(isinstance(one, str) and _ID.fullmatch(one) for one in ids):
        log.error("damaged: the ids of the store are %r; it gets another", found)
        return []
    return ids


async def identity(store: Store, tx: AsyncConnection) -> str:
    """What a database has and a copy of it has not: its file and the lock beside it, or its cluster and its place there."""
    if store.sqlite:
        return f"file {os.stat(str(store.url.database)).st_ino} {store.nonce()}"
    try:
        async with tx.begin_nested():
            cluster = await tx.scalar(text("SELECT system_identifier FROM pg_control_system()"))
    except DBAPIError:  # Some hosts do not let everybody ask.
        cluster = None
    place = await tx.scalar(text("SELECT oid FROM pg_database WHERE datname = current_database()"))
    return f"database {cluster} {place}"


async def take_store(store: Store, segments: Segments) -> str:
    """The store's id, and a run of this server's own; both are recorded. Call once, after `store.open`."""
    run = f"{store.epoch}-{secrets.token_hex(4)}"
    async with store.write() as tx:
        moved = await get(tx, MOVED_TO)
        if moved is not None:
            raise ConfigError(f"this store was moved to {moved}: set server.database to that; nothing was removed here")
        ids, known, now = await store_ids(tx), await get(tx, IDENTITY), await identity(store, tx)
        copied = bool(ids) and known != now
        if copied or not ids:
            ids.append(_PREFIX + secrets.token_hex(8))
            await put(store, tx, _IDS, json.dumps(ids))
        await put(store, tx, IDENTITY, now)
        await put(store, tx, f"{_RUN}{store.epoch}", f"{ids[-1]}/{run}")
    if copied:
        log.warning(
            "this database is a copy of another: from here on its segments are in %s; those from before are read, "
            "and never removed",
            ids[-1],
        )
    segments.own(ids[-1], run)
    return ids[-1]


async def take_location(store: Store, segments: Segments) -> None:
    """Record and mark the location. Refuses one that does not hold what this store wrote last, if its rows name that."""
    place = segments.location.name
    async with store.read() as tx:
        recorded, ids, marks = await get(tx, LOCATION), await store_ids(tx), await _marks(tx)
        named = await tx.scalar(
            select(tables.sessions.c.segment).where(tables.sessions.c.segment.is_not(None)).limit(1)
        )
    try:
        absent = [one for one in ids if not await segments.marked(one)]
        if recorded not in (None, place) and named:
            known = len(absent) < len(ids)
            current = known and (not marks or any([await segments.mark_of(one) in marks for one in ids]))
            if not current:
                raise ConfigError(
                    f"the trajectories of this store are in {recorded}; {place} holds "
                    f"{'only an older copy' if known else 'none'} of them: set server.segments to {recorded}, or take them "
                    f"along with `towline store move --to-segments {place}`"
                )
        for one in absent:
            if recorded is not None and await _names_segments(store, one):
                log.error("%s has lost the marker of %s: segments that are not there count as damaged", place, one)
        await settle(store, segments)
    except OSError as error:
        log.error("the location of the trajectories is away; sessions that end wait for it: %s", error)


async def settle(store: Store, segments: Segments) -> None:
    """The location is the store's from here on: no other that it had before is taken for it."""
    mark = secrets.token_hex(8)
    async with store.write() as tx:
        ids, marks = await store_ids(tx), await _marks(tx)
        await put(store, tx, _MARKS, json.dumps([mark, *marks]))
    await mark_absent(store, segments)
    for one in ids[-1:]:
        await segments.mark(one, store.shown, mark)
    async with store.write() as tx:
        await put(store, tx, _MARKS, json.dumps([mark]))
        await put(store, tx, LOCATION, segments.location.name)


async def mark_absent(store: Store, segments: Segments) -> None:
    """Markers for every id that the store has had. One that is there may be that of a store which this is a copy of."""
    async with store.read() as tx:
        ids = await store_ids(tx)
    for one in ids:
        if not await segments.marked(one):
            await segments.mark(one, store.shown, "")


async def _marks(tx: AsyncConnection) -> list[str]:
    """What the marker of the location says: one mark, or several if a server died while it wrote them."""
    try:
        found = json.loads(await get(tx, _MARKS) or "[]")
    except ValueError:
        return []
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


async def _names_segments(store: Store, id: str) -> bool:
    table = tables.sessions
    async with store.read() as tx:
        named = select(table.c.segment).where(table.c.segment >= f"{id}/", table.c.segment < f"{id}0").limit(1)
        return await tx.scalar(named) is not None


async def runs(store: Store, first: int) -> dict[int, str]:
    """The folders that earlier runs of this store's servers wrote to, from the first epoch on; copies' excepted."""
    table = tables.meta
    async with store.read() as tx:
        found = await tx.execute(select(table).where(func.substr(table.c.name, 1, len(_RUN)) == _RUN))
    named = {row.name.removeprefix(_RUN): str(row.value) for row in found}
    by_epoch = {int(name): value for name, value in named.items() if name.isdecimal()}
    return {epoch: folder for epoch, folder in sorted(by_epoch.items()) if first <= epoch < store.epoch}


async def forget_run(store: Store, tx: AsyncConnection, epoch: int) -> None:
    await tx.execute(delete(tables.meta).where(tables.meta.c.name == f"{_RUN}{epoch}"))
