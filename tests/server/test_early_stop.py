"""Early stop: the samples that a group does not need have a grace period, through restarts too, and are then cut."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from sqlalchemy import select, update

from support.server.server_rig import Rig, rig, task
from towline.benchmarks.fake_runner import FakeRunner
from towline.schema import EndReason, RewardStatus, SessionState, Task
from towline.server.scheduling.queue import serialize_task
from towline.server.store import tables

HOUR = 3600.0
TWO_HANG = {"hang": [False, False, True, True]}


async def until_grace(r: Rig, name: str) -> dict[str, Any]:
    """The status of a task once its grace period has begun."""
    for _ in range(2000):
        status: dict[str, Any] = await r.caller.ok("GET", f"/v1/tasks/{name}")
        if status["grace_until"] is not None:
            return status
        await asyncio.sleep(0.01)
    raise AssertionError(f"no grace period began: {status}")


async def pass_deadlines(r: Rig) -> None:
    """Move every deadline into the past."""
    table = tables.tasks
    async with r.service.store.write() as tx:
        await tx.execute(update(table).where(table.c.grace_until.is_not(None)).values(grace_until=1.0))


async def check_cut(r: Rig, name: str, *, cut: int) -> None:
    """The group has two sessions and says how many were cut; what was cut has no reward and is no failure."""
    (group,) = await r.caller.take(1, unit="group")
    assert ([one.sample for one in group.sessions], group.cut) == ([0, 1], cut)
    results = [one.sessions[0] for one in await r.caller.take(4)]
    ended = [one for one in results if one.end_reason is EndReason.EARLY_STOP]
    assert len(ended) == cut
    for one in ended:
        assert (one.state, one.usable, one.failure, one.reward) == (SessionState.CANCELLED, False, None, None)
        assert one.reward_status is not RewardStatus.SCORED
    status = await r.caller.ok("GET", f"/v1/tasks/{name}")
    assert (status["state"], status["finished"], status["usable"], status["cut"]) == ("done", 4, 2, cut)
    assert status["grace_until"] is None
    assert status["early_stop"]["cut"] == cut
    assert status["early_stop"]["finished"]["sessions"] == 2
    metrics = (await r.caller.call("GET", "/metrics")).body.decode()
    assert f"towline_sessions_cut_total {cut}.0" in metrics
    assert f'towline_early_stop_seconds_count{{outcome="cut"}} {cut}.0' in metrics
    assert "towline_sessions_failed_total{" not in metrics


async def test_without_grace_the_rest_is_stopped_at_once(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database) as r:
        await r.caller.submit(task("now", 4, min_samples=2, harness_options=TWO_HANG))
        await check_cut(r, "now", cut=2)
        status = await r.caller.ok("GET", "/v1/tasks/now")
        (one,) = {one["session_id"] for one in status["sessions"] if one["sample"] == 2}
        trajectory = await r.caller.ok("GET", f"/v1/sessions/{one}/trajectory")
        assert (trajectory["state"], trajectory["end_reason"]) == ("cancelled", "early_stop")


async def test_the_rest_is_stopped_when_the_grace_period_is_over(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database) as r:
        await r.caller.submit(task("soon", 4, min_samples=2, grace_seconds=0.2, harness_options=TWO_HANG))
        await check_cut(r, "soon", cut=2)


async def test_sessions_that_end_in_the_grace_period_are_in_the_group(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database) as r:
        r.runner.hold = True
        options = {"seconds": [0.001, 0.001, 0.0, 0.0], "fail": [0, 0, 0, 1]}
        await r.caller.submit(task("all", 4, min_samples=2, grace_seconds=HOUR, harness_options=options))
        status = await until_grace(r, "all")
        assert (status["state"], status["usable"], status["cut"]) == ("running", 2, 0)
        assert await r.caller.lease(unit="group", wait=0) == []
        r.runner.hold = False  # the failed sample is retried, in what is left of the grace period
        r.runner.release()
        (group,) = await r.caller.take(1, unit="group")
        assert ([one.sample for one in group.sessions], group.cut) == ([0, 1, 2, 3], 0)
        status = await r.caller.ok("GET", "/v1/tasks/all")
        assert (status["state"], status["usable"], status["grace_until"]) == ("done", 4, None)
        assert status["early_stop"] is None


async def test_a_restarted_server_honours_the_deadline(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database) as r:
        await r.caller.submit(task("kept", 4, min_samples=2, grace_seconds=HOUR, harness_options=TWO_HANG))
        before = (await until_grace(r, "kept"))["grace_until"]
    async with rig(tmp_path, database) as r:
        # The interrupted samples run again, until the same deadline.
        await r.caller.until("/healthz", active=2)
        assert (await r.caller.ok("GET", "/v1/tasks/kept"))["grace_until"] == before
        assert await r.caller.lease(unit="group", wait=0) == []
        await pass_deadlines(r)
    async with rig(tmp_path, database) as r:
        # The deadline passed while no server ran.
        await check_cut(r, "kept", cut=2)
        assert r.runner.started == []


async def test_a_deadline_wakes_the_server(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database) as r:
        await r.caller.submit(task("kept", 4, min_samples=2, grace_seconds=HOUR, harness_options=TWO_HANG))
        await until_grace(r, "kept")
        await pass_deadlines(r)
        # The grace period of another group makes it look at the deadlines again.
        await r.caller.submit(task("other", 2, min_samples=1, grace_seconds=HOUR, harness_options={"hang": [0, True]}))
        (group,) = await r.caller.take(1, unit="group")
        assert (group.task_id, group.cut) == ("kept", 2)


async def test_a_task_that_is_cancelled_in_its_grace_period_is_dropped(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database) as r:
        await r.caller.submit(task("off", 4, min_samples=2, grace_seconds=HOUR, harness_options=TWO_HANG))
        await until_grace(r, "off")
        assert (await r.caller.ok("DELETE", "/v1/tasks/off"))["state"] == "cancelled"
        (group,) = await r.caller.take(1, unit="group")
        assert (group.sessions, group.cut) == ([], 0)
        ended = {one.sessions[0].end_reason for one in await r.caller.take(4)}
        assert ended == {EndReason.EXITED, EndReason.CANCELLED}
        async with r.service.store.read() as tx:
            assert (await tx.execute(select(tables.tasks.c.grace_until))).scalar_one() is None


async def test_samples_that_never_started_are_cut_too(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database, FakeRunner(capacity=1)) as r:
        await r.caller.submit(task("queued", 4, min_samples=2))
        await check_cut(r, "queued", cut=2)
        report = (await r.caller.ok("GET", "/v1/tasks/queued"))["early_stop"]
        assert (report["cut"], report["not_started"], report["unestimated"]) == (2, 2, 0)
        assert report["so_far"]["sessions"] == 0


def test_a_task_without_grace_has_the_digest_of_before_there_was_any() -> None:
    one = Task(task_id="t", instruction="do it", harness="shell", min_samples=1, num_samples=2)
    assert serialize_task(one).digest == "f02d633fbf2d4b9ed5fe32751b8b49c43c1148d925d6aa9bea417c54e0db712c"
    assert serialize_task(one.model_copy(update={"grace_seconds": 1.0})).digest != serialize_task(one).digest
