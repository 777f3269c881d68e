"""A finding: what was looked at, how it stands, and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Not there, and not needed by these settings."""
    WARNING = "warning"
    """Works, with less than one might want."""
    BROKEN = "broken"
    """Needed, and does not work."""


@dataclass(frozen=True)
class Finding:
    area: str
    """`engine`, `template`, `sandboxes`, `harnesses`, `database`, `machine`."""
    name: str
    level: Level
    said: str
    fix: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def worst(findings: list[Finding]) -> Level:
    order = list(Level)
    return max((one.level for one in findings), key=order.index, default=Level.OK)
