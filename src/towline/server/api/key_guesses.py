"""How often a client may guess keys.

An address that sent too many unknown keys is not heard with any key that was not in use before, right or wrong, until a
minute's share is free again. Keys in use pass: clients that share the address with a guesser (behind a proxy, on one
machine) keep working.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

_ADDRESSES = 10_000
_KEYS = 10_000
"""Maximum number that is remembered; the least recent is forgotten first."""


@dataclass(slots=True)
class _Budget:
    left: float
    at: float


class GuessLimiter:
    """A budget of unknown keys per address, which refills over a minute."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic):
        self.per_minute = per_minute
        self._clock = clock
        self._budgets: OrderedDict[str, _Budget] = OrderedDict()
        self._used: OrderedDict[bytes, None] = OrderedDict()

    def retry_after(self, address: str, key: str) -> float | None:
        """Seconds until the address may try this key; `None`: now."""
        budget = self._budgets.get(address)
        if budget is None or _digest(key) in self._used:
            return None
        self._refill(budget)
        return None if budget.left >= 1 else (1 - budget.left) * 60 / self.per_minute

    def failed(self, address: str) -> None:
        """The address sent an unknown key."""
        budget = self._budgets.setdefault(address, _Budget(float(self.per_minute), self._clock()))
        self._budgets.move_to_end(address)
        self._refill(budget)
        budget.left = max(0.0, budget.left - 1)
        if len(self._budgets) > _ADDRESSES:
            self._budgets.popitem(last=False)

    def succeeded(self, key: str) -> None:
        """The key is valid."""
        digest = _digest(key)
        self._used[digest] = None
        self._used.move_to_end(digest)
        if len(self._used) > _KEYS:
            self._used.popitem(last=False)

    def _refill(self, budget: _Budget) -> None:
        now = self._clock()
        budget.left = min(float(self.per_minute), budget.left + (now - budget.at) * self.per_minute / 60)
        budget.at = now


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
