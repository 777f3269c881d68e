"""The death of a server costs no attempt; a task that kills its server is found and quarantined."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.server.server_process import Nursery, Process
from support.server.server_rig import Caller, task
from towline.runs.retries import strikes_after
from towline.schema import SessionState
from towline.server.scheduling import rules


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("processes"))
    try:
        yield nursery
    finally:
        nursery.close()


@asynccontextmanager
async def server(nursery: Nursery, data: Path, database: str) -> AsyncIterator[tuple[Process, Caller]]:
    """A server that is killed at the end of the block."""
    process = nursery.start(data, database)
    try:
        assert await process.listening(), process.log.read_text()
        async with aiohttp.ClientSession(process.url, timeout=aiohttp.ClientTimeout(total=60)) as web:
            yield process, Caller(web)
    finally:
        process.kill()
        await process.dead()


async def running(caller: Caller, task_id: str) -> dict[str, Any]:
    """The task once its latest attempts run, or all have ended."""
    for _ in range(6000):
        status: dict[str, Any] = await caller.ok("GET", f"/v1/tasks/{task_id}")
        states = {one["state"] for one in status["sessions"]}
        if states == {"running"} or status["state"] == "done":
            return status
        await asyncio.sleep(0.01)
    raise AssertionError(status)


async def test_three_kills_lose_nothing(nursery: Nursery, database: str, tmp_path: Path) -> None:
    """With the default attempts, sessions that run at all three kills are retried; a graceful failure still uses up attempts."""
    for kill in range(3):
        async with server(nursery, tmp_path, database) as (_, caller):
            if not kill:
                await caller.submit(
                    *(task(f"t{number}", 3, harness_options={"hang": 3}) for number in range(4)),
                    task("fails", harness_options={"hang": 3, "fail": 5}),
                )
            for number in range(4):
                await running(caller, f"t{number}")
            await running(caller, "fails")
    async with server(nursery, tmp_path, database) as (process, caller):
        sessions = [one.sessions[0] for one in await caller.take(13)]
        assert [one.state.value for one in sessions if one.task_id != "fails"] == ["done"] * 12
        assert {one.attempt for one in sessions if one.task_id != "fails"} == {4}
        # Lost three times, failed at attempts 4 and 5, done at 6.
        assert [(one.state.value, one.attempt) for one in sessions if one.task_id == "fails"] == [("done", 6)]
        groups = await caller.take(5, unit="group")
        assert all(one.sessions for one in groups)
        status = await caller.ok("GET", "/v1/tasks/t0")
        assert [(one["state"], one["failure"]) for one in status["attempts"][:4]] == [("lost", "node")] * 3 + [
            ("done", None)
        ]
        assert "quarantined" not in process.log.read_text()


async def test_a_session_that_kills_its_node_is_quarantined(nursery: Nursery, database: str, tmp_path: Path) -> None:
    """Alone at three deaths it is quarantined; among others it is isolated first, and the others lose nothing."""
    for kill in range(4):
        async with server(nursery, tmp_path, database) as (process, caller):
            if not kill:
                await caller.submit(task("alone", harness_options={"hang": True}))
            status = await running(caller, "alone")
            assert (status["state"] == "done") == (kill == 3)
    (result,) = [one for one in status["sessions"]]
    assert (result["state"], result["failure"], result["attempt"]) == ("failed", "quarantined", 3)
    lines = [line for line in process.log.read_text().splitlines() if "quarantined" in line]
    assert len(lines) == 1
    assert result["session_id"] in lines[0]
    deaths = 0
    for _ in range(12):
        async with server(nursery, tmp_path, database) as (_, caller):
            if not deaths:
                await caller.submit(
                    *(task(f"good{number}", 2, harness_options={"hang": 3}) for number in range(3)),
                    task("killer", 2, harness_options={"hang": [True, 3]}),
                )
            for _ in range(6000):
                status = await caller.ok("GET", "/v1/tasks/killer")
                first = next(one for one in status["sessions"] if one["sample"] == 0)
                if first["state"] in ("running", "failed") and (deaths >= 3 or await _all_run(caller)):
                    break
                await asyncio.sleep(0.01)
            if first["state"] == "failed":
                results = [one.sessions[0] for one in await caller.take(9)]
                break
        deaths += 1
    assert first["failure"] == "quarantined"
    assert 3 < deaths <= 8  # three that leave eight suspects, three that halve them, two alone
    good = {(one.task_id, one.sample): one.state.value for one in results if one.task_id.startswith("good")}
    assert good == dict.fromkeys([(f"good{number}", sample) for number in range(3) for sample in range(2)], "done")


async def _all_run(caller: Caller) -> bool:
    found = await caller.ok("GET", "/v1/sessions", state="running")
    return len(found) == 8


def test_the_rules_of_strikes() -> None:
    def strikes(
        state: SessionState, before: int = 0, attempt: int = 1, deaths: int = 0, blameless: bool = False
    ) -> int:
        free = rules.FREE_ATTEMPTS
        return strikes_after(state, before, attempt=attempt, deaths=deaths, blameless=blameless, free=free)

    assert strikes(SessionState.FAILED) == 1
    assert strikes(SessionState.LOST) == 0
    assert strikes(SessionState.FAILED, blameless=True) == 0
    # An outage that is there whenever this session runs ends some time, too.
    free = rules.FREE_ATTEMPTS
    assert strikes(SessionState.FAILED, 1, free + 1, 0, True) == 1
    assert strikes(SessionState.FAILED, 1, free + 2, 0, True) == 2
    assert strikes(SessionState.FAILED, 1, free + 3, 1, True) == 2
    cases = {(2, 3, 1, 1): False, (3, 3, 2, 1): False, (3, 3, 1, 1): True, (3, 3, 1, 2): False, (9, 3, 2, 1): False}
    cases |= {(9, 3, 1, 1): True, (9, 0, 1, 1): False, (1, 1, 1, 0): True}
    assert {case: rules.is_quarantined(*case) for case in cases} == cases
    assert [rules.suspects_at_once(company) for company in (1, 2, 3, 16)] == [1, 1, 1, 8]
