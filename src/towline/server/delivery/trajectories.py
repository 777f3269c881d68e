"""Trajectories on their way to a client: an Arrow stream with one batch each, and damaged results flagged."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence

import pyarrow as pa
import pyarrow.ipc as ipc

from towline.cluster.segments import SCHEMA, Segments, write_options
from towline.errors import DamagedData
from towline.schema import Result, SchemaError, Trajectory
from towline.schema.files import DAMAGED, conform, dump_json
from towline.server.store import queries
from towline.server.store.database import Store
from towline.server.store.queries import StoredTrajectories

log = logging.getLogger("towline.server")
ARROW = "application/vnd.apache.arrow.stream"


class _Sink:
    """Collects what was written since the last `take`."""

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


async def arrow_stream(segments: Segments, stored: StoredTrajectories) -> AsyncIterator[bytes]:
    """One batch per trajectory; if some are damaged, a last empty batch whose metadata maps their ids to the reasons."""
    sink, damaged = _Sink(), dict(stored.broken)
    options = write_options([piece.length for piece in stored.pieces.values()])
    with ipc.new_stream(pa.PythonFile(sink, mode="w"), SCHEMA, options=options) as writer:
        for session_id, piece in stored.pieces.items():
            try:
                table = conform(Trajectory, await segments.read(piece)).cast(SCHEMA)
            except (DamagedData, SchemaError) as error:
                log.error("the trajectory of session %s is damaged: %s", session_id, error)
                damaged[session_id] = str(error)
                continue
            writer.write_table(table)
            yield sink.take()
        if damaged:
            empty = pa.RecordBatch.from_pylist([], SCHEMA)
            writer.write_batch(empty, custom_metadata={DAMAGED: dump_json(damaged)})
    yield sink.take()


async def start_stream(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The stream with its first bytes read: an error before them is raised here, not in the middle of the response."""
    first = await anext(stream)

    async def whole() -> AsyncIterator[bytes]:
        yield first
        async for data in stream:
            yield data

    return whole()


async def flag_damaged(store: Store, segments: Segments, results: Sequence[Result]) -> list[Result]:
    """The results with sessions flagged, and not usable, whose trajectory is damaged.

    While the trajectory storage is down nothing is flagged.
    """
    stored = await queries.find_trajectories(store, [one.session_id for result in results for one in result.sessions])
    broken = dict(stored.broken)
    try:
        found = await segments.check(list(stored.pieces.values()))
    except OSError as error:
        log.warning("the trajectories of delivered results could not be checked: %s", error)
        found = {}
    broken |= {session_id: found[piece] for session_id, piece in stored.pieces.items() if piece in found}
    if not broken:
        return list(results)
    for session_id, reason in broken.items():
        log.error("the trajectory of session %s is damaged: %s", session_id, reason)
    return [result.with_damaged(broken) for result in results]
