"""Damaged journals, trajectory files, rows and segments: every start succeeds, and undamaged data survives.

Damage is random with a printed seed; `--fuzz-seed` sets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import shutil
import sqlite3
import struct
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, text

from support.gateway.gateway_rig import chat, message_of, results, running_gateway, user
from support.seeds import chosen_seed
from support.server.server_rig import rig, task
from towline.common.files import QUARANTINE
from towline.config import GatewaySettings, NodeSettings
from towline.demo import tokenizer
from towline.engines.scripted import ScriptedEngine
from towline.gateway.gateway import Gateway
from towline.gateway.journal import Disk, Record, encode, replay
from towline.gateway.journal.segments import FRAME_HEADER, SegmentWriter, segment_path
from towline.node.environment import SandboxRuntimes
from towline.node.node import recover_sessions
from towline.schema import Trajectory
from towline.server.store import tables
from towline.server.store.database import Store, database_url
from towline.server.store.salvage import salvage
from towline.tokens.loading import load_codec
from towline.tokens.templates.sentinel import SentinelCodec

ROUNDS = 36
"""Random damages to each kind of file; more with `--fuzz-rounds`."""


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> SentinelCodec:
    folder = tmp_path_factory.mktemp("model")
    tokenizer.write(folder)
    return load_codec(folder)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return chosen_seed(request.config.getoption("--fuzz-seed", default=None))


# Gateway and node


class Left:
    """A data folder as a killed server leaves it: open sessions of several turns each, in one journal."""

    def __init__(self, folder: Path, ids: list[str], reference: dict[str, list[int]]):
        self.folder = folder
        self.ids = ids
        self.reference = reference
        """The sampled ids of each session."""


@pytest.fixture(scope="module")
def left(codec: SentinelCodec, tmp_path_factory: pytest.TempPathFactory) -> Left:
    return asyncio.run(killed(codec, tmp_path_factory.mktemp("left") / "data"))


async def killed(codec: SentinelCodec, folder: Path) -> Left:
    ids = []
    async with running_gateway(codec, folder) as r:
        for number in range(4):
            session = await r.open(id=f"session-{number}")
            ids.append(session.id)
            history = [user(f"Number {number}")]
            for _ in range(3):
                status, answer = await r.post(session, chat(*history))
                assert status == 200, answer
                message = message_of(answer)
                history += [message, *results(message)]
        reference = {id: sampled(r.gateway.trajectory(id)) for id in ids}
    return Left(folder, ids, reference)


def sampled(trajectory: Trajectory) -> list[int]:
    return [int(id) for turn in trajectory.turns for id in turn.sampled]


@contextlib.asynccontextmanager
async def started(codec: SentinelCodec, folder: Path) -> AsyncIterator[Gateway]:
    gateway = Gateway(ScriptedEngine(codec), codec, GatewaySettings(port=0, control_port=0, data=folder))
    await gateway.open()
    try:
        yield gateway
    finally:
        await gateway.close()


async def recovered(codec: SentinelCodec, folder: Path, ids: list[str]) -> dict[str, list[int]]:
    """What a start recovers of the open sessions."""
    runtimes = SandboxRuntimes(NodeSettings(), folder / "sandboxes", folder / "cache")
    async with started(codec, folder) as gateway:
        found = {one.session_id: sampled(one) async for one in recover_sessions(gateway, runtimes, set(ids))}
        for id in found:
            await gateway.release(id)
            gateway.trajectory_file(id).unlink(missing_ok=True)
        return found


def segment(folder: Path) -> Path:
    """The segment that holds the sessions."""
    return max((folder / "journal").glob("*.seg"), key=lambda path: path.stat().st_size)


def frames(data: bytes) -> list[int]:
    """Offsets of the frames."""
    found, at = [], data.find(b"\xff\xfa\xf5\xff")
    while at >= 0:
        found.append(at)
        at = data.find(b"\xff\xfa\xf5\xff", at + FRAME_HEADER.size + int.from_bytes(data[at + 4 : at + 8], "little"))
    return found


def flip(chance: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 1, 8])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(chance: random.Random, path: Path) -> None:
    data = path.read_bytes()
    edges = [0, 1, 8, 23, 24, *frames(data), len(data) - 1]
    path.write_bytes(data[: max(0, chance.choice(edges) + chance.choice([-1, 0, 1, FRAME_HEADER.size]))])


def blank(chance: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data))
    end = min(len(data), start + chance.choice([1, 64, 4096]))
    data[start:end] = bytes(end - start)
    path.write_bytes(data)


def shift(chance: random.Random, path: Path) -> None:
    data = path.read_bytes()
    at = chance.randrange(len(data))
    path.write_bytes(data[:at] + b"\x00" * chance.randrange(1, 5) + data[at:])


def extend(chance: random.Random, path: Path) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randrange(1, 400)))


def replace_by_folder(chance: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_bytes(b"x")


def remove(chance: random.Random, path: Path) -> None:
    path.unlink()


def newer(chance: random.Random, path: Path) -> None:
    data = path.read_bytes()
    head = data[:8] + struct.pack("<I", chance.randrange(2, 100)) + data[12:20]
    path.write_bytes(head + struct.pack("<I", zlib.crc32(head)) + data[24:])


def far_away(chance: random.Random, path: Path) -> None:
    """A gap in the sequence numbers."""
    path.rename(path.with_name(f"{chance.randrange(100, 10**8):08d}.seg"))


def with_records(change: Callable[[random.Random, list[Record]], None]) -> Callable[[random.Random, Path], None]:
    """The segment rewritten with valid frames and invalid records."""

    def done(chance: random.Random, path: Path) -> None:
        made = list(replay(path.parent))
        change(chance, made)
        number = int(path.stem)
        writer = SegmentWriter(path.parent, number, Disk())
        for one in made:
            writer.add(one if isinstance(one, bytes) else encode(one.kind, one.fields, one.arrays))
        writer.seal()
        writer.publish("test")
        writer.close()
        for other in path.parent.glob("*.seg"):
            if other != segment_path(path.parent, number):
                other.unlink()

    done.__name__ = change.__name__
    return done


@with_records
def positive_logprob(chance: random.Random, made: list[Record]) -> None:
    turns = [one for one in made if one.kind == "turn" and len(one.arrays["logprobs"])]
    one = chance.choice(turns)
    logprobs = one.arrays["logprobs"].copy()
    logprobs[chance.randrange(len(logprobs))] = chance.choice([0.5, np.nan, np.inf])
    one.arrays["logprobs"] = logprobs


@with_records
def lost_field(chance: random.Random, made: list[Record]) -> None:
    one = chance.choice(made)
    one.fields.pop(chance.choice(list(one.fields)))


@with_records
def other_field(chance: random.Random, made: list[Record]) -> None:
    one = chance.choice(made)
    one.fields[chance.choice(list(one.fields))] = chance.choice([None, -1, "x", [], {"a": 1}, "\x00", 10**18])


@with_records
def lost_record(chance: random.Random, made: list[Record]) -> None:
    del made[chance.randrange(len(made))]


@with_records
def later_kind(chance: random.Random, made: list[Record]) -> None:
    made.insert(chance.randrange(len(made)), Record("hologram", {"session": "session-1", "v": 9}, {}))
    made.insert(chance.randrange(len(made)), Record("hologram", {}, {}))


@with_records
def no_record(chance: random.Random, made: list[Record]) -> None:
    made.insert(chance.randrange(len(made)), chance.randbytes(chance.randrange(40)))  # type: ignore[arg-type]


BYTES = [flip, flip, cut, cut, blank, shift, extend, replace_by_folder, remove, newer, far_away]
RECORDS = [positive_logprob, lost_field, other_field, other_field, lost_record, later_kind, no_record]


async def test_damaged_journals(
    codec: SentinelCodec, left: Left, tmp_path: Path, seed: int, request: pytest.FixtureRequest
) -> None:
    assert await recovered(codec, copied(left, tmp_path / "whole"), left.ids) == left.reference
    chance = random.Random(seed)
    outcomes = {"whole": 0, "some": 0, "none": 0}
    for number in range(request.config.getoption("--fuzz-rounds", default=None) or ROUNDS):
        damage = (BYTES + RECORDS)[number % len(BYTES + RECORDS)]
        folder = copied(left, tmp_path / f"{number}-{damage.__name__}")
        path = segment(folder)
        damage(chance, path)
        evidence = path.read_bytes() if path.is_file() else None
        found = await recovered(codec, folder, left.ids)
        for id, ids in found.items():
            if damage not in RECORDS:
                # What is there is what was sampled: whole, or without turns at the end.
                assert left.reference[id][: len(ids)] == ids, (damage, id)
        kept = list((folder / QUARANTINE).rglob("*")) if (folder / QUARANTINE).exists() else []
        if damage in (flip, blank, newer) and found != left.reference:
            torn = evidence is not None and not any(one.is_file() and one.read_bytes() == evidence for one in kept)
            assert not torn or lacks_only_the_end(found, left), f"{damage.__name__}: the damaged segment is not kept"
        if damage is positive_logprob:
            assert len(found) == len(left.ids) - 1
            (aside,) = [one for one in kept if one.name.startswith("session-") and one.is_dir()]
            assert {one.fields["session"] for one in replay(aside)} == {aside.name.removeprefix("session-")}
        outcomes["whole" if found == left.reference else "some" if found else "none"] += 1
        # It is repaired: another start finds nothing to complain of.
        async with started(codec, folder) as gateway:
            assert gateway.sessions == {}
        again = list((folder / QUARANTINE).rglob("*")) if (folder / QUARANTINE).exists() else []
        assert len(again) == len(kept), damage
        shutil.rmtree(folder)
    assert outcomes["some"], outcomes


WRONG = [None, -1, "\x00", "../../x", "y" * 5000, {"a": 1}]


async def test_any_field_of_any_record_may_be_wrong(codec: SentinelCodec, left: Left, tmp_path: Path) -> None:
    """One wrong field costs at most its session: the start succeeds, the others are whole, and nothing is complained of twice."""
    cases = {(one.kind, name) for one in replay(segment(left.folder).parent) for name in one.fields}
    assert len(cases) > 20
    for number, ((kind, name), value) in enumerate(itertools.product(sorted(cases), WRONG)):

        def set_field(chance: random.Random, made: list[Record], kind: str = kind, name: str = name) -> None:
            next(one for one in made if one.kind == kind and name in one.fields).fields[name] = value  # noqa: B023

        folder = copied(left, tmp_path / str(number))
        with_records(set_field)(random.Random(0), segment(folder))
        found = await recovered(codec, folder, left.ids)
        whole = sum(left.reference[id] == ids for id, ids in found.items())
        assert whole >= len(left.ids) - 1, (kind, name, value)
        kept = sorted((folder / QUARANTINE).rglob("*")) if (folder / QUARANTINE).exists() else []
        async with started(codec, folder) as gateway:
            assert gateway.sessions == {}, (kind, name, value)
        again = sorted((folder / QUARANTINE).rglob("*")) if (folder / QUARANTINE).exists() else []
        assert again == kept, (kind, name, value)
        shutil.rmtree(folder)
    assert os.listdir(tmp_path) == []


def lacks_only_the_end(found: dict[str, list[int]], left: Left) -> bool:
    """As after a torn write: records are missing from some point on."""
    return all(left.reference[id][: len(ids)] == ids for id, ids in found.items())


def copied(left: Left, to: Path) -> Path:
    shutil.copytree(left.folder, to)
    return to


async def test_damaged_surroundings(codec: SentinelCodec, left: Left, tmp_path: Path) -> None:
    """Folders in place of files, files in place of folders, and invalid trajectory files."""
    places = ["journal/lock", "journal/00000009.tmp", "trajectories/.x.tmp", "trajectories/session-1.arrow"]
    for name in [*places, "trajectories/other.arrow"]:
        folder = copied(left, tmp_path / name.replace("/", "-"))
        path = folder / name
        if path.is_file():
            path.unlink()
        path.mkdir()
        assert await recovered(codec, folder, left.ids) == left.reference, name
    for name in ("trajectories", "quarantine"):
        folder = copied(left, tmp_path / name)
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).write_bytes(b"?")
        (folder / "journal" / "00000007.seg").write_bytes(b"?")
        assert await recovered(codec, folder, left.ids) == left.reference, name
    folder = copied(left, tmp_path / "file")
    shutil.rmtree(folder / "journal")
    (folder / "journal").write_bytes(b"?")
    assert await recovered(codec, folder, left.ids) == {}
    # A trajectory that was written, and damaged before the journal said so, is made again from the journal.
    folder = copied(left, tmp_path / "again")
    (folder / "trajectories" / "session-2.arrow").write_bytes(b"ARROW1 and then nothing")
    assert await recovered(codec, folder, left.ids) == left.reference
    assert [one.name for one in (folder / QUARANTINE).iterdir()] == ["session-2.arrow"]


async def test_session_that_cannot_be_built_logs_one_line(
    codec: SentinelCodec, left: Left, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied(left, tmp_path / "data")
    positive_logprob(random.Random(1), segment(folder))
    with caplog.at_level(logging.ERROR):
        found = await recovered(codec, folder, left.ids)
    assert len(found) == 3
    told = [record.getMessage() for record in caplog.records if record.name == "towline.common.files"]
    assert len(told) == 1
    assert "cannot be built" in told[0]
    assert "\n" not in told[0]


# Rows and segments


async def test_damaged_rows_and_segments(
    database: str, tmp_path: Path, seed: int, request: pytest.FixtureRequest
) -> None:
    """Overwrite one value after the other; after each, the service starts and runs new tasks."""
    chance = random.Random(seed)
    async with rig(tmp_path, database) as r:
        await r.caller.submit(*(task(f"old/{number}", 2) for number in range(6)))
        await r.caller.take(12, "first")
        await r.caller.submit(*(task(f"wait/{number}", 1, harness_options={"hang": True}) for number in range(3)))
        await r.caller.until("/healthz", active=3)
    rounds = (request.config.getoption("--fuzz-rounds", default=None) or ROUNDS) // 3
    for number in range(rounds):
        done = await harm_row(chance, database, tmp_path)
        if number % 4 == 3:
            files = sorted((tmp_path / "segments").rglob("*.arrow"))
            chance.choice([flip, cut, blank, remove])(chance, chance.choice(files))
        try:
            async with rig(tmp_path, database) as r:
                await r.caller.ok("POST", "/v1/policy/resume", {})
                await r.caller.submit(task(f"new/{number}"))
                await r.caller.until(f"/v1/tasks/new%2F{number}", state="done")
                assert (await r.caller.ok("GET", "/healthz"))["status"] == "ok"
                taken = await r.caller.lease(f"reader-{number}", max=1000, wait=1)
                assert any(one.task_id == f"new/{number}" for one in taken)
                assert (await r.caller.ack(*taken, consumer=f"reader-{number}"))["unknown"] == []
        except Exception as error:
            raise AssertionError(f"round {number}, after {done}") from error


async def test_rows_without_a_task_id_get_one(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database) as r:
        await r.caller.submit(*(task(f"old/{number}", 2) for number in range(2)))
        await r.caller.take(4, "first")
    store = Store(database_url(database, tmp_path))
    await store.open(serving=False)
    async with store.write() as tx:
        await tx.execute(text("UPDATE results SET task_id = ''"))
        await tx.execute(text("UPDATE sessions SET task_id = '' WHERE task_id = 'old/1'"))
    await store.close()
    async with rig(tmp_path, database) as r:
        sessions = await r.caller.lease("reader", max=100, wait=1)
        assert sorted(one.task_id for one in sessions) == ["old/0", "old/0", "old/1", "old/1"]
        # A group's row names nothing else: it is delivered, and can be acknowledged.
        groups = await r.caller.lease("reader", unit="group", max=100, wait=1)
        assert [one.task_id.startswith("damaged-") for one in groups] == [True, True]
        assert (await r.caller.ack(*sessions, *groups, consumer="reader"))["unknown"] == []


def header(chance: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[chance.choice([0, 5, 16, 18, 19, 21, 44, 47, 56, 59])] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def definition(chance: random.Random, path: Path) -> None:
    """Rename a column in the definition of a table, or make the definition invalid."""
    data = path.read_bytes()
    path.write_bytes(
        data.replace(*chance.choice([(b"\tsession_id ", b"\tsession_xx "), (b"CREATE TABLE", b"CREATE\xff\xffABLE")]))
    )


def page(chance: random.Random, path: Path) -> None:
    """Zero a page other than the first, which lists the tables."""
    data = bytearray(path.read_bytes())
    start = chance.randrange(1, len(data) // 4096) * 4096
    data[start : start + 4096] = bytes(4096)
    path.write_bytes(data)


def half(chance: random.Random, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def test_a_crash_before_the_first_checkpoint_is_no_damage(tmp_path: Path) -> None:
    """Until then the main file of a new database has an almost empty header, and everything is in the write-ahead log."""
    path = tmp_path / "towline.db"
    made = f"""
import os, sqlite3
database = sqlite3.connect({str(path)!r})
database.execute("PRAGMA journal_mode = WAL")
database.execute("CREATE TABLE t (a)")
database.execute("INSERT INTO t VALUES (7)")
database.commit()
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", made], check=True)
    salvage(path)
    assert not (tmp_path / "quarantine").exists()
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT a FROM t").fetchall() == [(7,)]


@pytest.mark.parametrize("damage", [header, definition, page, flip, half])
async def test_damaged_database_file(damage: Callable[[random.Random, Path], None], tmp_path: Path, seed: int) -> None:
    """The service starts with the rows that can be read; the file is kept."""
    chance, file = random.Random(seed), tmp_path / "towline.db"
    async with rig(tmp_path) as r:
        await r.caller.submit(*(task(f"old/{number}", 2) for number in range(8)))
        await r.caller.take(16, "first")
        whole = {one.name for one in (tmp_path / "segments").rglob("*.arrow")}
    for number in range(3):
        # Each start may have moved what is in the write-ahead log.
        damage(chance, file)
        evidence = file.read_bytes()
        async with rig(tmp_path) as r:
            await r.caller.submit(task(f"new/{number}"))
            await r.caller.until(f"/v1/tasks/new%2F{number}", state="done")
            assert any(one.task_id == f"new/{number}" for one in await r.caller.lease("reader", max=1000, wait=1))
            if damage in (header, definition):
                assert (await r.caller.ok("GET", "/v1/tasks/old%2F0"))["state"] == "done"
        assert evidence in salvaged_files(tmp_path) or damage is flip
        assert whole <= {one.name for one in (tmp_path / "segments").rglob("*.arrow")}


def salvaged_files(folder: Path) -> list[bytes]:
    """The databases in the quarantine; nothing else of a salvage is left."""
    assert {one.name for one in folder.glob("towline.db.*")} == {"towline.db.lock"}
    return [one.read_bytes() for one in (folder / QUARANTINE).glob("towline.db*")]


async def test_interrupted_salvage_is_completed(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.caller.submit(task("old"))
        await r.caller.take(1)
    file = tmp_path / "towline.db"
    shutil.copy(file, tmp_path / "towline.db.salvaged")
    file.write_bytes(b"damaged")
    async with rig(tmp_path) as r:
        assert (await r.caller.ok("GET", "/v1/tasks/old"))["state"] == "done"


NEVER = {("alembic_version", "version_num"), ("meta", "name"), ("counters", "name")}
"""Which step the schema is at, and the names of things, are no values."""


async def harm_row(chance: random.Random, database: str, folder: Path) -> str:
    """Overwrite one value of one row, outside of keys."""
    store = Store(database_url(database, folder))
    await store.open(serving=False)
    try:
        while True:
            table = chance.choice(tables.metadata.sorted_tables)
            columns = [
                one
                for one in table.columns
                if not one.primary_key and not one.unique and (table.name, one.name) not in NEVER
            ]
            async with store.read() as tx:
                found = list(await tx.execute(select(table)))
            if not found or not columns:
                continue
            row, column = chance.choice(found), chance.choice(columns)
            keys = {key.name: getattr(row, key.name) for key in table.primary_key}
            value = wrong(chance, column, sqlite=store.sqlite)
            where = " AND ".join(f'"{name}" = :k_{name}' for name in keys)
            async with store.write() as tx:
                await tx.execute(
                    text(f'UPDATE "{table.name}" SET "{column.name}" = :value WHERE {where}'),
                    {"value": value, **{f"k_{name}": key for name, key in keys.items()}},
                )
            return f"{table.name}.{column.name} of {keys} was set to {value!r}"
    finally:
        await store.close()


def wrong(chance: random.Random, column: Any, *, sqlite: bool) -> Any:
    """A wrong value for a column, of its type where the database enforces it."""
    kind = column.type.python_type
    if column.nullable and chance.random() < 0.2:
        return None
    if kind is bytes:
        return chance.choice([b"", b"{", b"[1]", b'{"metadata": 3}', chance.randbytes(30)])
    if kind is bool:
        return chance.choice([True, False])
    if kind in (int, float):
        most = 2**15 - 1 if "SMALL" in str(column.type) else 2**31 - 1
        return chance.choice([0, 1, -1, 3, most, *(["x", b"\xff"] if sqlite else [])])
    return chance.choice(["", "x", "9:9", "nowhere/1.arrow", "\u2028" * 3, "0" * 16])[
        : getattr(column.type, "length", None)
    ]
