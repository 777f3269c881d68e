"""The server's store with SQLite in the thread of the event loop.

The statements, transactions and pragmas are those of a server. Only the hand-over to a thread per connection is missing: it
takes most of the time of a small statement, and makes the order of events depend on the machine.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import aiosqlite

from towline.common.clock import Clock
from towline.server.store.database import Store, database_url

_TIMEOUT = 30.0


class _Inline:
    """Takes the place of the driver's queue: executes a call when it is put."""

    def put_nowait(self, call: tuple[asyncio.Future[Any] | None, Callable[[], Any]]) -> None:
        future, function = call
        try:
            result = function()
        except Exception as error:
            if future is None:
                raise
            future.set_exception(error)
        else:
            if future is not None:
                future.set_result(result)


class _InlineConnection(aiosqlite.Connection):
    def __init__(self, connector: Callable[[], sqlite3.Connection]):
        super().__init__(connector, iter_chunk_size=64)
        self._tx = _Inline()  # type: ignore[assignment]

    def __await__(self) -> Generator[Any, None, aiosqlite.Connection]:
        # Its thread is never started.
        return self._connect().__await__()


def inline_store(file: Path, clock: Clock) -> Store:
    """A store in this file that uses no threads."""
    connect = partial(sqlite3.connect, file, timeout=_TIMEOUT)
    return Store(
        database_url(f"sqlite:///{file}", file.parent),
        clock=clock,
        driver={"async_creator": lambda: _InlineConnection(connect)},
    )
