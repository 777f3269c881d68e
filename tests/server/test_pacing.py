"""Pacing in the real service: admission, withheld groups, restarts, failures, several consumers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from support.server.server_rig import Rig, rig, task, until_idle
from towline.benchmarks.fake_runner import FakeRunner
from towline.cluster.runner import SessionOutcome
from towline.schema import Pacing, Result, Session, Task
from towline.server.pacing import pacer

PACE = {"unit": "group", "groups_per_update": 2, "max_staleness": 1}


class Held(FakeRunner):
    """Sessions that end when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[str] = []
        """In the order their first sessions came."""
        self._ends: dict[str, asyncio.Event] = {}

    def submit(self, task: Task, session: Session) -> Awaitable[SessionOutcome]:
        if task.task_id not in self.tasks:
            self.tasks.append(task.task_id)
        return super().submit(task, session)

    def _end_of(self, task_id: str) -> asyncio.Event:
        return self._ends.setdefault(task_id, asyncio.Event())

    async def _work(self, task: Task, seconds: float, cancelled: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(one.wait()) for one in (self._end_of(task.task_id), cancelled)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()

    def end(self, *task_ids: str) -> None:
        for task_id in task_ids:
            self._end_of(task_id).set()


async def advance(r: Rig) -> None:
    await r.service.policy.resume(r.service.policy.now.version + 1)


async def started(r: Rig, count: int) -> list[str]:
    """The tasks that were started: exactly `count`, after the scheduler has looked at the queue again."""
    assert isinstance(r.runner, Held)
    for _ in range(3000):
        if len(r.runner.tasks) >= count:
            break
        await asyncio.sleep(0.01)
    await until_idle(r.service)
    assert len(r.runner.tasks) == count
    return r.runner.tasks


async def asked(r: Rig, **query: Any) -> list[Result]:
    return await r.caller.lease("c", **{**PACE, "wait": 0, "max": 100, **query})


async def finished(r: Rig, *task_ids: str) -> None:
    assert isinstance(r.runner, Held)
    r.runner.end(*task_ids)
    for task_id in task_ids:
        await r.caller.until(f"/v1/tasks/{task_id}", state="done")


async def pacing(r: Rig) -> Pacing:
    return Pacing.model_validate(await r.caller.ok("GET", "/v1/pacing"))


async def test_sessions_start_at_the_pace_of_updates_oldest_groups_first(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database, Held()) as r:
        await asked(r, max=0)
        await r.caller.submit(*(task(f"t{n}", 2) for n in range(10)))
        # Two versions of two groups each; all samples of a group that was started.
        assert await started(r, 4) == ["t0", "t1", "t2", "t3"]
        assert len(r.runner.started) == 8
        await finished(r, "t2", "t3")
        first = await asked(r)
        assert [one.task_id for one in first] == ["t2", "t3"]
        await r.caller.ack(*first)
        await started(r, 4)
        await advance(r)
        assert (await started(r, 6))[4:] == ["t4", "t5"]
        # t0 and t1 would be too old after this update: both of its places are theirs, however long they take.
        await finished(r, "t4", "t5")
        assert await asked(r) == []
        (status,) = (await pacing(r)).consumers
        assert (status.running, status.finished, status.in_hand, status.used, status.admissible) == (2, 2, 0, 0, 0)
        await finished(r, "t1")
        (old,) = await asked(r)
        assert old.task_id == "t1"
        assert await asked(r) == []
        # Cancelled, t0 leaves its place to another.
        await r.caller.ok("DELETE", "/v1/tasks/t0")
        found = await asked(r, max=2)
        assert [(one.task_id, len(one.sessions)) for one in found] == [("t0", 0), ("t4", 2)]
        body = {"consumer": "c", "result_ids": [one.result_id for one in (old, *found)]}
        await r.caller.ok("POST", "/v1/results/ack", body)
        await advance(r)
        (last,) = await asked(r)
        assert last.task_id == "t5"
        assert not last.sessions[0].stale
        assert (await r.caller.ok("GET", "/v1/results", consumer="c", **PACE))["dropped"] == 0
        # A consumer that drops what is too old is told what that does to slow tasks.
        dropping = {"consumer": "d", "unit": "group", "max_staleness": 0, "max": 100}
        assert (await r.caller.ok("GET", "/v1/results", **dropping))["dropped"] == 5
        (biased,) = [one for one in (await pacing(r)).consumers if one.consumer == "d"]
        assert biased.groups_per_update is None
        assert [(one.groups, one.trained) for one in biased.quartiles] == [(1, 0), (1, 0), (1, 0), (2, 0)]
        text = (await r.caller.call("GET", "/metrics")).body.decode()
        assert "towline_pacing_idle_slot_seconds" in text
        assert 'towline_trained_share{consumer="c",quartile="4",tenant="default"}' in text


async def test_a_restart_keeps_the_pace(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database, Held()) as r:
        await asked(r, max=0)
        await r.caller.submit(*(task(f"t{n}") for n in range(8)))
        await started(r, 4)
        await finished(r, "t0")
        (one,) = await asked(r)
        await r.caller.ack(one)
    async with rig(tmp_path, database, Held()) as r:
        # Three were lost and are tried again, one was used: there is no room until the version advances.
        assert set(await started(r, 3)) == {"t1", "t2", "t3"}
        await advance(r)
        assert (await started(r, 4))[3] == "t4"


async def test_failed_and_unusable_groups_free_their_slots(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database, Held()) as r:
        await asked(r, max=0)
        broken = {"harness_options": {"fail": 99}, "max_attempts": 2}
        await r.caller.submit(*(task(f"t{n}", **broken) for n in range(2)), *(task(f"t{n}") for n in range(2, 9)))
        await started(r, 4)
        # A retry is of a group that was started; the last failure frees the place.
        await finished(r, "t0")
        assert (await started(r, 5))[4] == "t4"
        await finished(r, "t2", "t3", "t4")
        found = await asked(r)
        assert [(one.task_id, len(one.sessions)) for one in found] == [("t0", 0), ("t2", 1), ("t3", 1), ("t4", 1)]
        await started(r, 5)
        equal = found[1].result_id
        body = {"consumer": "c", "result_ids": [equal], "unusable": [equal]}
        await r.caller.ok("POST", "/v1/results/ack", body)
        assert (await started(r, 6))[5] == "t5"
        await r.caller.ack(found[2])
        await started(r, 6)


async def test_only_tasks_of_paced_consumers_are_held(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database, Held()) as r:
        await asked(r, max=0, prefix="run/")
        await r.caller.lease("other", "group", wait=0, max_staleness=1)
        await r.caller.submit(*(task(f"run/{n}") for n in range(8)), *(task(f"eval/{n}") for n in range(8)))
        assert len(await started(r, 12)) == 12
        # A task may want fresher groups than its consumer: this one waits for an update with room at once.
        await r.caller.submit(task("run/strict", max_staleness=0))
        await started(r, 12)
        # The strictest of several paces.
        await r.caller.lease("strict", **{**PACE, "max": 0, "wait": 0, "max_staleness": 0, "prefix": "run/"})
        r.runner.end("run/0")
        await started(r, 12)
        refused = await r.caller.call("GET", "/v1/results", consumer="c", groups_per_update=2)
        assert (refused.status, refused.body["field"]) == (422, "groups_per_update")
        # A consumer that says nothing of a pace any more has none.
        for name in ("c", "strict"):
            await r.caller.lease(name, "group", wait=0, max=0)
        await started(r, 17)


async def test_consumer_that_exceeds_its_pace_gets_one_more_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacer, "STARVED", 0.2)
    pace = {**PACE, "max_staleness": 0}
    async with rig(tmp_path, None, Held()) as r:
        await asked(r, max=0, **pace)
        await r.caller.submit(*(task(f"t{n}") for n in range(4)))
        await started(r, 2)
        await finished(r, "t0", "t1")
        assert len(await asked(r, **pace)) == 2
        await started(r, 2)
        waiting = asyncio.create_task(asked(r, **{**pace, "wait": 30}))
        await asyncio.sleep(0.3)
        await started(r, 3)
        r.runner.end("t2")
        (more,) = await waiting
        assert more.task_id == "t2"
