"""The rules of attempts and groups, for any outcome of the samples.

Every sample yields one result and every task one group; a group has enough usable sessions, or none at all; no sample is
tried more often than the task allows; unusable sessions never count as usable.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.server.server_rig import task, until_idle
from towline.benchmarks.fake_runner import FakeRunner
from towline.config import ServerSettings
from towline.schema import Result, SessionState, Task, Unit
from towline.server.api.auth import ANONYMOUS
from towline.server.delivery.leases import LeaseRequest
from towline.server.service import Service


@st.composite
def tasks(draw: st.DrawFn) -> list[dict[str, Any]]:
    made = []
    for number in range(draw(st.integers(1, 4))):
        samples = draw(st.integers(1, 5))

        def each(kind: st.SearchStrategy[Any], samples: int = samples) -> list[Any]:
            return draw(st.lists(kind, min_size=samples, max_size=samples))

        options = {
            "fail": each(st.integers(0, 3)),
            "lose": each(st.integers(0, 3)),
            "hopeless": each(st.booleans()),
            "empty": each(st.booleans()),
            "seconds": each(st.sampled_from([0.0, 0.01])),
        }
        fields = {"min_samples": draw(st.integers(0, samples)), "max_attempts": draw(st.integers(1, 3))}
        fields["grace_seconds"] = draw(st.sampled_from([0.0, 0.02]))
        made.append(task(f"t{number}", samples, harness_options=options, **fields))
    return made


def usable_in_the_end(given: dict[str, Any], sample: int) -> bool:
    """Whether a sample becomes usable if it is not cancelled."""
    options = given["harness_options"]
    lost, failing = options["lose"][sample], options["fail"][sample]
    if lost >= 3:
        return False  # quarantined
    strikes = max(0, failing - lost)
    if strikes and (options["hopeless"][sample] or strikes >= given["max_attempts"]):
        return False
    return not options["empty"][sample]


async def run(given_tasks: list[dict[str, Any]], folder: Path) -> tuple[list[Result], list[Result]]:
    service = Service(ServerSettings(data=folder, stop_seconds=0, trust_tasks=True), FakeRunner(capacity=4))
    await service.open()
    try:
        await service.submit([Task.model_validate(one) for one in given_tasks], ANONYMOUS, many=True)
        wanted = {Unit.SESSION: sum(one["num_samples"] for one in given_tasks), Unit.GROUP: len(given_tasks)}
        found: dict[Unit, list[Result]] = {unit: [] for unit in Unit}
        for unit, count in wanted.items():
            while len(found[unit]) < count:
                some = await service.lease(LeaseRequest("c", unit, 100, 600.0), 30.0)
                assert some.results, f"{len(found[unit])} of {count} came"
                found[unit] += some.results
        await asyncio.gather(*service.scheduler.active.values())
        await until_idle(service)
        for unit in Unit:
            assert not (await service.lease(LeaseRequest("c", unit, 100, 600.0), 0.0)).results
        return found[Unit.SESSION], found[Unit.GROUP]
    finally:
        await service.close()


@given(made=tasks())
@settings(max_examples=12, deadline=None)
@example(made=[task("t0", 2, min_samples=1, max_attempts=1, harness_options={"fail": [0, 0], "lose": [0, 0], "hopeless": [False, False], "empty": [False, True], "seconds": [0.0, 0.0]})])  # fmt: skip
def test_every_sample_and_group_is_published_once(made: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results, groups = asyncio.run(run(made, Path(folder)))
    known = {one["task_id"]: one for one in made}
    sessions = [result.sessions[0] for result in results]
    assert sorted((one.task_id, one.sample) for one in sessions) == sorted(
        (one["task_id"], sample) for one in made for sample in range(one["num_samples"])
    )
    for one in sessions:
        lost = known[one.task_id]["harness_options"]["lose"][one.sample]
        assert one.attempt <= known[one.task_id]["max_attempts"] + min(lost, 3)
        assert one.usable == (one.state is SessionState.DONE and one.trained_tokens > 0)
        assert one.state is not SessionState.LOST
        assert not one.usable or usable_in_the_end(known[one.task_id], one.sample)
        assert one.state is not SessionState.FAILED or one.error
    assert sorted(group.task_id for group in groups) == sorted(known)
    for group in groups:
        given_task = known[group.task_id]
        required = given_task["min_samples"] or given_task["num_samples"]
        possible = sum(usable_in_the_end(given_task, sample) for sample in range(given_task["num_samples"]))
        members = {one.sample for one in group.sessions}
        assert len(members) == len(group.sessions)
        assert all(one.usable for one in group.sessions)
        assert len(members) >= required if possible >= required else not members
        if given_task["min_samples"] == 0:
            ended = {one.state for one in sessions if one.task_id == group.task_id}
            assert SessionState.CANCELLED not in ended  # nobody asked for fewer than all
