"""Trajectories as Arrow files, in a folder or anywhere fsspec reaches.

A segment is an Arrow file with one record batch for each session that ended at about the same time: what ends together is
made durable together. It is whole and durable before the rows that name it are committed, so a row never names a file that
was not written. Each batch's bytes have a hash of their own in its session's row: damage to one leaves the others readable.

Names are `<store>/<run>/<thousand>/<number>.arrow`. The store's id keeps stores apart that share a location; the run (the
server's epoch with a random part) keeps apart what two copies of one database would write. A crash leaves files that no row
names: a later run of the same store looks for them in the folders of its own earlier runs and nowhere else.

Each store's folder holds a marker that names the store. A file that is missing beside its marker is lost; without the
marker the location is not the one that was written to, or is away, and nothing is said about the file.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.ipc as ipc

from towline.crashpoints import crash_point
from towline.schema import SchemaError, Trajectory
from towline.schema.columns import check_table_version, to_table
from towline.server.errors import Damaged
from towline.server.locations import LocalFolder, Location, open_location

_FOLDER = 1000
"""Most files in one folder."""
_SMALL = 32 * 1024
"""Bytes of a trajectory below which compressing its many short columns takes longer than it saves."""
MARKER = "store.json"
_LEGACY = re.compile(r"[0-9]+/[0-9]{6}/[0-9]{9}\.arrow")
"""Names of segments from before stores had ids."""
_MAGIC = b"ARROW1\0\0"
"""Stands before the first message of an Arrow file, which is its schema."""
_TRIES = 3
"""Looks at a file before it counts as unreadable, and the seconds between them:"""
_AGAIN = 0.1


def write_options(sizes: Sequence[int]) -> ipc.IpcWriteOptions:
    """How trajectories of these sizes are written."""
    worth = sum(sizes) >= _SMALL * len(sizes) and pa.Codec.is_available("zstd")
    return ipc.IpcWriteOptions(compression="zstd" if worth else None)


SCHEMA: pa.Schema = to_table(Trajectory, []).schema


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a trajectory is, and what its bytes must hash to."""

    segment: str
    row: int
    offset: int
    length: int
    sha256: str

    @property
    def place(self) -> str:
        """Where in its segment."""
        return f"{self.row}:{self.offset}:{self.length}"

    @classmethod
    def at(cls, segment: str, place: str, sha256: str) -> Piece:
        """Raises `Damaged` for a row that names no place."""
        try:
            row, offset, length = map(int, place.split(":"))
            if min(row, offset, length) < 0:
                raise ValueError("negative")
        except (AttributeError, ValueError) as error:
            raise Damaged(f"the row of segment {segment} names no place in it: {place!r}") from error
        return cls(segment, row, offset, length, sha256)


class Segments:
    """The segments at one location. What is not `own` is only ever read."""

    def __init__(self, place: str | Path | Location):
        self.location = open_location(place) if isinstance(place, str | Path) else place
        self.store = ""
        self._run = ""
        self._numbers = itertools.count(1)

    def own(self, store: str, run: str) -> None:
        """From here on this is the location of that store, and its server's run writes to it."""
        self.store, self._run = store, run

    # Markers

    async def marked(self, store: str) -> bool:
        """Whether the location holds segments of that store. Raises `OSError` if that cannot be known."""
        return await asyncio.to_thread(self.location.exists, f"{store}/{MARKER}")

    async def mark(self, store: str, database: str, mark: str) -> None:
        """Say that the folder belongs to a store. By the mark, which changes, an older copy of the folder is known."""
        told = {"format": 1, "store": store, "database": database, "mark": mark, "written": time.time()}
        await asyncio.to_thread(self.location.write, f"{store}/{MARKER}", orjson.dumps(told))

    async def mark_of(self, store: str) -> str:
        """The mark of a store's folder; empty if there is none to read."""
        return await asyncio.to_thread(self._mark_of, store)

    def _mark_of(self, store: str) -> str:
        try:
            with self.location.open(f"{store}/{MARKER}") as file:
                return str(orjson.loads(file.read()).get("mark", ""))
        except (AttributeError, FileNotFoundError, ValueError):
            return ""

    # Writing

    async def write(self, trajectories: Sequence[Trajectory]) -> list[Piece | SchemaError]:
        """A segment of the trajectories, durable on return; an error in the place of one that cannot be written."""
        number = next(self._numbers)
        name = f"{self.store}/{self._run}/{number // _FOLDER:06d}/{number:09d}.arrow"
        return await asyncio.to_thread(self._write, trajectories, name)

    def _write(self, trajectories: Sequence[Trajectory], name: str) -> list[Piece | SchemaError]:
        batches = [_batch(trajectory) for trajectory in trajectories]
        options = write_options([batch.nbytes for batch in batches if isinstance(batch, pa.RecordBatch)])
        sink = pa.BufferOutputStream()
        places: list[tuple[int, int] | SchemaError] = []
        with ipc.new_file(sink, SCHEMA, options=options) as writer:
            for batch in batches:
                if isinstance(batch, SchemaError):
                    places.append(batch)
                    continue
                start = sink.tell()
                writer.write_batch(batch)
                places.append((start, sink.tell() - start))
        data = sink.getvalue()
        crash_point("server.before_segment")
        self.location.write(name, data)
        crash_point("server.after_segment")
        rows = itertools.count()
        return [
            place if isinstance(place, SchemaError) else Piece(name, next(rows), *place, _hash(data, *place))
            for place in places
        ]

    # Reading

    async def read(self, piece: Piece) -> pa.Table:
        """The one-row table of a trajectory. `Damaged` if it is not what was written; `OSError` if the location is away."""
        return await asyncio.to_thread(self._read, piece)

    def _read(self, piece: Piece) -> pa.Table:
        data, schema = self._checked(piece)
        try:
            return pa.Table.from_batches([ipc.read_record_batch(_message(data), schema)])
        except (OSError, StopIteration, ValueError, pa.ArrowException) as error:
            raise Damaged(f"segment {piece.segment} cannot be read: {error}") from error

    async def check(self, pieces: Sequence[Piece]) -> dict[Piece, str]:
        """Those that cannot be read, each with the reason. Raises `OSError` if the location is away."""
        return await asyncio.to_thread(self._check, pieces)

    def _check(self, pieces: Sequence[Piece]) -> dict[Piece, str]:
        damaged: dict[Piece, str] = {}
        for piece in pieces:
            try:
                self._checked(piece)
            except Damaged as error:
                damaged[piece] = str(error)
        return damaged

    def _checked(self, piece: Piece) -> tuple[pa.Buffer, pa.Schema]:
        """The bytes of a piece, if they are what was written, and the columns of its segment."""
        for left in reversed(range(_TRIES)):
            try:
                with self.location.open(piece.segment) as file:
                    data = file.read_at(piece.length, piece.offset)
                    if len(data) < piece.length:
                        raise Damaged(f"segment {piece.segment} is cut off: it has {file.size()} bytes")
                    if hashlib.sha256(data).hexdigest() != piece.sha256:
                        raise Damaged(f"segment {piece.segment} is not what was written: a hash differs")
                    return pa.py_buffer(data), _schema(file, piece)
            except FileNotFoundError as error:
                self.located(piece.segment, error)
                raise Damaged(f"segment {piece.segment} is missing") from error
            except OSError as error:
                if not left:
                    self.located(piece.segment, error)
                    raise Damaged(f"segment {piece.segment} cannot be read: {error}") from error
            time.sleep(_AGAIN)
        raise AssertionError("unreachable")

    def located(self, segment: str, error: OSError) -> None:
        """Raise `OSError` unless the location is the one that the segment was written to."""
        if _LEGACY.fullmatch(segment):
            if isinstance(self.location, LocalFolder) and not self.location.folder.is_dir():
                raise error
            return
        if not self.location.exists(f"{segment.partition('/')[0]}/{MARKER}"):
            raise OSError(
                f"{self.location.name} does not hold the segments of this store: is it mounted? ({error})"
            ) from error

    # Removing

    async def delete(self, names: Sequence[str]) -> None:
        """Names that are not there are fine: a crash may have come between the file and the row. Others' files stay."""
        await asyncio.to_thread(self._delete, names)

    def _delete(self, names: Sequence[str]) -> None:
        others = self._others() if any(map(_LEGACY.fullmatch, names)) else []
        for name in names:
            if name.startswith(f"{self.store}/") or (_LEGACY.fullmatch(name) and not others):
                self.location.delete(name)

    def _others(self) -> list[str]:
        """Other stores that share the location."""
        folders = self.location.folders()
        return [name for name in folders if name != self.store and self.location.exists(f"{name}/{MARKER}")]

    async def names(self, folder: str) -> list[str]:
        """Every segment in a folder of this store; unfinished files are removed on the way."""
        if not folder.startswith(f"{self.store}/"):
            return []
        return await asyncio.to_thread(self._names, folder)

    def _names(self, folder: str) -> list[str]:
        self.location.tidy(folder)
        return [name for name in self.location.find(folder) if name.endswith(".arrow")]


def _batch(trajectory: Trajectory) -> pa.RecordBatch | SchemaError:
    try:
        (batch,) = trajectory.to_arrow().combine_chunks().to_batches()
    except SchemaError as error:
        return error
    return batch


def _hash(data: pa.Buffer, offset: int, length: int) -> str:
    return hashlib.sha256(data.slice(offset, length)).hexdigest()


def _message(data: pa.Buffer) -> ipc.Message:
    """The batch in the bytes of a piece. Those of a segment's first begin where the file does."""
    first = data.slice(0, len(_MAGIC)).to_pybytes() == _MAGIC
    messages = ipc.MessageReader.open_stream(pa.BufferReader(data.slice(len(_MAGIC) if first else 0)))
    if first:
        messages.read_next_message()
    return messages.read_next_message()


def _schema(file: pa.NativeFile, piece: Piece) -> pa.Schema:
    """The columns of a segment. They stand at its end and at its beginning: one of both may be damaged."""
    found: list[pa.Schema] = []
    for read in (_footer, _header):
        try:
            schema = read(file)
        except (OSError, ValueError, pa.ArrowException):
            continue
        if schema.equals(SCHEMA, check_metadata=True):
            return schema
        found.append(schema)
    if not found or any(not one.equals(found[0], check_metadata=True) for one in found):
        raise Damaged(f"segment {piece.segment} is not what was written: its columns are damaged")
    try:
        check_table_version(found[0].empty_table())
    except SchemaError as error:
        raise Damaged(f"segment {piece.segment} cannot be read: {error}") from error
    return found[0]


def _footer(file: pa.NativeFile) -> pa.Schema:
    return ipc.open_file(file).schema


def _header(file: pa.NativeFile) -> pa.Schema:
    file.seek(len(_MAGIC))
    return ipc.read_schema(file)
