"""The open journal: appends gathered into batches by a writer thread, and the upkeep of complete segments."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Self

from towline import locks
from towline.crashpoints import crash_point
from towline.errors import ConfigError
from towline.gateway.journal.codec import JournalError, Record, RecordError, decode
from towline.gateway.journal.salvage import make_whole
from towline.gateway.journal.segments import (
    FRAME_HEADER,
    Disk,
    JournalCorrupt,
    SegmentReader,
    SegmentWriter,
    UnknownFormat,
    rewrite,
    segment_numbers,
    segment_path,
    sync_folder,
)
from towline.quarantine import Quarantine

MAX_PAYLOAD = 1 << 30
_PENDING_BYTES = 64 << 20
"""Hand-overs beyond this much unwritten data wait for the writer, so that memory stays bounded."""
_LOCK = "lock"
_CLOSING_SECONDS = 120.0
"""How long closing waits for what is pending to be written and synced."""


class SyncMode(StrEnum):
    """When an append counts as done; the table of this package says what each survives."""

    GROUP = "group"
    OS = "os"
    NONE = "none"


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
        quarantine: Quarantine | None = None,
    ) -> Self:
        """Lock the folder, verify every record in it, repair the end, and start a new segment.

        With `quarantine`, no damage is an error: what is damaged is kept there, and the valid records stay.
        """
        try:
            if quarantine is not None:
                quarantine.make_folder(folder)
                if (folder / _LOCK).is_dir():
                    quarantine.move(folder / _LOCK, "a file should be there")
            _make_folder(folder)
            with contextlib.ExitStack() as undo:
                lock = _lock_folder(folder)
                undo.callback(os.close, lock)
                try:
                    journal = cls(folder, lock, SyncMode(mode), segment_bytes, disk)
                except (JournalCorrupt, UnknownFormat, OSError):
                    if quarantine is None:
                        raise
                    make_whole(folder, quarantine, disk)
                    journal = cls(folder, lock, SyncMode(mode), segment_bytes, disk)
                undo.pop_all()
                return journal
        except OSError as error:
            raise ConfigError(f"the journal folder {folder} cannot be used: {error}") from error

    def _recover(self) -> SegmentWriter:
        for draft in self.folder.glob("[0-9]*.tmp"):
            if not draft.is_dir():
                draft.unlink()
        numbers = segment_numbers(self.folder)
        first_free = 1
        for number in numbers:
            newest = number == numbers[-1]
            reader = SegmentReader(self.folder, number, newest=newest)
            for _ in reader:
                pass
            if newest and not reader.sealed:
                self.repaired_bytes = reader.size - reader.end
                if not reader.count:
                    first_free = number  # nothing is lost when the new segment takes its name
                    break
                valid = SegmentReader(self.folder, number, newest=True)
                rewrite(self.folder, number, valid, self._disk, "recover")
            self._closed[number] = reader.count
            first_free = number + 1
        return self._create(first_free)

    def _create(self, number: int) -> SegmentWriter:
        segment = SegmentWriter(self.folder, number, self._disk)
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
                frame = FRAME_HEADER.size + len(entry.payload)
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

    @property
    def trouble(self) -> str:
        """Why it takes no more records; empty while it does."""
        return "" if self._failure is None else str(self._stopped())

    def _stopped(self) -> JournalError:
        error = JournalError(f"the journal in {self.folder} has stopped after a failed write: {self._failure}")
        error.__cause__ = self._failure
        return error

    def records(self, unreadable: Callable[[bytes, RecordError], None] | None = None) -> Iterator[Record]:
        """What the log holds at this moment, in order, a record at a time. Not to be read on while `compact` or
        `drop_segments` runs. Payloads that are no records go to `unreadable`; without it they are an error."""
        with self._wake:
            closed, active, limit = sorted(self._closed), self._active.number, self._active.written
        readers = [SegmentReader(self.folder, number, newest=False) for number in closed]
        readers.append(SegmentReader(self.folder, active, newest=True, limit=limit))
        return _decoded((payload for reader in readers for payload in reader), unreadable)

    async def compact(self, keep: Callable[[Record], bool]) -> int:
        """Rewrite complete segments without the records that `keep` refuses, and without payloads that are none; the
        bytes this freed.

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
            before = SegmentReader(self.folder, number, newest=False)
            kept = [_is_kept(payload, keep) for payload in before]
            if not all(kept):
                again = SegmentReader(self.folder, number, newest=False)
                rest = (payload for payload, needed in zip(again, kept, strict=True) if needed)
                freed += before.size - rewrite(self.folder, number, rest, self._disk, "compact")
                with self._wake:
                    self._closed[number] = sum(kept)
        return freed + self._drop(lambda number: self._closed[number] == 0)

    def _drop(self, unneeded: Callable[[int], bool]) -> int:
        freed = 0
        for number in self._complete():
            if not unneeded(number):
                break
            path = segment_path(self.folder, number)
            freed += path.stat().st_size
            path.unlink()
            crash_point("journal.dropped")
            sync_folder(self.folder)  # one by one: a later file must not vanish before an earlier one
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
        self._thread.join(_CLOSING_SECONDS)
        if self._thread.is_alive():
            raise JournalError(f"the disk under {self.folder} does not answer: the last records may not be safe")
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
    numbers = segment_numbers(folder)
    readers = (SegmentReader(folder, number, newest=number == numbers[-1]) for number in numbers)
    return (decode(payload) for reader in readers for payload in reader)


def _decoded(payloads: Iterable[bytes], unreadable: Callable[[bytes, RecordError], None] | None) -> Iterator[Record]:
    for payload in payloads:
        try:
            record = decode(payload)
        except RecordError as error:
            if unreadable is None:
                raise
            unreadable(payload, error)
        else:
            yield record


def _is_kept(payload: bytes, keep: Callable[[Record], bool]) -> bool:
    try:
        record = decode(payload)
    except RecordError:
        return False
    return keep(record)


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


def _make_folder(folder: Path) -> None:
    """Create the folder and what is missing above it, durably."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def _lock_folder(folder: Path) -> int:
    """Take the folder for this process; the kernel gives it back when the process ends, however it ends."""
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        locks.take(handle)
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
