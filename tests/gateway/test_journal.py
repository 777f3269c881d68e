"""The journal against real files, real processes and real `kill -9`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from towline.errors import ConfigError
from towline.gateway.journal import (
    Disk,
    Journal,
    JournalCorrupt,
    JournalError,
    Record,
    RecordError,
    SyncMode,
    decode,
    encode,
    log,
    replay,
)
from towline.gateway.journal.segments import FRAME_HEADER, SegmentReader, SegmentWriter

SEAL_BYTES = 8


def turn(number: int, size: int = 5) -> bytes:
    return encode("turn", {"id": number}, {"ids": np.arange(number, number + size, dtype=np.int32)})


def ids(records: Iterable[Record]) -> list[int]:
    found = []
    for record in records:
        number = record.fields["id"]
        assert record.arrays["ids"].tolist() == list(range(number, number + len(record.arrays["ids"])))
        found.append(number)
    return found


async def write_turns(folder: Path, numbers: Iterable[int], **options: Any) -> None:
    async with Journal.open(folder, **options) as journal:
        for number in numbers:
            await journal.append(turn(number))


async def snapshot_unsealed(tmp_path: Path, count: int) -> tuple[Path, list[int]]:
    """A folder as a killed process leaves it, and where each of its records begins."""
    async with Journal.open(tmp_path / "live") as journal:
        starts = []
        for number in range(count):
            starts.append(segments(journal.folder)[-1].stat().st_size)
            await journal.append(turn(number))
        shutil.copytree(journal.folder, tmp_path / "killed")
    return tmp_path / "killed", starts


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"))


def drafts(folder: Path) -> list[Path]:
    return list(folder.glob("*.tmp"))


def fresh(folder: Path) -> Path:
    """A copy to damage."""
    copy = folder.with_name("damaged")
    shutil.rmtree(copy, ignore_errors=True)
    return shutil.copytree(folder, copy)


# --- records -------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
any_array = hnp.arrays(
    dtype=hnp.scalar_dtypes().filter(lambda dtype: dtype.kind in "biufc" and dtype.itemsize <= 16),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
)


@given(
    st.text(), st.dictionaries(st.text(), json_values, max_size=5), st.dictionaries(st.text(), any_array, max_size=4)
)
@settings(max_examples=200, deadline=None)
def test_a_record_round_trips_exactly(kind: str, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    awkward = {name: array.T[::-1] if array.ndim else array for name, array in arrays.items()}
    record = decode(encode(kind, fields, awkward))
    assert (record.kind, record.fields) == (kind, fields)
    assert list(record.arrays) == list(awkward)
    for name, array in record.arrays.items():
        expected = awkward[name]
        assert array.dtype == expected.dtype.newbyteorder("<")
        assert array.shape == expected.shape
        assert array.tobytes() == expected.astype(array.dtype).tobytes()
        assert not array.flags.writeable
        assert array.flags.aligned


def test_arrays_are_raw_bytes_read_without_a_copy() -> None:
    sampled = np.arange(10_000, dtype=np.int32)
    payload = encode("turn", {}, {"sampled": sampled})
    assert sampled.tobytes() in payload
    assert len(payload) < sampled.nbytes + 100
    base = decode(payload).arrays["sampled"]
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    assert base is payload


def test_what_is_no_record_is_refused() -> None:
    for bad in (np.array([object()]), np.array(["text"]), np.zeros(2, dtype=[("a", "i4")])):
        with pytest.raises(RecordError, match="'bad' of 'turn'"):
            encode("turn", {}, {"bad": bad})
    for field in (object(), 2**64, "\ud800", {1: 2}):
        with pytest.raises(RecordError, match="not JSON"):
            encode("turn", {"field": field}, {})
    payload = encode("turn", {"id": 1}, {"a": np.arange(3), "b": np.ones(2)})
    for length in range(len(payload)):
        with pytest.raises(RecordError, match="not an encoded record"):
            decode(payload[:length])
    with pytest.raises(RecordError, match="expected"):
        decode(payload + b"x")


# --- order, modes, life ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", SyncMode)
async def test_order_is_kept_over_segments_loops_and_reopening(tmp_path: Path, mode: SyncMode) -> None:
    """Four threads with an event loop each, sixty tasks each, a third of them not waiting; then a second life."""
    folder = tmp_path / "deep" / "journal"
    journal = Journal.open(folder, mode=mode, segment_bytes=2_000)
    assert list(journal.records()) == []

    async def one_loop(loop_number: int) -> None:
        async def one(number: int) -> None:
            payload = encode("turn", {"loop": loop_number, "n": number}, {"pad": np.zeros(number, np.uint8)})
            await journal.append(payload, sync=number % 3 > 0)

        async with asyncio.TaskGroup() as group:
            for number in range(60):
                group.create_task(one(number))

    threads = [threading.Thread(target=lambda n=n: asyncio.run(one_loop(n)), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join, 60)
        assert not thread.is_alive()
    await journal.flush()

    def check(records: Iterable[Record]) -> None:
        seen: dict[int, list[int]] = {n: [] for n in range(4)}
        for record in records:
            seen[record.fields["loop"]].append(record.fields["n"])
        assert seen == {n: list(range(60)) for n in range(4)}

    check(journal.records())
    check(replay(folder))
    assert len(segments(folder)) > 5
    assert all(path.stat().st_size < 2_100 for path in segments(folder))
    await journal.close()
    await journal.close()
    check(replay(folder))
    with pytest.raises(JournalError, match="is closed"):
        await journal.append(b"late")

    async with Journal.open(folder, mode=mode, segment_bytes=2_000) as second:
        assert second.repaired_bytes == 0
        check(second.records())
        await second.append(encode("turn", {"loop": 9, "n": 0}, {}))
    assert [record.fields["loop"] for record in replay(folder)][-1] == 9


async def test_reading_streams_and_idle_openings_leave_nothing_behind(tmp_path: Path) -> None:
    await write_turns(tmp_path, range(20), segment_bytes=300)
    count = len(segments(tmp_path))
    for _ in range(3):
        async with Journal.open(tmp_path):
            pass
    assert len(segments(tmp_path)) == count + 1
    first_damaged = segments(tmp_path)[5]
    first_damaged.write_bytes(b"")
    reading = replay(tmp_path)
    assert next(reading).fields["id"] == 0, "the first record comes before the sixth segment is even looked at"
    with pytest.raises(JournalCorrupt, match=first_damaged.name):
        list(reading)
    with pytest.raises(ConfigError, match="does not exist"):
        replay(tmp_path / "elsewhere")


class GatedDisk:
    """Counts syncs, and holds them while `gate` is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.syncing = threading.Event()
        self.syncs = 0
        self.disk = Disk(sync=self.sync)

    def sync(self, file: int) -> None:
        self.syncs += 1
        self.syncing.set()
        assert self.gate.wait(60)
        os.fdatasync(file)

    def close_gate(self) -> None:
        self.syncing.clear()
        self.gate.clear()
        self.syncs = 0


async def test_group_commit_acknowledges_after_the_sync_and_shares_it(tmp_path: Path) -> None:
    gated = GatedDisk()
    async with Journal.open(tmp_path, disk=gated.disk) as journal:
        gated.close_gate()
        first = asyncio.create_task(journal.append(turn(0)))
        assert await asyncio.to_thread(gated.syncing.wait, 60)
        others = [asyncio.create_task(journal.append(turn(number))) for number in range(1, 500)]
        await asyncio.sleep(0)  # every append hands its record over in its first step; the writer is held at the sync
        assert ids(replay(tmp_path)) == [0], "written, and the rest gathers while the sync runs"
        assert not first.done()
        assert not any(task.done() for task in others)
        gated.gate.set()
        await asyncio.gather(first, *others)
        assert gated.syncs == 2
        for number in range(500, 520):
            await journal.append(turn(number), sync=False)
        await journal.append(turn(520))
        assert gated.syncs <= 4, "records without a waiter do not cost a sync each"
    assert ids(replay(tmp_path)) == list(range(521))


async def test_other_modes_do_not_wait_for_the_disk(tmp_path: Path) -> None:
    for mode in (SyncMode.OS, SyncMode.NONE):
        gated = GatedDisk()
        async with Journal.open(tmp_path / mode, mode=mode, disk=gated.disk) as journal:
            gated.close_gate()
            await asyncio.gather(*(journal.append(turn(number)) for number in range(100)))
            if mode is SyncMode.OS:
                assert ids(replay(journal.folder)) == list(range(100)), "the kernel has what is acknowledged"
            flushing = asyncio.create_task(journal.flush())
            assert await asyncio.to_thread(gated.syncing.wait, 60)
            assert not flushing.done()
            gated.gate.set()
            await flushing
        assert ids(replay(journal.folder)) == list(range(100))


async def test_memory_is_bounded_by_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_PENDING_BYTES", 1_000)
    writing, gate = threading.Event(), threading.Event()

    def slow_write(file: int, data: memoryview) -> int:
        if len(data) > 24:  # more than the header of a new segment
            writing.set()
            assert gate.wait(60)
        return os.write(file, data)

    async with Journal.open(tmp_path, mode=SyncMode.NONE, disk=Disk(write=slow_write)) as journal:
        await journal.append(turn(0))
        assert await asyncio.to_thread(writing.wait, 60)
        await journal.append(turn(1, 300))
        over = asyncio.create_task(journal.append(turn(2)))
        await asyncio.sleep(0)  # its first step: the writer is held, so nothing can end the wait
        assert not over.done()
        gate.set()
        await over
    assert ids(replay(tmp_path)) == [0, 1, 2]


async def test_a_cancelled_waiter_does_not_affect_others(tmp_path: Path) -> None:
    gated = GatedDisk()
    async with Journal.open(tmp_path, disk=gated.disk) as journal:
        gated.close_gate()

        def abandon() -> None:
            loop = asyncio.new_event_loop()
            waiting = loop.create_task(journal.append(turn(0)))
            loop.run_until_complete(asyncio.sleep(0))
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(waiting)
            loop.close()

        await asyncio.to_thread(abandon)
        assert await asyncio.to_thread(gated.syncing.wait, 60)
        cancelled = asyncio.create_task(journal.append(turn(1)))
        waiting = asyncio.create_task(journal.append(turn(2)))
        await asyncio.sleep(0)
        cancelled.cancel()
        gated.gate.set()
        await waiting
        assert cancelled.cancelled()
    assert ids(replay(tmp_path)) == [0, 1, 2]


async def test_closing_over_a_disk_that_does_not_answer_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = GatedDisk()
    journal = Journal.open(tmp_path, disk=gated.disk)
    gated.close_gate()
    waiting = asyncio.create_task(journal.append(turn(0)))
    assert await asyncio.to_thread(gated.syncing.wait, 60)
    monkeypatch.setattr(log, "_CLOSING_SECONDS", 0.05)
    with pytest.raises(JournalError, match="does not respond"):
        await journal.close()
    monkeypatch.undo()
    gated.gate.set()
    await waiting
    await journal.close()
    assert ids(replay(tmp_path)) == [0]


async def test_a_large_batch_takes_several_writes_and_one_sync(tmp_path: Path) -> None:
    gated = GatedDisk()
    written: list[int] = []

    def write(file: int, data: memoryview) -> int:
        written.append(len(data))
        return os.write(file, data)

    async with Journal.open(tmp_path, disk=Disk(write, gated.sync)) as journal:
        gated.close_gate()
        first = asyncio.create_task(journal.append(turn(0)))
        assert await asyncio.to_thread(gated.syncing.wait, 60)
        written.clear()
        large = [asyncio.create_task(journal.append(turn(number, 150_000))) for number in range(1, 11)]
        await asyncio.sleep(0)
        gated.gate.set()
        await asyncio.gather(first, *large)
        assert gated.syncs == 2
        assert len(written) == 5
        assert max(written) < 1_300_000
    assert ids(replay(tmp_path)) == list(range(11))


# --- crashes -------------------------------------------------------------------------------------------------------

CHILD = """
import asyncio, os, sys
from pathlib import Path
import numpy as np
from towline.gateway.journal import Journal, SyncMode, encode, segments

async def main():
    segments._BUFFER_BYTES = int(sys.argv[3])
    journal = Journal.open(Path(sys.argv[1]), mode=SyncMode(sys.argv[2]), segment_bytes=4000)
    following = iter(range(10**9))

    async def writer():
        while True:
            number = next(following)
            await journal.append(encode("turn", {"id": number}, {"ids": np.arange(number, number + 5, dtype=np.int32)}))
            os.write(1, b"%d\\n" % number)

    await asyncio.gather(*(writer() for _ in range(8)))

asyncio.run(main())
"""


def child(script: str, *arguments: object, crash_at: str = "", **options: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TOWLINE_CRASH_AT": crash_at, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, **options)


async def check_survivors(folder: Path, acknowledged: list[int]) -> None:
    """Everything acknowledged is there; and, ids being given in order, nothing is missing, twice or out of order."""
    left_by_the_crash = ids(replay(folder))
    async with Journal.open(folder) as journal:
        survivors = ids(journal.records())
        assert survivors == left_by_the_crash
        assert survivors == list(range(len(survivors)))
        assert set(acknowledged) <= set(survivors)
        await journal.append(turn(len(survivors)))
    assert ids(replay(folder)) == [*survivors, len(survivors)]


# With eight writers the twentieth batch needs acknowledgements of earlier ones, so that there is something to lose.
COMMIT_POINTS = [
    "before_write:20",
    "after_write:20",
    "after_sync:20",
    "sealed:5",
    "create_written:3",
    "create_renamed:3",
]


@pytest.mark.parametrize("mode", [SyncMode.GROUP, SyncMode.OS])
@pytest.mark.parametrize("point", COMMIT_POINTS)
async def test_kill_at_a_named_point_loses_nothing_acknowledged(tmp_path: Path, mode: SyncMode, point: str) -> None:
    if point == "after_sync:20" and mode is SyncMode.OS:
        point = "after_write:30"  # this mode acknowledges without a sync
    process = child(CHILD, tmp_path, mode, 1 << 20, crash_at=f"journal.{point}")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    acknowledged = [int(line) for line in output.split(b"\n")[:-1]]
    assert acknowledged == sorted(acknowledged)
    assert acknowledged
    await check_survivors(tmp_path, acknowledged)


@pytest.mark.parametrize("mode", [SyncMode.GROUP, SyncMode.OS])
@pytest.mark.parametrize("seed", range(10))
async def test_kill_at_a_random_moment_loses_nothing_acknowledged(tmp_path: Path, mode: SyncMode, seed: int) -> None:
    chance = random.Random(seed)
    a_batch_takes_several_writes = seed % 2
    process = child(CHILD, tmp_path, mode, 150 if a_batch_takes_several_writes else 1 << 20)
    assert process.stdout is not None
    output = b"".join(process.stdout.readline() for _ in range(chance.randrange(1, 300)))
    await asyncio.sleep(chance.random() * 0.03)
    process.kill()
    output += process.communicate(timeout=60)[0]
    await check_survivors(tmp_path, [int(line) for line in output.split(b"\n")[:-1]])


async def test_a_machine_crash_loses_nothing_that_group_mode_acknowledged(tmp_path: Path) -> None:
    """Every byte that was not synced is gone: at many moments, the files are cut to what had been synced."""
    synced: dict[int, int] = {}

    def sync(file: int) -> None:
        status = os.fstat(file)
        os.fdatasync(file)
        synced[status.st_ino] = status.st_size

    acknowledged: list[int] = []
    following = iter(range(400))
    moments = random.Random(7)
    async with Journal.open(tmp_path / "live", segment_bytes=4_000, disk=Disk(sync=sync)) as journal:

        async def writer() -> None:
            for number in following:
                await journal.append(turn(number))
                acknowledged.append(number)
                if moments.random() < 0.05:
                    await crash(list(acknowledged))

        async def crash(known: list[int]) -> None:
            after = tmp_path / f"after-{known[-1]}"
            after.mkdir()
            for path in segments(journal.folder):
                data = path.read_bytes()
                (after / path.name).write_bytes(data[: synced[path.stat().st_ino]])
            await check_survivors(after, known)

        await asyncio.gather(*(writer() for _ in range(8)))
    assert len(os.listdir(tmp_path)) > 5


async def test_a_torn_end_is_cut_off_wherever_it_tears(tmp_path: Path) -> None:
    killed, starts = await snapshot_unsealed(tmp_path, 4)
    name = segments(killed)[-1].name
    data = (killed / name).read_bytes()
    noise = random.Random(1).randbytes(len(data))

    for cut in range(starts[-1], len(data)):
        torn = {
            "truncated": data[:cut],
            "zeros": data[:cut] + bytes(len(data) - cut + 5_000),
            "noise": data[:cut] + bytes(a ^ b or 1 for a, b in zip(data[cut:], noise, strict=False)) + noise,
        }
        for how, content in torn.items():
            folder = fresh(killed)
            (folder / name).write_bytes(content)
            if how == "zeros" and data[cut:].strip(b"\0") == b"":
                continue  # the same bytes as before: nothing is torn
            assert ids(replay(folder)) == [0, 1, 2], (how, cut)
            async with Journal.open(folder) as journal:
                assert journal.repaired_bytes == len(content) - starts[-1], (how, cut)
                assert ids(journal.records()) == [0, 1, 2]
                await journal.append(turn(3))
            assert ids(replay(folder)) == [0, 1, 2, 3]
            async with Journal.open(folder) as journal:
                assert journal.repaired_bytes == 0


async def test_a_torn_record_may_contain_a_copy_of_a_journal(tmp_path: Path) -> None:
    """A frame is valid only in its place: a payload that holds frames is no evidence of records after the damage."""
    await write_turns(tmp_path / "inner", range(3))
    inner = np.frombuffer(segments(tmp_path / "inner")[0].read_bytes(), np.uint8)
    async with Journal.open(tmp_path / "live") as journal:
        await journal.append(turn(0))
        await journal.append(encode("turn", {}, {"file": inner}))
        shutil.copytree(journal.folder, tmp_path / "killed")
    path = segments(tmp_path / "killed")[0]
    path.write_bytes(path.read_bytes()[:-1])
    async with Journal.open(tmp_path / "killed") as journal:
        assert ids(journal.records()) == [0]


async def test_what_a_dead_process_left_is_written_anew(tmp_path: Path) -> None:
    """Its last sync may have failed and left pages that only memory has: they must reach the disk before use."""
    killed, _ = await snapshot_unsealed(tmp_path, 3)
    path = segments(killed)[-1]
    before, content = path.stat().st_ino, path.read_bytes()
    keep_alive = path.open("rb")  # so that its inode number is not given again
    synced: list[int] = []
    disk = Disk(sync=lambda file: synced.append(os.fstat(file).st_ino))
    async with Journal.open(killed, disk=disk):
        assert path.stat().st_ino != before
        assert path.stat().st_ino in synced
        assert path.read_bytes().startswith(content)
    keep_alive.close()


async def test_any_flipped_byte_before_the_end_is_an_error(tmp_path: Path) -> None:
    killed, starts = await snapshot_unsealed(tmp_path, 4)
    newest = segments(killed)[-1].name
    closed = tmp_path / "closed"
    await write_turns(closed, range(12), segment_bytes=300)
    older = segments(closed)[1].name

    cases = [(killed, newest, position) for position in range(starts[-1])]
    cases += [(closed, older, position) for position in range((closed / older).stat().st_size)]
    for original, name, position in cases:
        folder = fresh(original)
        damaged = bytearray((folder / name).read_bytes())
        damaged[position] ^= 0x20
        (folder / name).write_bytes(damaged)
        for reading in (lambda folder=folder: list(replay(folder)), lambda folder=folder: Journal.open(folder)):
            with pytest.raises(JournalCorrupt, match=name) as caught:
                reading()
            assert caught.value.path == folder / name
            if original is killed:
                assert caught.value.offset == max((s for s in starts if s <= position), default=0)
        assert (folder / name).read_bytes() == damaged, "evidence is left alone"


async def test_missing_pieces_are_noticed(tmp_path: Path) -> None:
    await write_turns(tmp_path / "whole", range(12), segment_bytes=300)
    names = [path.name for path in segments(tmp_path / "whole")]

    def remove(folder: Path) -> None:
        (folder / names[2]).unlink()

    def cut_at_a_record(folder: Path) -> None:
        path = folder / names[1]
        path.write_bytes(path.read_bytes()[: -FRAME_HEADER.size - SEAL_BYTES])

    def swap(folder: Path) -> None:
        shutil.copy(folder / names[0], folder / names[1])

    def extend(folder: Path) -> None:
        with (folder / names[-1]).open("ab") as file:
            file.write(b"after the seal")

    for damage, name in ((remove, names[2]), (cut_at_a_record, names[1]), (swap, names[1]), (extend, names[-1])):
        folder = fresh(tmp_path / "whole")
        damage(folder)
        with pytest.raises(JournalCorrupt, match=name):
            Journal.open(folder)

    folder = fresh(tmp_path / "whole")
    data = (folder / names[0]).read_bytes()
    head = data[:8] + (99).to_bytes(4, "little") + data[12:20]
    (folder / names[0]).write_bytes(head + zlib.crc32(head).to_bytes(4, "little") + data[24:])
    with pytest.raises(ConfigError, match="has format 99"):
        Journal.open(folder)


# --- lock and failures -----------------------------------------------------------------------------------------------


async def test_one_owner_at_a_time(tmp_path: Path) -> None:
    async with Journal.open(tmp_path):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} .* on .* since"):
            Journal.open(tmp_path)
    folder = tmp_path / "other"
    process = child(CHILD, folder, SyncMode.OS, 1 << 20)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(ConfigError, match=f"in use by process {process.pid} "):
        Journal.open(folder)
    process.kill()
    process.communicate(timeout=60)
    async with Journal.open(folder):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        Journal.open(tmp_path / "file")


@pytest.mark.parametrize("mode", SyncMode)
@pytest.mark.parametrize("failing", ["write", "sync"])
async def test_after_a_failure_nothing_is_acknowledged(tmp_path: Path, mode: SyncMode, failing: str) -> None:
    """The disk fills up in the middle of a write, or a sync fails once and then would work again."""
    broken = threading.Event()
    held = GatedDisk()
    written_when_broken: list[int] = []

    def write(file: int, data: memoryview) -> int:
        if broken.is_set() and failing == "write":
            if partial := 30 - sum(written_when_broken):
                written_when_broken.append(os.write(file, data[:partial]))
                return partial
            raise OSError(errno.ENOSPC, "no space left")
        return os.write(file, data)

    def sync(file: int) -> None:
        fails = broken.is_set() and failing == "sync"
        held.sync(file)
        if fails:
            broken.clear()
            raise OSError(errno.EIO, "input/output error")

    journal = Journal.open(tmp_path, mode=mode, disk=Disk(write, sync))
    for number in range(3):
        await journal.append(turn(number))
    await journal.flush()
    held.close_gate()
    flushing = asyncio.create_task(journal.flush())
    assert await asyncio.to_thread(held.syncing.wait, 60)
    waiting = [asyncio.create_task(journal.append(turn(number))) for number in range(3, 40)]
    await asyncio.sleep(0)
    last = asyncio.create_task(journal.flush())
    await asyncio.sleep(0)
    broken.set()
    held.gate.set()
    results = await asyncio.gather(flushing, *waiting, last, return_exceptions=True)
    assert results[0] is None, "its sync began before"
    assert isinstance(results[-1], JournalError)
    if mode is not SyncMode.NONE:
        assert all(isinstance(result, JournalError) for result in results[1:])
        assert len({id(result) for result in results[1:]}) == len(results) - 1, "each waiter has an error of its own"
    broken.clear()
    for action in (journal.append(turn(99)), journal.append(turn(99), sync=False), journal.flush(), journal.close()):
        with pytest.raises(JournalError, match=r"stopped after a failed write: .*(no space|input/output)") as caught:
            await asyncio.wait_for(action, 60)
        assert isinstance(caught.value.__cause__, OSError)
    await journal.close()
    async with Journal.open(tmp_path, mode=mode) as again:
        survivors = ids(again.records())
        assert survivors[:3] == [0, 1, 2]
        assert survivors == list(range(len(survivors)))
        assert 99 not in survivors
        assert (again.repaired_bytes == 30) == (failing == "write")


def test_a_real_file_size_limit_stops_the_journal(tmp_path: Path) -> None:
    """The kernel itself refuses to write on: the child sees a typed error, and what it was promised is there."""
    script = (
        CHILD.replace("asyncio.run(main())", "").replace("segment_bytes=4000", "segment_bytes=1 << 20")
        + """
from towline.gateway.journal import JournalError
try:
    asyncio.run(main())
except JournalError as error:
    os.write(1, b"stopped: " + type(error.__cause__).__name__.encode())
"""
    )
    limit = 20_000
    process = child(
        script,
        tmp_path,
        SyncMode.GROUP,
        1 << 20,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    *acknowledged, last = process.communicate(timeout=60)[0].split(b"\n")
    assert last == b"stopped: OSError"
    survivors = ids(replay(tmp_path))
    assert survivors == list(range(len(survivors)))
    assert {int(line) for line in acknowledged} <= set(survivors)
    assert len(acknowledged) > 100


async def test_an_invalid_or_oversized_append_does_not_affect_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "MAX_PAYLOAD", 1_000)
    async with Journal.open(tmp_path, segment_bytes=200) as journal:
        with pytest.raises(RecordError, match="limit of 1000"):
            await journal.append(bytes(1_001))
        await journal.append(turn(0, 200))
        await journal.append(turn(1))
    assert ids(replay(tmp_path)) == [0, 1], "a record larger than a segment has one to itself"


# --- compaction ------------------------------------------------------------------------------------------------------


def keep_odd_from_30(record: Record) -> bool:
    return record.fields["id"] >= 30 and record.fields["id"] % 2 == 1


async def test_compaction_drops_what_is_not_kept_and_never_touches_the_active_segment(tmp_path: Path) -> None:
    async with Journal.open(tmp_path, segment_bytes=400) as journal:
        for number in range(60):
            await journal.append(turn(number))
        active = segments(tmp_path)[-1]
        in_active = ids(replay_one(active))
        before = (active.stat().st_ino, active.read_bytes())
        size = sum(path.stat().st_size for path in segments(tmp_path))
        freed = await journal.compact(keep_odd_from_30)
        assert freed == size - sum(path.stat().st_size for path in segments(tmp_path)) > size / 2
        assert (active.stat().st_ino, active.read_bytes()) == before
        expected = [n for n in range(60) if n in in_active or (n >= 30 and n % 2)]
        assert ids(journal.records()) == expected
        assert await journal.compact(keep_odd_from_30) == 0
        unchanged = {path: path.stat().st_ino for path in segments(tmp_path)}
        with pytest.raises(ZeroDivisionError):
            await journal.compact(lambda record: bool(1 // 0))
        assert {path: path.stat().st_ino for path in segments(tmp_path)} == unchanged
        await journal.append(turn(60))
    assert ids(replay(tmp_path)) == [*expected, 60]

    async with Journal.open(tmp_path, segment_bytes=400) as journal:
        await journal.append(turn(61))
        assert await journal.compact(lambda record: False) > 0
        assert ids(journal.records()) == [61], "the active segment stays"
    with pytest.raises(JournalError, match="is closed"):
        await journal.compact(keep_odd_from_30)
    async with Journal.open(tmp_path) as journal:
        assert ids(journal.records()) == [61]


def replay_one(path: Path) -> list[Record]:
    return [decode(payload) for payload in SegmentReader(path.parent, int(path.stem), newest=True)]


async def test_compaction_while_appends_go_on(tmp_path: Path) -> None:
    async with Journal.open(tmp_path, segment_bytes=400, mode=SyncMode.OS) as journal:

        async def compact_again_and_again() -> None:
            while len(acknowledged) < 600:
                await journal.compact(lambda record: record.fields["id"] % 10 == 0)

        acknowledged: list[int] = []

        async def write() -> None:
            for number in range(600):
                await journal.append(turn(number))
                acknowledged.append(number)

        await asyncio.gather(compact_again_and_again(), write())
        survivors = ids(journal.records())
    assert survivors == sorted(set(survivors))
    assert set(survivors) >= set(range(0, 600, 10))
    assert len(survivors) < 600
    assert ids(replay(tmp_path)) == survivors


def test_a_full_segment_may_be_compacted_before_its_writer_closes_it(tmp_path: Path) -> None:
    full = SegmentWriter(tmp_path, 1, Disk())
    full.publish("create")
    full.seal()
    compacted = SegmentWriter(tmp_path, 1, Disk())
    full.close()
    compacted.publish("compact")
    compacted.close()
    assert [path.name for path in tmp_path.iterdir()] == ["00000001.seg"]


async def test_a_failed_compaction_changes_nothing_and_appends_go_on(tmp_path: Path) -> None:
    full = threading.Event()

    def write(file: int, data: memoryview) -> int:
        if full.is_set():
            raise OSError(errno.ENOSPC, "no space left")
        return os.write(file, data)

    async with Journal.open(tmp_path, segment_bytes=400, disk=Disk(write=write)) as journal:
        for number in range(20):
            await journal.append(turn(number))
        full.set()
        with pytest.raises(JournalError, match=r"cannot be compacted: .*no space"):
            await journal.compact(lambda record: record.fields["id"] % 2 == 0)
        full.clear()
        assert not drafts(tmp_path)
        await journal.append(turn(20))
    assert ids(replay(tmp_path)) == list(range(21))


COMPACTING_CHILD = """
import asyncio, sys
from pathlib import Path
from towline.gateway.journal import Journal

async def main():
    journal = Journal.open(Path(sys.argv[1]), segment_bytes=400)
    await journal.compact(lambda record: record.fields["id"] >= 30 and record.fields["id"] % 2 == 1)

asyncio.run(main())
"""

STEPS = ["compact_written", "compact_written:9", "compact_renamed", "compact_renamed:9", "dropped", "dropped:3"]
STEPS += ["recover_written", "recover_renamed", "create_written", "create_renamed"]


@pytest.mark.parametrize("step", STEPS)
async def test_a_crash_in_compaction_or_recovery_loses_nothing_needed(tmp_path: Path, step: str) -> None:
    async with Journal.open(tmp_path / "live", segment_bytes=400) as journal:
        for number in range(60):
            await journal.append(turn(number))
        folder = shutil.copytree(journal.folder, tmp_path / "killed")
    process = child(COMPACTING_CHILD, folder, crash_at=f"journal.{step}")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert bool(drafts(folder)) == ("_written" in step)

    async with Journal.open(folder, segment_bytes=400) as journal:
        assert not drafts(folder)
        survivors = ids(journal.records())
        assert survivors == sorted(set(survivors))
        assert {n for n in range(60) if n >= 30 and n % 2} <= set(survivors)
        assert journal.repaired_bytes == 0
        if not step.startswith(("compact", "dropped")):
            assert survivors == list(range(60))
        await journal.compact(keep_odd_from_30)
        assert ids(journal.records()) == [n for n in range(60) if n >= 30 and n % 2]


# --- crash points ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("", "abc"), ("elsewhere", "abc"), ("here", ""), ("here:1", ""), ("here:3", "ab"), ("here:4", "abc")],
)
def test_crash_points_kill_at_the_nth_hit(setting: str, expected: str) -> None:
    script = """
import os
from towline.common.crashpoints import crash_point
for letter in b"abc":
    crash_point("here")
    os.write(1, bytes([letter]))
"""
    process = child(script, crash_at=setting)
    output = process.communicate(timeout=60)[0].decode()
    assert output == expected
    assert process.returncode == (0 if expected == "abc" else -signal.SIGKILL)


def test_a_crash_point_setting_that_means_nothing_is_refused() -> None:
    for setting in ("here:0", "here:x", "here:", "here:-1"):
        process = child("import towline.common.crashpoints", crash_at=setting, stderr=subprocess.PIPE)
        assert b"ConfigError: TOWLINE_CRASH_AT" in process.communicate(timeout=60)[1]
