"""The database: SQLite in WAL mode with `synchronous=FULL` by default, PostgreSQL by URL.

Every change is one transaction of `write()`: when the block has ended, it is durable. Rows are locked in one order, tasks
(by id) before sessions before consumers before counters, so that two transactions never wait for each other.
One server at a time uses a store; a second is refused, and what an earlier one left half done is fenced off by `epoch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Insert, Table, event, insert, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from towline import locks
from towline.errors import ConfigError
from towline.schema.files import dump_json
from towline.server import tables
from towline.server.errors import StoreError
from towline.server.migrating import migrate
from towline.server.outages import Outage

log = logging.getLogger("towline.server")
T = TypeVar("T")
_LOCK = 0x746F776C696E65
"""The advisory lock that the one server of a PostgreSQL database holds."""
_WRITES = "towline_writes"
_AGAIN = ("40001", "40P01")
"""PostgreSQL: serialization failure, deadlock."""
_TAKEN = "another server uses this database; stop it, or give this one a database of its own"
_GOODBYE = 10.0
"""Seconds that connections have to close."""
CHUNK = 500
"""Most values in one `IN`."""


def database_url(given: str | None, data: Path) -> URL:
    """The URL with the driver that the store uses; without one, a file in the data folder."""
    if not given:
        return URL.create("sqlite+aiosqlite", database=str(data / "towline.db"))
    try:
        url = make_url(given)
    except ArgumentError as error:
        raise ConfigError("server.database is not a URL such as postgresql://user@host/name") from error
    backend = url.get_backend_name()
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
    if backend not in drivers:
        raise ConfigError(f"server.database: {backend} is neither sqlite nor postgresql")
    return url.set(drivername=drivers[backend])


class Store:
    def __init__(self, url: URL):
        self.url = url
        self.sqlite = url.get_backend_name() == "sqlite"
        self.epoch = 0
        """Counts the servers that used this store."""
        self.token = ""
        """Names the store in the ids of its results."""
        self.outage = Outage("the database is")
        self._engine = self._make_engine()
        self._writing = asyncio.Lock()
        """SQLite has one writer at a time; waiting here costs less than polling there."""
        self._holder: AsyncConnection | None = None
        self._lock: int | None = None
        """Beside an SQLite file: the descriptor of a file that one server at a time has locked."""

    def _make_engine(self) -> AsyncEngine:
        try:
            if self.sqlite:
                engine = create_async_engine(self.url, connect_args={"timeout": 30})
                event.listen(engine.sync_engine, "connect", _tune_sqlite)
                event.listen(engine.sync_engine, "begin", _begin_sqlite)
            else:
                # Connections that broke while they were idle are noticed before they are used.
                # One that answers nothing at all, because the network is cut, is given up in the end.
                waits = {"timeout": 30, "command_timeout": 300}
                engine = create_async_engine(
                    self.url, pool_pre_ping=True, pool_size=10, max_overflow=10, connect_args=waits
                )
        except (ImportError, NoSuchModuleError) as error:
            raise ConfigError("a store on PostgreSQL needs its driver: pip install 'towline[postgres]'") from error
        return engine

    @property
    def shown(self) -> str:
        """The URL without its password."""
        return self.url.render_as_string(hide_password=True)

    # Opening

    async def open(self, *, serving: bool = True) -> None:
        """Bring the schema up to date; with `serving`, become the one server of this store."""
        try:
            if serving:
                await self._hold()
            async with self.write() as tx:
                await migrate(tx, lock=None if self.sqlite else _LOCK + 1)
            async with self.write() as tx:
                await self._introduce(tx, serving=serving)
                if serving:
                    self.epoch = await take(tx, "epoch")
        except SQLAlchemyError as error:
            await self.close()
            raise StoreError(f"the database {self.shown} cannot be used: {_said(error)}") from error
        except OSError as error:
            await self.close()
            raise StoreError(f"the database does not answer: {error}") from error
        except BaseException:
            await self.close()
            raise

    async def _hold(self) -> None:
        if self.sqlite:
            self._lock = _locked(Path(f"{self.url.database}.lock"))
            return
        self._holder = await self._engine.connect()
        await self._holder.execution_options(isolation_level="AUTOCOMMIT")
        got = await self._holder.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _LOCK})
        if not got:
            raise StoreError(_TAKEN)

    def nonce(self) -> str:
        """A random word in the lock file of an SQLite database: a copy of the database alone comes without it."""
        assert self._lock is not None, "only the server of a store has its lock"
        found = os.pread(self._lock, 64, 0)
        if not found:
            found = secrets.token_hex(16).encode()
            os.pwrite(self._lock, found, 0)
            os.fsync(self._lock)
        return found.decode("ascii", "replace")

    async def hold(self) -> None:
        """See that this is still the one server: a connection that broke gave the lock back."""
        if self.sqlite:
            return
        try:
            if self._holder is not None:
                await self._holder.scalar(text("SELECT 1"))
                return
        except (DBAPIError, OSError):
            log.warning("the connection that holds the store broke; taking hold again")
        await self._let_go()
        await self._hold()

    async def _let_go(self) -> None:
        holder, self._holder = self._holder, None
        if holder is not None:
            with contextlib.suppress(SQLAlchemyError, OSError):
                await holder.close()

    async def _introduce(self, tx: AsyncConnection, *, serving: bool) -> None:
        from towline.server.repair import repair_counters

        for name in tables.COUNTERS:
            await tx.execute(self.insert_new(tables.counters).values(name=name, value=0))
        await tx.execute(self.insert_new(tables.meta).values(name="token", value=secrets.token_hex(4)))
        if serving:
            await repair_counters(self, tx)
        self.token = str(await tx.scalar(select(tables.meta.c.value).where(tables.meta.c.name == "token")))

    async def close(self) -> None:
        await self._let_go()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        try:
            async with asyncio.timeout(_GOODBYE):
                await self._engine.dispose()
        except TimeoutError:
            log.warning("the connections to the database do not close; they end with this process")

    # Transactions

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        async with self._noticing(), self._engine.connect() as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """One transaction: committed and durable when the block ends, undone if it raises."""
        one_writer = self._writing if self.sqlite else contextlib.nullcontext()
        async with self._noticing(), one_writer, self._engine.connect() as connection:
            await connection.execution_options(**{_WRITES: True})
            async with connection.begin():
                yield connection

    @contextlib.asynccontextmanager
    async def _noticing(self) -> AsyncIterator[None]:
        """Notice that the database is away, or back."""
        try:
            yield
        except (SQLAlchemyError, OSError) as error:
            if passing(error):
                self.outage.met(_said(error))
            raise
        self.outage.over()

    async def insist(self, work: Callable[[AsyncConnection], Awaitable[T]], *, what: str) -> T:
        """The result of one transaction that must not be lost: tried again for as long as the database is away.

        `what` it writes is for the log at level DEBUG.
        """
        pause = 0.05
        while True:
            try:
                async with self.write() as tx:
                    return await work(tx)
            except (SQLAlchemyError, OSError) as error:
                if not passing(error):
                    raise
                log.debug("%s: the database is away, trying again: %s", what, _said(error))
            await asyncio.sleep(pause)
            pause = min(5.0, pause * 2)

    # What the dialects say differently

    def insert_new(self, table: Table) -> Insert:
        """An insert that leaves a row alone that is there."""
        made = sqlite.insert(table) if self.sqlite else postgresql.insert(table)
        return made.on_conflict_do_nothing()


def _locked(path: Path) -> int:
    """A descriptor of the file, locked for as long as it is open: a killed server leaves no lock behind."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        locks.take(descriptor)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StoreError(_TAKEN) from error
    return descriptor


def passing(error: BaseException) -> bool:
    """Whether the same transaction may succeed later: the database is away, busy or full, or broke a deadlock."""
    if isinstance(error, OSError | NoConnection):
        return True
    if not isinstance(error, DBAPIError):
        return False
    code = getattr(error.orig, "sqlstate", None) or ""
    busy = any(said in str(error.orig) for said in ("database is locked", "database or disk is full"))
    return error.connection_invalidated or busy or code in _AGAIN or code[:2] in ("08", "57")


def _said(error: BaseException) -> str:
    return str(getattr(error, "orig", None) or error).splitlines()[0]


def _tune_sqlite(connection: Any, record: Any) -> None:
    # The driver starts no transactions of its own; `_begin_sqlite` does.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "temp_store=MEMORY"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and writes later would fail if another wrote in between: writers say so at once.
    writes = connection.get_execution_options().get(_WRITES)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


async def take(tx: AsyncConnection, counter: str, count: int = 1) -> int:
    """The last of `count` fresh numbers; the counter stays locked until the transaction ends."""
    table = tables.counters
    grown = update(table).where(table.c.name == counter).values(value=table.c.value + count).returning(table.c.value)
    return int((await tx.execute(grown)).scalar_one())


async def add_events(tx: AsyncConnection, happened: Sequence[tuple[str, dict[str, Any]]], at: float) -> int:
    """Write events; the last thing in a transaction, since the counter is what all transactions share."""
    if not happened:
        return 0
    last = await take(tx, "events", len(happened))
    first = last - len(happened) + 1
    rows = [
        {"seq": first + index, "at": at, "kind": kind, "body": dump_json(body)}
        for index, (kind, body) in enumerate(happened)
    ]
    await tx.execute(insert(tables.events), rows)
    return last


def chunks(values: Sequence[T]) -> list[Sequence[T]]:
    return [values[start : start + CHUNK] for start in range(0, len(values), CHUNK)]
