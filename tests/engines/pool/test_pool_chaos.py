"""Many conversations over replicas that die, hang, restart with old weights, and are updated and paused meanwhile.

Whatever the order of events: every turn ends, every token stands where it was sampled, under the weights that sampled it,
in one result only, and nothing older than an update is sampled after the update returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from support.engines.pool_rig import FakeReplica, Log, ask, audit, simulate
from towline.engines.base import PauseMode, Sample, SampleRequest
from towline.engines.pool import EnginePool
from towline.errors import EngineError
from towline.gateway import sampling

CONVERSATIONS, TURNS = 24, 6
INTERVAL = 0.2
EVENTS = ["die", "die", "hang", *["revive"] * 5, "update", "update", "pause", "abort"]


@dataclass
class Storm:
    """One run: what was asked and answered, and when which version was in force."""

    rng: random.Random
    log: Log = field(default_factory=Log)
    answers: list[tuple[SampleRequest, Sample]] = field(default_factory=list)
    updated: list[tuple[float, int]] = field(default_factory=list)
    cancelled: int = 0

    def __post_init__(self) -> None:
        rng = self.rng
        self.replicas = [
            FakeReplica(
                f"r{n}", self.log, pace=rng.uniform(0.005, 0.05), streams=rng.random() < 0.7, tells=rng.random() < 0.5
            )
            for n in range(rng.randint(2, 4))
        ]
        self.pool = EnginePool(
            {r.name: r for r in self.replicas},
            limit=rng.randint(1, 8),
            interval=INTERVAL,
            deadline=3600,
            max_moves=99,
            max_fruitless=99,
        )

    async def run(self) -> None:
        await self.pool.start()
        weather = asyncio.create_task(self.weather())
        await asyncio.gather(*(self.converse(n) for n in range(CONVERSATIONS)))
        weather.cancel()
        await asyncio.gather(weather, return_exceptions=True)
        await self.pool.close()

    async def converse(self, number: int) -> None:
        """Turn after turn, each behind all that came before it."""
        await asyncio.sleep(self.rng.uniform(0, 2))
        row = np.arange(2, 6, dtype=np.int32)
        for turn in range(TURNS):
            request = ask(f"{number}-{turn}", f"c{number}", f"g{number % 5}")
            # Sampled ids of earlier turns are context; a turn counts its own length from zero.
            request.prompt = np.concatenate([row, request.prompt]) % 900 + 2
            sample = await self.answer(request)
            row = np.concatenate([request.prompt, sample.ids])

    async def answer(self, request: SampleRequest) -> Sample:
        """As the gateway asks; now and then the harness leaves and comes again."""
        while True:
            work = asyncio.create_task(sampling.sample_turn(self.pool, request))
            if self.rng.random() < 0.1:
                await asyncio.wait((work,), timeout=self.rng.uniform(0, 0.5))
                if work.cancel():
                    await asyncio.wait((work,))
                    self.cancelled += work.cancelled()
                    if work.cancelled():
                        continue
            sample = await work
            self.answers.append((request, sample))
            return sample

    async def update(self, version: int) -> None:
        with contextlib.suppress(EngineError):
            await self.pool.update_weights(Path(f"/weights/{version}"), version)
            self.updated.append((asyncio.get_running_loop().time(), version))

    async def weather(self) -> None:
        version, rng, now = 0, self.rng, asyncio.get_running_loop().time
        updates: list[asyncio.Task[None]] = []
        while True:
            await asyncio.sleep(rng.expovariate(4))
            replica = rng.choice(self.replicas)
            event = rng.choice(EVENTS)
            if event == "die":
                replica.die()
            elif event == "hang":
                replica.hangs = True
            elif event == "revive":
                # A server that does not tell its weights is seen to be away before it is there again.
                if not replica.alive and (replica.tells or now() - replica.died > 3 * INTERVAL):
                    replica.revive()
                elif replica.hangs:
                    replica.die()
                replica.dies_in_update, replica.refuses = False, ""
            elif event == "update":
                version += 1
                failing = rng.choice(["", "", "dies", "refuses"])
                replica.dies_in_update, replica.refuses = failing == "dies", "no" if failing == "refuses" else ""
                updates.append(asyncio.create_task(self.update(version)))
            elif event == "pause":
                await self.pool.pause(rng.choice(list(PauseMode)), rng.choice([None, 0.1]))
                quiet = len(self.log.tokens)
                await asyncio.sleep(rng.uniform(0, 1))
                assert len(self.log.tokens) == quiet, "sampled while paused"
                await self.pool.resume()
            else:
                await self.pool.abort([request.id for r in self.replicas for request in r.seen[-3:]])


@pytest.mark.parametrize("seed", range(16))
def test_no_turn_is_lost_none_is_sampled_twice_into_a_result_and_every_version_is_right(seed: int) -> None:
    storm = Storm(random.Random(seed))
    simulate(storm.run())
    assert len(storm.answers) == CONVERSATIONS * TURNS
    used: set[int] = set()
    for request, sample in storm.answers:
        sampled = audit(storm.log, request, sample)
        assert len(sampled) == 20
        assert used.isdisjoint(sampled)
        used.update(sampled)
        assert sample.prompt_tokens == len(request.prompt)
        for id in sampled:
            origin = storm.log.tokens[id]
            due = max((version for when, version in storm.updated if when < origin.when), default=0)
            assert origin.loaded >= due, f"version {origin.loaded} after {due} was in force"
    assert all(replica.in_flight == 0 for replica in storm.pool.replicas)


def test_the_storms_are_storms() -> None:
    """What the test above relies on did happen: deaths under turns, updates, cancellations, returns."""
    storms = []
    for seed in range(4):
        storm = Storm(random.Random(seed))
        simulate(storm.run())
        storms.append(storm)
    replicas = [replica for storm in storms for replica in storm.pool.replicas]
    assert sum(replica.counters.moved for replica in replicas) > 20
    assert sum(replica.counters.failures for replica in replicas) > 10
    assert sum(replica.epoch > 1 for replica in replicas) > 4
    assert sum(len(storm.updated) for storm in storms) > 10
    assert sum(storm.cancelled for storm in storms) > 10
    assert sum("resumed" in sample.flags for storm in storms for _, sample in storm.answers) > 10
