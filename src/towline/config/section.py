"""The base of every section of the settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the settings: frozen, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)
