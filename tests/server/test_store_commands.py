"""`towline store verify` and `towline store move`: damage is reported, and moves are complete."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from support.server.postgres import Postgres
from support.server.server_rig import rig, task
from towline.cli.store import app
from towline.errors import ConfigError, StoreError
from towline.schema import Trajectory
from towline.server.store import maintenance, ownership, tables
from towline.server.store.database import Store, database_url
from towline.server.store.tables import get_meta


async def store(*words: str) -> tuple[int, Any]:
    """Run the command in its own thread, since it has an event loop."""
    done = await asyncio.to_thread(CliRunner().invoke, app, [*words, "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit | typer.Exit):
        raise done.exception
    return done.exit_code, json.loads(done.stdout) if done.stdout.strip() else None


async def test_verify_reports_damage(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.caller.submit(task("t", 4))
        results = await r.caller.take(4)
        # Also while the service runs.
        assert await store("verify", "--data", str(tmp_path)) == (
            0,
            {"sessions": 4, "segments": len(files(tmp_path)), "damaged": {}, "orphans": 0},
        )
    victim = files(tmp_path)[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    (victim.parent / "000000099.arrow").write_bytes(b"left by a crash")
    code, found = await store("verify", "--data", str(tmp_path))
    assert (code, found["sessions"], found["orphans"]) == (1, 4, 1)
    names = {one.session_id for result in results for one in result.sessions}
    assert found["damaged"]
    assert set(found["damaged"]) <= names
    assert all("hash differs" in reason for reason in found["damaged"].values())


def files(data: Path) -> list[Path]:
    return sorted(data.glob("segments/store-*/*/*/*.arrow"))


@pytest.mark.parametrize("direction", ["to postgresql", "to sqlite"])
async def test_a_moved_store_continues_where_it_was(direction: str, tmp_path: Path, postgres: Postgres) -> None:
    """Move database and location at once: acknowledged results stay acknowledged, leased ones are delivered again."""
    ours, theirs = f"sqlite:///{tmp_path}/other.db", postgres.database()
    old, new = (ours, theirs) if direction == "to postgresql" else (theirs, ours)
    place = str(tmp_path / "elsewhere")
    async with rig(tmp_path, old) as r:
        await r.caller.submit(task("t", 6))
        results = await r.caller.take(2)
        results += await r.caller.lease(max=2, wait=30)
        leased = {one.result_id for one in results[2:]}
        with pytest.raises(StoreError, match="another server uses this database"):
            await move(tmp_path, old, new, place)
    output = await move(tmp_path, old, new, place)
    assert output["segments"]["damaged"] == {}
    # Neither the old location nor the old database is the store's any more.
    with pytest.raises(ConfigError, match="holds only an older copy of them"):
        async with rig(tmp_path, new):
            pass
    # Running it again changes nothing.
    assert (await move(tmp_path, old, new, None))["database"] == output["database"]
    async with rig(tmp_path, new, segments=place) as r:
        await r.caller.ok("POST", "/v1/results/release", {"consumer": "c"})
        again = await r.caller.take(4)
        assert leased < {one.result_id for one in again}
        assert not {one.result_id for one in results[:2]} & {one.result_id for one in again}
        for one in [*results, *again]:
            session_id = one.sessions[0].session_id
            found = await r.caller.ok("GET", f"/v1/sessions/{session_id}/trajectory")
            assert Trajectory.model_validate(found).session_id == session_id
        await r.caller.submit(task("later", 1))
        await r.caller.take(1)
    # The old database names its successor, and serves no more.
    with pytest.raises(ConfigError, match="this store was moved to"):
        async with rig(tmp_path, old):
            pass


async def test_existing_damage_does_not_stop_a_move(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        for number in range(4):
            await r.caller.submit(task(f"t{number}"))
            await r.caller.take(1)
    flipped, missing, folder, *whole = files(tmp_path)
    flipped.write_bytes(bytes(byte ^ 1 for byte in flipped.read_bytes()))
    missing.unlink()
    folder.unlink()
    folder.mkdir()
    place = str(tmp_path / "elsewhere")
    for _ in range(2):
        code, before = await store("verify", "--data", str(tmp_path))
        assert (code, len(before["damaged"]), len(whole)) == (1, 3, 1)
        if not (tmp_path / "elsewhere").exists():
            code, output = await store("move", "--data", str(tmp_path), "--to-segments", place)
            assert (code, output["segments"]["damaged"].keys()) == (0, before["damaged"].keys())
    async with rig(tmp_path, segments=place) as r:
        results = await r.caller.take(4, "other")
        assert sum(one.sessions[0].damaged is None for one in results) == 1


async def move(data: Path, old: str, new: str, place: str | None) -> Any:
    words = ["move", "--data", str(data), "--to-database", new]
    words += ["--to-segments", place] if place is not None else []
    config = data / "towline.toml"
    config.write_text(f'[server]\ndatabase = "{old}"\n')
    code, output = await store(*words, "--config", str(config))
    assert code == 0
    return output


async def test_interrupted_move_can_be_repeated(tmp_path: Path, postgres: Postgres) -> None:
    async with rig(tmp_path) as r:
        await r.caller.submit(task("t", 3))
        await r.caller.take(3)
    source, target = Store(database_url(None, tmp_path)), Store(database_url(postgres.database(), tmp_path))
    await source.open()
    await target.open()
    try:

        def interrupt(done: int, total: int, what: str) -> None:
            if what == "sessions":
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            await maintenance.move_database(source, target, interrupt)
        async with source.read() as tx:
            assert await get_meta(tx, ownership.MOVED_TO) is None, "the old store is still the store"
        rows = await maintenance.move_database(source, target)
        assert rows["sessions"] == 3
        async with target.write() as tx:
            await tx.execute(tables.tasks.delete())
    finally:
        await source.close()
        await target.close()


async def test_store_is_not_moved_onto_another(tmp_path: Path) -> None:
    for name in ("a", "b"):
        async with rig(tmp_path / name) as r:
            await r.caller.submit(task(name, 1))
            await r.caller.take(1)
    other = f"sqlite:///{tmp_path}/b/towline.db"
    with pytest.raises(ConfigError, match="holds 1 tasks of another store"):
        await store("move", "--data", str(tmp_path / "a"), "--to-database", other)
    with pytest.raises(ConfigError, match="no target"):
        await store("move", "--data", str(tmp_path / "a"))
    with pytest.raises(ConfigError, match="no store in"):
        await store("verify", "--data", str(tmp_path / "nowhere"))
