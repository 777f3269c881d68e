"""Three ways to collect groups for a trainer, on the real server and on virtual time, over the same stream of tasks.

- `paced`: the trainer declares its pace, so the server admits groups such that none exceeds the staleness bound.
- `fcfs`: first come, first served. Sessions start in the order of submission whenever a slot is free; groups that are too
  old when the trainer gets them are dropped.
- `synchronous`: the trainer submits a batch, waits for all of it, updates, and submits the next one.

Each runs until the trainer has made the same number of updates, with the same number of groups in each. The trainer holds
its groups by lease while it learns, acknowledges them, and advances the policy version.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from towline.benchmarks.simulation.cluster import SimulatedRunner
from towline.benchmarks.simulation.durations import LogNormalDurations
from towline.benchmarks.simulation.inline_store import inline_store
from towline.benchmarks.simulation.virtual_time import VirtualTimeLoop
from towline.config import ServerSettings
from towline.schema import Result, Start, Task, Unit
from towline.server.api.auth import ANONYMOUS
from towline.server.delivery.leases import LeaseRequest
from towline.server.service import Service

_TRAINER = "trainer"
_LEASE_SECONDS = 24 * 3600.0
_LEASED = 64
"""Most groups leased per call."""
_SUBMITTED = 200
"""Most tasks submitted per call."""


class Collection(StrEnum):
    """How groups are collected."""

    PACED = "paced"
    """At the trainer's pace."""
    FCFS = "fcfs"
    """First come, first served; stale groups are dropped."""
    SYNCHRONOUS = "synchronous"
    """Batch by batch."""


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """Parameters of a simulated training run."""

    nodes: int = 200
    slots: int = 2
    """Sessions at once per node."""
    sessions: int = 20_000
    """That the updates use in total."""
    samples: int = 8
    """Sessions per group."""
    waves: float = 4.0
    """Sessions per update, as a multiple of the slots."""
    max_staleness: int = 4
    learning: float = 0.9
    """Seconds per update, as a share of the time in which all slots produce its sessions."""
    init: float = 2.0
    """Seconds in INIT."""
    report: float = 1.0
    """Seconds between two reports of ended sessions by the nodes; 0: at once. Each report is one transaction."""
    poll: float = 10.0
    """Seconds between two calls of a trainer that waits."""
    seed: int = 0
    durations: LogNormalDurations = field(default_factory=LogNormalDurations)

    @property
    def total_slots(self) -> int:
        return self.nodes * self.slots

    @property
    def groups(self) -> int:
        """Per update."""
        return max(1, round(self.total_slots * self.waves / self.samples))

    @property
    def updates(self) -> int:
        return max(1, round(self.sessions / (self.groups * self.samples)))

    @property
    def learning_seconds(self) -> float:
        busy = self.init + self.durations.mean
        return self.learning * self.groups * self.samples * busy / self.total_slots

    def task(self, number: int) -> Task:
        seconds = self.durations.draw(self.seed, number, self.samples)
        return Task(
            task_id=str(number),
            instruction="x",
            harness="fake",
            num_samples=self.samples,
            harness_options={"seconds": seconds},
        )


@dataclass(slots=True)
class TrainedGroups:
    """What the trainer got."""

    submitted: int = 0
    trained: list[int] = field(default_factory=list)
    """Numbers of the groups, in order of use."""
    stalenesses: list[int] = field(default_factory=list)
    dropped: int = 0
    waited: float = 0.0
    """Seconds that the trainer waited for groups."""
    makespan: float = 0.0
    """Seconds from the first submission to the last update."""


class SimulatedTrainer:
    """Submits, leases, learns, acknowledges, and advances the version, as `collection` says."""

    def __init__(
        self,
        service: Service,
        plan: SimulationPlan,
        collection: Collection,
        progress: Callable[[int], None] = lambda _: None,
    ):
        self.service = service
        self.plan = plan
        self.collection = collection
        self.progress = progress
        self.groups = TrainedGroups()

    async def run(self) -> TrainedGroups:
        clock = asyncio.get_running_loop().time
        began = clock()
        # Its first call registers the consumer, and declares its pace.
        await self.service.lease(self._request(0), 0.0)
        for version in range(self.plan.updates):
            waiting = clock()
            batch = await self._collect(version)
            self.groups.waited += clock() - waiting
            for one in batch:
                self.groups.trained.append(int(one.task_id))
                self.groups.stalenesses.append(version - min(own.lowest_version or 0 for own in one.sessions))
            await asyncio.sleep(self.plan.learning_seconds)
            for start in range(0, len(batch), _SUBMITTED):
                await self.service.ack(_TRAINER, [one.result_id for one in batch[start : start + _SUBMITTED]])
            await self.service.policy.resume(version + 1)
            self.progress(version + 1)
        self.groups.makespan = clock() - began
        return self.groups

    async def _collect(self, version: int) -> list[Result]:
        """The groups of one update."""
        batch: list[Result] = []
        wanted = self.plan.groups
        while len(batch) < wanted:
            await self._submit(version, len(batch))
            got = await self.service.lease(self._request(min(_LEASED, wanted - len(batch))), 0.0)
            self.groups.dropped += got.dropped
            batch += got.results
            if not got.results:
                await asyncio.sleep(self.plan.poll)
        return batch

    def _request(self, most: int) -> LeaseRequest:
        paced = self.collection is Collection.PACED
        return LeaseRequest(
            _TRAINER,
            Unit.GROUP,
            most,
            _LEASE_SECONDS,
            Start.BEGINNING,
            self.plan.max_staleness,
            groups_per_update=self.plan.groups if paced else None,
        )

    async def _submit(self, version: int, in_hand: int) -> None:
        """Keep the queue filled: without batches, as far ahead as the staleness bound can use."""
        plan, groups = self.plan, self.groups
        left = (plan.updates - version) * plan.groups - in_hand
        ahead = (
            plan.groups - in_hand
            if self.collection is Collection.SYNCHRONOUS
            else (plan.max_staleness + 2) * plan.groups
        )
        in_flight = groups.submitted - len(groups.trained) - in_hand - groups.dropped
        fresh = max(0, min(ahead, left) - in_flight)
        while fresh > 0:
            count = min(fresh, _SUBMITTED)
            tasks = [plan.task(number) for number in range(groups.submitted, groups.submitted + count)]
            await self.service.submit(tasks, ANONYMOUS, many=True)
            groups.submitted += count
            fresh -= count


@asynccontextmanager
async def serving(
    loop: VirtualTimeLoop, plan: SimulationPlan, folder: Path
) -> AsyncIterator[tuple[Service, SimulatedRunner]]:
    """A service on virtual time, with its simulated cluster."""
    runner = SimulatedRunner(plan.nodes, plan.slots, init=plan.init, report=plan.report, clock=loop.clock)
    # No retention, and no limit of the queue: the store holds the whole run.
    settings = ServerSettings(
        trust_tasks=True,
        data=folder,
        stop_seconds=0,
        queue=10_000_000,
        keep_seconds=3e8,
        silent_seconds=3e8,
        pacing_seconds=3e8,
    )
    store = inline_store(folder / "towline.db", loop.clock)
    service = Service(settings, runner, store=store)
    loop.working = lambda: store.transactions > 0
    with loop.stopped():
        await service.open()
    try:
        yield service, runner
    finally:
        with loop.stopped():
            await service.close()


async def simulate(
    loop: VirtualTimeLoop,
    plan: SimulationPlan,
    collection: Collection,
    folder: Path,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[TrainedGroups, SimulatedRunner]:
    """Run one way of collection on a service of its own."""
    async with serving(loop, plan, folder) as (service, runner):
        return await SimulatedTrainer(service, plan, collection, progress).run(), runner
