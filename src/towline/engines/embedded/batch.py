"""What one step computes, as plain arrays: the tokens, where they stand, and which slots each of them sees.

Invariant: tokens of one sequence are consecutive positions, and the slots a sequence sees include those its own tokens
are written to in this step. Slot 0 holds nothing: it only pads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(slots=True)
class Group:
    """Single tokens of several sequences, side by side in the batch, that attend together."""

    start: int
    """Index of the first one in the batch."""
    stop: int
    prefix: Indices
    """Slots that all of them see first."""
    contexts: Indices
    """The slots that each of them sees after those, a row each, padded with 0."""
    lengths: Indices
    """How many of each row are real; at least one, the token's own."""


@dataclass(slots=True)
class Span:
    """Several consecutive tokens of one sequence."""

    start: int
    """Index of the first one in the batch."""
    stop: int
    past: Indices
    """The slots of the sequence before the first of these tokens."""


@dataclass(slots=True)
class Batch:
    """The tokens of one step: every one is in one group or one span."""

    ids: Indices
    positions: Indices
    slots: Indices
    """Where the keys and values of each token are written."""
    groups: list[Group]
    spans: list[Span]
