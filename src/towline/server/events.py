"""What happened, in order and for a while: the feed behind `GET /v1/events`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from sqlalchemy import Row, delete, func, select

from towline.schema import Event, SchemaError
from towline.schema.files import dump_json, load_json
from towline.server import tables
from towline.server.signals import Signal
from towline.server.store import Store

log = logging.getLogger("towline.server")
_PAGE = 500
_PING = 15.0
"""Seconds of silence after which a comment is sent, so that nobody in between cuts the connection."""


class Events:
    def __init__(self, store: Store, happened: Signal, stopping: asyncio.Event, *, keep: int):
        self.store = store
        self.happened = happened
        self.stopping = stopping
        self.keep = keep

    async def newest(self) -> int:
        table = tables.counters
        async with self.store.read() as tx:
            return int(await tx.scalar(select(table.c.value).where(table.c.name == "events")) or 0)

    async def after(self, seq: int) -> list[Event]:
        table = tables.events
        async with self.store.read() as tx:
            rows = await tx.execute(select(table).where(table.c.seq > seq).order_by(table.c.seq).limit(_PAGE))
            return [_event(row) for row in rows]

    async def stream(self, after: int | None, limit: int | None, idle: float | None) -> AsyncIterator[bytes]:
        """Server-sent events from the one after `after`, or from now; ends after `limit`, or after `idle` seconds."""
        newest = await asyncio.shield(asyncio.ensure_future(self.newest()))
        # Whoever has seen more than there is has seen another store.
        seq = newest if after is None else min(after, newest)
        told, quiet = 0, 0.0
        yield b": towline events\n\n"
        while not self.stopping.is_set():
            count = self.happened.count
            # Who leaves takes his stream with him, but not a connection to the database in the middle of its work.
            found = await asyncio.shield(asyncio.ensure_future(self.after(seq)))
            if found and after is not None and found[0].seq > seq + 1:
                missed = {"first": seq + 1, "last": found[0].seq - 1}
                yield _wire(Event(seq=found[0].seq - 1, at=found[0].at, kind="missed", body=missed))
            after = seq if after is None else after
            for event in found:
                yield _wire(event)
                seq, told, quiet = event.seq, told + 1, 0.0
                if limit is not None and told >= limit:
                    return
            if found:
                continue
            if idle is not None and quiet >= idle:
                return
            pause = _PING if idle is None else min(_PING, idle - quiet)
            began = asyncio.get_running_loop().time()
            await self.happened.wait(count, pause)
            waited = asyncio.get_running_loop().time() - began
            quiet += waited
            if waited >= _PING:
                yield b": still here\n\n"

    async def prune(self) -> None:
        """Forget the oldest beyond what is kept."""
        table = tables.events
        async with self.store.write() as tx:
            newest = int(await tx.scalar(select(func.max(table.c.seq))) or 0)
            await tx.execute(delete(table).where(table.c.seq <= newest - self.keep))


def _wire(event: Event) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.seq, event.kind.encode(), dump_json(event))


def _event(row: Row[Any]) -> Event:
    try:
        return Event(seq=row.seq, at=row.at, kind=row.kind, body=load_json(row.body))
    except (SchemaError, TypeError, ValueError) as error:
        log.error("damaged: the row of event %s: %s", row.seq, " ".join(str(error).split())[:200])
        return Event(seq=row.seq, at=0.0, kind="damaged", body={})
