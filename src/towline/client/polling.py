"""The pace of waiting: how often to look, how much to ask for, and when to stop."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from towline.schema import Results


@dataclass
class Polling:
    """Looks that begin close together and become rare."""

    within: float | None
    began: float = field(default_factory=time.monotonic)
    looks: int = 0

    def pause(self) -> float | None:
        """Seconds until the next look; `None` when time is up."""
        self.looks += 1
        wanted = min(2.0, 0.05 * 1.5 ** min(self.looks, 20))
        if self.within is None:
            return wanted
        left = self.began + self.within - time.monotonic()
        return min(wanted, left) if left > 0 else None


@dataclass
class Stream:
    """Where a loop over results stands."""

    limit: int | None
    idle: float | None
    largest: int
    longest: float
    lease: float | None = None
    """Seconds that the loop asked to have for each result."""
    taken: int = 0
    dropped: int = 0
    latest: float = field(default_factory=time.monotonic)
    """When results last came, or the loop began."""
    arrived: float = 0.0
    """When the batch at hand came."""
    of_batch: int = 0
    """How many of it were handed to the loop."""

    breath = 0.05
    """Seconds between two calls that brought nothing, for a service that does not wait itself."""

    @property
    def over(self) -> bool:
        if self.limit is not None and self.taken >= self.limit:
            return True
        return self.idle is not None and self._left() <= 0

    @property
    def max(self) -> int:
        return self.largest if self.limit is None else min(self.largest, self.limit - self.taken)

    @property
    def wait(self) -> float:
        return self.longest if self.idle is None else min(self.longest, max(0.0, self._left()))

    def came(self, batch: Results) -> None:
        self.dropped += batch.dropped
        self.arrived, self.of_batch = time.monotonic(), 0

    @property
    def expired(self) -> bool:
        """Whether what is left of the batch may be in other hands by now; it comes again if it is not.

        The first of a batch always goes to the loop: with leases shorter than it takes to fetch the tokens, nothing would
        ever be used.
        """
        return self.of_batch > 0 and self.lease is not None and time.monotonic() - self.arrived >= self.lease

    def take(self) -> int:
        """One result is handed to the loop; how many stale ones were passed over before it."""
        dropped, self.dropped = self.dropped, 0
        self.taken += 1
        self.of_batch += 1
        # The time that the consumer takes over a result is not time without results.
        self.latest = time.monotonic()
        return dropped

    def _left(self) -> float:
        return self.latest + (self.idle or 0.0) - time.monotonic()
