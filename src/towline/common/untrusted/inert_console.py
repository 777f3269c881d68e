"""The console of every command: what agents, tasks and servers wrote is shown, and never acted on by the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from towline.common.text import inert


class InertConsole(Console):
    """Makes every character visible that a terminal would act on: escape sequences, other control characters, and those
    that change the direction of text. Only the console's own styles reach the terminal as escape sequences."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or (segment.text.isascii() and segment.text.isprintable()):
                yield segment
            else:
                yield Segment(inert(segment.text), segment.style)
