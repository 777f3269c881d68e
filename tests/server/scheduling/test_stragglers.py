"""Stragglers: slow sessions are shown with what they are compared with, and flagged beyond three times the median."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from sqlalchemy import update
from typer.testing import CliRunner

from support.server.server_rig import Rig, rig, task
from towline.cli import app
from towline.cluster.runner import SessionOutcome
from towline.schema import Compared, EndReason, Session, SessionState, Trajectory
from towline.server.scheduling.stragglers import StageDurations, compare
from towline.server.store import tables


def running(session_id: str = "s") -> Session:
    return Session(session_id=session_id, task_id="t", state=SessionState.RUNNING)


@pytest.mark.parametrize(
    ("seconds", "siblings", "others", "median", "compared", "straggler"),
    [
        (100.0, [], [], None, None, False),
        (100.0, [1.0], [1.0] * 4, None, None, False),  # too few to say
        (31.0, [10.0, 10.0], [1.0] * 9, 10.0, Compared.SIBLINGS, True),
        (30.0, [10.0, 10.0], [1.0] * 9, 10.0, Compared.SIBLINGS, False),
        (31.0, [10.0], [8.0, 9.0, 10.0, 11.0, 500.0], 10.0, Compared.ALL, True),
        (29.0, [10.0], [8.0, 9.0, 10.0, 11.0, 500.0], 10.0, Compared.ALL, False),
    ],
)
def test_sessions_are_compared_with_siblings_then_with_all(
    seconds: float,
    siblings: list[float],
    others: list[float],
    median: float | None,
    compared: Compared | None,
    straggler: bool,
) -> None:
    found = compare(running(), seconds, 3, siblings, others)
    assert (found.seconds, found.turns, found.state) == (seconds, 3, SessionState.RUNNING)
    assert (found.median_seconds, found.compared_with, found.straggler) == (median, compared, straggler)


def test_only_finished_sessions_say_how_long_a_stage_takes() -> None:
    durations = StageDurations()
    timings = {"run": 2.0, "init": 1.0, "queued": 9.0}
    for end in (
        {"state": SessionState.DONE, "end_reason": EndReason.EXITED, "error": "nothing was sampled"},
        {"state": SessionState.CANCELLED, "end_reason": EndReason.EARLY_STOP},
    ):
        session = Session.model_validate({"session_id": "s", "task_id": "t"} | end)
        trajectory = Trajectory.model_validate({"session_id": "s", "group_id": "t", "timings": timings} | end)
        durations.add(SessionOutcome.of(session, trajectory))
    assert list(durations.of(SessionState.RUNNING)) == [2.0]
    assert list(durations.of(SessionState.INIT)) == [1.0]
    assert list(durations.of(SessionState.EVALUATING)) == []


async def test_the_service_lists_its_slowest_sessions(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database) as r:
        assert await r.caller.ok("GET", "/v1/stragglers") == []
        await r.caller.submit(task("slow", 4, harness_options={"hang": [False, False, True, True]}))
        await r.caller.until("/v1/tasks/slow", finished=2)
        await set_run_seconds(r, 1000.0)
        start_earlier(r, 2, 4000.0)
        found = await r.caller.ok("GET", "/v1/stragglers")
        assert [(one["sample"], one["state"], one["turns"], one["straggler"]) for one in found] == [
            (2, "running", 1, True),
            (3, "running", 1, False),
        ]
        assert found[0]["seconds"] >= 4000
        assert {(one["median_seconds"], one["compared_with"]) for one in found} == {(1000.0, "siblings")}
        assert [one["sample"] for one in await r.caller.ok("GET", "/v1/stragglers", limit=1)] == [2]
        as_json = json.loads(await command(r, "status", "--json"))
        assert [one["session_id"] for one in as_json["slowest"]] == [one["session_id"] for one in found]
        shown = await command(r, "status", "--once")
        assert "straggler: over 3x" in shown
        assert "slowest session" in shown
        await r.caller.ok("DELETE", "/v1/tasks/slow")
        await r.caller.until("/healthz", active=0)
        assert await r.caller.ok("GET", "/v1/stragglers") == []


async def set_run_seconds(r: Rig, seconds: float) -> None:
    """Let the finished sessions have run for so long."""
    async with r.service.store.write() as tx:
        await tx.execute(update(tables.sessions).where(tables.sessions.c.state == "done").values(seconds=seconds))


def start_earlier(r: Rig, sample: int, seconds: float) -> None:
    """Let an active sample have reached its stage so much earlier."""
    reached = r.service.scheduler.stages.reached
    (name,) = [name for name, one in reached.items() if one.sample == sample]
    reached[name] = reached[name].model_copy(update={"updated": reached[name].updated - seconds})


async def command(r: Rig, *words: str) -> str:
    done = await asyncio.to_thread(
        CliRunner().invoke, app, [*words, "--url", r.url], catch_exceptions=False, env={"COLUMNS": "200"}
    )
    assert done.exit_code == 0, done.output
    return str(done.output)
