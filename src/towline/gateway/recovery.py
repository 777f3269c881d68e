"""The sessions that a journal holds, restored at the start. Whatever cannot be restored is set aside, and stops nothing.

A session with a record that does not fit (of another version, damaged, or without the record it refers to) is no session any
more: all that the journal has of it is kept in the quarantine, as a journal of its own, and the rest of its records are
passed over. Its key does not work; whoever asked for the session runs it again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from towline.config import SessionSettings
from towline.conversation import Tool
from towline.gateway import records
from towline.gateway.journal import Disk, Journal, Record, RecordError, encode
from towline.gateway.journal.segments import SegmentWriter
from towline.quarantine import Quarantine
from towline.tokens.codec import Frame

if TYPE_CHECKING:
    from towline.gateway.gateway import Gateway


class Recovery:
    """One pass over the journal, for a gateway that is being opened."""

    def __init__(self, gateway: Gateway, quarantine: Quarantine):
        self._gateway = gateway
        self._quarantine = quarantine
        self.sealed: set[str] = set()
        """Sessions that are over: their records may go."""
        self._broken: dict[str, str] = {}
        """Those that cannot be restored, with the reason."""
        self._strays = False
        """Whether the journal holds what belongs to no session."""

    @property
    def compacts(self) -> bool:
        """Whether there is something in the journal that is not needed any more."""
        return bool(self.sealed) or self._strays

    def needed(self, record: Record) -> bool:
        id = _session_of(record)
        return id is not None and id not in self.sealed

    async def run(self) -> None:
        for record in self._gateway.journal.records(self._unreadable):
            self._take(record)
        if self._broken:
            await set_aside(self._gateway.journal, self._quarantine, self._broken)
            self.sealed |= self._broken.keys()

    def _unreadable(self, payload: bytes, error: RecordError) -> None:
        self._strays = True
        self._quarantine.place("record", str(error)).write_bytes(payload)

    def _take(self, record: Record) -> None:
        id = _session_of(record)
        if id is None:
            self._strays = True
            payload = encode(record.kind, record.fields, record.arrays)
            self._quarantine.place("record", f"a record {record.kind!r} names no session").write_bytes(payload)
            return
        if record.kind == records.SESSION:
            # An id may be taken anew once its trajectory was moved away.
            self._broken.pop(id, None)
        if id in self._broken:
            return
        try:
            restore(self._gateway, record, self.sealed)
        except Exception as error:  # Whatever a record holds, it is this session's own trouble.
            self._broken[id] = f"its record {record.kind!r} does not fit: {type(error).__name__}: {error}"
            self._gateway.forget(id)


async def set_aside(journal: Journal, quarantine: Quarantine, sessions: dict[str, str]) -> None:
    """Keep what the journal has of sessions elsewhere, and say in the journal that they are over."""
    places = {id: quarantine.place(f"session-{id}", reason) for id, reason in sessions.items()}
    await asyncio.to_thread(_archive, journal, places)
    for id in sessions:
        await journal.append(encode(records.SEALED, {"session": id}, {}))


def _archive(journal: Journal, places: dict[str, Path]) -> None:
    """The records of each session as a journal of its own."""
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
    id = record.fields.get("session") if isinstance(record.fields, dict) else None
    return id if isinstance(id, str) else None


def restore(gateway: Gateway, record: Record, sealed: set[str]) -> None:
    """Take one record. Raises whatever a record can make go wrong."""
    fields = record.fields
    id = fields["session"]
    if record.kind == records.SESSION:
        settings = SessionSettings.model_validate(fields["settings"])
        sealed.discard(id)
        gateway.add(
            id,
            fields["key"],
            settings,
            fields["group"],
            fields["instruction"],
            fields["metadata"],
            tuple(fields.get("later_instructions", ())),
            fields["created"],
        )
        return
    if record.kind == records.SEALED:
        gateway.forget(id)
        sealed.add(id)
        return
    session = gateway.sessions.get(id)
    if session is None:
        return
    if record.kind == records.TOOLS:
        fields = records.fields_of(record)
        tools = tuple(Tool(**tool) for tool in fields["tools"])
        session.tools[fields["key"]] = tools
        session.frames[fields["key"]] = Frame(tools, fields["arguments"], session.clock)
    elif record.kind == records.TURN:
        node = records.restore_turn(session.graph, record)
        if node is not None:
            session.adopt(node)
    elif record.kind == records.DELIVERED and fields["id"] in session.graph.by_id:
        session.graph.by_id[fields["id"]].delivered = True
        session.waiting.abandoned.discard(fields["id"])
