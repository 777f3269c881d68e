"""When to try again, and how long to pause before it.

Every call of the service is idempotent, so that whatever may not have arrived is simply sent again.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

AGAIN = frozenset({429, 502, 503, 504})
"""Statuses that pass."""


@dataclass
class Backoff:
    """The pauses between the attempts of one call; they grow, and differ from client to client."""

    patience: float
    """Seconds from the first attempt to the start of the last."""
    first: float = 0.1
    longest: float = 10.0
    began: float = field(default_factory=time.monotonic)
    attempts: int = 0

    def pause(self, asked: float | None = None) -> float | None:
        """Seconds until the next attempt, never less than the server asked for; `None` when patience is at its end."""
        grown = min(self.longest, self.first * 2.0 ** min(self.attempts, 30))
        self.attempts += 1
        wanted = max(random.uniform(grown / 2, grown), asked or 0.0)
        left = self.began + self.patience - time.monotonic()
        return wanted if wanted <= left else None


def retry_after(value: str | None) -> float | None:
    """The seconds of a `Retry-After` header; its other form, a date, is left to the back-off."""
    try:
        seconds = float(value) if value is not None else -1.0
    except ValueError:
        return None
    return seconds if 0 <= seconds < 86_400 else None
