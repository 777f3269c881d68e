"""Segments: the files of a journal, written under a draft name, sealed when they are complete, read frame by frame.

A segment has a versioned header, frames, and a seal that holds its number of records. A frame's checksum covers its
segment and offset, so that a valid frame is valid only where it was written.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from towline.crashpoints import crash_point
from towline.errors import ConfigError
from towline.gateway.journal.codec import JournalError

_VERSION = 1
_SEGMENT_HEADER = struct.Struct("<8sIQI")
"""magic, version, segment number, checksum of these"""
_SEGMENT_MAGIC = b"TOWLJRNL"
FRAME_HEADER = struct.Struct("<4sIIB")
"""magic, payload length, checksum, type"""
_FRAME_MAGIC = b"\xff\xfa\xf5\xff"  # bytes that occur neither in UTF-8 nor, four in a row, in arrays of token ids
_FRAME_PLACE = struct.Struct("<QQIB")
"""What a checksum covers besides the payload: segment number, offset, payload length, type"""
_DATA, _SEAL = 1, 2
_SEAL_PAYLOAD = struct.Struct("<Q")
_BUFFER_BYTES = 1 << 20
"""About as much as is joined for one write(), so that a large batch is not copied as a whole."""


class JournalCorrupt(JournalError):
    """Damage that no crash explains. Nothing is skipped; the file stays as it is."""

    def __init__(self, path: Path, offset: int, reason: str):
        super().__init__(f"{path} is damaged at offset {offset}: {reason}; restore the file, or move the folder away")
        self.path = path
        self.offset = offset
        self.reason = reason


class UnknownFormat(ConfigError):
    """A segment of another version of Towline."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The two calls that can fail under load, replaceable so that tests can count them and make them fail."""

    write: Callable[[int, memoryview], int] = os.write
    sync: Callable[[int], None] = os.fdatasync


class SegmentWriter:
    """Writes one segment: under a draft name until `publish`, so that a named segment always has its header."""

    def __init__(self, folder: Path, number: int, disk: Disk):
        self.number = number
        self.count = 0
        self.written = 0
        """Bytes the kernel has."""
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
        """Give the file its name, in place of what had it; the folder is synced when this returns."""
        self.write()
        self.sync()
        crash_point(f"journal.{step}_written")
        os.rename(self._draft, self._path)
        self._published = True
        crash_point(f"journal.{step}_renamed")
        sync_folder(self._path.parent)

    def close(self) -> None:
        """Close the file; a draft that was not published goes."""
        os.close(self._file)
        if not self._published:  # else the draft name may already be that of a compaction
            self._draft.unlink(missing_ok=True)


class SegmentReader:
    """Streams one segment's payloads; then `end` is where its valid frames end and `sealed` says if it is complete."""

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
                    raise self._corrupt("a frame behind the seal" if self.sealed else f"a frame of unknown type {kind}")
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
            raise UnknownFormat(f"{self._path} has format {version}, this version of Towline reads {_VERSION}")
        self.end = len(head)

    def check(self, frame: bytes, payload: bytes | memoryview, offset: int) -> int | None:
        """The frame's type, `None` if it is not valid at this place."""
        if len(frame) < FRAME_HEADER.size:
            return None
        magic, length, checksum, kind = FRAME_HEADER.unpack(frame)
        if magic != _FRAME_MAGIC or length != len(payload):
            return None
        place = zlib.crc32(_FRAME_PLACE.pack(self._number, offset, length, kind))
        return int(kind) if zlib.crc32(payload, place) == checksum else None

    def _require_torn(self, file: BinaryIO) -> None:
        """A crash tears the end of the newest segment only: nothing valid may follow the damage."""
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
    """The records of a segment that are valid where they stand, whatever is between them."""
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


def rewrite(folder: Path, number: int, payloads: Iterable[bytes], disk: Disk, step: str) -> int:
    """Replace a segment by a sealed one with these payloads, in one step; its size."""
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


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
