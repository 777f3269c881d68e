"""Admission counts groups in the database: the same as reading each of them, and no session is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.server.server_rig import Rig, rig, task
from towline.benchmarks.fake_runner import FakeRunner
from towline.server.pacing import consumers

CONSUMERS: dict[str, dict[str, Any]] = {
    "all": {"unit": "group", "groups_per_update": 2, "max_staleness": 2, "stale": "flag"},
    "some": {"unit": "group", "groups_per_update": 1, "max_staleness": 3, "stale": "flag", "prefix": "a"},
}


async def compare(r: Rig) -> int:
    """Compare both ways of counting in one transaction; returns how many groups there were."""
    service, groups = r.service, 0
    version = service.policy.now.version
    async with service.store.write() as tx:
        for row in await consumers.paced_rows(tx, service.store.clock.now(), 1e9):
            read = await consumers.paced_consumer(tx, row, await consumers.running_groups(tx, "default"), version)
            counted = await consumers.counted_consumer(tx, row, version)
            for name in ("running", "finished", "in_hand", "used", "pace", "admissible"):
                assert getattr(counted, name) == getattr(read, name), name
            groups += read.running + read.finished + read.in_hand
    return groups


async def test_groups_that_start_in_parts_and_are_retried_all_finish(database: str, tmp_path: Path) -> None:
    # Fewer slots than a group has samples: every group starts in parts, and each first attempt fails.
    async with rig(tmp_path, database, FakeRunner(3)) as r:
        for name, query in CONSUMERS.items():
            await r.caller.lease(name, **query, max=0, wait=0)
        names = [f"{'ab'[number % 2]}{number}" for number in range(12)]
        await r.caller.submit(*(task(name, 4, harness_options={"fail": 1, "seconds": 0.01}) for name in names))
        done: dict[str, set[str]] = {"all": set(), "some": set()}
        most, version = 0, 0
        while len(done["all"]) < len(names) or len(done["some"]) < len(names) / 2:
            for name, query in CONSUMERS.items():
                got = await r.caller.lease(name, **query, max=query["groups_per_update"], wait=0.2)
                # Elsewhere groups may end between the queries of one transaction.
                most = max(most, await compare(r) if r.service.store.sqlite else 1)
                done[name] |= {one.task_id for one in got}
                await r.caller.ok(
                    "POST", "/v1/results/ack", {"consumer": name, "result_ids": [one.result_id for one in got]}
                )
            version += 1
            await r.service.policy.resume(version)
        assert most > 0
        assert done == {"all": set(names), "some": {name for name in names if name[0] == "a"}}
