"""Messages from the items of OpenAI's responses: the items of one turn are the one assistant message that was sent.

Ids of items that Towline wrote name their answer and settle it, wherever the items stand. Without them the order does: a
turn is reasoning, then words, then calls, so that whatever could not come next in a turn begins a new one. Behind results
only a further call can belong to the same turn, if the call ids that Towline gave say so. Where neither tells, two turns
in a row are kept apart: what was split can be put together later, what was merged cannot be taken apart.

Invariant: which message an item joins depends on the items before it alone, so that reading goes on from any point.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from towline.conversation import Message
from towline.dialects.responses_items import Kind, kind_of

_OURS = re.compile(r"[a-z]+_([0-9a-z]+)x([0-9]+)")
_MINTED = re.compile(r"(call[0-9a-z]{5,}|c[0-9a-z]{5})([0-9]{3})")
"""A call id that Towline gave: the turn, and the call's place in it."""
_FOLLOW = {
    Kind.THOUGHT: (Kind.THOUGHT, Kind.WORDS, Kind.CALL),
    Kind.WORDS: (Kind.CALL,),
    Kind.CALL: (Kind.CALL,),
}
"""What can come next in a turn."""


def item_id(prefix: str, answer: str, place: int) -> str:
    """The id of an item that we write; answer ids are lower-case hexadecimal."""
    return f"{prefix}_{answer}x{place}"


def written(id: object) -> tuple[str, int] | None:
    """The answer and the place in it that an id of ours names."""
    found = _OURS.fullmatch(id) if isinstance(id, str) else None
    return (found[1], int(found[2])) if found else None


class Grouping:
    """Messages being put together, behind those that are there."""

    def __init__(self, messages: list[Message], starts: list[int]):
        """`starts[i]` is the index of the first item of message `i`."""
        self._messages = messages
        self.starts = starts
        places = (place for place in reversed(range(len(messages))) if messages[place].role == "assistant")
        self._last = next(places, -1)
        """The last assistant message, the only one that anything can join."""
        self._joined: dict[int, list[Message]] = {}
        """By message, what joined it. Put together at the end: a turn may have very many calls."""

    def add(self, message: Message, items: Sequence[Any], index: int) -> None:
        """Take in what `items[index]` says."""
        said = message.role == "assistant"
        if said and _goes_on(items, index):
            self._joined.setdefault(self._last, []).append(message)
            return
        if said:
            self._last = len(self._messages)
        self._messages.append(message)
        self.starts.append(index)

    def messages(self) -> list[Message]:
        """All messages; nothing can be added any more."""
        for place, parts in self._joined.items():
            self._messages[place] = _together(self._messages[place], parts)
        return self._messages


def _goes_on(items: Sequence[Any], index: int) -> bool:
    """Whether the item goes on with the turn before it."""
    apart = False
    for before in reversed(range(index)):
        if isinstance(items[before], tuple):
            return False
        kind = kind_of(items[before])
        if kind in _FOLLOW:
            return _same_turn(items[before], items[index], apart)
        if kind is Kind.OTHERS:
            return False
        apart = apart or kind is Kind.RESULT
    return False


def _same_turn(before: Mapping[str, Any], item: Mapping[str, Any], apart: bool) -> bool:
    one, other = written(before.get("id")), written(item.get("id"))
    if one and other:
        return one[0] == other[0] and one[1] < other[1]
    kinds = kind_of(before), kind_of(item)
    if not apart:
        return kinds[1] in _FOLLOW[kinds[0]]
    return kinds == (Kind.CALL, Kind.CALL) and _called_together(before.get("call_id"), item.get("call_id"))


def _called_together(one: object, other: object) -> bool:
    """Whether two calls were sampled in the same turn."""
    if not isinstance(one, str) or not isinstance(other, str):
        return False
    # Some harnesses strip what is not alphanumeric, some put it in.
    first, second = (_MINTED.fullmatch("".join(filter(str.isalnum, id))) for id in (one, other))
    return bool(first and second and first[1] == second[1] and int(first[2]) < int(second[2]))


def _together(first: Message, rest: Sequence[Message]) -> Message:
    parts = [first, *rest]
    return replace(
        first,
        text="".join(part.text for part in parts),
        reasoning="\n".join(part.reasoning for part in parts if part.reasoning) or None,
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
        media=tuple(item for part in parts for item in part.media),
        fingerprint=None,
    )
