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
class Span:
    """Several consecutive tokens of one sequence inside a batch."""

    start: int
    """Index of the first one in the batch."""
    stop: int
    context: Indices
    """The slots of the sequence from its beginning to the last of these tokens."""


@dataclass(slots=True)
class Batch:
    """The tokens of one step: first those that stand alone, one a sequence, then the spans."""

    ids: Indices
    positions: Indices
    slots: Indices
    """Where the keys and values of each token are written."""
    contexts: Indices
    """A row for each single token: the slots it sees, padded with 0."""
    lengths: Indices
    """How many slots of each row are real."""
    spans: list[Span]
