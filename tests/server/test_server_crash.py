"""kill -9 at named points and at random, on both databases: no task is lost, no result is lost, and nothing comes again
after its acknowledgement was answered.

The clients know nothing of crashes: they send again what got no answer, as `towline.Client` does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from server_process import Nursery, Process
from sqlalchemy import select

from towline.schema import Trajectory
from towline.server import tables
from towline.server.segments import Piece, Segments
from towline.server.store import Store, database_url

POINTS = [
    f"server.{when}_{what}:{nth}"
    for what, nth in (
        ("accept", 2),
        ("claim", 2),
        ("segment", 3),
        ("commit", 3),
        ("lease", 2),
        ("ack", 2),
        ("callback", 2),
    )
    for when in ("before", "after")
]
SAMPLES = 3


class Lost(Exception):
    """There was no answer."""


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("processes"))
    yield nursery
    nursery.close()


class Trainer:
    """Submits tasks and uses what comes of them; remembers what it was told."""

    def __init__(self, http: aiohttp.ClientSession, hook: str):
        self.http = http
        self.hook = hook
        self.accepted: set[str] = set()
        self.owed: list[dict[str, Any]] = []
        """Tasks that were sent and not answered: they are sent again."""
        self.used: dict[str, dict[str, dict[str, Any]]] = {"session": {}, "group": {}}
        self.unanswered: dict[str, set[str]] = {"session": set(), "group": set()}
        """Acknowledgements that were sent and not answered."""
        self.acked: set[str] = set()
        self.url = ""

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
                self.owed = [self._task(number) for number in range(first, first + 5)]
            await self.call("POST", "/v1/tasks", self.owed)
            self.accepted |= {one["task_id"] for one in self.owed}
            self.owed = []

    def _task(self, number: int) -> dict[str, Any]:
        options = {"seconds": [0.0, 0.01, 0.03], "fail": [number % 2, 0, 0]}
        return {
            "task_id": f"task/{number}",
            "instruction": "x",
            "harness": "fake",
            "harness_options": options,
            "num_samples": SAMPLES,
            "max_attempts": 1000,
            "callback": self.hook,
        }

    async def consume(self, unit: str, *, until: int | None = None) -> None:
        """Use results until the server is gone, or there are so many."""
        while until is None or len(self.used[unit]) < until or self.unanswered[unit]:
            if self.unanswered[unit]:
                ids = sorted(self.unanswered[unit])
                told = await self.call("POST", "/v1/results/ack", {"consumer": unit, "result_ids": ids})
                assert told == {"acked": ids, "unknown": []}
                self.acked |= self.unanswered[unit]
                self.unanswered[unit] = set()
            found = await self.call("GET", "/v1/results", consumer=unit, unit=unit, wait="0.5", max="10", lease="0.5")
            for result in found["results"]:
                name = result["result_id"]
                assert name not in self.acked, "delivered again after its acknowledgement"
                assert self.used[unit].setdefault(name, result)["sessions"] == result["sessions"]
                self.unanswered[unit].add(name)

    async def work(self, process: Process, calls: int) -> None:
        """Until the server is gone."""
        self.url = process.url

        async def until_lost(work: Any) -> None:
            try:
                await work
            except Lost:
                return

        await asyncio.gather(
            *(until_lost(work) for work in (self.submit(calls), self.consume("session"), self.consume("group")))
        )


async def look(data: Path, database: str, trainer: Trainer) -> None:
    """The store holds what the trainer was told, and its files are those that its rows name."""
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
            trajectory = Trajectory.from_arrow(await segments.read(Piece.at(row.segment, row.place, row.sha256)))
            assert (trajectory.session_id, trajectory.group_id) == (row.session_id, row.task_id)
    named = {row.segment for row in rows if row.segment}
    there = {str(path.relative_to(data / "segments")) for path in (data / "segments").rglob("*.arrow")}
    assert there == named, "orphans"
    lost = sum(row.state == "lost" for row in rows)
    assert lost > 0, "no crash met a session under way"


async def test_crashes(nursery: Nursery, database: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    told: set[str] = set()

    async def hear(hint: web.Request) -> web.Response:
        told.add((await hint.json())["task_id"])
        return web.Response()

    site = web.Application()
    site.router.add_post("/hook", hear)
    runner = web.AppRunner(site)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    hook = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        trainer = Trainer(http, hook)
        for point in POINTS:
            process = nursery.start(tmp_path, database, point)
            if await process.listening():
                await trainer.work(process, 3)
            await process.dead()
        for _ in range(request.config.getoption("--crashes", default=2)):
            process = nursery.start(tmp_path, database)
            assert await process.listening(), process.log.read_text()
            working = asyncio.create_task(trainer.work(process, 6))
            await asyncio.sleep(random.uniform(0.05, 0.5))
            process.kill()
            await working
            await process.dead()
        process = nursery.start(tmp_path, database)
        assert await process.listening(), process.log.read_text()
        trainer.url = process.url
        if trainer.owed:
            await trainer.submit(1)
        count = len(trainer.accepted)
        await asyncio.gather(trainer.consume("session", until=count * SAMPLES), trainer.consume("group", until=count))
        for _ in range(1000):
            if told >= trainer.accepted:
                break
            await asyncio.sleep(0.01)
        process.kill()
        await process.dead()
        # One more start: whatever the last crash left is collected.
        process = nursery.start(tmp_path, database)
        assert await process.listening()
        process.kill()
        await process.dead()
    await runner.cleanup()
    assert told == trainer.accepted
    assert count * SAMPLES >= 200, "hundreds of sessions"
    await look(tmp_path, database, trainer)
