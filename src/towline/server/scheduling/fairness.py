"""Weighted fair sharing: which tenant gets the next session slot.

The slots that tenants with waiting sessions hold, and the free ones, are divided by weight; no tenant gets more than its
part, rounded up, while another that waits has less. What is shared are slots held at any time, and not starts: a tenant
whose sessions take ten times as long would otherwise hold ten times the slots. Who gets the odd slots that rounding leaves,
or the only slot of a small machine, is decided by the slot seconds that each tenant has had for its weight, so that they
are shared over time as well.

A tenant cannot save up: while it has neither waiting nor running sessions it gains no claim, and when it returns it starts
level with those that competed meanwhile. Priorities order sessions within a tenant; here they count nothing.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping

Weight = Callable[[str], float]
"""The weight of a tenant; above 0."""
_ROUNDING = 1e-9
"""Errors of floating-point numbers that do not make a slot."""


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
        per_weight = (slots + sum(held.values())) / (sum(weights.values()) or 1.0)
        part = {tenant: math.ceil(weight * per_weight - _ROUNDING) for tenant, weight in weights.items()}

        def rank(tenant: str) -> tuple[bool, float, str]:
            # Slots that were given in this round count as if they had been held for a second each.
            served = self._served[tenant] + (held[tenant] - self.active[tenant]) / weights[tenant]
            return held[tenant] >= part[tenant], served, tenant

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
