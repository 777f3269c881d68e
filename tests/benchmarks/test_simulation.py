"""The simulation in small: virtual time, the fitted durations, what must hold of each way of collection."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from towline.benchmarks.simulation import decisions, report, virtual_time
from towline.benchmarks.simulation.collection import Collection, SimulationPlan
from towline.benchmarks.simulation.durations import P50, P90, P99, LogNormalDurations
from towline.benchmarks.simulation.run import collect, run
from towline.benchmarks.simulation.virtual_time import VirtualTimeLoop, VirtualTimeStuck

SMALL = SimulationPlan(nodes=4, slots=2, sessions=96, samples=4, waves=3.0)


def test_virtual_time_jumps_over_timers_and_stands_still_for_threads() -> None:
    async def main(loop: VirtualTimeLoop) -> tuple[float, float, float]:
        await asyncio.sleep(86_400.0)
        slept = loop.time()
        await asyncio.to_thread(time.sleep, 0.01)
        finished = loop.create_future()
        loop.working = lambda: not finished.done()
        thread = threading.Timer(0.05, loop.call_soon_threadsafe, (finished.set_result, None))
        thread.start()
        timer = asyncio.create_task(asyncio.sleep(1.0))
        await finished
        thread.join()
        worked = loop.time()
        await timer
        return slept, worked, loop.time()

    slept, worked, ended = virtual_time.run(main)
    assert slept == pytest.approx(86_400.0)
    assert worked == slept
    assert ended == pytest.approx(slept + 1.0)


def test_virtual_time_recognizes_a_program_that_waits_forever() -> None:
    async def main(loop: VirtualTimeLoop) -> None:
        await loop.create_future()

    with pytest.raises(VirtualTimeStuck):
        virtual_time.run(main)


def test_durations_have_the_published_quantiles() -> None:
    durations = LogNormalDurations(limit=1e9)
    drawn = np.array([value for group in range(4000) for value in durations.draw(7, group, 8)])
    found = np.quantile(drawn, [0.5, 0.9, 0.99])
    assert found == pytest.approx([P50, P90, P99], rel=0.1)
    limited = LogNormalDurations()
    drawn = np.minimum(drawn, limited.limit)
    assert drawn.mean() == pytest.approx(limited.mean, rel=0.05)


def test_a_small_simulation(tmp_path: Path) -> None:
    result = run(SMALL, sizes=(2, 4), claims=10, rounds=1)
    paced, fcfs, synchronous = (result["collections"][name] for name in ("paced", "fcfs", "synchronous"))
    groups = SMALL.updates * SMALL.groups
    for one in (paced, fcfs, synchronous):
        assert one["trained_groups"] == groups
        assert one["max_staleness"] <= SMALL.max_staleness
        assert 0 < one["useful_utilisation"] <= one["utilisation"] <= 1
    assert paced["dropped_groups"] == synchronous["dropped_groups"] == 0
    assert synchronous["max_staleness"] == 0
    assert paced["sessions"] == synchronous["sessions"] == groups * SMALL.samples
    assert paced["makespan_seconds"] < synchronous["makespan_seconds"]
    assert paced["utilisation"] > synchronous["utilisation"]
    assert all(one["placement_us"] > 0 and one["claim_us"] > 0 for one in result["decisions"]["sizes"])

    console = Console(record=True, width=120)
    report.render(result, console)
    assert "whole claim" in console.export_text()
    pytest.importorskip("matplotlib")
    report.plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_simulation_repeats_exactly() -> None:
    plan = replace(SMALL, sessions=48)
    first, second = (collect(plan, Collection.PACED) for _ in range(2))
    for one in (first, second):
        del one["real_seconds"], one["cpu_seconds"]
    assert first == second


def test_the_cost_of_placement_is_measured_on_a_full_cluster() -> None:
    assert decisions.placement_micros(10, 2, decisions=200) > 0
