"""How an image stands in a prompt: as placeholder ids, of which only the engine knows which and how many.

An engine whose model sees images is asked once for each of them, before a prompt is made. The prompt then holds the
engine's own placeholder ids, so that the tokens of a row are those that the model saw.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from towline.arrays import Ids
from towline.conversation import Media


def _none() -> Ids:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Placeholder:
    """What an engine puts into a prompt for one image."""

    ids: Ids | None
    """The ids that the model sees in its place; `None` if the engine does not say."""
    before: Ids = field(default_factory=_none)
    after: Ids = field(default_factory=_none)
    """A few ids on both sides, where the engine rendered the image in a message of its own: they tell which part of the
    template's text for an image is the placeholder, and which stays around it."""
    key: str = ""
    """What the engine calls the image, once it is ready for the model."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An image among the tokens of a prompt."""

    media: Media
    start: int
    length: int
    key: str = ""
    written: tuple[int, ...] = ()
    """What the template itself writes here, for engines that take a prompt and expand it themselves."""
    reported: bool = True
    """Its tokens are those that the model sees. Otherwise the engine puts its own in their place."""

    def moved(self, by: int) -> Placed:
        return replace(self, start=self.start + by)
