"""Trajectories as an Arrow stream, one batch each, read from their segments one at a time."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pyarrow as pa
import pyarrow.ipc as ipc

from towline.schema import SchemaError, Trajectory
from towline.schema.columns import DAMAGED, conform
from towline.schema.files import dump_json
from towline.server.errors import Damaged
from towline.server.reading import Stored
from towline.server.segments import SCHEMA, Segments, write_options

log = logging.getLogger("towline.server")
ARROW = "application/vnd.apache.arrow.stream"


class _Sink:
    """What was written since it was last asked."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        return None

    def close(self) -> None:
        self.closed = True

    def take(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


async def arrow_stream(segments: Segments, stored: Stored) -> AsyncIterator[bytes]:
    """A batch for each trajectory, then, if some are damaged, an empty one whose metadata names them with the reasons."""
    sink, damaged = _Sink(), dict(stored.broken)
    options = write_options([piece.length for piece in stored.pieces.values()])
    with ipc.new_stream(pa.PythonFile(sink, mode="w"), SCHEMA, options=options) as writer:
        for session_id, piece in stored.pieces.items():
            try:
                table = conform(Trajectory, await segments.read(piece)).cast(SCHEMA)
            except (Damaged, SchemaError) as error:
                log.error("the trajectory of session %s is damaged: %s", session_id, error)
                damaged[session_id] = str(error)
                continue
            writer.write_table(table)
            yield sink.take()
        if damaged:
            empty = pa.RecordBatch.from_pylist([], SCHEMA)
            writer.write_batch(empty, custom_metadata={DAMAGED: dump_json(damaged)})
    yield sink.take()


async def begun(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The stream, once its first bytes are there: what keeps it from beginning is raised here, and not in its middle."""
    first = await anext(stream)

    async def whole() -> AsyncIterator[bytes]:
        yield first
        async for data in stream:
            yield data

    return whole()
