"""The list of behaviours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from towline.audit.play import Expected, Play
from towline.audit.tongues import DIALECTS

Capture = Literal["exact", "plain", "as_sent"]
"""How a conversation is played: see `runner`."""
CAPTURES: tuple[Capture, ...] = ("exact", "plain", "as_sent")
SAMPLED: tuple[Capture, ...] = ("exact", "plain")
"""For behaviours whose prompts a plain server never shows: their point is what the gateway keeps."""
Act = Callable[[Play], Awaitable[Expected]]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One thing that harnesses do."""

    name: str
    act: Act
    about: str
    needs: frozenset[str] = frozenset()
    """Abilities that a target must have."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the session."""
    free: bool = False
    """Some of its replies may be sampled by the model itself."""
    split: float | None = None
    """The share of tokens to split, where it matters."""
    updates: bool = False
    """Changes the engine's weights, under everybody's feet."""
    dialects: tuple[str, ...] = DIALECTS
    """Those in which it can be told."""
    captures: tuple[Capture, ...] = CAPTURES
    """How it is played."""
    most: int | None = None
    """How many conversations of it an audit has at most, where one takes long."""


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
    """Put a function on the list, under its own name."""

    def register(act: Act) -> Act:
        name, about = act.__name__, (act.__doc__ or "").strip()
        given = settings or {}
        _ALL[name] = Behaviour(
            name, act, about, frozenset(needs), given, free, split, updates, dialects, captures, most
        )
        return act

    return register


def behaviours() -> dict[str, Behaviour]:
    """All of them by name, in the order of the table in the specification."""
    return dict(_ALL)
