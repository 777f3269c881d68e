"""Salvages a damaged SQLite database at the start: the file is quarantined, and its readable rows get a new one.

The new file is complete under a name of its own before the damaged one is removed, so a crash in between loses nothing.
It is another file, so the store gets a new id (`ownership`): segments whose rows were lost are never removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import URL, create_engine

from towline.common.files import QUARANTINE, Quarantine, sync_folder
from towline.errors import StoreError
from towline.server.store import tables
from towline.server.store.migrations import revisions, upgrade

_CHECKED_BYTES = 1 << 30
"""Largest database that is checked at each start; checking a larger one would take too long."""
_GAP = 1_000_000
"""Longest range of row ids between readable rows that is searched row by row."""
_BEYOND = 20_000
"""The same after the last readable row, if the end of the table is damaged."""
_MAGIC = b"SQLite format 3\0"
_PAGE_SIZE = 4096


def salvage(path: Path) -> None:
    """Replace a damaged database by one with its readable rows. Call while no connection is open."""
    made = path.with_name(f"{path.name}.salvaged")
    if not made.exists():
        damage = _find_damage(path)
        if damage is None:
            return
        _build(path, made, damage)
    _remove(path)
    made.rename(path)
    sync_folder(path.parent)


def _find_damage(path: Path) -> str | None:
    """What is wrong with a database file; `None` if nothing is, or there is no file."""
    if not path.is_file() or not path.stat().st_size:
        return None
    with path.open("rb") as file:
        header = file.read(100)
    if header != _valid_header(header):
        return "its header is damaged"
    if path.stat().st_size > _CHECKED_BYTES:
        return None
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=30)) as database:
            (found,) = database.execute("PRAGMA integrity_check(1)").fetchone()
            return _schema_damage(database) if found == "ok" else str(found)
    except sqlite3.OperationalError as error:
        # Busy, full, or out of reach: opening the store reports it.
        return str(error) if "malformed" in str(error) else None
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        return str(error)


def _schema_damage(database: sqlite3.Connection) -> str | None:
    """A table of the newest schema whose columns are not those of the code."""
    if _revision(database) != revisions()[0]:
        return None
    for table in tables.metadata.sorted_tables:
        columns = {row[1] for row in database.execute(f'PRAGMA table_info("{table.name}")')}
        if columns != {column.name for column in table.columns}:
            return f"the schema of table {table.name} is damaged"
    return None


def _revision(database: sqlite3.Connection) -> str:
    """The revision of the schema; empty if it cannot be read."""
    try:
        found = database.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.DatabaseError:
        return ""
    return str(found[0]) if found else ""


def _valid_header(header: bytes) -> bytes:
    """The header with the fields that have one valid value, or few, set to it."""
    fixed = bytearray(header.ljust(100, b"\0"))
    fixed[:16] = _MAGIC
    (size,) = struct.unpack(">H", fixed[16:18])
    if size != 1 and (size < 512 or size & (size - 1)):
        fixed[16:18] = struct.pack(">H", _PAGE_SIZE)
    for place in (18, 19):  # 1: rollback journal, 2: write-ahead log
        if fixed[place] not in (1, 2):
            fixed[place] = 2
    fixed[20:24] = bytes((0, 64, 32, 32))
    if fixed[44:48] + fixed[52:60] != bytes(12):
        # All three are 0 before the first checkpoint: until then the tables are in the write-ahead log.
        fixed[44:48] = struct.pack(">I", 4)
        fixed[52:60] = struct.pack(">II", 0, 1)  # no auto-vacuum, UTF-8
    return bytes(fixed)


def _build(path: Path, made: Path, damage: str) -> None:
    """Copy the database to the quarantine and write the rows that can be read to `made`."""
    quarantine, log_file = Quarantine(path.parent / QUARANTINE), path.with_name(f"{path.name}-wal")
    source, partial = path.with_name(f"{path.name}.source"), path.with_name(f"{path.name}.partial")
    _remove(source, partial)
    data = path.read_bytes()
    source.write_bytes(_valid_header(data[:100]) + data[100:])
    if log_file.is_file():
        shutil.copyfile(log_file, f"{source}-wal")
    with contextlib.closing(_connect_damaged(source)) as damaged:
        revision = _revision(damaged)
    if revision and revision not in revisions():
        raise StoreError(f"this store is damaged ({damage}) and was written by a newer Towline; use that version")
    quarantine.copy(path, f"{damage}; continuing with the rows that can be read")
    if log_file.is_file():
        quarantine.copy(log_file, "its database is damaged")
    # Without a revision, rows are read as those of the newest one: missing columns get their defaults.
    _create(partial, revision)
    with contextlib.closing(sqlite3.connect(partial)) as target:
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT IN ('alembic_version')"
        schema = dict(target.execute(query).fetchall())
        _restore_schema(source, schema)
        with contextlib.closing(_connect_damaged(source)) as damaged, target:
            for name in schema:
                _copy(damaged, target, name)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.rename(made)
    sync_folder(path.parent)
    _remove(source)


def _remove(*databases: Path) -> None:
    for path in databases:
        for end in ("", "-wal", "-shm", "-journal"):
            path.with_name(path.name + end).unlink(missing_ok=True)


def _create(path: Path, revision: str) -> None:
    """Create an empty database."""
    engine = create_engine(URL.create("sqlite", database=str(path)))
    with engine.begin() as connection:
        upgrade(connection, revision)
    engine.dispose()


def _connect_damaged(path: Path) -> sqlite3.Connection:
    damaged = sqlite3.connect(path)
    damaged.text_factory = lambda data: data.decode("utf-8", "replace")
    # Without this, SQLite rejects a truncated file and a schema with an invalid entry.
    damaged.execute("PRAGMA writable_schema = ON")
    return damaged


def _restore_schema(path: Path, schema: dict[str, str]) -> None:
    """Define the tables as they were: the damage may be in their definitions."""
    with contextlib.closing(_connect_damaged(path)) as damaged, contextlib.suppress(sqlite3.DatabaseError), damaged:
        for name, sql in schema.items():
            damaged.execute("UPDATE sqlite_master SET sql = ? WHERE type = 'table' AND name = ?", (sql, name))


def _copy(damaged: sqlite3.Connection, target: sqlite3.Connection, table: str) -> None:
    """Copy every row of a table that can be read and fits."""
    for row in _rows(damaged, table):
        with contextlib.suppress(sqlite3.DatabaseError):
            target.execute(f'INSERT OR IGNORE INTO "{table}" VALUES ({", ".join("?" * len(row))})', row)


def _rows(damaged: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """The rows of a table that can be read: from both ends, then one by one between the damaged pages."""
    query, last, first = f'SELECT rowid, * FROM "{table}" NOT INDEXED', 0, None
    try:
        for row in damaged.execute(f"{query} ORDER BY rowid"):
            last = row[0]
            yield row[1:]
        return
    except sqlite3.OperationalError:
        return  # There is no such table.
    except sqlite3.DatabaseError:
        pass
    with contextlib.suppress(sqlite3.DatabaseError):
        for row in damaged.execute(f"{query} WHERE rowid > {last} ORDER BY rowid DESC"):
            first = row[0]
            yield row[1:]
    end = last + _BEYOND if first is None else first
    for number in range(max(last + 1, end - _GAP), end):
        with contextlib.suppress(sqlite3.DatabaseError):
            yield from (row[1:] for row in damaged.execute(f"{query} WHERE rowid = {number}"))
