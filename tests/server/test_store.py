"""The store: its schema, its single server, the order of its numbers, and database outages."""

from __future__ import annotations

import asyncio
import random
import secrets
import signal
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import MetaData, Table, insert, inspect, select, update
from sqlalchemy.engine import Connection

from support.server.postgres import Postgres
from support.server.server_rig import rig, row_of, task
from towline.benchmarks.fake_runner import FakeRunner
from towline.config import ServerSettings
from towline.errors import ConfigError, StoreError
from towline.schema import DEFAULT_TENANT, Unit
from towline.server.api.app import serving
from towline.server.delivery.leases import LeaseManager, LeaseRequest
from towline.server.store import tables
from towline.server.store.database import Store, database_url
from towline.server.store.migrations import revisions, upgrade
from towline.server.store.tables import take_numbers


async def test_migrations_create_the_tables_of_the_code(database: str, tmp_path: Path) -> None:
    def differences(connection: Connection) -> list[object]:
        assert {"tasks", "sessions", "results"} < set(inspect(connection).get_table_names())
        return list(compare_metadata(MigrationContext.configure(connection), tables.metadata))

    store = Store(database_url(database, tmp_path))
    for epoch in (1, 2):  # a second start changes nothing
        await store.open()
        assert store.epoch == epoch
        async with store.read() as tx:
            assert await tx.run_sync(differences) == []
        await store.close()
    async with store.write() as tx:
        await tx.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreError, match="newer Towline"):
        await store.open()


@pytest.mark.parametrize("revision", revisions()[1:])
async def test_rows_of_an_earlier_schema_are_kept_and_get_an_owner(
    database: str, tmp_path: Path, revision: str
) -> None:
    store = Store(database_url(database, tmp_path))
    async with store.write() as tx:
        await tx.run_sync(upgrade, revision)
        here = set(await tx.run_sync(lambda connection: inspect(connection).get_table_names()))
        owned = [table for table in tables.metadata.sorted_tables if "owner" in table.c and table.name in here]
        assert len(owned) >= 9
        for table in owned:
            await tx.run_sync(_insert_row, table)
    await store.open()
    async with store.read() as tx:
        for table in owned:
            (row,) = (await tx.execute(select(table))).mappings()
            assert row["owner"] == DEFAULT_TENANT
        if revision < "0005":  # Later ones have these columns.
            task = (await tx.execute(select(tables.tasks))).one()
            assert (task.task_id, task.grace, task.grace_until, task.stopped, task.cut) == ("x", 0, None, None, 0)
            session = (await tx.execute(select(tables.sessions))).one()
            assert (session.session_id, session.turns, session.trained_tokens, session.seconds) == (
                "x",
                None,
                None,
                None,
            )
    await store.close()


def _insert_row(connection: Connection, table: Table) -> None:
    """Insert a row with the columns that the table of this database has."""
    here = Table(table.name, MetaData(), autoload_with=connection)
    values: dict[type, object] = {str: "x", int: 1, float: 1.0, bool: True, bytes: b"x"}
    row = {column.name: values[column.type.python_type] for column in here.columns}
    connection.execute(insert(here), row | ({"owner": ""} if "owner" in row else {}))


async def test_one_server_at_a_time(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path / "one", database):
        with pytest.raises(StoreError, match="another server"):
            async with serving(ServerSettings(port=0, data=tmp_path / "two", database=database), FakeRunner()):
                pass
    async with rig(tmp_path / "two", database) as r:
        assert r.service.store.epoch == 2


@pytest.mark.parametrize("url", ["mysql://me@host/x", "nonsense"])
def test_invalid_database_urls(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.database"):
        database_url(url, tmp_path)


async def test_unreachable_database(tmp_path: Path) -> None:
    secret = f"postgresql://me:hush@/none?host={tmp_path}"
    with pytest.raises(StoreError) as error:
        await Store(database_url(secret, tmp_path)).open()
    assert "hush" not in str(error.value)


async def test_a_result_that_commits_late_is_not_skipped(database: str, tmp_path: Path) -> None:
    """Transactions that publish commit slowly; a concurrent reader sees every number, in order."""
    seed = secrets.randbits(32)
    print("seed", seed)
    rng = random.Random(seed)
    store = Store(database_url(database, tmp_path))
    await store.open()
    delivery, seen, publishing = LeaseManager(store), [], True

    async def publish(times: int) -> None:
        for _ in range(times):
            async with store.write() as tx:
                await asyncio.sleep(rng.uniform(0, 0.005))
                last = await take_numbers(tx, "results", 2)
                await asyncio.sleep(rng.uniform(0, 0.005))
                await tx.execute(insert(tables.results), [row_of(last - 1, 0), row_of(last, 0)])
                await asyncio.sleep(rng.uniform(0, 0.005))

    async def read() -> None:
        while True:
            over = not publishing
            found = await delivery.lease(LeaseRequest("c", Unit.SESSION, 3, 60.0), version=0, now=0.0)
            seen.extend(int(one.result_id.split("-")[1]) for one in found.results)
            if over and not found.results:
                return

    reading = asyncio.create_task(read())
    async with asyncio.timeout(120):
        await asyncio.gather(*(publish(10) for _ in range(6)))
        publishing = False
        await reading
    await store.close()
    assert seen == list(range(1, 121))


async def test_late_end_changes_nothing(database: str, tmp_path: Path) -> None:
    """The end of a session that belongs to another epoch is ignored."""
    async with rig(tmp_path, database) as r:
        await r.caller.submit(task("a", harness_options={"hang": True}))
        await r.caller.until("/healthz", active=1)
        sessions = tables.sessions
        async with r.service.store.write() as tx:
            await tx.execute(update(sessions).values(epoch=99))
        r.runner.cancel(r.runner.started[0])
        await r.caller.until("/healthz", active=0)
        async with r.service.store.read() as tx:
            assert (await tx.execute(select(sessions.c.phase, sessions.c.segment))).one() == (1, None)
        assert await r.caller.lease(wait=0) == []


async def test_database_outage_loses_nothing(postgres: Postgres, tmp_path: Path) -> None:
    """Calls are answered with 503; sessions that end meanwhile wait, and nothing is lost."""
    async with rig(tmp_path, postgres.database()) as r:
        await r.caller.submit(task("a", 4, harness_options={"seconds": 0.3}))
        await r.caller.until("/healthz", active=4)
        await asyncio.to_thread(postgres.stop, signal.SIGQUIT)
        try:
            answers = [await r.caller.call("POST", "/v1/tasks", task("b")) for _ in range(3)]
            await asyncio.sleep(0.5)
            answers.append(await r.caller.call("GET", "/v1/tasks"))
        finally:
            await asyncio.to_thread(postgres.start)
        assert {answer.status for answer in answers} == {503}
        assert all(answer.headers["retry-after"] for answer in answers)
        results = await r.caller.take(4)
        assert {one.sessions[0].attempt for one in results} == {1}
        await r.caller.submit(task("b"))
        await r.caller.take(1)
