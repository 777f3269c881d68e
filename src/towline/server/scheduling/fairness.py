"""Weighted fair sharing: which tenant gets the next session slot.

A slot goes to the tenant with waiting sessions that holds the fewest slots for its weight. What is shared are the slots
that tenants hold at any time, and not the sessions they start: a tenant whose sessions take ten times as long would
otherwise hold ten times the slots. Ties are decided by the slot seconds that each tenant has had for its weight, so that
one odd slot, or one slot for many tenants, is shared over time as well.

A tenant cannot save up: while it has neither waiting nor running sessions it gains no claim, and when it returns it starts
level with those that competed meanwhile. Priorities order sessions within a tenant; here they count nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping

Weight = Callable[[str], float]
"""The weight of a tenant; above 0."""


class FairShare:
    """The slots that each tenant holds, and has held."""

    def __init__(self, weight: Weight, clock: Callable[[], float]):
        self.active: Counter[str] = Counter()
        """Slots that each tenant holds now."""
        self.slot_seconds: dict[str, float] = {}
        """Seconds times slots that each tenant has held since the server started."""
        self._weight = weight
        self._clock = clock
        self._at = clock()
        self._served: dict[str, float] = {}
        """Slot seconds for its weight of each tenant that competes."""

    def started(self, tenant: str) -> None:
        """Record that a session of the tenant takes a slot."""
        self._advance()
        self.active[tenant] += 1

    def ended(self, tenant: str) -> None:
        """Record that a session of the tenant frees its slot."""
        self._advance()
        self.active[tenant] -= 1
        if self.active[tenant] <= 0:
            del self.active[tenant]

    def divide(self, slots: int, waiting: Collection[str], given: Mapping[str, int]) -> Counter[str]:
        """How many of the free slots each tenant with waiting sessions gets, after those it was just given."""
        self._advance()
        self._admit(waiting)
        weights = {tenant: self._weight(tenant) for tenant in waiting}
        held = {tenant: self.active[tenant] + given.get(tenant, 0) for tenant in waiting}

        def rank(tenant: str) -> tuple[float, float, str]:
            # Slots that were given in this round count as if they had been held for a second each.
            served = self._served[tenant] + (held[tenant] - self.active[tenant]) / weights[tenant]
            return (held[tenant] + 1) / weights[tenant], served, tenant

        order = [rank(tenant) for tenant in waiting]
        heapq.heapify(order)
        divided: Counter[str] = Counter()
        for _ in range(slots if order else 0):
            tenant = order[0][2]
            divided[tenant] += 1
            held[tenant] += 1
            heapq.heapreplace(order, rank(tenant))
        return divided

    def _admit(self, waiting: Collection[str]) -> None:
        """Let new tenants compete, level with the least served of the others; those that no longer do are forgotten."""
        self._served = {name: at for name, at in self._served.items() if name in self.active or name in waiting}
        level = min(self._served.values(), default=0.0)
        for tenant in waiting:
            self._served.setdefault(tenant, level)

    def _advance(self) -> None:
        now = self._clock()
        passed, self._at = max(0.0, now - self._at), now
        for tenant, slots in self.active.items():
            self.slot_seconds[tenant] = self.slot_seconds.get(tenant, 0.0) + slots * passed
            if tenant in self._served:
                self._served[tenant] += slots * passed / self._weight(tenant)
