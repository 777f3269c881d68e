"""Images, audio and files in a prompt: markers for what the model does not see, placeholders for images that it does.

An image that the model can see is a content part of its own. Everything else, and every image for a text-only model, is
replaced by a marker such as `[image]`: a model that does not know of an image would be trained to answer as if there were
none. Markers exist in the rendered text only; fingerprints identify media by digest.

A template writes the same few special tokens for every image, for example `<|vision_start|><|image_pad|><|vision_end|>`;
the engine expands one of them to as many tokens as the image needs. Messages that spell these tokens are encoded as plain
text, so that every such token in a rendered prompt is an image.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from towline.common.arrays import Ids
from towline.common.images import ImagePlaceholder, PlacedImage
from towline.conversation import Media, Message
from towline.tokens.templates.chat_template import TemplateError
from towline.tokens.tokenizer import Tokenizer


def content_parts(message: Message, shown: Collection[Media]) -> list[str | Media]:
    """The message's text and the media that are `shown`, in order, with markers such as `[image]` for the others."""
    made: list[str | Media] = []
    text = ""
    place = 0
    for item in media_in_order(message):
        text = _join_lines(text, message.text[place : item.offset])
        place = max(place, item.offset)
        if item in shown:
            made += [text, item] if text else [item]
            text = ""
        else:
            text = _join_lines(text, f"[{item.kind}]")
    text = _join_lines(text, message.text[place:])
    return [*made, text] if text or not made else made


def media_in_order(message: Message) -> list[Media]:
    return sorted(message.media, key=lambda item: item.offset)


def _join_lines(before: str, after: str) -> str:
    """Both texts with a line break between them, unless there is white space already."""
    joint = before[-1:], after[:1]
    return before + after if any(not side or side.isspace() for side in joint) else f"{before}\n{after}"


def hidden_media_flags(messages: Sequence[Message], sees: Callable[[Message], Collection[Media]]) -> list[str]:
    """Flags for the kinds of media in the messages that the model does not see."""
    kinds = {item.kind for message in messages if message.media for item in message.media if item not in sees(message)}
    return [f"{kind}_not_shown" for kind in sorted(kinds)]


@dataclass(slots=True)
class EncodedText:
    """Ids with the images among them."""

    ids: list[int]
    images: list[PlacedImage]


class ImagePlaceholders:
    """The images of one template."""

    def __init__(self, tokenizer: Tokenizer, text: str, roles: frozenset[str]):
        """`text` is what the template writes for an image, from its first special token to its last; `roles` are the roles
        of messages in which it does."""
        self.text = text
        self.roles = roles
        self.spelled = re.compile("|".join(map(re.escape, tokenizer.added_pattern.findall(text))))
        """Matches image tokens spelled in message text."""
        self._tokenizer = tokenizer
        self._ids = np.asarray(tokenizer.encode(text), np.int32)

    def fits(self, placeholder: ImagePlaceholder) -> bool:
        return placeholder.ids is None or self._around(placeholder) is not None

    def _around(self, placeholder: ImagePlaceholder) -> tuple[int, int] | None:
        """How many of the template's ids stay before and after the placeholder: all of them, or all but the one that the
        engine expands."""
        ids, count = self._ids, len(self._ids)
        before, after = placeholder.before, placeholder.after
        lead = next(n for n in range(count, -1, -1) if _same(ids[:n], before[len(before) - n :]))
        tail = next(n for n in range(count - lead, -1, -1) if _same(ids[count - n :], after[:n]))
        return (lead, tail) if lead + tail >= count - 1 else None

    def encode(self, text: str, mark: str, shown: Iterable[tuple[Media, ImagePlaceholder]]) -> EncodedText:
        """The ids of rendered text that shows the images `shown`, in order. Text between two marks is plain."""
        made = EncodedText([], [])
        remaining = iter(shown)
        for number, piece in enumerate(text.split(mark)):
            if number % 2:
                made.ids += self._tokenizer.encode_plain(piece)
                continue
            for place, words in enumerate(piece.split(self.text)):
                if place:
                    self._place(made, remaining)
                made.ids += self._tokenizer.encode(words) if words else []
        if next(remaining, None) is not None:
            raise TemplateError("the template omits an image of these messages")
        return made

    def _place(self, made: EncodedText, remaining: Iterator[tuple[Media, ImagePlaceholder]]) -> None:
        item = next(remaining, None)
        if item is None:
            raise TemplateError("the template writes more images than these messages have")
        media, placeholder = item
        around = self._around(placeholder)
        if placeholder.ids is None or around is None:
            whole = tuple(self._ids.tolist())
            made.images.append(PlacedImage(media, len(made.ids), len(whole), placeholder.key, whole, reported=False))
            made.ids += whole
            return
        lead, end = around[0], len(self._ids) - around[1]
        made.ids += self._ids[:lead].tolist()
        written = tuple(self._ids[lead:end].tolist())
        made.images.append(PlacedImage(media, len(made.ids), len(placeholder.ids), placeholder.key, written))
        made.ids += [*placeholder.ids.tolist(), *self._ids[end:].tolist()]


def _same(one: Ids, two: Ids) -> bool:
    return len(one) == len(two) and bool((one == two).all())
