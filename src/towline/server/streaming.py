"""Trajectories as an Arrow stream, one batch each, read from their segments one at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pyarrow as pa
import pyarrow.ipc as ipc

from towline.server.segments import SCHEMA, Piece, Segments, write_options

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


async def arrow_stream(segments: Segments, stored: Sequence[Piece]) -> AsyncIterator[bytes]:
    sink = _Sink()
    options = write_options([piece.length for piece in stored])
    with ipc.new_stream(pa.PythonFile(sink, mode="w"), SCHEMA, options=options) as writer:
        for piece in stored:
            table = await segments.read(piece)
            writer.write_table(table.select(SCHEMA.names).cast(SCHEMA))
            yield sink.take()
    yield sink.take()
