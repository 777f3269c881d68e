"""What happened: `Signal` wakes waiting coroutines in this process, `Events` is the stored feed of `GET /v1/events`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row, delete, func, select

from towline.common.text import one_line
from towline.schema import Event, SchemaError
from towline.schema.files import dump_json, load_json
from towline.server.store import tables
from towline.server.store.database import Store

log = logging.getLogger("towline.server")
_PAGE = 500
"""Events read per query."""
_PING_SECONDS = 15.0
"""Silence after which a comment is sent, so that no proxy cuts the connection."""


class Signal:
    """Wakes every coroutine that waits when it is notified; later ones wait for the next notification."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None
        self.count = 0
        """Number of notifications so far."""

    @property
    def waiting(self) -> bool:
        """Whether a coroutine waits for the next notification."""
        return self._future is not None

    def notify(self) -> None:
        self.count += 1
        future, self._future = self._future, None
        if future is not None and not future.done():
            future.set_result(None)

    async def wait(self, since: int, seconds: float | None = None) -> None:
        """Wait for a notification after `count` was `since`, at most `seconds`."""
        if self.count != since:
            return
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
        await asyncio.wait((self._future,), timeout=seconds)


@dataclass(slots=True)
class Signals:
    """Wake-up calls between the parts of the server."""

    work: Signal = field(default_factory=Signal)
    """A session may be ready to start."""
    results: Signal = field(default_factory=Signal)
    events: Signal = field(default_factory=Signal)
    callbacks: Signal = field(default_factory=Signal)
    deadlines: Signal = field(default_factory=Signal)
    """The grace period of a group has begun."""


class Events:
    """The stored feed of events; the newest `keep` are kept."""

    def __init__(self, store: Store, happened: Signal, stopping: asyncio.Event, *, keep: int):
        self.store = store
        self.happened = happened
        self.stopping = stopping
        self.keep = keep

    async def newest(self) -> int:
        table = tables.counters
        async with self.store.read() as tx:
            return int(await tx.scalar(select(table.c.value).where(table.c.name == "events")) or 0)

    async def oldest(self) -> int:
        """The first event that is still kept; 0 if there is none."""
        async with self.store.read() as tx:
            return int(await tx.scalar(select(func.min(tables.events.c.seq))) or 0)

    async def after(self, seq: int, tenant: str | None = None) -> list[Event]:
        """The next events that concern a tenant, or all of them."""
        table = tables.events
        page = select(table).where(table.c.seq > seq).order_by(table.c.seq).limit(_PAGE)
        # One query per owner, so that each reads only its own part of the index.
        queries = [page.where(*tables.owned_by(table, owner)) for owner in ([None] if tenant is None else [tenant, ""])]
        async with self.store.read() as tx:
            rows = {row.seq: row for query in queries for row in await tx.execute(query)}
        return [_event(rows[seq]) for seq in sorted(rows)[:_PAGE]]

    async def stream(
        self, after: int | None, limit: int | None, idle: float | None, tenant: str | None = None
    ) -> AsyncIterator[bytes]:
        """Server-sent events from the one after `after`, or from now; ends after `limit` events or `idle` seconds.

        With a tenant, only its own events and those of the whole service.
        """
        newest = await asyncio.shield(asyncio.ensure_future(self.newest()))
        # A client that has seen more events than exist has seen those of another store.
        seq = newest if after is None else min(after, newest)
        sent, quiet = 0, 0.0
        yield b": towline events\n\n"
        while not self.stopping.is_set():
            count = self.happened.count
            # A client that disconnects cancels its stream, but not a database connection in the middle of its work.
            found = await asyncio.shield(asyncio.ensure_future(self.after(seq, tenant)))
            if found and after is not None and found[0].seq > seq + 1:
                # Numbers in between are of other tenants, or no longer kept.
                oldest = await asyncio.shield(asyncio.ensure_future(self.oldest()))
                if oldest > seq + 1:
                    missed = {"first": seq + 1, "last": oldest - 1}
                    yield _wire(Event(seq=oldest - 1, at=found[0].at, kind="missed", body=missed))
            after = seq if after is None else after
            for event in found:
                yield _wire(event)
                seq, sent, quiet = event.seq, sent + 1, 0.0
                if limit is not None and sent >= limit:
                    return
            if found:
                continue
            if idle is not None and quiet >= idle:
                return
            pause = _PING_SECONDS if idle is None else min(_PING_SECONDS, idle - quiet)
            began = asyncio.get_running_loop().time()
            await self.happened.wait(count, pause)
            waited = asyncio.get_running_loop().time() - began
            quiet += waited
            if waited >= _PING_SECONDS:
                yield b": still here\n\n"

    async def prune(self) -> None:
        """Remove the oldest events beyond those that are kept."""
        table = tables.events
        async with self.store.write() as tx:
            newest = int(await tx.scalar(select(func.max(table.c.seq))) or 0)
            await tx.execute(delete(table).where(table.c.seq <= newest - self.keep))


def _wire(event: Event) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.seq, event.kind.encode(), dump_json(event))


def _event(row: Row[Any]) -> Event:
    try:
        return Event(seq=row.seq, at=row.at, kind=row.kind, body=load_json(row.body), tenant=row.owner)
    except (SchemaError, TypeError, ValueError) as error:
        log.error("damaged: row of event %s: %s", row.seq, one_line(error))
        return Event(seq=row.seq, at=0.0, kind="damaged", body={})
