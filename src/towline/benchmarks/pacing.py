"""Pacing versus dropping: which tasks a trainer learns from when hard ones take longer.

The real service on SQLite with the fake runner runs twice, with the same stream of tasks. A task's difficulty is random and
its duration grows with it, from a fraction of an update to many updates. The trainer learns from a fixed number of groups
per update, keeps the next updates' groups in flight, and gets a new policy version after each. With `drop` the service
starts queued sessions at once and drops groups that are stale when they are leased; others replace them. With `paced` the
trainer declares `groups_per_update`.

The result is the share of the slowest quarter of tasks among the submitted and among the trained groups. If the second is
smaller, the trainer learns less from hard tasks than it was given. The cost of pacing is the time with empty slots.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from towline.benchmarks.fake_runner import FakeRunner
from towline.config import ServerSettings
from towline.schema import Result, Start, Task, Unit
from towline.server.api.auth import ANONYMOUS
from towline.server.delivery.leases import LeaseRequest
from towline.server.service import Service

MODES = ("drop", "paced")
MAX_POINTS = 3.0
"""Largest difference, in percentage points, between the slowest quarter's shares of trained and submitted groups."""
_HANG_SECONDS = 300.0
"""Seconds without a result after which the run counts as hanging."""


@dataclass(frozen=True, slots=True)
class PacingPlan:
    """Parameters of the simulated training run."""

    updates: int = 24
    groups: int = 8
    """Per update."""
    samples: int = 2
    """Sessions per group."""
    max_staleness: int = 2
    shortest: float = 0.03
    """Seconds of the easiest session."""
    longest: float = 1.2
    learning: float = 0.04
    """Seconds per update."""
    slots: int = 48
    seed: int = 0

    def seconds(self, number: int) -> float:
        """Duration of a session of the n-th task: exponential in its difficulty."""
        difficulty = random.Random(f"{self.seed} {number}").random()
        return float(self.shortest * (self.longest / self.shortest) ** difficulty)

    def quarter(self, number: int) -> int:
        """The difficulty quarter of the n-th task; 3 is the slowest."""
        return int(random.Random(f"{self.seed} {number}").random() * 4)


@dataclass(slots=True)
class GroupCounts:
    """Groups by quarter of difficulty, and what happened to them."""

    submitted: list[int] = field(default_factory=lambda: [0] * 4)
    """By quarter."""
    trained: list[int] = field(default_factory=lambda: [0] * 4)
    dropped: int = 0
    stalenesses: list[int] = field(default_factory=list)


def run(
    plan: PacingPlan | None = None, *, progress: Callable[[int, int, str], None] = lambda *_: None
) -> dict[str, Any]:
    """Run both modes and return their figures."""
    plan = plan or PacingPlan()
    modes = {}
    for number, mode in enumerate(MODES):
        progress(number, len(MODES), mode)
        with tempfile.TemporaryDirectory(prefix="towline-pacing-") as folder:
            modes[mode] = asyncio.run(_run(plan, Path(folder), paced=mode == "paced"))
    paced = modes["paced"]
    within = {
        "slowest_quarter": abs(paced["slowest"]["difference_points"]) <= MAX_POINTS,
        "staleness": paced["max_staleness"] <= plan.max_staleness,
        "nothing_dropped": not paced["dropped_groups"],
    }
    return {"plan": asdict(plan), "modes": modes, "within": within, "within_points": MAX_POINTS}


def render(result: dict[str, Any], console: Console) -> None:
    plan = result["plan"]
    modes = result["modes"]
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for mode in modes:
        table.add_column(mode, justify="right", no_wrap=True)
    for name, formatted in _FIGURES.items():
        table.add_row(name, *(formatted(figures) for figures in modes.values()))
    console.print(table)
    console.print(
        f"{plan['updates']} updates of {plan['groups']} groups, staleness limit {plan['max_staleness']}, sessions of "
        f"{plan['shortest']:g} to {plan['longest']:g} s, seed {plan['seed']}.",
        highlight=False,
    )


_FIGURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "slowest quarter of tasks: share of submitted groups": lambda one: f"{one['slowest']['submitted_share']:.1%}",
    "  share of trained groups": lambda one: f"{one['slowest']['trained_share']:.1%}",
    "  difference (percentage points)": lambda one: f"{one['slowest']['difference_points']:+.1f}",
    "groups dropped as stale": lambda one: f"{one['dropped_groups']}",
    "mean staleness": lambda one: f"{one['mean_staleness']:.2f}",
    "max staleness": lambda one: f"{one['max_staleness']}",
    "slot time lost to pacing": lambda one: f"{one['idle_slot_share']:.0%}",
    "trainer wait for older groups (s)": lambda one: f"{one['withheld_seconds']:.1f}",
    "duration (s)": lambda one: f"{one['seconds']:.1f}",
}


async def _run(plan: PacingPlan, folder: Path, *, paced: bool) -> dict[str, Any]:
    runner = FakeRunner(plan.slots)
    service = Service(ServerSettings(data=folder, stop_seconds=0, trust_tasks=True), runner)
    await service.open()
    try:
        began = time.perf_counter()
        counts = await _train(service, plan, paced=paced)
        seconds = time.perf_counter() - began
        service.pacer.set_idle(0)
        return _figures(plan, counts, service, seconds)
    finally:
        await service.close()


async def _train(service: Service, plan: PacingPlan, *, paced: bool) -> GroupCounts:
    """Simulate a trainer that submits ahead, learns, acknowledges, and then advances the version."""
    counts, sent, done = GroupCounts(), 0, 0
    pace = plan.groups if paced else None
    request = LeaseRequest("trainer", Unit.GROUP, 0, 600.0, Start.BEGINNING, plan.max_staleness, groups_per_update=pace)
    await service.lease(request, 0.0)
    for version in range(plan.updates):
        batch: list[Result] = []
        while len(batch) < plan.groups:
            # As far ahead as the staleness limit allows, but no group beyond the last update's needs.
            wanted = min((plan.max_staleness + 1) * plan.groups, (plan.updates - version) * plan.groups - len(batch))
            in_flight = sent - done - counts.dropped
            fresh = [_task(plan, number) for number in range(sent, sent + wanted - in_flight)]
            await service.submit(fresh, ANONYMOUS, many=True)
            for number in range(sent, sent + len(fresh)):
                counts.submitted[plan.quarter(number)] += 1
            sent += len(fresh)
            most = LeaseRequest(
                "trainer",
                Unit.GROUP,
                plan.groups - len(batch),
                600.0,
                Start.BEGINNING,
                plan.max_staleness,
                groups_per_update=pace,
            )
            async with asyncio.timeout(_HANG_SECONDS):
                got = await service.lease(most, 1.0)
            counts.dropped += got.dropped
            batch += got.results
            done += len(got.results)
        for one in batch:
            counts.trained[plan.quarter(int(one.task_id))] += 1
            counts.stalenesses.append(version - min(own.lowest_version or 0 for own in one.sessions))
        await asyncio.sleep(plan.learning)
        await service.ack("trainer", [one.result_id for one in batch])
        await service.policy.resume(version + 1)
    return counts


def _task(plan: PacingPlan, number: int) -> Task:
    options = {"seconds": plan.seconds(number)}
    return Task(task_id=str(number), instruction="x", harness="fake", num_samples=plan.samples, harness_options=options)


def _figures(plan: PacingPlan, counts: GroupCounts, service: Service, seconds: float) -> dict[str, Any]:
    submitted, trained = sum(counts.submitted), sum(counts.trained)
    quarters = [
        {"submitted": own, "trained": used, "submitted_share": own / submitted, "trained_share": used / trained}
        for own, used in zip(counts.submitted, counts.trained, strict=True)
    ]
    slowest = quarters[-1]
    idle = service.pacer.idle_seconds
    return {
        "slowest": {
            **slowest,
            "difference_points": (slowest["trained_share"] - slowest["submitted_share"]) * 100,
        },
        "quarters": quarters,
        "submitted_groups": submitted,
        "trained_groups": trained,
        "dropped_groups": counts.dropped,
        "max_staleness": max(counts.stalenesses),
        "mean_staleness": sum(counts.stalenesses) / len(counts.stalenesses),
        "idle_slot_seconds": idle,
        "idle_slot_share": idle / (plan.slots * seconds),
        "withheld_seconds": sum(service.pacer.withheld_seconds.values()),
        "seconds": seconds,
    }
