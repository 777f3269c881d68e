"""A trainer whose server crashes repeatedly, and the invariants that must hold in the end.

The trainer does not handle crashes: it retries calls without a response, as `towline.Client` does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from sqlalchemy import select

from support.server.server_process import Process
from towline.cluster.segments import Segments, SegmentSlice
from towline.schema import Trajectory
from towline.server.store import tables
from towline.server.store.database import Store, database_url

SAMPLES = 3
_PATIENCE = 240
"""Seconds until a crash must have come, or another result."""


class Lost(Exception):
    """The server did not respond."""


@dataclass
class Trainer:
    """Submits tasks and consumes results; records every answer."""

    http: aiohttp.ClientSession
    make: Callable[[int], dict[str, Any]]
    """The task of a number."""
    calls: int
    """Submissions to each server."""
    tasks: int
    """In each of them."""
    accepted: set[str] = field(default_factory=set)
    owed: list[dict[str, Any]] = field(default_factory=list)
    """Tasks that were sent and not answered: they are sent again."""
    used: dict[str, dict[str, dict[str, Any]]] = field(default_factory=lambda: {"session": {}, "group": {}})
    unanswered: dict[str, set[str]] = field(default_factory=lambda: {"session": set(), "group": set()})
    """Acknowledgements that were sent and not answered."""
    acked: set[str] = field(default_factory=set)
    url: str = ""

    async def call(self, method: str, path: str, body: Any = None, **params: Any) -> Any:
        try:
            async with self.http.request(method, self.url + path, json=body, params=params) as answer:
                found = await answer.json()
                assert answer.status == 200, found
                return found
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Lost from error

    async def submit(self, calls: int) -> None:
        for _ in range(calls):
            if not self.owed:
                first = len(self.accepted)
                self.owed = [self.make(number) for number in range(first, first + self.tasks)]
            await self.call("POST", "/v1/tasks", self.owed)
            self.accepted |= {one["task_id"] for one in self.owed}
            self.owed = []

    async def consume(self, unit: str, *, until: int | None = None) -> None:
        """Consume results until the server dies, or the count is reached."""
        wanted = {"wait": 0.5, "max": 10, "lease": 0.5}
        while until is None or len(self.used[unit]) < until or self.unanswered[unit]:
            if self.unanswered[unit]:
                ids = sorted(self.unanswered[unit])
                told = await self.call("POST", "/v1/results/ack", {"consumer": unit, "result_ids": ids})
                assert told == {"acked": ids, "unknown": []}
                self.acked |= self.unanswered[unit]
                self.unanswered[unit] = set()
            found = await self.call("POST", "/v1/results", wanted | {"consumer": unit, "unit": unit})
            for result in found["results"]:
                name = result["result_id"]
                assert name not in self.acked, "delivered again after its acknowledgement"
                assert self.used[unit].setdefault(name, result)["sessions"] == result["sessions"]
                self.unanswered[unit].add(name)

    async def work(self, process: Process) -> None:
        """Work until the server dies."""
        self.url = process.url

        async def until_lost(work: Any) -> None:
            with contextlib.suppress(Lost):
                await work

        async with asyncio.timeout(_PATIENCE):
            works = (self.submit(self.calls), self.consume("session"), self.consume("group"))
            await asyncio.gather(*map(until_lost, works))

    async def finish(self, process: Process) -> None:
        """Consume all remaining results from a server that does not crash."""
        self.url = process.url
        if self.owed:
            await self.submit(1)
        count = len(self.accepted)
        for unit, most in (("session", count * SAMPLES), ("group", count)):
            while self.unanswered[unit] or len(self.used[unit]) < most:
                async with asyncio.timeout(_PATIENCE):
                    await self.consume(unit, until=min(most, len(self.used[unit]) + 1))


@contextlib.asynccontextmanager
async def hook() -> AsyncIterator[tuple[str, set[str]]]:
    """A callback URL, and the tasks that were reported to it."""
    told: set[str] = set()

    async def hear(hint: web.Request) -> web.Response:
        told.add((await hint.json())["task_id"])
        return web.Response()

    site = web.Application()
    site.router.add_post("/hook", hear)
    runner = web.AppRunner(site)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/hook", told
    finally:
        await runner.cleanup()


async def look(data: Path, database: str, trainer: Trainer) -> int:
    """Check that the store has what the trainer was answered, and exactly the files that its rows name; returns lost sessions."""
    store = Store(database_url(database, data))
    await store.open(serving=False)
    async with store.read() as tx:
        tasks = {row.task_id: row for row in await tx.execute(select(tables.tasks))}
        rows = list(await tx.execute(select(tables.sessions)))
        results = list(await tx.execute(select(tables.results)))
    await store.close()
    assert trainer.accepted == set(tasks)
    assert {(row.state, row.finished, row.usable) for row in tasks.values()} == {("done", SAMPLES, SAMPLES)}
    assert {row.phase for row in rows} == {2}
    final = [(row.task_id, row.session_id) for row in results if row.unit == "session"]
    assert len(final) == len(tasks) * SAMPLES
    used = [one["sessions"][0] for one in trainer.used["session"].values()]
    assert sorted((one["task_id"], one["session_id"]) for one in used) == sorted(final)
    assert len({(one["task_id"], one["sample"]) for one in used}) == len(used)
    groups = list(trainer.used["group"].values())
    assert sorted(one["task_id"] for one in groups) == sorted(tasks)
    assert {len(one["sessions"]) for one in groups} == {SAMPLES}
    segments = Segments(data / "segments")
    for row in rows:
        if row.segment is not None:
            trajectory = Trajectory.from_arrow(await segments.read(SegmentSlice.at(row.segment, row.place, row.sha256)))
            assert (trajectory.session_id, trajectory.group_id) == (row.session_id, row.task_id)
    named = {row.segment for row in rows if row.segment}
    there = {str(path.relative_to(data / "segments")) for path in (data / "segments").rglob("*.arrow")}
    assert there == named, "orphans"
    return sum(row.state == "lost" for row in rows)
