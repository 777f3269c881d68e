"""The schedule of a storm: which fault when, and for how long, as a function of the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ENGINE_FAULTS = (
    "status_500",
    "rate_limit",
    "stall",
    "stall_midway",
    "reset",
    "garbage",
    "truncated",
    "wrong_ids",
    "nan_logprob",
    "away",
)
WEIGHTS = {
    "kill_server": 2,
    "restart_server": 1,
    "kill_host": 4,
    "kill_supervisor": 4,
    "kill_trainer": 3,
    "stop_host": 3,
    "stop_server": 2,
    "stop_database": 3,
    "restart_database": 2,
    "full_disk": 2,
    "clock_jump": 3,
    "engine": 8,
    "cut_network": 4,
    "kill_node": 3,
    "kill_raylet": 1,
}
"""How often each fault is drawn, relative to the others. A deployment without a part leaves out the faults of that part."""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    number: int
    name: str
    pause: float
    """Seconds since the end of the one before."""
    seconds: float
    """How long it lasts, if it does."""
    choice: float
    """From 0 to 1: picks the victim, the way in which an engine fails, or where a clock jumps."""

    def pick(self, among: Sequence[str]) -> str:
        return among[int(self.choice * len(among))]


def planned(seed: int, faults: Sequence[str], stretch: float = 1.0) -> Iterator[PlannedFault]:
    """Endless; equal seeds and faults give equal plans, whose times are multiplied by `stretch`."""
    draws = random.Random(seed)
    weights = [WEIGHTS[name] for name in faults]
    number = 0
    while True:
        number += 1
        (name,) = draws.choices(faults, weights)
        pause, seconds = draws.uniform(0.3, 3.0), draws.uniform(0.5, 4.0)
        yield PlannedFault(number, name, stretch * pause, stretch * seconds, draws.random())
