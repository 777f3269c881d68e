"""Pacing beside dropping: which tasks a trainer learns from when hard ones take longer.

The real service on SQLite with the fake runner, twice, with the same stream of tasks. A task's difficulty is drawn at random
and its duration grows with it, from a fraction of an update to many updates. The trainer learns from a fixed number of
groups per update, keeps the next updates' groups under way, and gets a new policy version after each. With `drop` the
service starts what waits and drops groups that are too old when they are handed out; others take their place. With
`paced` the trainer declares `groups_per_update`.

Reported for the slowest quarter of the tasks: its share of the submitted and of the trained groups. Where the second is
smaller, the trainer learns less from hard tasks than it was given. What pacing costs is the time in which slots stood empty.
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
from towline.server.auth import ANYBODY
from towline.server.results import Wish
from towline.server.service import Service

MODES = ("drop", "paced")
POINTS = 3.0
"""How far the slowest quarter's share of the trained groups may be from its share of the submitted ones."""
_GIVE_UP = 300.0
"""Seconds without a single result after which the run is taken to hang."""


@dataclass(frozen=True, slots=True)
class Plan:
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
        """How long a session of the n-th task takes: easy ones are short, and each step harder is so many times longer."""
        difficulty = random.Random(f"{self.seed} {number}").random()
        return float(self.shortest * (self.longest / self.shortest) ** difficulty)

    def quarter(self, number: int) -> int:
        """Which quarter of difficulty the n-th task is of; 3 is the slowest."""
        return int(random.Random(f"{self.seed} {number}").random() * 4)


@dataclass(slots=True)
class Found:
    submitted: list[int] = field(default_factory=lambda: [0] * 4)
    """Groups by quarter."""
    trained: list[int] = field(default_factory=lambda: [0] * 4)
    dropped: int = 0
    stalenesses: list[int] = field(default_factory=list)


def run(plan: Plan | None = None, *, report: Callable[[int, int, str], None] = lambda *_: None) -> dict[str, Any]:
    """The figures of both modes."""
    plan = plan or Plan()
    modes = {}
    for number, mode in enumerate(MODES):
        report(number, len(MODES), mode)
        with tempfile.TemporaryDirectory(prefix="towline-pacing-") as folder:
            modes[mode] = asyncio.run(_run(plan, Path(folder), paced=mode == "paced"))
    paced = modes["paced"]
    within = {
        "slowest_quarter": abs(paced["slowest"]["difference_points"]) <= POINTS,
        "staleness": paced["max_staleness"] <= plan.max_staleness,
        "nothing_dropped": not paced["dropped_groups"],
    }
    return {"plan": asdict(plan), "modes": modes, "within": within, "within_points": POINTS}


def render(result: dict[str, Any], console: Console) -> None:
    plan = result["plan"]
    modes = result["modes"]
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for mode in modes:
        table.add_column(mode, justify="right", no_wrap=True)
    for name, shown in _FIGURES.items():
        table.add_row(name, *(shown(found) for found in modes.values()))
    console.print(table)
    console.print(
        f"{plan['updates']} updates of {plan['groups']} groups at staleness ≤ {plan['max_staleness']}, sessions of "
        f"{plan['shortest']:g} to {plan['longest']:g} s, seed {plan['seed']}.",
        highlight=False,
    )


_FIGURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "slowest quarter of tasks: share of submitted groups": lambda one: f"{one['slowest']['submitted_share']:.1%}",
    "  share of trained groups": lambda one: f"{one['slowest']['trained_share']:.1%}",
    "  difference, points": lambda one: f"{one['slowest']['difference_points']:+.1f}",
    "groups dropped as too old": lambda one: f"{one['dropped_groups']}",
    "staleness, mean": lambda one: f"{one['mean_staleness']:.2f}",
    "staleness, largest": lambda one: f"{one['max_staleness']}",
    "slot time lost to pacing": lambda one: f"{one['idle_slot_share']:.0%}",
    "trainer waited for older groups, s": lambda one: f"{one['withheld_seconds']:.1f}",
    "seconds": lambda one: f"{one['seconds']:.1f}",
}


async def _run(plan: Plan, folder: Path, *, paced: bool) -> dict[str, Any]:
    runner = FakeRunner(plan.slots)
    service = Service(ServerSettings(data=folder, stop_seconds=0), runner)
    await service.open()
    try:
        began = time.perf_counter()
        found = await _train(service, plan, paced=paced)
        seconds = time.perf_counter() - began
        service.pacer.idle(0)
        return _figures(plan, found, service, seconds)
    finally:
        await service.close()


async def _train(service: Service, plan: Plan, *, paced: bool) -> Found:
    """A trainer that submits ahead, learns, acknowledges, and then advances the version."""
    found, sent, done = Found(), 0, 0
    pace = plan.groups if paced else None
    wish = Wish("trainer", Unit.GROUP, 0, 600.0, Start.BEGINNING, plan.max_staleness, groups_per_update=pace)
    await service.lease(wish, 0.0)
    for version in range(plan.updates):
        batch: list[Result] = []
        while len(batch) < plan.groups:
            # As far ahead as the bound allows, and no group that no update will need.
            wanted = min((plan.max_staleness + 1) * plan.groups, (plan.updates - version) * plan.groups - len(batch))
            under_way = sent - done - found.dropped
            fresh = [_task(plan, number) for number in range(sent, sent + wanted - under_way)]
            await service.submit(fresh, ANYBODY, many=True)
            for number in range(sent, sent + len(fresh)):
                found.submitted[plan.quarter(number)] += 1
            sent += len(fresh)
            most = Wish(
                "trainer",
                Unit.GROUP,
                plan.groups - len(batch),
                600.0,
                Start.BEGINNING,
                plan.max_staleness,
                groups_per_update=pace,
            )
            async with asyncio.timeout(_GIVE_UP):
                got = await service.lease(most, 1.0)
            found.dropped += got.dropped
            batch += got.results
            done += len(got.results)
        for one in batch:
            found.trained[plan.quarter(int(one.task_id))] += 1
            found.stalenesses.append(version - min(own.lowest_version or 0 for own in one.sessions))
        await asyncio.sleep(plan.learning)
        await service.ack("trainer", [one.result_id for one in batch])
        await service.policy.resume(version + 1)
    return found


def _task(plan: Plan, number: int) -> Task:
    options = {"seconds": plan.seconds(number)}
    return Task(task_id=str(number), instruction="x", harness="fake", num_samples=plan.samples, harness_options=options)


def _figures(plan: Plan, found: Found, service: Service, seconds: float) -> dict[str, Any]:
    submitted, trained = sum(found.submitted), sum(found.trained)
    quarters = [
        {"submitted": own, "trained": used, "submitted_share": own / submitted, "trained_share": used / trained}
        for own, used in zip(found.submitted, found.trained, strict=True)
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
        "dropped_groups": found.dropped,
        "max_staleness": max(found.stalenesses),
        "mean_staleness": sum(found.stalenesses) / len(found.stalenesses),
        "idle_slot_seconds": idle,
        "idle_slot_share": idle / (plan.slots * seconds),
        "withheld_seconds": sum(service.pacer.withheld_seconds.values()),
        "seconds": seconds,
    }
