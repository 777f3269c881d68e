"""The arithmetic of pacing, simulated with random durations, failures and trainers: no group is too old, no trainer waits
forever, and every slot that a group frees is used again."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from towline.server.pacing.pace import GroupPace, slack, taken_slots


@dataclass
class World:
    """A service with a number of slots, and a trainer that keeps its promise."""

    size: int
    bound: int
    slots: int
    random: random.Random
    failing: float
    useless: float
    ahead: int
    """Groups that the trainer takes into hand beyond those of the update at hand."""
    slow: float
    version: int = 0
    now: float = 0.0
    used: int = 0
    hand: list[int] = field(default_factory=list)
    """Versions that groups in hand were started under, in the order they came."""
    running: list[tuple[float, int, int]] = field(default_factory=list)
    """End, number, version."""
    finished: list[int] = field(default_factory=list)
    started: int = 0
    stalenesses: list[int] = field(default_factory=list)
    training_until: float | None = None

    def pace(self) -> GroupPace:
        slacks = [slack(one, self.bound, self.version) for one in self.finished]
        slacks += [slack(version, self.bound, self.version) for _, _, version in self.running]
        return GroupPace.of(self.size, taken_slots(self.used, len(self.hand), self.size), slacks)

    def admit(self) -> None:
        pace = self.pace()
        while len(self.running) < self.slots and pace.admits(self.bound):
            pace.admit(self.bound)
            # Slow groups are slower than many updates.
            seconds = self.random.expovariate(1.0) * (self.slow if self.random.random() < 0.2 else 1.0)
            heapq.heappush(self.running, (self.now + seconds, self.started, self.version))
            self.started += 1

    def take(self) -> None:
        pace, kept = self.pace(), []
        for version in sorted(self.finished):
            left = slack(version, self.bound, self.version)
            assert left is None or left >= 0, "a group that waited is too old"
            wanted = self.size + self.ahead - len(self.hand)
            if wanted > 0 and pace.delivers(left):
                if self.random.random() < self.useless:
                    # Acknowledged at once as unusable: its place is free again.
                    pace.waiting.remove(left or 0)
                    continue
                pace.deliver(left)
                self.hand.append(version)
            else:
                kept.append(version)
        self.finished = kept

    def train(self) -> None:
        if self.training_until is None and len(self.hand) >= self.size:
            self.stalenesses += [self.version - version for version in self.hand[: self.size]]
            self.training_until = self.now + self.random.expovariate(2.0)

    def step(self) -> bool:
        """Advance to the next event; returns whether there is one."""
        self.admit()
        self.take()
        self.admit()
        self.train()
        ends = self.running[0][0] if self.running else None
        if self.training_until is not None and (ends is None or self.training_until <= ends):
            self.now, self.training_until = self.training_until, None
            del self.hand[: self.size]
            # Acknowledged, then pushed: at no moment between the two may the pace give room that the next version lacks.
            self.used = self.size
            self.admit()
            self.version, self.used = self.version + 1, 0
        elif ends is not None:
            self.now, _, version = heapq.heappop(self.running)
            if self.random.random() >= self.failing:
                self.finished.append(version)
        else:
            return False
        return True


@given(
    size=st.integers(1, 6),
    bound=st.integers(0, 4),
    slots=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    failing=st.sampled_from([0.0, 0.3]),
    useless=st.sampled_from([0.0, 0.3]),
    ahead=st.integers(0, 12),
    slow=st.sampled_from([1.0, 10.0, 100.0]),
)
def test_no_group_exceeds_its_bound_and_the_trainer_never_starves(
    size: int, bound: int, slots: int, seed: int, failing: float, useless: float, ahead: int, slow: float
) -> None:
    world = World(size, bound, slots, random.Random(seed), failing, useless, ahead, slow)
    while world.version < 30:
        assert world.step(), f"nothing happens any more in {world}"
    assert max(world.stalenesses) <= bound
    # Every place was given to somebody: what was started is trained on, failed, or still fits into the bound.
    assert len(world.running) + len(world.finished) + len(world.hand) <= (bound + 1) * size
    if slots >= (bound + 1) * size and ahead == 0 and slow == 1.0 and bound:
        assert max(world.stalenesses) >= 1, "the bound is used, or the engine would stand still for nothing"


@given(
    size=st.integers(1, 5),
    gone=st.integers(0, 10),
    slacks=st.lists(st.integers(-2, 5), max_size=15),
    own=st.integers(0, 5),
)
def test_admission_and_delivery_leave_slots_for_all_others(size: int, gone: int, slacks: list[int], own: int) -> None:
    def fits(pace: GroupPace) -> bool:
        return all(
            sum(other <= one for other in pace.waiting) + pace.taken <= (one + 1) * pace.groups_per_update
            for one in pace.waiting
        )

    pace = GroupPace.of(size, gone, slacks)
    before = fits(pace)
    admitted = pace.admits(own)
    pace.admit(own)
    if before:
        assert admitted == fits(pace)
        assert pace.room(own, 100) == 0 or admitted
    pace = GroupPace.of(size, gone, [*slacks, own])
    delivered = pace.delivers(own)
    before = fits(pace)
    first = not any(0 <= one < own for one in slacks)
    pace.deliver(own)
    if before:
        assert delivered == fits(pace)
    assert delivered or not first, "the earliest deadline always goes"


def test_the_numbers_of_a_small_case() -> None:
    fresh = GroupPace.of(4, 0, [])
    assert fresh.room(2, 100) == 12  # three updates of four: versions 0, 1 and 2
    assert GroupPace.of(4, 0, [2] * 12).room(2, 100) == 0
    assert GroupPace.of(4, 4, [2] * 7).room(2, 100) == 1  # an update in hand
    assert GroupPace.of(4, 0, [-1] * 50 + [None] * 50).room(2, 100) == 12  # what is too old anyway takes no place
    assert GroupPace.of(4, 0, []).room(None, 100) == 100
    assert not GroupPace.of(4, 0, []).admits(-1)
    # Two groups of the update at hand still run: two of its four places are theirs.
    late = GroupPace.of(4, 2, [0, 0, 1])
    assert not late.delivers(1)
    assert late.delivers(0)
    assert GroupPace.of(4, 1, [0, 0, 1]).delivers(1)
    # A consumer that uses more than it promised before the version advances does not lock itself out.
    assert taken_slots(100, 3, 4) == 7
    assert slack(None, 2, 7) == 2
    assert slack(5, 2, 7) == 0
    assert slack(5, None, 7) is None
