"""Images, sounds and files before a model that sees text only: a marker stands where each of them was.

A model that is told nothing of a picture would be trained to answer as if there were none. The marker is part of what the
template renders and of nothing else: fingerprints know media by their digests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from towline.conversation import Message


def with_markers(message: Message) -> str:
    """The message's text with a line such as `[image]` in the place of each of its media."""
    shown = ""
    place = 0
    for item in sorted(message.media, key=lambda item: item.offset):
        shown = _apart(shown, message.text[place : item.offset])
        shown = _apart(shown, f"[{item.kind}]")
        place = max(place, item.offset)
    return _apart(shown, message.text[place:])


def _apart(before: str, after: str) -> str:
    """The two with a line break between them, unless there is space already."""
    joint = before[-1:], after[:1]
    return before + after if any(not side or side.isspace() for side in joint) else f"{before}\n{after}"


def not_shown(messages: Sequence[Message], shown: Collection[str]) -> list[str]:
    """Flags for what the messages hold and the model does not see."""
    kinds = {item.kind for message in messages for item in message.media}
    return [f"{kind}_not_shown" for kind in sorted(kinds) if kind not in shown]
