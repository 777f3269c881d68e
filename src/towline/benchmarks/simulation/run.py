"""`towline bench simulation`: utilisation, queueing delay and staleness of three ways of collection, and cost per decision.

The service is the real one: queue, scheduler, pacing, placement, leases and store. Simulated are the time, the nodes, what
a session does, and the trainer. The store is an SQLite file in memory if the machine has a file system for that, and SQLite
runs in the event loop's thread; so real times here are no measure of a server with a disk, and CPU times are without thread
switches and without syncing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from towline.benchmarks.simulation import decisions, virtual_time
from towline.benchmarks.simulation.cluster import SimulatedRunner
from towline.benchmarks.simulation.collection import Collection, SimulationPlan, TrainedGroups, simulate
from towline.common.gc_tuning import gc_tuning

_MEMORY = Path("/dev/shm")


def run(
    plan: SimulationPlan | None = None,
    *,
    sizes: tuple[int, ...] = decisions.NODES,
    claims: int = decisions.CLAIMS,
    rounds: int = 3,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> dict[str, Any]:
    """Run all ways of collection, and measure the cost of decisions at each number of nodes: the median of `rounds`."""
    plan = plan or SimulationPlan()
    steps = len(sizes) * rounds + len(Collection) * plan.updates
    measured: dict[int, list[tuple[float, float]]] = {nodes: [] for nodes in sizes}
    # Rounds alternate between the sizes, so that a machine that is busy for a while slows down all of them.
    for number, nodes in enumerate(sizes * rounds):
        progress(number, steps, f"cost per decision, {nodes} nodes")
        # Garbage is collected as in a server.
        with _folder() as folder, gc_tuning():
            sized = decisions.at(plan, nodes)
            claim = virtual_time.run(partial(decisions.claim_micros, plan=sized, folder=folder, decisions=claims))
        measured[nodes].append((decisions.placement_micros(nodes, plan.slots), claim))
    costs = [
        {"nodes": nodes, "placement_us": median(one[0] for one in found), "claim_us": median(one[1] for one in found)}
        for nodes, found in measured.items()
    ]
    collections = {}
    for number, collection in enumerate(Collection):
        before = len(sizes) * rounds + number * plan.updates

        def on_update(version: int, before: int = before, collection: Collection = collection) -> None:
            progress(before + version, steps, f"{collection}: update {version} of {plan.updates}")

        on_update(0)
        collections[collection.value] = collect(plan, collection, on_update)
    return {
        "plan": asdict(plan)
        | {"groups": plan.groups, "updates": plan.updates, "learning_seconds": plan.learning_seconds},
        "decisions": {
            "sizes": costs,
            "placement_ratio": decisions.ratio(costs, "placement_us"),
            "claim_ratio": decisions.ratio(costs, "claim_us"),
        },
        "collections": collections,
    }


def collect(
    plan: SimulationPlan, collection: Collection, progress: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """The figures of one way of collection."""
    began, cpu = time.perf_counter(), time.process_time()
    with _folder() as folder:
        groups, runner = virtual_time.run(lambda loop: simulate(loop, plan, collection, folder, progress))
    real = {"real_seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    return _figures(plan, groups, runner) | real


def _figures(plan: SimulationPlan, groups: TrainedGroups, runner: SimulatedRunner) -> dict[str, Any]:
    used = set(groups.trained)
    slot_seconds = plan.total_slots * groups.makespan
    delays = np.array([one.queued for one in runner.sessions])
    busy = sum(min(one.ended, groups.makespan) - one.started for one in runner.sessions)
    useful = sum(one.ended - one.started for one in runner.sessions if one.group in used)
    slowest = _slowest(plan, groups.submitted)
    return {
        "utilisation": busy / slot_seconds,
        "useful_utilisation": useful / slot_seconds,
        "makespan_seconds": groups.makespan,
        "queueing_p50_seconds": float(np.quantile(delays, 0.5)),
        "queueing_p99_seconds": float(np.quantile(delays, 0.99)),
        "mean_staleness": float(np.mean(groups.stalenesses)),
        "max_staleness": max(groups.stalenesses),
        "dropped_groups": groups.dropped,
        "trained_groups": len(groups.trained),
        "slowest_share": len(slowest & used) / len(used),
        "trainer_waited_share": groups.waited / groups.makespan,
        "sessions": len(runner.sessions),
        "busy_slots": _busy_slots(runner, groups.makespan, plan.total_slots),
    }


def _slowest(plan: SimulationPlan, groups: int) -> set[int]:
    """The slowest quarter of the first groups, by their longest session."""
    longest = [max(plan.durations.draw(plan.seed, number, plan.samples)) for number in range(groups)]
    return {int(number) for number in np.argsort(longest)[len(longest) * 3 // 4 :]}


def _busy_slots(runner: SimulatedRunner, makespan: float, slots: int, points: int = 200) -> dict[str, list[float]]:
    """The share of busy slots over time."""
    starts = np.sort([one.started for one in runner.sessions])
    ends = np.sort([one.ended for one in runner.sessions])
    times = np.linspace(0.0, makespan, points)
    busy = np.searchsorted(starts, times, "right") - np.searchsorted(ends, times, "right")
    return {"seconds": [float(one) for one in times], "share": [float(one) for one in busy / slots]}


@contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder, in memory if possible."""
    place = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="towline-simulation-", dir=place) as folder:
        yield Path(folder)
