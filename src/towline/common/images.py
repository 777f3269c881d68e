"""Images in a prompt: placeholder ids, whose values and number only the engine knows.

A multimodal engine is asked once per image, before the prompt is built. The prompt then holds the engine's own placeholder
ids, so that the tokens of a row are those that the model saw.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from towline.common.arrays import Ids
from towline.conversation import Media


def _none() -> Ids:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class ImagePlaceholder:
    """The tokens that an engine puts into a prompt for one image."""

    ids: Ids | None
    """The ids that the model sees; `None` if the engine does not report them."""
    before: Ids = field(default_factory=_none)
    after: Ids = field(default_factory=_none)
    """A few ids on both sides, if the engine rendered the image in a message of its own: they show which part of the
    template's text for an image is the placeholder, and which part surrounds it."""
    key: str = ""
    """The engine's identifier of the processed image."""


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image and its position among the tokens of a prompt."""

    media: Media
    start: int
    length: int
    key: str = ""
    written: tuple[int, ...] = ()
    """The ids that the template writes here, for engines that expand the prompt themselves."""
    reported: bool = True
    """Whether its tokens are those that the model sees; otherwise the engine substitutes its own."""

    def moved(self, by: int) -> PlacedImage:
        return replace(self, start=self.start + by)
