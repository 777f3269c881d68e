"""The clock of a server: what a simulation replaces to run on virtual time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """Both times of a server. Timers of the event loop are not included: they follow the loop's own clock."""

    now: Callable[[], float] = time.time
    """Seconds since 1970, for times that are stored."""
    monotonic: Callable[[], float] = time.monotonic
    """Seconds from any start, for durations."""


SYSTEM_CLOCK = Clock()
