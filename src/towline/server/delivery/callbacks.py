"""Callbacks: a POST to the URL of a task when its group is complete.

A hint, never the only delivery: it names the result, which is fetched like any other. It stays in the store until it is
answered with 2xx, and is dropped after a number of attempts with growing pauses. It goes only to hosts and ports that the
operator lists; redirects are not followed, and the response body is not read.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver
from sqlalchemy import Row, delete, func, select, update
from sqlalchemy.exc import SQLAlchemyError
from yarl import URL

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
_PORTS = {"http": 80, "https": 443}
_ODD = re.compile(r"[\x00-\x20\x7f\\]")
"""Characters that some readers of URLs skip or take for others."""


def check_callback(url: str, hosts: Sequence[str], field: str) -> None:
    """Raise `InvalidInput` unless the operator allows the URL's host and port."""
    try:
        parts = urlsplit(url)
        # The library that sends the request may read an odd URL in another way: both must agree.
        sent = URL(url)
        host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme)
        agree = (sent.scheme, sent.host, sent.port) == (parts.scheme, host, port)
    except ValueError as error:
        raise InvalidInput(f"not a URL: {error}", field=field) from error
    if parts.scheme not in _PORTS or not host or len(url) > 2048 or not url.isascii() or _ODD.search(url) or not agree:
        raise InvalidInput("must be an http or https URL", field=field)
    if parts.username is not None or parts.password is not None:
        raise InvalidInput("must not contain a user or password: it is stored and displayed", field=field)
    if not any(_allows(pattern, host, port, _PORTS[parts.scheme]) for pattern in hosts):
        shown = f"[{host}]" if ":" in host else host
        raise InvalidInput(f"{shown}:{port} is not in server.callback_hosts", field=field)


def _allows(pattern: str, host: str, port: int | None, default: int) -> bool:
    """Whether `name:port`, `name` (the scheme's own port) or `name:*` (any port) covers the host and port."""
    name, wanted = pattern.lower(), str(default)
    if name.startswith("["):
        name, _, rest = name[1:].partition("]")
        wanted = rest.removeprefix(":") or wanted
    elif name.count(":") == 1:
        name, _, wanted = name.partition(":")
    return host == name and wanted in ("*", str(port))


class PublicResolver(ThreadedResolver):
    """Resolves names for callbacks, once per connection: the addresses that are checked are those that are used.

    A name, other than `localhost`, that leads to this machine or to its link (where cloud metadata is) is refused: the owner
    of an allowed name does not get to choose what the service connects to here.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await super().resolve(host, port, family)
        if host.lower() != "localhost":
            check_addresses(host, [one["host"] for one in found])
        return found


def check_addresses(host: str, addresses: Sequence[str]) -> None:
    """Raise `OSError` if one of the addresses of a name is not one of another machine."""
    for one in addresses:
        address: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(one.partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        if address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast:
            raise OSError(f"{host} leads to {one}, which is not an address of another machine")


class Callbacks:
    """Sends the callbacks in the store, with retries."""

    def __init__(self, store: Store, signal: Signal, metrics: ServerMetrics, *, tries: int, hosts: Sequence[str] = ()):
        """`hosts`: `server.callback_hosts`, which also holds for callbacks of tasks that were accepted under another one."""
        self.store = store
        self.signal = signal
        self.metrics = metrics
        self.tries = tries
        self.hosts = hosts

    async def run(self) -> None:
        """Send callbacks when they are due, forever."""
        connector = aiohttp.TCPConnector(resolver=PublicResolver(), use_dns_cache=False, force_close=True)
        jar = aiohttp.DummyCookieJar()
        async with aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector, cookie_jar=jar) as web:
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
        refused = False
        try:
            check_callback(row.url, self.hosts, "callback")
            headers = {"content-type": "application/json"}
            async with web.post(row.url, data=row.body, headers=headers, allow_redirects=False) as answer:
                if not 200 <= answer.status < 300:
                    problem = f"status {answer.status}"
        except InvalidInput as error:
            problem, refused = str(error), True
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            problem = str(error) or type(error).__name__
        crash_point("server.after_callback")
        table = tables.callbacks
        tries = row.tries + 1
        over = not problem or refused or tries >= self.tries
        async with self.store.write() as tx:
            if over:
                await tx.execute(delete(table).where(table.c.seq == row.seq))
            else:
                due = self.store.clock.now() + min(_LONGEST, _FIRST * 2 ** (tries - 1))
                await tx.execute(update(table).where(table.c.seq == row.seq).values(tries=tries, due=due))
        self.metrics.callbacks.labels("failed" if problem else "told").inc()
        if problem and over:
            log.warning("callback for result %d dropped after %d attempts: %s", row.seq, tries, problem)
