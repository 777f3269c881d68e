"""Images, sounds and files in what a template is given.

An image that the model is shown is a part of its own. For everything else, and before a model that sees text only, a
marker stands where it was: a model that is told nothing of a picture would be trained to answer as if there were none.
Neither is part of anything but the rendered text: fingerprints know media by their digests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from towline.conversation import Media, Message


def with_markers(message: Message) -> str:
    """The message's text with a line such as `[image]` in the place of each of its media."""
    return "".join(part for part in parts(message, ()) if isinstance(part, str))


def parts(message: Message, shown: Collection[Media]) -> list[str | Media]:
    """The message's text and the media that are shown, in order; markers stand for the others."""
    made: list[str | Media] = []
    text = ""
    place = 0
    for item in in_order(message):
        text = _apart(text, message.text[place : item.offset])
        place = max(place, item.offset)
        if item in shown:
            made += [text, item] if text else [item]
            text = ""
        else:
            text = _apart(text, f"[{item.kind}]")
    text = _apart(text, message.text[place:])
    return [*made, text] if text or not made else made


def in_order(message: Message) -> list[Media]:
    return sorted(message.media, key=lambda item: item.offset)


def _apart(before: str, after: str) -> str:
    """The two with a line break between them, unless there is space already."""
    joint = before[-1:], after[:1]
    return before + after if any(not side or side.isspace() for side in joint) else f"{before}\n{after}"


def not_shown(messages: Sequence[Message], sees: Callable[[Message], Collection[Media]]) -> list[str]:
    """Flags for what the messages hold and the model does not see."""
    kinds = {item.kind for message in messages if message.media for item in message.media if item not in sees(message)}
    return [f"{kind}_not_shown" for kind in sorted(kinds)]
