"""Segments: trajectories as Arrow files, in a folder or any fsspec location.

A segment is an Arrow file with one record batch per session; sessions that end together share one, so they become durable
together. It is complete and durable before the rows that name it are committed, so a row never names a file that was not
written. Each session's row has a hash of its batch: damage to one batch leaves the others readable.

Names are `<store>/<run>/[<writer>-]<thousand>/<number>.arrow`. The store id separates stores that share a location; the
run (the server's epoch plus a random part) separates what two copies of one database write; the writer separates the node
hosts of one run. A crash leaves files that no row names: a later run of the same store looks for them in the folders of its
own earlier runs only.

Each store's folder has a marker that names the store. A file that is missing beside its marker is lost; without the marker
the location is down, or not the one that was written to, and nothing is concluded about the file.
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

from towline.cluster.locations import LocalFolder, Location, open_location
from towline.common.crashpoints import crash_point
from towline.errors import DamagedData
from towline.schema import SchemaError, Trajectory
from towline.schema.files import check_table_version, to_table

_FOLDER = 1000
"""Most files in one folder."""
_SMALL = 32 * 1024
"""Bytes of a trajectory below which compressing its many short columns costs more than it saves."""
MARKER = "store.json"
_LEGACY = re.compile(r"[0-9]+/[0-9]{6}/[0-9]{9}\.arrow")
"""Names of segments in stores without ids."""
_MAGIC = b"ARROW1\0\0"
"""Precedes the first message of an Arrow file, which is its schema."""
_TRIES, _RETRY_SECONDS = 3, 0.1
"""Reads before a file counts as unreadable, and the pause between them."""


def write_options(sizes: Sequence[int]) -> ipc.IpcWriteOptions:
    """Compression for trajectories of these sizes."""
    worth = sum(sizes) >= _SMALL * len(sizes) and pa.Codec.is_available("zstd")
    return ipc.IpcWriteOptions(compression="zstd" if worth else None)


SCHEMA: pa.Schema = to_table(Trajectory, []).schema


@dataclass(frozen=True, slots=True)
class SegmentSlice:
    """Where a trajectory is stored, and the hash of its bytes."""

    segment: str
    row: int
    offset: int
    length: int
    sha256: str

    @property
    def place(self) -> str:
        """The position in the segment, as its row stores it."""
        return f"{self.row}:{self.offset}:{self.length}"

    @classmethod
    def at(cls, segment: str, place: str, sha256: str) -> SegmentSlice:
        """The slice that a row names; raises `DamagedData` if the row is damaged."""
        try:
            row, offset, length = map(int, place.split(":"))
            if min(row, offset, length) < 0:
                raise ValueError("negative")
        except (AttributeError, ValueError) as error:
            raise DamagedData(f"the row of segment {segment} has no valid position: {place!r}") from error
        return cls(segment, row, offset, length, sha256)


class Segments:
    """The segments at one location. Segments of other stores are only read."""

    def __init__(self, place: str | Path | Location, *, writer: str = ""):
        """`writer` is unique among all that write in one run: two writers never share a file name."""
        self.location = open_location(place) if isinstance(place, str | Path) else place
        self.store = ""
        self.run = ""
        """Folder of what is written, relative to the store's."""
        self._writer = f"{writer}-" if writer else ""
        self._numbers = itertools.count(1)

    def set_owner(self, store: str, run: str) -> None:
        """Write as this run of the store from here on."""
        self.store, self.run = store, run

    # Markers

    async def marked(self, store: str) -> bool:
        """Whether the location has the marker of that store. Raises `OSError` if the location is down."""
        return await asyncio.to_thread(self.location.exists, f"{store}/{MARKER}")

    async def mark(self, store: str, database: str, mark: str) -> None:
        """Write the marker of a store. The mark changes with each move, so an older copy of the folder is recognized."""
        marker = {"format": 1, "store": store, "database": database, "mark": mark, "written": time.time()}
        await asyncio.to_thread(self.location.write, f"{store}/{MARKER}", orjson.dumps(marker))

    async def mark_of(self, store: str) -> str:
        """The mark in a store's marker; empty if it cannot be read."""
        return await asyncio.to_thread(self._mark_of, store)

    def _mark_of(self, store: str) -> str:
        try:
            with self.location.open(f"{store}/{MARKER}") as file:
                return str(orjson.loads(file.read()).get("mark", ""))
        except (AttributeError, FileNotFoundError, ValueError):
            return ""

    # Writing

    async def write(self, trajectories: Sequence[Trajectory]) -> list[SegmentSlice | SchemaError]:
        """Write a segment, durable on return; returns a slice per trajectory, or the error of one that cannot be written."""
        number = next(self._numbers)
        name = f"{self.store}/{self.run}/{self._writer}{number // _FOLDER:06d}/{number:09d}.arrow"
        return await asyncio.to_thread(self._write, trajectories, name)

    def _write(self, trajectories: Sequence[Trajectory], name: str) -> list[SegmentSlice | SchemaError]:
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
            place if isinstance(place, SchemaError) else SegmentSlice(name, next(rows), *place, _hash(data, *place))
            for place in places
        ]

    # Reading

    async def read(self, piece: SegmentSlice) -> pa.Table:
        """The one-row table of a trajectory. Raises `DamagedData` if it was changed, `OSError` if the location is down."""
        return await asyncio.to_thread(self._read, piece)

    def _read(self, piece: SegmentSlice) -> pa.Table:
        data, schema = self._checked(piece)
        try:
            return pa.Table.from_batches([ipc.read_record_batch(_message(data), schema)])
        except (OSError, StopIteration, ValueError, pa.ArrowException) as error:
            raise DamagedData(f"segment {piece.segment} cannot be read: {error}") from error

    async def check(self, pieces: Sequence[SegmentSlice]) -> dict[SegmentSlice, str]:
        """The slices that cannot be read, with reasons. Raises `OSError` if the location is down."""
        return await asyncio.to_thread(self._check, pieces)

    def _check(self, pieces: Sequence[SegmentSlice]) -> dict[SegmentSlice, str]:
        damaged: dict[SegmentSlice, str] = {}
        for piece in pieces:
            try:
                self._checked(piece)
            except DamagedData as error:
                damaged[piece] = str(error)
        return damaged

    def _checked(self, piece: SegmentSlice) -> tuple[pa.Buffer, pa.Schema]:
        """The bytes of a slice, verified by hash, and the schema of its segment."""
        for left in reversed(range(_TRIES)):
            try:
                with self.location.open(piece.segment) as file:
                    data = file.read_at(piece.length, piece.offset)
                    if len(data) < piece.length:
                        raise DamagedData(f"segment {piece.segment} is truncated: it has {file.size()} bytes")
                    if hashlib.sha256(data).hexdigest() != piece.sha256:
                        raise DamagedData(f"segment {piece.segment} is not what was written: its hash differs")
                    return pa.py_buffer(data), _schema(file, piece)
            except FileNotFoundError as error:
                self.check_location(piece.segment, error)
                raise DamagedData(f"segment {piece.segment} is missing") from error
            except OSError as error:
                if not left:
                    self.check_location(piece.segment, error)
                    raise DamagedData(f"segment {piece.segment} cannot be read: {error}") from error
            time.sleep(_RETRY_SECONDS)
        raise AssertionError("unreachable")

    def check_location(self, segment: str, error: OSError) -> None:
        """Raise `OSError` unless this is the location that the segment was written to."""
        if _LEGACY.fullmatch(segment):
            if isinstance(self.location, LocalFolder) and not self.location.folder.is_dir():
                raise error
            return
        if not self.location.exists(f"{segment.partition('/')[0]}/{MARKER}"):
            raise OSError(
                f"{self.location.name} does not have the segments of this store: is it mounted? ({error})"
            ) from error

    # Removing

    async def delete(self, names: Sequence[str]) -> None:
        """Delete segments of this store; missing ones are fine, since a crash can come between file and row."""
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
        """Every segment in a folder of this store; also removes unfinished files."""
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
    """The batch in the bytes of a slice. The first slice of a segment also contains the head of the file."""
    first = data.slice(0, len(_MAGIC)).to_pybytes() == _MAGIC
    messages = ipc.MessageReader.open_stream(pa.BufferReader(data.slice(len(_MAGIC) if first else 0)))
    if first:
        messages.read_next_message()
    return messages.read_next_message()


def _schema(file: pa.NativeFile, piece: SegmentSlice) -> pa.Schema:
    """The schema of a segment. It is stored at both ends of the file: one of the two may be damaged."""
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
        raise DamagedData(f"segment {piece.segment} is not what was written: its schema is damaged")
    try:
        check_table_version(found[0].empty_table())
    except SchemaError as error:
        raise DamagedData(f"segment {piece.segment} cannot be read: {error}") from error
    return found[0]


def _footer(file: pa.NativeFile) -> pa.Schema:
    return ipc.open_file(file).schema


def _header(file: pa.NativeFile) -> pa.Schema:
    file.seek(len(_MAGIC))
    return ipc.read_schema(file)
