"""Segments: the files of a journal. Written under a draft name, sealed when complete, read frame by frame, repaired.

A segment has a versioned header, frames, and a seal with its number of records. A frame's checksum covers its segment and
offset, so that a valid frame is valid only where it was written. It holds one record: a kind, JSON fields and raw arrays.
Invariant: `decode(encode(…))` returns the same kind, fields and arrays, and copies no array.

`repair` handles damage that no crash explains: each damaged segment is quarantined and replaced, in one step, by a sealed
one with the records that are still valid where they stand. Segments behind a gap move up. A crash during the repair leaves
some records twice, which readers tolerate.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import re
import socket
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import orjson

from towline.common.crashpoints import crash_point
from towline.common.files import Quarantine, lock_file, sync_folder
from towline.errors import ConfigError, TowlineError

_ARRAY_ALIGNMENT = 16


class JournalError(TowlineError):
    """The journal cannot complete an operation. After a failed write or sync it acknowledges nothing more."""

    failure = "storage"


class RecordError(JournalError):
    """A record that cannot be encoded, or bytes that are not a record."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A decoded payload."""

    kind: str
    fields: dict[str, Any]
    """JSON values."""
    arrays: dict[str, npt.NDArray[Any]]
    """Read-only, little-endian views into the payload."""


def encode(kind: str, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> bytes:
    """A JSON header, then the raw little-endian bytes of each array, aligned. Floats that may be NaN or infinite must be in
    an array: JSON has neither."""
    shapes: list[tuple[str, str, tuple[int, ...]]] = []
    parts: list[bytes | memoryview] = []
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc":
            raise RecordError(f"array {name!r} of {kind!r}: {array.dtype} has no raw little-endian form")
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        shapes.append((name, little.dtype.str, array.shape))
        parts += (little.data.cast("B") if little.size else b"", bytes(-little.nbytes % _ARRAY_ALIGNMENT))
    try:
        header = orjson.dumps((kind, fields, shapes))
    except TypeError as error:
        raise RecordError(f"the fields of {kind!r} are not JSON: {error}") from error
    return b"".join((struct.pack("<I", len(header)), header, bytes(-(4 + len(header)) % _ARRAY_ALIGNMENT), *parts))


def decode(payload: bytes) -> Record:
    """The inverse of `encode`; copies no array."""
    try:
        (length,) = struct.unpack_from("<I", payload)
        kind, fields, shapes = orjson.loads(memoryview(payload)[4 : 4 + length])
        offset = 4 + length + -(4 + length) % _ARRAY_ALIGNMENT
        arrays = {}
        for name, code, shape in shapes:
            array = np.frombuffer(payload, np.dtype(code), math.prod(shape), offset).reshape(shape)
            arrays[name] = array
            offset += array.nbytes + -array.nbytes % _ARRAY_ALIGNMENT
    except (struct.error, ValueError, TypeError, OverflowError) as error:
        raise RecordError(f"not an encoded record: {error}") from error
    if offset != len(payload):
        raise RecordError(f"not an encoded record: {len(payload)} bytes, expected {offset}")
    return Record(kind, fields, arrays)


_VERSION = 1
_SEGMENT_HEADER = struct.Struct("<8sIQI")
"""magic, version, segment number, checksum of these"""
_SEGMENT_MAGIC = b"TOWLJRNL"
FRAME_HEADER = struct.Struct("<4sIIB")
"""magic, payload length, checksum, type"""
_FRAME_MAGIC = b"\xff\xfa\xf5\xff"  # bytes that occur neither in UTF-8 nor, four in a row, in arrays of token ids
_FRAME_PLACE = struct.Struct("<QQIB")
"""Covered by the checksum besides the payload: segment number, offset, payload length, type"""
_DATA, _SEAL = 1, 2
LOCK = "lock"
"""The lock file in the journal's folder."""
_SEAL_PAYLOAD = struct.Struct("<Q")
_BUFFER_BYTES = 1 << 20
"""Approximate size of one write(), so that a large batch is not copied as a whole."""


class JournalCorrupt(JournalError):
    """Damage that no crash explains. Nothing is skipped; the file is left unchanged."""

    def __init__(self, path: Path, offset: int, reason: str):
        super().__init__(f"{path} is damaged at offset {offset}: {reason}; restore the file, or move the folder away")
        self.path = path
        self.offset = offset
        self.reason = reason


class UnknownJournalFormat(ConfigError):
    """A segment written by an incompatible version of Towline."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The two system calls that can fail under load; tests replace them to count calls and inject failures."""

    write: Callable[[int, memoryview], int] = os.write
    sync: Callable[[int], None] = os.fdatasync


class SegmentWriter:
    """Writes one segment: under a draft name until `publish`, so that a published segment always has its header."""

    def __init__(self, folder: Path, number: int, disk: Disk):
        self.number = number
        self.count = 0
        self.written = 0
        """Bytes handed to the kernel."""
        self._path = segment_path(folder, number)
        self._draft = self._path.with_suffix(".tmp")
        self._disk = disk
        head = struct.pack("<8sIQ", _SEGMENT_MAGIC, _VERSION, number)
        self._buffer: list[bytes] = [head + struct.pack("<I", zlib.crc32(head))]
        self.end = _SEGMENT_HEADER.size
        """Bytes written and buffered."""
        self._published = False
        self._file = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def add(self, payload: bytes, kind: int = _DATA) -> None:
        checksum = zlib.crc32(payload, zlib.crc32(_FRAME_PLACE.pack(self.number, self.end, len(payload), kind)))
        self._buffer += (FRAME_HEADER.pack(_FRAME_MAGIC, len(payload), checksum, kind), payload)
        self.end += FRAME_HEADER.size + len(payload)
        self.count += kind == _DATA
        if self.end - self.written > _BUFFER_BYTES:
            self.write()

    def write(self) -> None:
        left = memoryview(b"".join(self._buffer))
        self._buffer.clear()
        while left:
            count = self._disk.write(self._file, left)
            if count <= 0:
                raise OSError(errno.EIO, "write() wrote nothing", str(self._path))
            left = left[count:]
        self.written = self.end

    def sync(self) -> None:
        self._disk.sync(self._file)

    def seal(self) -> None:
        self.add(_SEAL_PAYLOAD.pack(self.count), _SEAL)
        self.write()
        self.sync()

    def publish(self, step: str) -> None:
        """Rename the draft to its final name, replacing an existing file; the folder is synced on return."""
        self.write()
        self.sync()
        crash_point(f"journal.{step}_written")
        os.rename(self._draft, self._path)
        self._published = True
        crash_point(f"journal.{step}_renamed")
        sync_folder(self._path.parent)

    def close(self) -> None:
        """Close the file; an unpublished draft is deleted."""
        os.close(self._file)
        if not self._published:  # otherwise the draft name may already belong to a compaction
            self._draft.unlink(missing_ok=True)


class SegmentReader:
    """Streams one segment's payloads; afterwards `end` is the end of its valid frames, `sealed` whether it is complete."""

    def __init__(self, folder: Path, number: int, *, newest: bool, limit: int | None = None):
        self.count = 0
        self.end = 0
        self.size = 0
        self.sealed = False
        self._path = segment_path(folder, number)
        self._number = number
        self._newest = newest
        """Only the newest segment may lack its seal and end in a torn frame."""
        self._limit = limit

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb", buffering=_BUFFER_BYTES) as file:
            self.size = os.fstat(file.fileno()).st_size if self._limit is None else self._limit
            self._read_header(file)
            while self.end < self.size:
                frame = file.read(min(FRAME_HEADER.size, self.size - self.end))
                length = int.from_bytes(frame[4:8], "little")
                payload = file.read(min(length, self.size - self.end - len(frame)))
                kind = self.check(frame, payload, self.end)
                if kind is None:
                    self._require_torn(file)
                    return
                if self.sealed or kind not in (_DATA, _SEAL):
                    raise self._corrupt("a frame after the seal" if self.sealed else f"a frame of unknown type {kind}")
                if kind == _SEAL:
                    if payload != _SEAL_PAYLOAD.pack(self.count):
                        raise self._corrupt(f"the seal does not fit the {self.count} records before it")
                    self.sealed = True
                self.end += len(frame) + len(payload)
                if kind == _DATA:
                    self.count += 1
                    yield payload
        if not (self.sealed or self._newest):
            raise self._corrupt("the segment ends without its seal")

    def _read_header(self, file: BinaryIO) -> None:
        head = file.read(_SEGMENT_HEADER.size)
        if len(head) < _SEGMENT_HEADER.size:
            raise self._corrupt("the segment header is cut short")
        magic, version, number, checksum = _SEGMENT_HEADER.unpack(head)
        if magic != _SEGMENT_MAGIC or checksum != zlib.crc32(head[:-4]) or number != self._number:
            raise self._corrupt("the segment header is not that of this segment")
        if version != _VERSION:
            raise UnknownJournalFormat(f"{self._path} has format {version}, this version of Towline reads {_VERSION}")
        self.end = len(head)

    def check(self, frame: bytes, payload: bytes | memoryview, offset: int) -> int | None:
        """The frame's type; `None` if it is not valid at this offset."""
        if len(frame) < FRAME_HEADER.size:
            return None
        magic, length, checksum, kind = FRAME_HEADER.unpack(frame)
        if magic != _FRAME_MAGIC or length != len(payload):
            return None
        place = zlib.crc32(_FRAME_PLACE.pack(self._number, offset, length, kind))
        return int(kind) if zlib.crc32(payload, place) == checksum else None

    def _require_torn(self, file: BinaryIO) -> None:
        """A crash tears only the end of the newest segment: no valid frame may follow the damage."""
        if not self._newest or self.sealed:
            raise self._corrupt("a frame with a wrong checksum in a complete segment")
        file.seek(self.end)
        rest = file.read(self.size - self.end)
        at = rest.find(_FRAME_MAGIC, 1)
        while at >= 0:
            start = at + FRAME_HEADER.size
            length = int.from_bytes(rest[at + 4 : at + 8], "little")
            if self.check(rest[at:start], memoryview(rest)[start : start + length], self.end + at) is not None:
                raise self._corrupt(f"a frame with a wrong checksum, and a valid one at {self.end + at}")
            at = rest.find(_FRAME_MAGIC, at + 1)

    def _corrupt(self, reason: str) -> JournalCorrupt:
        return JournalCorrupt(self._path, self.end, reason)


def valid_payloads(folder: Path, number: int) -> Iterator[bytes]:
    """The records of a segment that are valid at their offset, skipping anything in between."""
    data = segment_path(folder, number).read_bytes()
    reader = SegmentReader(folder, number, newest=True)
    at = data.find(_FRAME_MAGIC)
    while at >= 0:
        start = at + FRAME_HEADER.size
        end = start + int.from_bytes(data[at + 4 : at + 8], "little")
        kind = reader.check(data[at:start], memoryview(data)[start:end], at)
        if kind == _DATA:
            yield data[start:end]
        at = data.find(_FRAME_MAGIC, at + 1 if kind is None else end)


def rewrite_segment(folder: Path, number: int, payloads: Iterable[bytes], disk: Disk, step: str) -> int:
    """Atomically replace a segment with a sealed one of these payloads; returns its size."""
    segment = SegmentWriter(folder, number, disk)
    try:
        for payload in payloads:
            segment.add(payload)
        segment.seal()
        segment.publish(step)
    finally:
        segment.close()
    return segment.end


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.seg"


def segment_numbers(folder: Path) -> list[int]:
    numbers = sorted(int(path.stem) for path in folder.iterdir() if re.fullmatch(r"\d{8,}\.seg", path.name))
    for before, after in itertools.pairwise(numbers):
        if after != before + 1:
            raise JournalCorrupt(segment_path(folder, before + 1), 0, "the segment is missing")
    return numbers


def repair(folder: Path, quarantine: Quarantine, disk: Disk) -> None:
    """Repair all segments of a journal that is not open."""
    for draft in folder.glob("[0-9]*.tmp"):
        if draft.is_dir():
            quarantine.move(draft, "expected a file")
    files = {int(path.stem): path for path in folder.iterdir() if re.fullmatch(r"\d{8,}\.seg", path.name)}
    numbers = sorted(files)
    for place, number in enumerate(numbers):
        target = numbers[0] + place
        payloads = _valid_records(folder, number, newest=number == numbers[-1], quarantine=quarantine)
        if payloads is None and target == number:
            continue
        rewrite_segment(
            folder, target, valid_payloads(folder, number) if payloads is None else payloads, disk, "recover"
        )
        if target != number:
            segment_path(folder, number).unlink(missing_ok=True)
            sync_folder(folder)


def _valid_records(folder: Path, number: int, *, newest: bool, quarantine: Quarantine) -> Iterator[bytes] | None:
    """The valid records of a damaged segment; `None` for an intact one."""
    path = segment_path(folder, number)
    reader = SegmentReader(folder, number, newest=newest)
    try:
        for _ in reader:
            pass
    except UnknownJournalFormat as error:
        quarantine.copy(path, str(error))
        return iter(())
    except JournalCorrupt as error:
        quarantine.copy(path, f"{error.reason}, at offset {error.offset}")
        return valid_payloads(folder, number)
    except OSError as error:
        # A folder in its place, or an unreadable disk.
        quarantine.move(path, str(error))
        return iter(())
    return None


def make_folder(folder: Path) -> None:
    """Create the folder and its missing parents, durably."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def lock_folder(folder: Path) -> int:
    """Lock the folder for this process; the kernel releases the lock when the process ends, however it ends."""
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock_file(handle)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        who = f"process {os.getpid()} ({Path(sys.argv[0]).name}) on {socket.gethostname()} since {since}"
        os.ftruncate(handle, 0)
        os.write(handle, who.encode())
    except BlockingIOError as error:
        who = os.read(handle, 1000).decode(errors="replace") or "another process"
        os.close(handle)
        raise ConfigError(f"the journal folder {folder} is in use by {who}; stop it, or set another folder") from error
    except OSError:
        os.close(handle)
        raise
    return handle
