"""CPU time per scheduling decision, by number of nodes: `Placement` alone, and the whole path from the queue to a node.

The whole path is `SessionScheduler.claim` on a full cluster, for each session that ends: the pacing gate, the rows of the
queue and of the task, and their update. Every claim starts one session, which is the most expensive case: if several
sessions end together, one claim starts them all. A trainer leases and acknowledges meanwhile, outside of the measured time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from towline.benchmarks.simulation.collection import Collection, SimulatedTrainer, SimulationPlan, serving
from towline.benchmarks.simulation.virtual_time import VirtualTimeLoop
from towline.cluster.placement import NodeOffer, Placement

NODES = (10, 100, 1000)
_PLACED = 20_000
CLAIMS = 150


def placement_micros(nodes: int, slots: int, seed: int = 0, decisions: int = _PLACED) -> float:
    """CPU microseconds to place, start and end one session while the cluster is nearly full."""
    placement, chance = Placement(), random.Random(seed)
    for number in range(nodes):
        placement.update(NodeOffer(f"node-{number:05}", slots, starting=slots))
    names = placement.names
    prefers = [chance.choice(names) for _ in range(decisions)]
    running: deque[str] = deque()
    while placement.room > 1:
        running.append(f"first-{len(running)}")
        placement.place(running[-1])
        placement.started(running[-1])
    chance.shuffle(running)
    ids = [str(number) for number in range(decisions)]
    began = time.thread_time()
    for session_id, prefer in zip(ids, prefers, strict=True):
        placement.place(session_id, prefer=prefer)
        placement.started(session_id)
        running.append(session_id)
        placement.ended(running.popleft())
    return (time.thread_time() - began) / decisions * 1e6


async def claim_micros(loop: VirtualTimeLoop, plan: SimulationPlan, folder: Path, decisions: int = CLAIMS) -> float:
    """CPU microseconds of `SessionScheduler.claim` per session, the median over claims of one session on a full cluster."""
    async with serving(loop, plan, folder) as (service, _):
        scheduler, work = service.scheduler, service.signals.work
        # The service's own loop claims nothing.
        mine = asyncio.current_task()
        scheduler.hold_reasons.append(lambda: "" if asyncio.current_task() is mine else "held by the benchmark")
        trainer = asyncio.create_task(SimulatedTrainer(service, plan, Collection.PACED).run())
        try:
            micros: list[float] = []
            full = False
            while len(micros) < decisions:
                count, timed = work.count, _TimedCall(scheduler.claim())
                claimed = await timed
                if full and claimed:
                    micros.append(timed.seconds / claimed * 1e6)
                full = full or len(scheduler.active) >= plan.total_slots
                if not claimed:
                    await work.wait(count)
        finally:
            trainer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await trainer
    return median(micros)


class _TimedCall:
    """Awaits a coroutine and adds up the CPU time of its own steps, not of what runs while it waits."""

    def __init__(self, coroutine: Coroutine[Any, Any, int]):
        self.coroutine = coroutine
        self.seconds = 0.0

    def __await__(self) -> Generator[Any, Any, int]:
        steps = self.coroutine.__await__()
        sent = None
        while True:
            began = time.thread_time()
            try:
                waits_for = steps.send(sent)
            except StopIteration as done:
                return int(done.value)
            finally:
                self.seconds += time.thread_time() - began
            sent = yield waits_for


def ratio(figures: Sequence[dict[str, Any]], name: str) -> float:
    """The cost at the largest number of nodes, as a multiple of that at the smallest."""
    return float(figures[-1][name] / figures[0][name])


def at(plan: SimulationPlan, nodes: int) -> SimulationPlan:
    """The plan for a cluster of that size: one update uses as many sessions as there are slots."""
    return replace(plan, nodes=nodes, waves=1.0, report=0.0, sessions=1_000_000_000)
