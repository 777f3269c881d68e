"""`towline doctor`: check by trial what works on this machine. A finding says what was checked and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How a check ended, from best to worst."""

    OK = "ok"
    """Works."""
    NOTE = "note"
    """Not available, and not needed by these settings."""
    WARNING = "warning"
    """Works, with limitations."""
    BROKEN = "broken"
    """Needed by these settings, and does not work."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    area: str
    """`engine`, `template`, `sandboxes`, `harnesses`, `database` or `machine`."""
    name: str
    level: Level
    message: str
    fix: str = ""
    """What to do about it."""
    values: dict[str, Any] = field(default_factory=dict)
    """What was measured, for programs."""

    def as_json(self) -> dict[str, Any]:
        named = {"area": self.area, "name": self.name, "level": self.level}
        return {**named, "said": self.message, "fix": self.fix, "figures": self.values}


def worst(findings: list[Finding]) -> Level:
    """The worst level among the findings."""
    order = list(Level)
    return max((one.level for one in findings), key=order.index, default=Level.OK)
