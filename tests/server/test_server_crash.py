"""kill -9 at named points and at random, on both databases: no task and no result is lost, acknowledged results are never
delivered again, and no process of a dead server is left when the next one listens.

The first test uses the fake runner, and so reaches the server's own crash points many times; the second is `towline serve`
with sandboxes, gateway and journal. `make test-crashes` runs every point there, too.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.server.crashing import SAMPLES, Trainer, hook, look
from support.server.server_process import Nursery, Process, in_host
from towline.demo import tokenizer

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
NODE_POINTS = [
    "gateway.before_journal:5",
    "gateway.after_journal:5",
    "journal.before_write:9",
    "journal.after_write:9",
    "journal.after_sync:9",
    "gateway.before_reply:5",
    "gateway.after_reply:5",
    "gateway.before_sealed:2",
    "gateway.after_sealed:2",
]
"""On the way of a turn, which only a real node has."""
FEW = ["gateway.before_journal:5", "gateway.after_journal:5", "server.after_segment:2"]
AGENT = Path(__file__).parents[1] / "support" / "node" / "program"


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("processes"))
    try:
        yield nursery
    finally:
        nursery.close()


def printed_random() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@dataclass
class Crashes:
    """Servers on one store, one after the other, which all die."""

    nursery: Nursery
    data: Path
    database: str
    serve: Sequence[str] = ()
    count: int = 0
    supervisors: set[str] = field(default_factory=set)
    """Names of the supervisors' folders."""
    latest: Process | None = None
    moments: random.Random = field(default_factory=printed_random)

    async def at(self, point: str, trainer: Trainer) -> None:
        process = self.start(point)
        if await self.ready(process):
            host = asyncio.create_task(
                self.kill_after_host(process) if self.serve and in_host(point) else process.dead()
            )
            await trainer.work(process)
            await host
        await process.dead()
        self.count += 1

    async def kill_after_host(self, process: Process) -> None:
        """Kill the server once one of its node hosts has died."""
        while process.alive() and "node host local was killed by SIGKILL" not in process.log.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        process.kill()

    async def at_random(self, longest: float, trainer: Trainer) -> None:
        """Kill at a random moment after the start, or after it listens."""
        process = self.start()
        moment = partial(asyncio.get_running_loop().call_later, self.moments.uniform(0.0, longest), process.kill)
        if self.count % 2:
            moment()
        if await self.ready(process):
            if not self.count % 2:
                moment()
            await trainer.work(process)
        await process.dead()
        self.count += 1

    async def unharmed(self) -> Process:
        process = self.start()
        assert await self.ready(process), process.log.read_text()
        return process

    def start(self, point: str = "") -> Process:
        self.supervisors |= self._folders()
        # So many crashes in so short a time would make suspects of sessions that did nothing.
        self.latest = self.nursery.start(self.data, self.database, point, self.serve, quarantine_deaths=0)
        return self.latest

    def end(self) -> None:
        """End the server, so that a failed test leaves none behind."""
        if self.latest is not None:
            self.latest.kill()

    async def ready(self, process: Process) -> bool:
        """Whether it listens; then no process of earlier servers may exist."""
        if not await process.listening():
            return False
        before, now = self.supervisors, self._folders()
        assert before.isdisjoint(now), "folders of a dead server"
        await self._nothing_left(process)
        self.supervisors = before | now
        return True

    async def none_left(self) -> None:
        """Check after a clean shutdown."""
        assert self._folders() == set()
        await self._nothing_left(None)

    async def _nothing_left(self, alive: Process | None) -> None:
        found: list[str] = []
        for _ in range(40):  # what was killed may take a moment to be gone
            found = self.nursery.strays(alive) + self._groups() + self._mounts()
            if not found or (alive is not None and not alive.alive()):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"left by a dead server: {found}")

    def _folders(self) -> set[str]:
        return {path.name for path in (self.data / "sandboxes" / "bubblewrap").glob("keeper-*")}

    def _groups(self) -> list[str]:
        """Control groups of dead supervisors."""
        if not self.supervisors:
            return []
        names = {f"towline-{name.removeprefix('keeper-')}" for name in self.supervisors}
        return [f"{path}/{name}" for path, folders, _ in os.walk("/sys/fs/cgroup") for name in names & set(folders)]

    def _mounts(self) -> list[str]:
        return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.data) in line]


def web_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))


async def told_of(told: set[str], tasks: set[str]) -> None:
    for _ in range(3000):
        if told >= tasks:
            break
        await asyncio.sleep(0.01)
    assert told == tasks


async def test_crashes(nursery: Nursery, database: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    crashes = Crashes(nursery, tmp_path, database)
    request.addfinalizer(crashes.end)

    def task(number: int) -> dict[str, Any]:
        options = {"seconds": [0.0, 0.01, 0.03], "fail": [number % 2, 0, 0]}
        fixed = {"instruction": "x", "harness": "fake", "num_samples": SAMPLES}
        return {"task_id": f"task/{number}", "harness_options": options, "callback": address, **fixed}

    async with hook() as (address, told), web_session() as http:
        trainer = Trainer(http, task, calls=3, tasks=5)
        for point in POINTS:
            await crashes.at(point, trainer)
        for _ in range(request.config.getoption("--crashes", default=10)):
            await crashes.at_random(0.6, trainer)
        process = await crashes.unharmed()
        await trainer.finish(process)
        await told_of(told, trainer.accepted)
        process.kill()
        await process.dead()
        # One more start: whatever the last crash left is collected.
        process = await crashes.unharmed()
        process.kill()
        await process.dead()
    assert len(trainer.accepted) * SAMPLES >= 200, "hundreds of sessions"
    assert await look(tmp_path, database, trainer) > 0, "no crash met a session under way"


async def test_crashes_with_a_real_node(
    nursery: Nursery, database: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    all_points = request.config.getoption("--all-crashes", default=False)
    points = [*NODE_POINTS, *POINTS] if all_points else FEW
    (tmp_path / "model").mkdir()
    tokenizer.write(tmp_path / "model")
    data = tmp_path / "data"
    serve = ["--engine=scripted", f"--model={tmp_path / 'model'}", "--sandbox=bubblewrap", "--concurrency=4"]
    crashes = Crashes(nursery, data, database, serve)
    request.addfinalizer(crashes.end)

    def task(number: int) -> dict[str, Any]:
        options = {"command": "python3 {program}/agent.py work", "folder": str(AGENT)}
        fixed = {"instruction": "Say hello.", "harness": "shell", "num_samples": SAMPLES}
        said = {"harness_options": options, "evaluator": {"kind": "completed"}, "callback": address}
        return {"task_id": f"task/{number}", **fixed, **said}

    began = time.monotonic()
    async with hook() as (address, told), web_session() as http:
        trainer = Trainer(http, task, calls=2, tasks=3 if all_points else 2)
        for point in points:
            await crashes.at(point, trainer)
        for _ in range(10 if all_points else 1):
            await crashes.at_random(2.5, trainer)
        process = await crashes.unharmed()
        await trainer.finish(process)
        await told_of(told, trainer.accepted)
        process.kill(signal.SIGTERM)
        await process.dead()
    await crashes.none_left()
    assert list((data / "trajectories").iterdir()) == [], "they are segments now"
    lost = await look(data, database, trainer)
    assert lost > 0, "no crash met a session under way"
    with capsys.disabled():
        sessions = len(trainer.accepted) * SAMPLES
        print(
            f" {crashes.count} crashes, {sessions} sessions, {lost} attempts lost and made again, "
            f"{time.monotonic() - began:.0f} s ",
            end="",
        )


async def test_three_kills_with_the_default_attempts_and_damaged_journals(
    nursery: Nursery, database: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Flip a bit of the journal after each kill: every start succeeds, and every sample ends."""
    (tmp_path / "model").mkdir()
    tokenizer.write(tmp_path / "model")
    data = tmp_path / "data"
    serve = ["--engine=scripted", f"--model={tmp_path / 'model'}", "--sandbox=process", "--concurrency=4"]
    crashes = Crashes(nursery, data, database, serve)
    request.addfinalizer(crashes.end)

    def task(number: int) -> dict[str, Any]:
        options = {"command": "python3 {program}/agent.py work", "folder": str(AGENT)}
        fixed = {"instruction": "Say hello.", "harness": "shell", "num_samples": SAMPLES, "harness_options": options}
        return {"task_id": f"task/{number}", "evaluator": {"kind": "completed"}, "callback": address, **fixed}

    async with hook() as (address, told), web_session() as http:
        trainer = Trainer(http, task, calls=1, tasks=2)
        for _ in range(3):
            await crashes.at("gateway.after_journal:6", trainer)
            damage(data / "journal")
        process = await crashes.unharmed()
        await trainer.finish(process)
        await told_of(told, trainer.accepted)
        process.kill(signal.SIGTERM)
        await process.dead()
    assert kept(data), "no damage was met"
    assert await look(data, database, trainer) > 0, "no crash met a session under way"


def damage(journal: Path) -> None:
    """Flip a bit in the middle of the newest data."""
    path = max(journal.glob("*.seg"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def kept(data: Path) -> list[Path]:
    return list((data / "quarantine").iterdir())
