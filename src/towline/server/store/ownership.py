"""Ownership of segments: the store's id, the runs of its servers, and the location that it writes to.

A store gets an id with its database. A copied database is recognized (it is another file, or another database of the
cluster) and gets a new id: both copies still read what their rows name, and neither removes or overwrites what the other
has written since. `towline store move` keeps the id.

The location is recorded. A server that is configured with another one that does not have this store's segments is
rejected: it would find every trajectory missing.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets

from sqlalchemy import delete, func, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from towline.cluster.segments import Segments
from towline.errors import ConfigError
from towline.server.store import tables
from towline.server.store.database import Store
from towline.server.store.tables import get_meta, put_meta

log = logging.getLogger("towline.server")
_IDS, IDENTITY, LOCATION, _RUN = "stores", "identity", "segments", "run."
_MARKS = "marks"
MOVED_FROM, MOVED_TO = "moved_from", "moved_to"
"""In the target of a move, the token of the moved store; in the source, the URL of the target."""
_PREFIX = "store-"
_ID = re.compile(_PREFIX + "[0-9a-f]{16}")


async def store_ids(tx: AsyncConnection) -> list[str]:
    """Every id that this store has had; the last is the current one."""
    found = await get_meta(tx, _IDS)
    try:
        ids = json.loads(found or "[]")
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not all(isinstance(one, str) and _ID.fullmatch(one) for one in ids):
        log.error("damaged: ids of the store: %r; it gets a new one", found)
        return []
    return ids


async def identity(store: Store, tx: AsyncConnection) -> str:
    """What distinguishes a database from its copies: its file and lock file, or its cluster and OID."""
    if store.sqlite:
        return f"file {os.stat(str(store.url.database)).st_ino} {store.nonce()}"
    try:
        async with tx.begin_nested():
            cluster = await tx.scalar(text("SELECT system_identifier FROM pg_control_system()"))
    except DBAPIError:  # Some hosts do not allow this query.
        cluster = None
    place = await tx.scalar(text("SELECT oid FROM pg_database WHERE datname = current_database()"))
    return f"database {cluster} {place}"


async def take_store(store: Store, segments: Segments) -> str:
    """Record the id of the store and a new run of this server; returns the id. Call once, after `store.open`."""
    run = f"{store.epoch}-{secrets.token_hex(4)}"
    async with store.write() as tx:
        moved = await get_meta(tx, MOVED_TO)
        if moved is not None:
            raise ConfigError(f"this store was moved to {moved}: set server.database to that URL")
        ids, known, now = await store_ids(tx), await get_meta(tx, IDENTITY), await identity(store, tx)
        copied = bool(ids) and known != now
        if copied or not ids:
            ids.append(_PREFIX + secrets.token_hex(8))
            await put_meta(tx, _IDS, json.dumps(ids))
        await put_meta(tx, IDENTITY, now)
        await put_meta(tx, f"{_RUN}{store.epoch}", f"{ids[-1]}/{run}")
    if copied:
        log.warning(
            "this database is a copy of another: it now writes segments to %s, and reads the earlier ones without ever "
            "removing them",
            ids[-1],
        )
    segments.set_owner(ids[-1], run)
    return ids[-1]


async def take_location(store: Store, segments: Segments) -> None:
    """Record and mark the location. Rejects one that does not have the latest segments that the rows name."""
    place = segments.location.name
    async with store.read() as tx:
        recorded, ids, marks = await get_meta(tx, LOCATION), await store_ids(tx), await _marks(tx)
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
                    f"{'only an older copy' if known else 'none'} of them: set server.segments to {recorded}, or move them "
                    f"with `towline store move --to-segments {place}`"
                )
        for one in absent:
            if recorded is not None and await _names_segments(store, one):
                log.error("%s has lost the marker of %s: missing segments count as damaged", place, one)
        await record_location(store, segments)
    except OSError as error:
        log.error("the trajectory storage is down; sessions that end wait for it: %s", error)


async def record_location(store: Store, segments: Segments) -> None:
    """Make this the location of the store: earlier ones are no longer accepted."""
    mark = secrets.token_hex(8)
    async with store.write() as tx:
        ids, marks = await store_ids(tx), await _marks(tx)
        await put_meta(tx, _MARKS, json.dumps([mark, *marks]))
    await mark_absent(store, segments)
    for one in ids[-1:]:
        await segments.mark(one, store.display_url, mark)
    async with store.write() as tx:
        await put_meta(tx, _MARKS, json.dumps([mark]))
        await put_meta(tx, LOCATION, segments.location.name)


async def mark_absent(store: Store, segments: Segments) -> None:
    """Write missing markers for every id of the store. Existing ones may belong to the store that this is a copy of."""
    async with store.read() as tx:
        ids = await store_ids(tx)
    for one in ids:
        if not await segments.marked(one):
            await segments.mark(one, store.display_url, "")


async def _marks(tx: AsyncConnection) -> list[str]:
    """The valid marks of the location: one, or several if a server died while changing it."""
    try:
        found = json.loads(await get_meta(tx, _MARKS) or "[]")
    except ValueError:
        return []
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


async def _names_segments(store: Store, id: str) -> bool:
    table = tables.sessions
    async with store.read() as tx:
        named = select(table.c.segment).where(table.c.segment >= f"{id}/", table.c.segment < f"{id}0").limit(1)
        return await tx.scalar(named) is not None


async def runs(store: Store, first: int) -> dict[int, str]:
    """The folders of earlier runs of this store by epoch, from the first given; not those of copies."""
    table = tables.meta
    async with store.read() as tx:
        found = await tx.execute(select(table).where(func.substr(table.c.name, 1, len(_RUN)) == _RUN))
    named = {row.name.removeprefix(_RUN): str(row.value) for row in found}
    by_epoch = {int(name): value for name, value in named.items() if name.isdecimal()}
    return {epoch: folder for epoch, folder in sorted(by_epoch.items()) if first <= epoch < store.epoch}


async def forget_run(store: Store, tx: AsyncConnection, epoch: int) -> None:
    await tx.execute(delete(tables.meta).where(tables.meta.c.name == f"{_RUN}{epoch}"))
