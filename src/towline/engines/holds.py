"""When an engine is on hold: paused, taking new weights, or unusable. Time on hold is charged to nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, runtime_checkable

Tell = Callable[[bool], None]


class Holds:
    """The reasons to be on hold, and who is told when the first comes and the last goes."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._watchers: list[Tell] = []

    @property
    def held(self) -> bool:
        return bool(self._reasons)

    def hold(self, reason: str) -> None:
        before = self.held
        self._reasons.add(reason)
        if not before:
            self._tell(True)

    def release(self, reason: str) -> None:
        before = self.held
        self._reasons.discard(reason)
        if before and not self.held:
            self._tell(False)

    def watch(self, tell: Tell) -> Callable[[], None]:
        """`tell` gets every change, and `True` at once if there is a hold. Returns how to stop that; if there is a hold
        then, `tell` gets a last `False`."""
        self._watchers.append(tell)
        if self.held:
            tell(True)

        def stop() -> None:
            if tell in self._watchers:
                self._watchers.remove(tell)
                if self.held:
                    tell(False)

        return stop

    def _tell(self, held: bool) -> None:
        for tell in list(self._watchers):
            tell(held)


class Gate(asyncio.Event):
    """An event that is set while an engine samples; its holds follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = Holds()
        super().set()

    def set(self) -> None:
        super().set()
        self.holds.release("paused")

    def clear(self) -> None:
        super().clear()
        self.holds.hold("paused")


@runtime_checkable
class Holding(Protocol):
    """An engine that tells when it is on hold."""

    @property
    def holds(self) -> Holds: ...
