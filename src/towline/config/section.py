"""The base of every section of the settings, and the largest values that a limit may have.

Every number has a lower and an upper bound: a limit that can be set to infinity, or to nothing, limits nothing.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MAX_SECONDS = 10 * 366 * 86_400.0
"""Ten years."""
MAX_COUNT = 10_000_000
MAX_TOKENS = 10**12
MAX_BYTES = 2**50
"""One pebibyte, for what is on disk."""
MAX_BODY_BYTES = 4 * 1024**3
"""For what one request may hold in memory."""


class Section(BaseModel):
    """A section of the settings: frozen, without unknown keys, and without numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
