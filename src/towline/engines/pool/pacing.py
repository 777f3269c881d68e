"""How many turns may run on a replica at once.

The limit follows what the engine tells of itself: it grows while the key-value cache has room and turns are held back,
stands still when the cache is nearly full, and shrinks when it is full or the engine's own queue grows long. Turns that
run are never stopped for it: a lower limit only holds back those that come.
"""

from __future__ import annotations

from dataclasses import dataclass

from towline.engines.base import Load

ROOMY = 0.6
"""Key-value usage below which the limit grows fast; from there to `NEARLY_FULL` it grows by one."""
NEARLY_FULL = 0.8
FULL = 0.9
_FASTER = 1.5
_SLOWER = 0.75


@dataclass(slots=True)
class Pace:
    limit: int
    least: int = 1
    most: int = 1024

    def adapt(self, load: Load, in_flight: int) -> None:
        """Take in what the engine tells; `in_flight` turns are ours."""
        usage = load.kv_usage
        if (usage is not None and usage >= FULL) or load.waiting > max(1, load.running // 2):
            # From what runs, not from a limit that nobody reaches: else it would take many rounds to be felt.
            self.limit = max(self.least, int(min(self.limit, max(in_flight, 1)) * _SLOWER))
            return
        held_back = in_flight >= self.limit
        if not held_back or load.waiting or (usage is not None and usage >= NEARLY_FULL):
            return
        faster = usage is None or usage < ROOMY
        grown = max(int(self.limit * _FASTER), self.limit + 1) if faster else self.limit + 1
        self.limit = min(self.most, grown)
