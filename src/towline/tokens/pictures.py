"""What a template writes for an image, and how an engine's placeholder takes its place.

A template writes the same few special tokens for every image, `<|vision_start|><|image_pad|><|vision_end|>` say; the engine
makes as many tokens of one of them as the image needs. Messages that spell these tokens are encoded as plain text, so that
each of them in a rendered prompt is an image.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from towline.arrays import Ids
from towline.conversation import Media
from towline.images import Placed, Placeholder
from towline.tokens.jinja import TemplateError
from towline.tokens.tokenizer import Tokenizer


@dataclass(slots=True)
class Encoding:
    """Ids with the images among them."""

    ids: list[int]
    images: list[Placed]


class Pictures:
    """The images of one template."""

    def __init__(self, tokenizer: Tokenizer, text: str, roles: frozenset[str]):
        """`text` is what the template writes for an image, from its first special token to its last; `roles` are those of
        the messages in which it does."""
        self.text = text
        self.roles = roles
        self.spelled = re.compile("|".join(map(re.escape, tokenizer.added_pattern.findall(text))))
        """Finds the tokens of an image in what somebody wrote."""
        self._tokenizer = tokenizer
        self._ids = np.asarray(tokenizer.encode(text), np.int32)

    def fits(self, placeholder: Placeholder) -> bool:
        return placeholder.ids is None or self._around(placeholder) is not None

    def _around(self, placeholder: Placeholder) -> tuple[int, int] | None:
        """How many of the template's ids stay before the placeholder and behind it: all of them, or all but the one that it
        is made of."""
        ids, count = self._ids, len(self._ids)
        before, after = placeholder.before, placeholder.after
        lead = next(n for n in range(count, -1, -1) if _same(ids[:n], before[len(before) - n :]))
        tail = next(n for n in range(count - lead, -1, -1) if _same(ids[count - n :], after[:n]))
        return (lead, tail) if lead + tail >= count - 1 else None

    def encode(self, text: str, mark: str, shown: Iterable[tuple[Media, Placeholder]]) -> Encoding:
        """The ids of rendered text in which `shown` are the images, in order. Between two marks text is plain."""
        made = Encoding([], [])
        waiting = iter(shown)
        for number, piece in enumerate(text.split(mark)):
            if number % 2:
                made.ids += self._tokenizer.encode_plain(piece)
                continue
            for place, words in enumerate(piece.split(self.text)):
                if place:
                    self._place(made, waiting)
                made.ids += self._tokenizer.encode(words) if words else []
        if next(waiting, None) is not None:
            raise TemplateError("the template leaves out an image of these messages")
        return made

    def _place(self, made: Encoding, waiting: Iterator[tuple[Media, Placeholder]]) -> None:
        item = next(waiting, None)
        if item is None:
            raise TemplateError("the template writes an image more than these messages hold")
        media, placeholder = item
        around = self._around(placeholder)
        if placeholder.ids is None or around is None:
            whole = tuple(self._ids.tolist())
            made.images.append(Placed(media, len(made.ids), len(whole), placeholder.key, whole, reported=False))
            made.ids += whole
            return
        lead, end = around[0], len(self._ids) - around[1]
        made.ids += self._ids[:lead].tolist()
        written = tuple(self._ids[lead:end].tolist())
        made.images.append(Placed(media, len(made.ids), len(placeholder.ids), placeholder.key, written))
        made.ids += [*placeholder.ids.tolist(), *self._ids[end:].tolist()]


def _same(one: Ids, two: Ids) -> bool:
    return len(one) == len(two) and bool((one == two).all())
