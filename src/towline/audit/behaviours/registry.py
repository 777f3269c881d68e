"""The registry of behaviours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from towline.audit.clients import DIALECTS
from towline.audit.simulation import Expected, SimulatedHarness

Capture = Literal["exact", "plain", "as_sent"]
"""How a conversation is played; see `runner`."""
CAPTURES: tuple[Capture, ...] = ("exact", "plain", "as_sent")
SAMPLED: tuple[Capture, ...] = ("exact", "plain")
"""For behaviours whose prompts no plain server would show: they test what the gateway keeps."""
Act = Callable[[SimulatedHarness], Awaitable[Expected]]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One thing that harnesses do."""

    name: str
    act: Act
    about: str
    needs: frozenset[str] = frozenset()
    """Capabilities that a target must have."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Session settings."""
    free: bool = False
    """Some of its replies may be sampled by the model itself."""
    split: float | None = None
    """Share of tokens to split, if it matters."""
    updates: bool = False
    """Updates the engine's weights, which affects all concurrent conversations."""
    dialects: tuple[str, ...] = DIALECTS
    """Dialects that can express it."""
    captures: tuple[Capture, ...] = CAPTURES
    """How it is played."""
    most: int | None = None
    """Maximum number of conversations per audit, for slow behaviours."""


_ALL: dict[str, Behaviour] = {}


def behaviour(
    *needs: str,
    settings: Mapping[str, Any] | None = None,
    free: bool = False,
    split: float | None = None,
    updates: bool = False,
    dialects: tuple[str, ...] = DIALECTS,
    captures: tuple[Capture, ...] = CAPTURES,
    most: int | None = None,
) -> Callable[[Act], Act]:
    """Register a function as a behaviour under its own name."""

    def register(act: Act) -> Act:
        name, about = act.__name__, (act.__doc__ or "").strip()
        given = settings or {}
        _ALL[name] = Behaviour(
            name, act, about, frozenset(needs), given, free, split, updates, dialects, captures, most
        )
        return act

    return register


def behaviours() -> dict[str, Behaviour]:
    """All behaviours by name, in the order of registration."""
    return dict(_ALL)
