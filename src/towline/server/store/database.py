"""The database: SQLite in WAL mode with `synchronous=FULL` by default, PostgreSQL by URL.

Every change is one transaction of `write()`: when the block has ended, it is durable. Rows are locked in one order, tasks
(by id) before sessions before consumers before counters, so that two transactions never wait for each other.
One server at a time uses a store; a second is rejected, and late writes of an earlier one are fenced off by `epoch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import event, text
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from towline.common.clock import SYSTEM_CLOCK, Clock
from towline.common.files import lock_file
from towline.errors import ConfigError, StoreError
from towline.server.store import tables
from towline.server.store.migrations import migrate
from towline.server.store.repair import repair_counters
from towline.server.store.salvage import salvage
from towline.server.store.tables import get_meta, insert_new, take_numbers

log = logging.getLogger("towline.server")
T = TypeVar("T")
_LOCK = 0x746F776C696E65
"""The advisory lock that the one server of a PostgreSQL database holds."""
_WRITES = "towline_writes"
_RETRYABLE = ("40001", "40P01")
"""PostgreSQL: serialization failure, deadlock."""
_IN_USE = "another server uses this database; stop it, or set server.database to another one"
_CLOSE_SECONDS = 10.0
"""How long connections may take to close."""
_LOG_SECONDS = 60.0
"""Between two log lines of one outage; after this long without a call, the next failure is a new outage."""


class Outage:
    """Logs an outage in a few lines, however many calls fail: when it begins, once per minute, and when it is over."""

    def __init__(self, what: str):
        self.what = what
        """What is down."""
        self.reason = ""
        """Why the last call failed; empty while there is no outage."""
        self._began = 0.0
        self._latest = 0.0
        self._logged = 0.0
        self._calls = 0

    def failed(self, reason: str) -> None:
        """Record a call that failed."""
        now = time.monotonic()
        if not self.reason or now - self._latest > _LOG_SECONDS:
            self._began, self._calls = now, 0
        self.reason, self._latest = reason, now
        self._calls += 1
        if self._calls == 1:
            self._logged = now
            log.warning("%s is down; calls are retried until it is back: %s", self.what, reason)
        elif now - self._logged >= _LOG_SECONDS:
            self._logged = now
            elapsed = now - self._began
            log.warning("%s is still down after %.0f s and %d calls: %s", self.what, elapsed, self._calls, reason)

    def recovered(self) -> None:
        """Record a call that succeeded."""
        if self.reason:
            self.reason = ""
            log.warning("%s is back after %.0f s; %d calls failed", self.what, self._latest - self._began, self._calls)


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
    """One database, used by one server at a time."""

    def __init__(self, url: URL, *, clock: Clock = SYSTEM_CLOCK, driver: Mapping[str, Any] | None = None):
        """`driver`: further options of the database engine."""
        self.url = url
        self.clock = clock
        """Gives the times in the rows."""
        self.transactions = 0
        """Transactions under way, those that wait for the writer included."""
        self.sqlite = url.get_backend_name() == "sqlite"
        self.epoch = 0
        """The run of this server: how many servers have used this store."""
        self.token = ""
        """Identifies the store in the ids of its results."""
        self.outage = Outage("the database")
        self._engine = self._make_engine(driver or {})
        self._writing = asyncio.Lock()
        """SQLite has one writer at a time; waiting here is cheaper than polling the file."""
        self._lock_connection: AsyncConnection | None = None
        self._lock: int | None = None
        """Descriptor of the lock file beside an SQLite database."""

    def _make_engine(self, driver: Mapping[str, Any]) -> AsyncEngine:
        try:
            if self.sqlite:
                engine = create_async_engine(self.url, connect_args={"timeout": 30}, **driver)
                event.listen(engine.sync_engine, "connect", _tune_sqlite)
                event.listen(engine.sync_engine, "begin", _begin_sqlite)
            else:
                # `pool_pre_ping` finds connections that broke while idle; the timeouts give up on those that hang because
                # the network is cut.
                waits = {"timeout": 30, "command_timeout": 300}
                engine = create_async_engine(
                    self.url, pool_pre_ping=True, pool_size=10, max_overflow=10, connect_args=waits, **driver
                )
        except (ImportError, NoSuchModuleError) as error:
            raise ConfigError("a store on PostgreSQL needs its driver: pip install 'towline[postgres]'") from error
        return engine

    @property
    def display_url(self) -> str:
        """The URL without its password."""
        return self.url.render_as_string(hide_password=True)

    # Opening

    async def open(self, *, serving: bool = True) -> None:
        """Migrate the schema; with `serving`, become the one server of this store."""
        try:
            if serving:
                await self._acquire_lock()
            async with self.write() as tx:
                await migrate(tx, lock=None if self.sqlite else _LOCK + 1)
            async with self.write() as tx:
                await self._initialize(tx, serving=serving)
                if serving:
                    self.epoch = await take_numbers(tx, "epoch")
        except SQLAlchemyError as error:
            await self.close()
            raise StoreError(f"the database {self.display_url} cannot be used: {_first_line(error)}") from error
        except OSError as error:
            await self.close()
            raise StoreError(f"the database does not respond: {error}") from error
        except BaseException:
            await self.close()
            raise

    async def _acquire_lock(self) -> None:
        if self.sqlite:
            self._lock = _locked(Path(f"{self.url.database}.lock"))
            await asyncio.to_thread(salvage, Path(str(self.url.database)))
            return
        self._lock_connection = await self._engine.connect()
        await self._lock_connection.execution_options(isolation_level="AUTOCOMMIT")
        got = await self._lock_connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _LOCK})
        if not got:
            raise StoreError(_IN_USE)

    def nonce(self) -> str:
        """A random word in the lock file of an SQLite database; a copy of the database file does not have it."""
        assert self._lock is not None, "only the server of a store holds its lock"
        found = os.pread(self._lock, 64, 0)
        if not found:
            found = secrets.token_hex(16).encode()
            os.pwrite(self._lock, found, 0)
            os.fsync(self._lock)
        return found.decode("ascii", "replace")

    async def check_lock(self) -> None:
        """Make sure that this is still the one server: a broken connection releases the lock."""
        if self.sqlite:
            return
        try:
            if self._lock_connection is not None:
                await self._lock_connection.scalar(text("SELECT 1"))
                return
        except (DBAPIError, OSError):
            log.warning("the connection that holds the lock of the store broke; acquiring it again")
        await self._release_lock()
        await self._acquire_lock()

    async def _release_lock(self) -> None:
        holder, self._lock_connection = self._lock_connection, None
        if holder is not None:
            with contextlib.suppress(SQLAlchemyError, OSError):
                await holder.close()

    async def _initialize(self, tx: AsyncConnection, *, serving: bool) -> None:
        for name in tables.COUNTERS:
            await tx.execute(insert_new(tx, tables.counters).values(name=name, value=0))
        await tx.execute(insert_new(tx, tables.meta).values(name="token", value=secrets.token_hex(4)))
        if serving:
            await repair_counters(tx)
        self.token = str(await get_meta(tx, "token"))

    async def close(self) -> None:
        await self._release_lock()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._engine.dispose()
        except TimeoutError:
            log.warning("database connections did not close in time; the OS closes them on exit")

    # Transactions

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        async with self._track(), self._engine.connect() as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """One transaction: committed and durable when the block ends, rolled back if it raises."""
        one_writer = self._writing if self.sqlite else contextlib.nullcontext()
        async with self._track(), one_writer, self._engine.connect() as connection:
            await connection.execution_options(**{_WRITES: True})
            async with connection.begin():
                yield connection

    @contextlib.asynccontextmanager
    async def _track(self) -> AsyncIterator[None]:
        """Count a transaction, and record whether the database is down."""
        self.transactions += 1
        try:
            yield
        except (SQLAlchemyError, OSError) as error:
            if is_transient(error):
                self.outage.failed(_first_line(error))
            raise
        finally:
            self.transactions -= 1
        self.outage.recovered()

    async def write_with_retry(self, work: Callable[[AsyncConnection], Awaitable[T]], *, what: str) -> T:
        """Run a transaction that must not be lost, retrying while the database is down; returns its result.

        `what` names it in debug logs.
        """
        pause = 0.05
        while True:
            try:
                async with self.write() as tx:
                    return await work(tx)
            except (SQLAlchemyError, OSError) as error:
                if not is_transient(error):
                    raise
                log.debug("%s: the database is down, retrying: %s", what, _first_line(error))
            await asyncio.sleep(pause)
            pause = min(5.0, pause * 2)


def _locked(path: Path) -> int:
    """A descriptor of the file, locked while it is open: a killed server leaves no lock behind."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        lock_file(descriptor)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StoreError(_IN_USE) from error
    return descriptor


def is_transient(error: BaseException) -> bool:
    """Whether the same transaction may succeed later: the database is down, busy or full, or resolved a deadlock."""
    if isinstance(error, OSError | NoConnection):
        return True
    if not isinstance(error, DBAPIError):
        return False
    code = getattr(error.orig, "sqlstate", None) or ""
    busy = any(message in str(error.orig) for message in ("database is locked", "database or disk is full"))
    return error.connection_invalidated or busy or code in _RETRYABLE or code[:2] in ("08", "57")


def _first_line(error: BaseException) -> str:
    return str(getattr(error, "orig", None) or error).splitlines()[0]


def _tune_sqlite(connection: Any, record: Any) -> None:
    # `_begin_sqlite` starts the transactions, not the driver.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "temp_store=MEMORY"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and writes later fails if another wrote in between, so writers lock at once.
    writes = connection.get_execution_options().get(_WRITES)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
