"""Trajectories as Arrow files, in a folder or anywhere fsspec reaches.

A segment is an Arrow file with one record batch for each session that ended at about the same time: what ends together is
made durable together. It is whole and durable before the rows that name it are committed, so a row never names a file that
is not there. The other way round, a crash leaves files that no row names; those of one run of the server are under its
epoch, and the next run looks there and nowhere else. Each batch's bytes have a hash of their own in its session's row.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc

from towline.crashpoints import crash_point
from towline.errors import ConfigError
from towline.schema import SchemaError, Trajectory
from towline.schema.columns import to_table
from towline.schema.files import write_atomically
from towline.server.errors import Damaged

_FOLDER = 1000
"""Most files in one folder."""
_SMALL = 32 * 1024
"""Bytes of a trajectory below which compressing its many short columns takes longer than it saves."""


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
        row, offset, length = map(int, place.split(":"))
        return cls(segment, row, offset, length, sha256)


class Segments:
    """Files by name: `<epoch>/<thousand>/<number>.arrow`."""

    def __init__(self, place: str | Path):
        """`place` is a folder, or a URL such as `s3://bucket/prefix`."""
        self._folder: Path | None = None
        self._remote: Any = None
        self._root = ""
        self._numbers = itertools.count(1)
        if isinstance(place, str) and "://" in place:
            self._remote, self._root = _remote(place)
        else:
            self._folder = Path(place)

    # Writing

    async def write(self, trajectories: Sequence[Trajectory], epoch: int) -> list[Piece | SchemaError]:
        """A segment of the trajectories, durable on return; an error in the place of one that cannot be written."""
        number = next(self._numbers)
        name = f"{epoch}/{number // _FOLDER:06d}/{number:09d}.arrow"
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
        if self._folder is not None:
            path = self._folder / name
            _make_folder(path.parent, self._folder)
            write_atomically(path, data)
        else:
            self._remote.pipe_file(f"{self._root}/{name}", data.to_pybytes())
        crash_point("server.after_segment")
        rows = itertools.count()
        return [
            place if isinstance(place, SchemaError) else Piece(name, next(rows), *place, _hash(data, *place))
            for place in places
        ]

    # Reading

    async def read(self, piece: Piece) -> pa.Table:
        """The one-row table of a trajectory; `Damaged` if it is not what was written."""
        return await asyncio.to_thread(self._read, piece)

    def _read(self, piece: Piece) -> pa.Table:
        try:
            if self._folder is not None:
                with pa.memory_map(str(self._folder / piece.segment)) as file:
                    data = file.read_buffer()
            else:
                data = pa.py_buffer(self._remote.cat_file(f"{self._root}/{piece.segment}"))
            if _hash(data, piece.offset, piece.length) != piece.sha256:
                raise Damaged(f"segment {piece.segment} is not what was written: a hash differs")
            return pa.Table.from_batches([ipc.open_file(data).get_batch(piece.row)])
        except (OSError, ValueError, pa.ArrowException) as error:
            raise Damaged(f"segment {piece.segment} cannot be read: {error}") from error

    # Removing

    async def delete(self, names: Sequence[str]) -> None:
        """Names that are not there are fine: a crash may have come between the file and the row."""
        await asyncio.to_thread(self._delete, names)

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            if self._folder is not None:
                (self._folder / name).unlink(missing_ok=True)
                continue
            try:
                self._remote.rm_file(f"{self._root}/{name}")
            except FileNotFoundError:
                continue

    async def names(self, epoch: int) -> list[str]:
        """Every segment that the server of that epoch wrote; its unfinished files are removed on the way."""
        return await asyncio.to_thread(lambda: list(self._names(epoch)))

    def _names(self, epoch: int) -> Iterator[str]:
        if self._folder is None:
            root = f"{self._root}/{epoch}"
            for path in self._remote.find(root) if self._remote.exists(root) else ():
                yield str(path).strip("/").removeprefix(self._root.strip("/")).lstrip("/")
            return
        for path in sorted((self._folder / str(epoch)).glob("*/*")):
            if path.suffix == ".tmp":
                path.unlink()
            else:
                yield str(path.relative_to(self._folder))


def _batch(trajectory: Trajectory) -> pa.RecordBatch | SchemaError:
    try:
        (batch,) = trajectory.to_arrow().combine_chunks().to_batches()
    except SchemaError as error:
        return error
    return batch


def _hash(data: pa.Buffer, offset: int, length: int) -> str:
    return hashlib.sha256(data.slice(offset, length)).hexdigest()


def _remote(place: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs

        remote, root = url_to_fs(place)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"server.segments {place!r} cannot be used: {error}") from error
    return remote, str(root).rstrip("/")


def _make_folder(folder: Path, root: Path) -> None:
    """With the names of new folders durable too, up to the root."""
    if folder.is_dir():
        return
    if folder == root:
        folder.mkdir(parents=True, exist_ok=True)
        return
    _make_folder(folder.parent, root)
    folder.mkdir(exist_ok=True)
    above = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(above)
    finally:
        os.close(above)
