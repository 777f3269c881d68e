"""What a consumer's data is biased by: how long groups took, and which of them were trained on.

Dropping stale groups drops slow ones. The groups that a consumer was done with lately are sorted by duration into
quartiles; if the slowest quartile's share of the trained groups is less than a quarter, slow tasks are trained on less
than they were submitted. Kept in memory: it begins anew with the server.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from towline.schema import DurationQuartile

_KEPT = 2000
"""Groups per consumer."""
_CONSUMERS = 64
"""Consumers that are remembered."""


@dataclass(frozen=True, slots=True)
class Done:
    """A complete group that a consumer is done with."""

    seconds: float
    """From its first session's start to its end."""
    trained: bool


class Bias:
    def __init__(self) -> None:
        self._done: dict[str, deque[Done]] = {}

    def add(self, consumer: str, done: Done) -> None:
        if consumer not in self._done and len(self._done) >= _CONSUMERS:
            self._done.pop(next(iter(self._done)))
        self._done.setdefault(consumer, deque(maxlen=_KEPT)).append(done)

    @property
    def consumers(self) -> list[str]:
        return list(self._done)

    def quartiles(self, consumer: str) -> list[DurationQuartile]:
        """From the fastest to the slowest; none while there are fewer groups than quartiles."""
        return quartiles(list(self._done.get(consumer, ())))


def quartiles(groups: list[Done]) -> list[DurationQuartile]:
    ordered = sorted(groups, key=lambda one: one.seconds)
    count, trained = len(ordered), sum(one.trained for one in ordered)
    if count < 4:
        return []
    found = []
    for number in range(4):
        own = ordered[count * number // 4 : count * (number + 1) // 4]
        used = sum(one.trained for one in own)
        found.append(
            DurationQuartile(
                longest_seconds=own[-1].seconds,
                groups=len(own),
                trained=used,
                share=len(own) / count,
                trained_share=used / trained if trained else 0.0,
            )
        )
    return found
