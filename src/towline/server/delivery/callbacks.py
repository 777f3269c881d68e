"""Callbacks: a POST to the URL of a task when its group is complete.

A hint, never the only delivery: it names the result, which is fetched like any other. It stays in the store until it is
answered with 2xx, and is dropped after a number of attempts with growing pauses. The operator allows the hosts;
redirects are not followed, and the response body is not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from sqlalchemy import Row, delete, func, select, update
from sqlalchemy.exc import SQLAlchemyError

from towline.common.crashpoints import crash_point
from towline.server.errors import InvalidInput
from towline.server.events import Signal
from towline.server.metrics import ServerMetrics
from towline.server.store import tables
from towline.server.store.database import Store

log = logging.getLogger("towline.server")
_TIMEOUT = aiohttp.ClientTimeout(total=10)
_FIRST, _LONGEST = 1.0, 300.0
"""First and longest pause between two tries, in seconds."""


def check_callback(url: str, hosts: Sequence[str], field: str) -> None:
    """Raise `InvalidInput` unless the operator allows the URL."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidInput(f"not a URL: {error}", field=field) from error
    if parts.scheme not in ("http", "https") or not host or len(url) > 2048 or not url.isascii() or " " in url:
        raise InvalidInput("must be an http or https URL", field=field)
    if parts.username is not None or parts.password is not None:
        raise InvalidInput("must not contain a user or password: it is stored and displayed", field=field)
    allowed = {name.lower() for name in hosts}
    if host not in allowed and f"{host}:{port or (443 if parts.scheme == 'https' else 80)}" not in allowed:
        raise InvalidInput(f"host {host} is not in server.callback_hosts", field=field)


class Callbacks:
    """Sends the callbacks in the store, with retries."""

    def __init__(self, store: Store, signal: Signal, metrics: ServerMetrics, *, tries: int):
        self.store = store
        self.signal = signal
        self.metrics = metrics
        self.tries = tries

    async def run(self) -> None:
        """Send callbacks when they are due, forever."""
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as web:
            while True:
                count = self.signal.count
                try:
                    due = await self._due()
                    await asyncio.gather(*(self._send(web, row) for row in due))
                    pause = 0.0 if due else await self._until_next()
                except (SQLAlchemyError, OSError) as error:
                    log.debug("callbacks wait for the database: %s", error)
                    pause = 5.0
                if pause:
                    await self.signal.wait(count, pause)

    async def _due(self) -> list[Row[Any]]:
        table = tables.callbacks
        async with self.store.read() as tx:
            query = select(table).where(table.c.due <= self.store.clock.now()).order_by(table.c.due).limit(32)
            return list(await tx.execute(query))

    async def _until_next(self) -> float:
        async with self.store.read() as tx:
            found = await tx.scalar(select(func.min(tables.callbacks.c.due)))
        return 60.0 if found is None else min(60.0, max(0.01, float(found) - self.store.clock.now()))

    async def _send(self, web: aiohttp.ClientSession, row: Row[Any]) -> None:
        crash_point("server.before_callback")
        problem = ""
        try:
            headers = {"content-type": "application/json"}
            async with web.post(row.url, data=row.body, headers=headers, allow_redirects=False) as answer:
                if not 200 <= answer.status < 300:
                    problem = f"status {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            problem = str(error) or type(error).__name__
        crash_point("server.after_callback")
        table = tables.callbacks
        tries = row.tries + 1
        over = not problem or tries >= self.tries
        async with self.store.write() as tx:
            if over:
                await tx.execute(delete(table).where(table.c.seq == row.seq))
            else:
                due = self.store.clock.now() + min(_LONGEST, _FIRST * 2 ** (tries - 1))
                await tx.execute(update(table).where(table.c.seq == row.seq).values(tries=tries, due=due))
        self.metrics.callbacks.labels("failed" if problem else "told").inc()
        if problem and over:
            log.warning("callback for result %d dropped after %d attempts: %s", row.seq, tries, problem)
