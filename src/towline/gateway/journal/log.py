"""The open journal: appends batched by a writer thread, and maintenance of complete segments."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from towline.common.crashpoints import crash_point
from towline.common.files import Quarantine, sync_folder
from towline.errors import ConfigError
from towline.gateway.journal.segments import (
    FRAME_HEADER,
    LOCK,
    Disk,
    JournalCorrupt,
    JournalError,
    Record,
    RecordError,
    SegmentReader,
    SegmentWriter,
    UnknownJournalFormat,
    decode,
    lock_folder,
    make_folder,
    repair,
    rewrite_segment,
    segment_numbers,
    segment_path,
)

MAX_PAYLOAD = 1 << 30
_PENDING_BYTES = 64 << 20
"""Appends beyond this much unwritten data wait for the writer, so that memory stays bounded."""
_CLOSING_SECONDS = 120.0
"""How long closing waits for pending records to be written and synced."""


class SyncMode(StrEnum):
    """When an append is acknowledged; the table in this package's docstring says what each mode survives."""

    GROUP = "group"
    """After the fdatasync of its batch."""
    OS = "os"
    """After the write to the kernel."""
    NONE = "none"
    """At once, before it is written."""


@dataclass(slots=True)
class _Pending:
    payload: bytes | None
    """`None` for a flush."""
    sync: bool
    waiter: asyncio.Future[None] | None


class Journal:
    """An open journal. All methods may be called from any thread and any event loop."""

    def __init__(self, folder: Path, lock: int, mode: SyncMode, segment_bytes: int, disk: Disk):
        """Use `Journal.open`."""
        self.folder = folder
        self.mode = mode
        self.repaired_bytes = 0
        """Bytes of a torn end that were cut off at opening."""
        self._segment_bytes = segment_bytes
        self._disk = disk
        self._lock_file: int | None = lock
        self._closed: dict[int, int] = {}
        """Number of records per complete segment."""
        self._active = self._recover()
        self._pending: list[_Pending] = []
        self._pending_bytes = 0
        self._failure: Exception | None = None
        self._closing = False
        self._wake = threading.Condition()
        """Guards all mutable state above; wakes the writer thread."""
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

        With `quarantine`, damage is not an error: damaged files are kept there, and the valid records stay.
        """
        try:
            if quarantine is not None:
                quarantine.make_folder(folder)
                if (folder / LOCK).is_dir():
                    quarantine.move(folder / LOCK, "expected a file")
            make_folder(folder)
            with contextlib.ExitStack() as undo:
                lock = lock_folder(folder)
                undo.callback(os.close, lock)
                try:
                    journal = cls(folder, lock, SyncMode(mode), segment_bytes, disk)
                except (JournalCorrupt, UnknownJournalFormat, OSError):
                    if quarantine is None:
                        raise
                    repair(folder, quarantine, disk)
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
                    first_free = number  # it is empty: the new segment takes its name
                    break
                valid = SegmentReader(self.folder, number, newest=True)
                rewrite_segment(self.folder, number, valid, self._disk, "recover")
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
        """Return when the record is as safe as the mode promises; with `sync=False`, when its order is fixed.

        A cancelled append may still be written.
        """
        if len(payload) > MAX_PAYLOAD:
            raise RecordError(f"a record of {len(payload)} bytes exceeds the journal's limit of {MAX_PAYLOAD}")
        wait = sync and self.mode is not SyncMode.NONE
        waiter = self._hand_over(payload, sync=wait and self.mode is SyncMode.GROUP, wait=wait)
        if waiter is not None:
            await waiter

    async def flush(self) -> None:
        """Return when everything appended so far is synced to disk, in any mode."""
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
        """The writer thread: records that arrive while one batch is written and synced form the next batch."""
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
        except Exception as error:  # no caller may wait forever, and nothing more may be acknowledged
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
        """Why the journal accepts no more records; empty while it does."""
        return "" if self._failure is None else str(self._stopped())

    def _stopped(self) -> JournalError:
        error = JournalError(f"the journal in {self.folder} has stopped after a failed write: {self._failure}")
        error.__cause__ = self._failure
        return error

    def records(self, unreadable: Callable[[bytes, RecordError], None] | None = None) -> Iterator[Record]:
        """The current records in order, one at a time. Must not be iterated while `compact` runs.
        Payloads that are not records are passed to `unreadable`; without it they are an error."""
        with self._wake:
            closed, active, limit = sorted(self._closed), self._active.number, self._active.written
        readers = [SegmentReader(self.folder, number, newest=False) for number in closed]
        readers.append(SegmentReader(self.folder, active, newest=True, limit=limit))
        return _decoded((payload for reader in readers for payload in reader), unreadable)

    async def compact(self, keep: Callable[[Record], bool]) -> int:
        """Rewrite complete segments without the records that `keep` rejects and without unreadable payloads; returns the
        number of bytes freed.

        `keep` is called in another thread, once per record. Appends continue meanwhile. A crash leaves each segment either
        unchanged or compacted. An empty segment is removed once no older one is left: a gap in the numbers always means
        damage.
        """
        return await asyncio.to_thread(self._maintain, keep)

    def _maintain(self, keep: Callable[[Record], bool]) -> int:
        with self._maintenance:
            if self._lock_file is None:
                raise JournalError(f"the journal in {self.folder} is closed")
            try:
                return self._compact(keep) + self._drop_empty()
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
                freed += before.size - rewrite_segment(self.folder, number, rest, self._disk, "compact")
                with self._wake:
                    self._closed[number] = sum(kept)
        return freed

    def _drop_empty(self) -> int:
        freed = 0
        for number in self._complete():
            if self._closed[number]:
                break
            path = segment_path(self.folder, number)
            freed += path.stat().st_size
            path.unlink()
            crash_point("journal.dropped")
            sync_folder(self.folder)  # one by one: a later file must not disappear before an earlier one
            with self._wake:
                del self._closed[number]
        return freed

    def _complete(self) -> list[int]:
        with self._wake:
            return sorted(self._closed)

    async def close(self) -> None:
        """Write, sync and seal pending records and release the folder; raises if that, or any earlier write, failed.

        Closing again is a no-op.
        """
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(_CLOSING_SECONDS)
        if self._thread.is_alive():
            raise JournalError(f"the disk of {self.folder} does not respond; the last records may be lost")
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
    """The records of a journal, open or not, in order, one at a time. Read-only; a torn end is skipped, any other damage
    raises `JournalCorrupt`."""
    if not folder.is_dir():
        raise ConfigError(f"the journal folder {folder} does not exist")
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
    """Wake the waiters in order, with one call per event loop."""
    waiters: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for entry in batch:
        if entry.waiter is not None:
            waiters.setdefault(entry.waiter.get_loop(), []).append(entry.waiter)
    for loop, futures in waiters.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: no waiter is left
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
