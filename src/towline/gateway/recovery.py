"""Restores the sessions of a journal at start. A session that cannot be restored is quarantined and stops nothing.

If a record of a session is unusable (incompatible, damaged, or without the record it refers to), all records of the session
are moved to the quarantine as a journal of their own. Its key stops working, and the session has to be run again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from towline.common.files import Quarantine
from towline.config import SessionSettings
from towline.conversation import Tool
from towline.gateway import records
from towline.gateway.budgets import SessionUsage
from towline.gateway.journal import Disk, Journal, Record, RecordError, encode
from towline.gateway.journal.segments import SegmentWriter
from towline.gateway.model_routes import ModelRoutes
from towline.gateway.session import SESSION_ID, GatewaySession
from towline.tokens.codec import RenderContext


class SessionTable(Protocol):
    """The open sessions of a gateway."""

    sessions: dict[str, GatewaySession]
    routes: ModelRoutes

    @property
    def journal(self) -> Journal: ...

    def new_usage(self) -> SessionUsage: ...

    def add(self, session: GatewaySession) -> None: ...

    def forget(self, id: str) -> None: ...


class Recovery:
    """One pass over the journal while a gateway opens."""

    def __init__(self, table: SessionTable, quarantine: Quarantine):
        self._table = table
        self._quarantine = quarantine
        self.sealed: set[str] = set()
        """Sessions that are sealed; their records may be dropped."""
        self._broken: dict[str, str] = {}
        """Sessions that cannot be restored, with the reason."""
        self._strays = False
        """Whether the journal contains records that belong to no valid session."""

    @property
    def compacts(self) -> bool:
        """Whether the journal contains records that can be dropped."""
        return bool(self.sealed) or self._strays

    def needed(self, record: Record) -> bool:
        id = _session_of(record)
        return id is not None and id not in self.sealed

    async def run(self) -> None:
        for record in self._table.journal.records(self._unreadable):
            self._take(record)
        if self._broken:
            await quarantine_sessions(self._table.journal, self._quarantine, self._broken)
            self.sealed |= self._broken.keys()

    def _unreadable(self, payload: bytes, error: RecordError) -> None:
        self._strays = True
        self._quarantine.place("record", str(error)).write_bytes(payload)

    def _take(self, record: Record) -> None:
        id = _session_of(record)
        if id is None:
            self._strays = True
            payload = encode(record.kind, record.fields, record.arrays)
            self._quarantine.place("record", f"record {record.kind!r} names no valid session").write_bytes(payload)
            return
        if record.kind == records.SESSION:
            # An id may be reused once its trajectory was moved away.
            self._broken.pop(id, None)
        if id in self._broken:
            return
        try:
            restore_record(self._table, record, self.sealed)
        except Exception as error:  # an unusable record affects only its own session
            self._broken[id] = f"its record {record.kind!r} cannot be restored: {type(error).__name__}: {error}"
            self._table.forget(id)


async def quarantine_sessions(journal: Journal, quarantine: Quarantine, sessions: dict[str, str]) -> None:
    """Copy the records of sessions to the quarantine, and mark the sessions as sealed in the journal."""
    places = {id: quarantine.place(f"session-{id}", reason) for id, reason in sessions.items()}
    await asyncio.to_thread(_archive, journal, places)
    for id in sessions:
        await journal.append(encode(records.SEALED, {"session": id}, {}))


def _archive(journal: Journal, places: dict[str, Path]) -> None:
    """Write the records of each session as a journal of its own."""
    writers: dict[str, SegmentWriter] = {}
    try:
        for record in journal.records(lambda payload, error: None):
            id = _session_of(record)
            if id is not None and id in places:
                if id not in writers:
                    places[id].mkdir(parents=True)
                    writers[id] = SegmentWriter(places[id], 1, Disk())
                writers[id].add(encode(record.kind, record.fields, record.arrays))
        for writer in writers.values():
            writer.seal()
            writer.publish("archive")
    finally:
        for writer in writers.values():
            writer.close()


def _session_of(record: Record) -> str | None:
    """The session that a record belongs to; None if it names none that this gateway could have created."""
    id = record.fields.get("session") if isinstance(record.fields, dict) else None
    return id if isinstance(id, str) and SESSION_ID.fullmatch(id) else None


def restore_record(table: SessionTable, record: Record, sealed: set[str]) -> None:
    """Apply one record. Raises whatever an unusable record causes."""
    fields = record.fields
    id = fields["session"]
    if record.kind == records.SESSION:
        settings = SessionSettings.model_validate(fields["settings"])
        sealed.discard(id)
        session = GatewaySession(
            id,
            fields["key"],
            settings,
            table.routes,
            table.journal,
            fields["group"],
            fields["instruction"],
            fields["metadata"],
            tuple(fields.get("later_instructions", ())),
            fields["created"],
            table.new_usage(),
        )
        table.add(session)
        return
    if record.kind == records.SEALED:
        table.forget(id)
        sealed.add(id)
        return
    opened = table.sessions.get(id)
    if opened is None:
        return
    if record.kind == records.TOOLS:
        fields = records.fields_of(record)
        tools = tuple(Tool(**tool) for tool in fields["tools"])
        opened.tools[fields["key"]] = tools
        opened.contexts[fields["key"]] = RenderContext(tools, fields["arguments"], opened.clock)
    elif record.kind == records.TURN:
        node = records.restore_turn(opened.graph, record)
        if node is not None:
            opened.restore(node)
    elif record.kind == records.DELIVERED and fields["id"] in opened.graph.by_id:
        opened.graph.by_id[fields["id"]].delivered = True
        opened.turns.inflight.abandoned.discard(fields["id"])


def session_record(session: GatewaySession) -> bytes:
    """The record that a session is restored from."""
    return encode(
        records.SESSION,
        {
            "session": session.id,
            "key": session.key_hash,
            "settings": session.settings.model_dump(mode="json"),
            "group": session.group,
            "instruction": session.instruction,
            "later_instructions": list(session.later_instructions),
            "metadata": session.metadata,
            "created": session.created,
        },
        {},
    )
