"""The journal: an append-only, checksummed log of turns, written before a harness sees its reply.

Invariant: what `append` has acknowledged is in the log after the crash that the mode survives, in order, exactly once.
A record that was never acknowledged may be there or not; half a record never is.

| mode    | `append` returns after                     | process killed     | machine crash, power loss         |
|---------|--------------------------------------------|--------------------|-----------------------------------|
| `GROUP` | fdatasync of the batch that holds it       | survives           | survives                          |
| `OS`    | write() to the kernel                      | survives           | newest segment may lose or tear   |
| `NONE`  | hand-over to the writer thread's memory    | may lose the newest| newest segment may lose or tear   |

A journal is a folder of numbered segments. A segment has a versioned header, frames, and, once it is complete, a seal
that holds its number of records, synced before its successor is created. So only the newest segment can be torn, and a
cut in any other is noticed. A frame's checksum covers its segment and offset: a valid frame is valid only where it was
written, and bytes of a payload cannot pass for one.

Damage that a crash explains (a torn end of the newest segment) is repaired at opening. Any other is `JournalCorrupt`,
including a damaged frame with a valid one behind it: acknowledged records may be in there, so a person decides.

A process never appends to a segment of another: the kernel may hold pages in memory, marked clean, that a failed sync
never brought to the disk. An unsealed segment is therefore copied, synced and sealed at opening.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import math
import os
import re
import socket
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
import orjson

from towline.crashpoints import crash_point
from towline.errors import ConfigError, TowlineError

MAX_PAYLOAD = 1 << 30
_VERSION = 1
_SEGMENT_HEADER = struct.Struct("<8sIQI")
"""magic, version, segment number, checksum of these"""
_SEGMENT_MAGIC = b"TOWLJRNL"
_FRAME_HEADER = struct.Struct("<4sIIB")
"""magic, payload length, checksum, type"""
_FRAME_MAGIC = b"\xff\xfa\xf5\xff"  # bytes that occur neither in UTF-8 nor, four in a row, in arrays of token ids
_FRAME_PLACE = struct.Struct("<QQIB")
"""What a checksum covers besides the payload: segment number, offset, payload length, type"""
_DATA, _SEAL = 1, 2
_SEAL_PAYLOAD = struct.Struct("<Q")
_ARRAY_ALIGNMENT = 16
_BUFFER_BYTES = 1 << 20
"""About as much as is joined for one write(), so that a large batch is not copied as a whole."""
_PENDING_BYTES = 64 << 20
"""Hand-overs beyond this much unwritten data wait for the writer, so that memory stays bounded."""


class JournalError(TowlineError):
    """The journal cannot do what was asked. After a failed write or sync it acknowledges nothing any more."""


class RecordError(JournalError):
    """A record that cannot be encoded, or bytes that are not one."""


class JournalCorrupt(JournalError):
    """Damage that no crash explains. Nothing is skipped; the file stays as it is."""

    def __init__(self, path: Path, offset: int, reason: str):
        super().__init__(f"{path} is damaged at offset {offset}: {reason}; restore the file, or move the folder away")
        self.path = path
        self.offset = offset
        self.reason = reason


class SyncMode(StrEnum):
    """When an append counts as done; the table above says what each survives."""

    GROUP = "group"
    OS = "os"
    NONE = "none"


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A decoded payload."""

    kind: str
    fields: dict[str, Any]
    """JSON values."""
    arrays: dict[str, npt.NDArray[Any]]
    """Read-only, little-endian views into the payload."""


def encode(kind: str, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> bytes:
    """A JSON header, then each array's raw little-endian bytes, aligned. Floats that may be NaN or infinite belong in
    an array: JSON has none."""
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


@dataclass(frozen=True, slots=True)
class Disk:
    """The two calls that can fail under load, replaceable so that tests can count them and make them fail."""

    write: Callable[[int, memoryview], int] = os.write
    sync: Callable[[int], None] = os.fdatasync


class _SegmentWriter:
    """Writes one segment: under a draft name until `publish`, so that a named segment always has its header."""

    def __init__(self, folder: Path, number: int, disk: Disk):
        self.number = number
        self.count = 0
        self.written = 0
        """Bytes the kernel has."""
        self._path = _segment_path(folder, number)
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
        self._buffer += (_FRAME_HEADER.pack(_FRAME_MAGIC, len(payload), checksum, kind), payload)
        self.end += _FRAME_HEADER.size + len(payload)
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
        _sync_folder(self._path.parent)

    def close(self) -> None:
        """Close the file; a draft that was not published goes."""
        os.close(self._file)
        if not self._published:  # else the draft name may already be that of a compaction
            self._draft.unlink(missing_ok=True)


class _SegmentReader:
    """Streams one segment's payloads; then `end` is where its valid frames end and `sealed` says if it is complete."""

    def __init__(self, folder: Path, number: int, *, newest: bool, limit: int | None = None):
        self.count = 0
        self.end = 0
        self.size = 0
        self.sealed = False
        self._path = _segment_path(folder, number)
        self._number = number
        self._newest = newest
        """Only the newest segment may lack its seal and end in a torn frame."""
        self._limit = limit

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb", buffering=_BUFFER_BYTES) as file:
            self.size = os.fstat(file.fileno()).st_size if self._limit is None else self._limit
            self._read_header(file)
            while self.end < self.size:
                frame = file.read(min(_FRAME_HEADER.size, self.size - self.end))
                length = int.from_bytes(frame[4:8], "little")
                payload = file.read(min(length, self.size - self.end - len(frame)))
                kind = self._check(frame, payload, self.end)
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
            raise ConfigError(f"{self._path} has format {version}, this version of Towline reads {_VERSION}")
        self.end = len(head)

    def _check(self, frame: bytes, payload: bytes | memoryview, offset: int) -> int | None:
        """The frame's type, `None` if it is not valid at this place."""
        if len(frame) < _FRAME_HEADER.size:
            return None
        magic, length, checksum, kind = _FRAME_HEADER.unpack(frame)
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
            start = at + _FRAME_HEADER.size
            length = int.from_bytes(rest[at + 4 : at + 8], "little")
            if self._check(rest[at:start], memoryview(rest)[start : start + length], self.end + at) is not None:
                raise self._corrupt(f"a frame with a wrong checksum, and a valid one at {self.end + at}")
            at = rest.find(_FRAME_MAGIC, at + 1)

    def _corrupt(self, reason: str) -> JournalCorrupt:
        return JournalCorrupt(self._path, self.end, reason)


@dataclass(slots=True)
class _Pending:
    payload: bytes | None
    """`None` for a flush."""
    sync: bool
    waiter: asyncio.Future[None] | None


class Journal:
    """An open journal. Every method may be called from any thread and any event loop."""

    def __init__(self, folder: Path, lock: int, mode: SyncMode, segment_bytes: int, disk: Disk):
        """Use `Journal.open`."""
        self.folder = folder
        self.mode = mode
        self.repaired_bytes = 0
        """Bytes of a torn end that opening cut off."""
        self._segment_bytes = segment_bytes
        self._disk = disk
        self._lock_file: int | None = lock
        self._closed: dict[int, int] = {}
        """Complete segments and how many records they hold."""
        self._active = self._recover()
        self._pending: list[_Pending] = []
        self._pending_bytes = 0
        self._failure: Exception | None = None
        self._closing = False
        self._wake = threading.Condition()
        """Guards everything above that changes; wakes the writer thread."""
        self._maintenance = threading.Lock()
        """Held while complete segments are rewritten or removed."""
        self._thread = threading.Thread(target=self._run, name="towline-journal", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        mode: SyncMode = SyncMode.GROUP,
        segment_bytes: int = 64 << 20,
        disk: Disk = Disk(),  # noqa: B008 - immutable
    ) -> Self:
        """Lock the folder, verify every record in it, repair the end, and start a new segment."""
        try:
            _make_folder(folder)
            with contextlib.ExitStack() as undo:
                lock = _lock_folder(folder)
                undo.callback(os.close, lock)
                journal = cls(folder, lock, SyncMode(mode), segment_bytes, disk)
                undo.pop_all()
                return journal
        except OSError as error:
            raise ConfigError(f"the journal folder {folder} cannot be used: {error}") from error

    def _recover(self) -> _SegmentWriter:
        for draft in self.folder.glob("[0-9]*.tmp"):
            draft.unlink()
        numbers = _segment_numbers(self.folder)
        first_free = 1
        for number in numbers:
            newest = number == numbers[-1]
            reader = _SegmentReader(self.folder, number, newest=newest)
            for _ in reader:
                pass
            if newest and not reader.sealed:
                self.repaired_bytes = reader.size - reader.end
                if not reader.count:
                    first_free = number  # nothing is lost when the new segment takes its name
                    break
                valid = _SegmentReader(self.folder, number, newest=True)
                _rewrite(self.folder, number, valid, self._disk, "recover")
            self._closed[number] = reader.count
            first_free = number + 1
        return self._create(first_free)

    def _create(self, number: int) -> _SegmentWriter:
        segment = _SegmentWriter(self.folder, number, self._disk)
        try:
            segment.publish("create")
        except OSError:
            segment.close()
            raise
        return segment

    async def append(self, payload: bytes, *, sync: bool = True) -> None:
        """Returns when the record is safe for the mode; with `sync=False`, when it has its place in the order.

        A cancelled append may still be written.
        """
        if len(payload) > MAX_PAYLOAD:
            raise RecordError(f"a record of {len(payload)} bytes; the journal takes up to {MAX_PAYLOAD}")
        wait = sync and self.mode is not SyncMode.NONE
        waiter = self._hand_over(payload, sync=wait and self.mode is SyncMode.GROUP, wait=wait)
        if waiter is not None:
            await waiter

    async def flush(self) -> None:
        """Returns when everything handed over so far is synced to disk, whatever the mode."""
        waiter = self._hand_over(None, sync=True, wait=True)
        if waiter is not None:
            await waiter

    def _hand_over(self, payload: bytes | None, *, sync: bool, wait: bool) -> asyncio.Future[None] | None:
        with self._wake:
            if self._failure is not None:
                raise self._stopped()
            if self._closing:
                raise JournalError(f"the journal in {self.folder} is closed")
            wait = wait or self._pending_bytes > _PENDING_BYTES
            waiter = asyncio.get_running_loop().create_future() if wait else None
            self._pending.append(_Pending(payload, sync, waiter))
            self._pending_bytes += len(payload or b"")
            self._wake.notify()
        return waiter

    def _run(self) -> None:
        """The writer thread: whatever gathers while one batch is written and synced is the next batch."""
        batch: list[_Pending] = []
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._pending or self._closing)
                    batch, self._pending, self._pending_bytes = self._pending, [], 0
                if not batch:
                    break
                self._commit(batch)
                _settle(batch, lambda: None)
            if self._active.count:
                self._active.seal()
        except Exception as error:  # whatever it is, nobody may wait for ever and nothing more may be acknowledged
            with self._wake:
                self._failure = error
                batch, self._pending = batch + self._pending, []
            _settle(batch, self._stopped)
        finally:
            self._active.close()

    def _commit(self, batch: list[_Pending]) -> None:
        crash_point("journal.before_write")
        for entry in batch:
            if entry.payload is not None:
                frame = _FRAME_HEADER.size + len(entry.payload)
                if self._active.count and self._active.end + frame > self._segment_bytes:
                    self._rotate()
                self._active.add(entry.payload)
        self._active.write()
        crash_point("journal.after_write")
        if any(entry.sync for entry in batch):
            self._active.sync()
            crash_point("journal.after_sync")

    def _rotate(self) -> None:
        self._active.seal()
        crash_point("journal.sealed")
        successor = self._create(self._active.number + 1)
        with self._wake:
            full, self._active = self._active, successor
            self._closed[full.number] = full.count
        full.close()

    def _stopped(self) -> JournalError:
        error = JournalError(f"the journal in {self.folder} has stopped after a failed write: {self._failure}")
        error.__cause__ = self._failure
        return error

    def records(self) -> Iterator[Record]:
        """What the log holds at this moment, in order, a record at a time. Not to be read on while `compact` or
        `drop_segments` runs."""
        with self._wake:
            closed, active, limit = sorted(self._closed), self._active.number, self._active.written
        readers = [_SegmentReader(self.folder, number, newest=False) for number in closed]
        readers.append(_SegmentReader(self.folder, active, newest=True, limit=limit))
        return (decode(payload) for reader in readers for payload in reader)

    async def compact(self, keep: Callable[[Record], bool]) -> int:
        """Rewrite complete segments without the records that `keep` refuses; the bytes this freed.

        `keep` is called in another thread, once a record. Appends go on meanwhile. A crash leaves each segment as it
        was or compacted. An empty segment goes once no older one is left: a gap in the numbers always means damage.
        """
        return await asyncio.to_thread(self._maintain, lambda: self._compact(keep))

    async def drop_segments(self, *, before: int) -> int:
        """Remove the complete segments with a number below `before`; the bytes this freed."""
        return await asyncio.to_thread(self._maintain, lambda: self._drop(lambda number: number < before))

    @property
    def active_segment(self) -> int:
        """The number of the segment that takes new records."""
        return self._active.number

    def _maintain(self, work: Callable[[], int]) -> int:
        with self._maintenance:
            if self._lock_file is None:
                raise JournalError(f"the journal in {self.folder} is closed")
            try:
                return work()
            except OSError as error:
                raise JournalError(f"the journal in {self.folder} cannot be compacted: {error}") from error

    def _compact(self, keep: Callable[[Record], bool]) -> int:
        freed = 0
        for number in self._complete():
            before = _SegmentReader(self.folder, number, newest=False)
            kept = [keep(decode(payload)) for payload in before]
            if not all(kept):
                again = _SegmentReader(self.folder, number, newest=False)
                rest = (payload for payload, needed in zip(again, kept, strict=True) if needed)
                freed += before.size - _rewrite(self.folder, number, rest, self._disk, "compact")
                with self._wake:
                    self._closed[number] = sum(kept)
        return freed + self._drop(lambda number: self._closed[number] == 0)

    def _drop(self, unneeded: Callable[[int], bool]) -> int:
        freed = 0
        for number in self._complete():
            if not unneeded(number):
                break
            path = _segment_path(self.folder, number)
            freed += path.stat().st_size
            path.unlink()
            crash_point("journal.dropped")
            _sync_folder(self.folder)  # one by one: a later file must not vanish before an earlier one
            with self._wake:
                del self._closed[number]
        return freed

    def _complete(self) -> list[int]:
        with self._wake:
            return sorted(self._closed)

    async def close(self) -> None:
        """Write, sync and seal what is pending and let the folder go; raises if that, or anything before, failed.

        Closing again does nothing.
        """
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        with self._maintenance:
            if self._lock_file is None:
                return
            os.close(self._lock_file)
            self._lock_file = None
        if self._failure is not None:
            raise self._stopped()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def replay(folder: Path) -> Iterator[Record]:
    """The records of a journal that need not be open, in order, a record at a time. Changes nothing; a torn end is left
    out, any other damage is `JournalCorrupt`."""
    if not folder.is_dir():
        raise ConfigError(f"there is no journal folder {folder}")
    numbers = _segment_numbers(folder)
    readers = (_SegmentReader(folder, number, newest=number == numbers[-1]) for number in numbers)
    return (decode(payload) for reader in readers for payload in reader)


def _rewrite(folder: Path, number: int, payloads: Iterable[bytes], disk: Disk, step: str) -> int:
    """Replace a segment by a sealed one with these payloads, in one step; its size."""
    segment = _SegmentWriter(folder, number, disk)
    try:
        for payload in payloads:
            segment.add(payload)
        segment.seal()
        segment.publish(step)
    finally:
        segment.close()
    return segment.end


def _settle(batch: list[_Pending], outcome: Callable[[], JournalError | None]) -> None:
    """Wake the waiters in order, with one call into each event loop."""
    waiters: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for entry in batch:
        if entry.waiter is not None:
            waiters.setdefault(entry.waiter.get_loop(), []).append(entry.waiter)
    for loop, futures in waiters.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            loop.call_soon_threadsafe(_resolve, futures, outcome)


def _resolve(futures: list[asyncio.Future[None]], outcome: Callable[[], JournalError | None]) -> None:
    for future in futures:
        if future.done():  # cancelled
            continue
        error = outcome()
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.seg"


def _segment_numbers(folder: Path) -> list[int]:
    numbers = sorted(int(path.stem) for path in folder.iterdir() if re.fullmatch(r"\d{8,}\.seg", path.name))
    for before, after in itertools.pairwise(numbers):
        if after != before + 1:
            raise JournalCorrupt(_segment_path(folder, before + 1), 0, "the segment is missing")
    return numbers


def _make_folder(folder: Path) -> None:
    """Create the folder and what is missing above it, durably."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _lock_folder(folder: Path) -> int:
    """Take the folder for this process; the kernel gives it back when the process ends, however it ends."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        who = f"process {os.getpid()} ({Path(sys.argv[0]).name}) on {socket.gethostname()} since {since}"
        os.ftruncate(handle, 0)
        os.write(handle, who.encode())
    except BlockingIOError as error:
        who = os.read(handle, 1000).decode(errors="replace") or "another process"
        os.close(handle)
        raise ConfigError(f"the journal folder {folder} is in use by {who}; stop it or give another folder") from error
    except OSError:
        os.close(handle)
        raise
    return handle
