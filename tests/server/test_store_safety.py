"""Stores that share a location, copied databases, and damaged trajectories: nothing else is lost."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pytest
import typer
from sqlalchemy import select, update
from typer.testing import CliRunner

from support.server.postgres import Postgres
from support.server.server_rig import Caller, Rig, rig, task
from towline.cli import service as export
from towline.client import AsyncClient, Client, Delivered
from towline.cluster.segments import MARKER, SCHEMA, Segments, SegmentSlice
from towline.errors import ConfigError
from towline.schema import Result, Trajectory
from towline.schema.files import VERSION_KEY, dump_json
from towline.server.store import tables
from towline.server.store.database import Store, database_url


async def readable(caller: Caller, results: list[Result]) -> None:
    """Every session of the results has its trajectory."""
    for result in results:
        for one in result.sessions:
            assert one.damaged is None, one
            found = await caller.ok("GET", f"/v1/sessions/{one.session_id}/trajectory")
            assert Trajectory.model_validate(found).session_id == one.session_id


@pytest.mark.parametrize("place", ["folder", "memory://towline-shared"])
async def test_two_services_on_one_location(place: str, tmp_path: Path, postgres: Postgres) -> None:
    """SQLite and PostgreSQL side by side and in turn, killed and not: each keeps all of its own."""
    segments = str(tmp_path / "shared") if place == "folder" else f"{place}/{tmp_path.name}"
    databases = [None, postgres.database()]
    kept: list[list[Result]] = [[], []]
    for turn in range(3):
        async with (
            rig(tmp_path / "a", databases[0], segments=segments) as a,
            rig(tmp_path / "b", databases[1], segments=segments) as b,
        ):
            for place_, (r, mine) in enumerate(zip((a, b), kept, strict=True)):
                await r.caller.submit(task(f"t{turn}", 3))
                mine += await r.caller.take(3)
                # A server that is killed leaves a segment that no row names.
                (one,) = await orphan(r, mine[0].sessions[0].session_id)
                assert one.segment.startswith(r.service.segments.store), place_
            for r, mine in zip((a, b), kept, strict=True):
                await readable(r.caller, mine)
    async with rig(tmp_path / "a", databases[0], segments=segments) as a:
        named = {row.segment for row in await rows(a.service.store)}
        assert set(await asyncio.to_thread(lambda: own_files(a.service.segments))) == named


async def orphan(r: Rig, session_id: str) -> list[SegmentSlice]:
    found = await r.caller.ok("GET", f"/v1/sessions/{session_id}/trajectory")
    return [
        one
        for one in await r.service.segments.write([Trajectory.model_validate(found)])
        if isinstance(one, SegmentSlice)
    ]


def own_files(segments: Segments) -> list[str]:
    return [name for name in segments.location.find(segments.store) if name.endswith(".arrow")]


def old_files(folder: Path) -> list[Path]:
    return list(folder.glob("segments/1/*/*.arrow"))


async def rows(store: Store) -> list[Any]:
    async with store.read() as tx:
        return list(await tx.execute(select(tables.sessions).where(tables.sessions.c.segment.is_not(None))))


async def test_one_data_folder_and_two_databases(tmp_path: Path, postgres: Postgres) -> None:
    other = postgres.database()
    kept: dict[str | None, list[Result]] = {None: [], other: []}
    for database in (None, other, None, other):
        async with rig(tmp_path, database) as r:
            await r.caller.submit(task(f"t{len(kept[database])}", 2))
            kept[database] += await r.caller.take(2)
            await readable(r.caller, kept[database])


async def test_copied_database_removes_nothing_of_the_original(tmp_path: Path) -> None:
    segments = str(tmp_path / "segments")
    async with rig(tmp_path / "a", segments=segments) as a:
        await a.caller.submit(task("first", 2))
        before = await a.caller.take(2)
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "a/towline.db", tmp_path / "b/towline.db")
    async with rig(tmp_path / "a", segments=segments) as a:
        await a.caller.submit(task("second", 2))
        mine = await a.caller.take(2)
        # The copy has the same earlier runs, and rows for less of them.
        async with rig(tmp_path / "b", segments=segments) as b:
            await readable(b.caller, before)
            await b.caller.submit(task("second", 2))
            await readable(b.caller, await b.caller.take(2))
            await b.service.retention.sweep(b.service.started + 1e6)
            await readable(a.caller, before + mine)
    # Moved, with all that belongs to it, it is the same store.
    async with rig(tmp_path / "a", segments=segments) as a:
        store = a.service.segments.store
    (tmp_path / "a").rename(tmp_path / "c")
    async with rig(tmp_path / "c", segments=segments) as c:
        assert c.service.segments.store == store


async def legacy(folder: Path, database: str | None = None) -> None:
    """Turn a store into one without ids."""
    store = Store(database_url(database, folder))
    await store.open(serving=False)
    sessions, meta = tables.sessions, tables.meta
    names = {row.segment for row in await rows(store)}
    async with store.write() as tx:
        for number, name in enumerate(sorted(names), 1):
            old = f"1/000000/{number:09d}.arrow"
            (folder / "segments" / old).parent.mkdir(parents=True, exist_ok=True)
            (folder / "segments" / name).rename(folder / "segments" / old)
            await tx.execute(update(sessions).where(sessions.c.segment == name).values(segment=old))
        await tx.execute(meta.delete().where(meta.c.name.not_in(["token", "swept_epoch"])))
    await store.close()
    for path in (folder / "segments").glob("store-*"):
        shutil.rmtree(path)


async def test_legacy_segments_are_readable(tmp_path: Path, postgres: Postgres) -> None:
    async with rig(tmp_path) as r:
        await r.caller.submit(task("a", 2), task("b"))
        kept = await r.caller.take(3)
    await legacy(tmp_path)
    async with rig(tmp_path, postgres.database()) as other:
        await other.caller.submit(task("a"))
        await readable(other.caller, await other.caller.take(1))
    async with rig(tmp_path) as r:
        await readable(r.caller, kept)
        # Another store is there: whose these are is not known, so they stay.
        assert await r.service.retention.sweep(r.service.started + 1e6) == 2
        assert old_files(tmp_path)


async def test_legacy_segments_are_removed_with_their_tasks(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.caller.submit(task("a", 2))
        await r.caller.take(2)
    await legacy(tmp_path)
    async with rig(tmp_path) as r:
        assert old_files(tmp_path)
        assert await r.service.retention.sweep(r.service.started + 1e6) == 1
        assert not old_files(tmp_path)


async def test_location_without_the_segments_is_rejected(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.caller.submit(task("a", 2))
        kept = await r.caller.take(2)
    with pytest.raises(ConfigError, match=r"are in .*segments; .*elsewhere holds none of them: set server\.segments"):
        async with rig(tmp_path, segments=str(tmp_path / "elsewhere")):
            pass
    # A copy from before the last server began is not where the store's trajectories are.
    shutil.copytree(tmp_path / "segments", tmp_path / "old")
    async with rig(tmp_path) as r:
        await r.caller.submit(task("later"))
        kept += await r.caller.take(1)
    with pytest.raises(ConfigError, match="holds only an older copy of them"):
        async with rig(tmp_path, segments=str(tmp_path / "old")):
            pass
    shutil.move(tmp_path / "segments", tmp_path / "elsewhere")
    async with rig(tmp_path, segments=str(tmp_path / "elsewhere")) as r:
        await readable(r.caller, kept)
        # What vanishes while the server runs is away, and not damaged.
        (tmp_path / "elsewhere").rename(tmp_path / "unmounted")
        answer = await r.caller.call("GET", f"/v1/sessions/{kept[0].sessions[0].session_id}/trajectory")
        assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
        body = {"session_ids": [kept[0].sessions[0].session_id]}
        assert (await r.caller.call("POST", "/v1/trajectories", body)).status == 503
        assert all(one.sessions[0].damaged is None for one in await r.caller.lease("later"))
        (tmp_path / "unmounted").rename(tmp_path / "elsewhere")
        await readable(r.caller, kept)
    shutil.rmtree(tmp_path / "elsewhere")
    async with rig(tmp_path, segments=str(tmp_path / "elsewhere")) as r:  # it starts, and says what is lost
        assert all("is missing" in str(one.sessions[0].damaged) for one in await r.caller.lease("last", max=3))
        await r.caller.submit(task("b"))
        assert (await r.caller.take(1, "last"))[0].sessions[0].damaged is None


# Damage


async def one_segment(r: Rig, ids: list[str]) -> Path:
    """Write the trajectories of sessions into one segment, in this order."""
    found = [Trajectory.model_validate(await r.caller.ok("GET", f"/v1/sessions/{one}/trajectory")) for one in ids]
    pieces = await r.service.segments.write(found)
    await point(r, dict(zip(ids, pieces, strict=True)))
    return Path(r.service.segments.location.name) / str(pieces[0].segment)  # type: ignore[union-attr]


async def point(r: Rig, pieces: dict[str, Any]) -> None:
    table = tables.sessions
    async with r.service.store.write() as tx:
        for name, piece in pieces.items():
            values = {"segment": piece.segment, "place": piece.place, "sha256": piece.sha256}
            await tx.execute(update(table).where(table.c.session_id == name).values(**values))


Harm = Callable[[Rig, Path, list[str]], Awaitable[None]]


async def piece_of(r: Rig, session_id: str) -> SegmentSlice:
    (row,) = [row for row in await rows(r.service.store) if row.session_id == session_id]
    return SegmentSlice.at(row.segment, row.place, row.sha256)


def to_file(harm: Callable[[Path, SegmentSlice], None]) -> Harm:
    """Damage to the segment, given the position of the second trajectory."""

    @functools.wraps(harm)
    async def done(r: Rig, path: Path, ids: list[str]) -> None:
        harm(path, await piece_of(r, ids[1]))

    return done


@to_file
def flip(path: Path, second: SegmentSlice) -> None:
    """One bit of the second trajectory."""
    data = bytearray(path.read_bytes())
    data[second.offset + second.length // 2] ^= 4
    path.write_bytes(data)


@to_file
def flip_end(path: Path, second: SegmentSlice) -> None:
    """The file's own index: every trajectory is still intact."""
    data = path.read_bytes()
    path.write_bytes(data[:-400] + bytes(byte ^ 255 for byte in data[-400:]))


@to_file
def cut(path: Path, second: SegmentSlice) -> None:
    """Everything behind the middle of the second trajectory."""
    path.write_bytes(path.read_bytes()[: second.offset + second.length // 2])


@to_file
def missing(path: Path, second: SegmentSlice) -> None:
    path.unlink()


@to_file
def folder_instead(path: Path, second: SegmentSlice) -> None:
    path.unlink()
    path.mkdir()


@to_file
def empty(path: Path, second: SegmentSlice) -> None:
    path.write_bytes(b"")


async def newer(r: Rig, path: Path, ids: list[str]) -> None:
    """The second trajectory as a later version would write it."""
    table = await r.service.segments.read(await piece_of(r, ids[1]))
    later = table.schema.with_metadata({VERSION_KEY: b"99"})
    await point(r, {ids[1]: written(r, table.replace_schema_metadata(later.metadata))})


async def older(r: Rig, path: Path, ids: list[str]) -> None:
    """The second trajectory as an earlier version wrote it, without newer columns. It is not damaged."""
    table = await r.service.segments.read(await piece_of(r, ids[1]))
    await point(r, {ids[1]: written(r, table.drop_columns(["failure"] if "failure" in table.column_names else []))})


def written(r: Rig, table: pa.Table) -> SegmentSlice:
    sink = pa.BufferOutputStream()
    with ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    name = f"{r.service.segments.store}/{r.service.store.epoch}-made/000000/{hashlib.md5(data).hexdigest()}.arrow"
    r.service.segments.location.write(name, data)
    with ipc.open_file(pa.py_buffer(data)) as file:
        assert file.num_record_batches == 1
    return SegmentSlice(name, 0, 0, len(data), hashlib.sha256(data).hexdigest())


async def no_place(r: Rig, path: Path, ids: list[str]) -> None:
    table = tables.sessions
    async with r.service.store.write() as tx:
        await tx.execute(update(table).where(table.c.session_id == ids[1]).values(place="nowhere"))


async def no_body(r: Rig, path: Path, ids: list[str]) -> None:
    table = tables.results
    async with r.service.store.write() as tx:
        await tx.execute(update(table).where(table.c.session_id == ids[1]).values(body=b'{"session_id": "x'))


HARMS: list[tuple[Harm, set[int], str]] = [
    (flip, {1}, "its hash differs"),
    (flip_end, set(), ""),
    (cut, {1, 2}, "is truncated"),
    (missing, {0, 1, 2}, "is missing"),
    (folder_instead, {0, 1, 2}, "cannot be read"),
    (empty, {0, 1, 2}, "is truncated"),
    (newer, {1}, "99"),
    (older, set(), ""),
    (no_place, {1}, "no valid position"),
    (no_body, {1}, "the row of this result is damaged"),
]


@pytest.mark.parametrize(("harm", "lost", "reason"), HARMS, ids=[harm.__name__ for harm, _, _ in HARMS])
async def test_damage_affects_only_its_session(
    harm: Harm, lost: set[int], reason: str, database: str, tmp_path: Path
) -> None:
    async with rig(tmp_path, database) as r:
        await r.caller.submit(task("a", 3), task("b", 2))
        results = await r.caller.take(5, "first")
        ids = [one.sessions[0].session_id for one in results if one.task_id == "a"]
        await harm(r, await one_segment(r, ids), ids)
        expected = {ids[index] for index in lost}

        # Raw HTTP: flagged, and acknowledged as any other.
        raw = await r.caller.take(5, "raw")
        flagged = {one.sessions[0].session_id: one.sessions[0] for one in raw if one.sessions[0].damaged}
        assert flagged.keys() == expected
        assert all(reason in str(one.damaged) and not one.usable for one in flagged.values()), flagged
        assert await r.caller.lease("raw", wait=0) == []
        for name in ids if harm is not no_body else ():
            answer = await r.caller.call("GET", f"/v1/sessions/{name}/trajectory")
            assert answer.status == (500 if name in expected else 200), answer
            if name in expected:
                assert name in answer.body["error"]

        # Both clients, both units.
        def blocking() -> list[Delivered]:
            with Client(r.url, patience=5) as client:
                return list(client.results("sync", limit=5, auto_ack=True))

        async with AsyncClient(r.url, patience=5) as client:
            delivered = [one async for one in client.results("async", limit=5, auto_ack=True)]
            groups = [one async for one in client.results("groups", "group", limit=2, auto_ack=True)]
            assert [one async for one in client.results("async", idle=0, wait=0)] == []
        for found in (delivered, await asyncio.to_thread(blocking)):
            assert {name for one in found for name in one.damaged} == expected
            got = {trajectory.session_id for one in found for trajectory in one.trajectories}
            assert got >= {one.sessions[0].session_id for one in results} - expected
        assert sorted(one.task_id for one in groups) == ["a", "b"]
        assert {name for one in groups for name in one.damaged} == expected
        assert all(len(one.trajectories) >= len(one.sessions) - len(one.damaged) for one in groups)

        if harm in (flip, newer):
            await exports(r, tmp_path, expected)


async def exports(r: Rig, tmp_path: Path, expected: set[str]) -> None:
    """The others are exported, and the command reports what it left out."""
    app = typer.Typer()
    app.command()(export.export)
    out = tmp_path / "rows.parquet"
    for options in (["--json"], []):
        ran = await asyncio.to_thread(CliRunner().invoke, app, ["--out", str(out), "--url", r.url, *options])
        assert ran.exit_code == 1, ran.output
        if options:
            told = json.loads(ran.stdout)
            assert (told["damaged"].keys(), told["sessions"], told["rows"]) == (expected, 4, 4)
        else:
            assert all(f"damaged, left out: {name}" in ran.output for name in expected)


def test_markers_name_their_store(tmp_path: Path) -> None:
    async def run() -> str:
        async with rig(tmp_path) as r:
            return r.service.segments.store

    store = asyncio.run(run())
    told = json.loads((tmp_path / "segments" / store / MARKER).read_bytes())
    assert told["store"] == store
    assert "towline.db" in told["database"]
    assert dump_json(told)
    assert "session_id" in SCHEMA.names
