"""Which part of a history the text after a turn may depend on.

A suffix is rendered from less than the whole history only where a comparison has shown that the rest does not matter, and
a comparison holds only for histories that the template cannot tell apart. `HistoryClassifier.key` identifies such a class:
equal keys mean the same beginning, the same notable messages (those with a string the template looks for), and the same
shape as far as the template counts. A conversation of ordinary messages goes through a handful of keys, so the number of
comparisons does not grow with it; every notable message makes a new key.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from hashlib import blake2b
from typing import NamedTuple

from towline.conversation import Message
from towline.tokens.templates.conditions import TemplateConditions

_SIZE = 16
_MOST_NOTABLE = 8
"""With more notable messages than this, rendering only those saves little."""


class HistoryScope(IntEnum):
    """How much of the history before a turn is rendered, from least to all."""

    REDUCED = 0
    """A placeholder message."""
    NOTABLE = 1
    """The system prompt and the notable messages, with the real tools."""
    FULL = 2
    """All messages."""


class _Traits(NamedTuple):
    """What a template can tell about one message, and the text this was computed from."""

    owner: object
    text: str
    reasoning: str | None
    calls: object
    kind: str
    notable: bytes | None
    """A digest, if the message contains a string that the template looks for."""


class HistoryClassifier:
    """Classifies histories as one template sees them."""

    def __init__(self, conditions: TemplateConditions):
        self.conditions = conditions
        self._pattern = conditions.pattern()
        self._max_count = conditions.thresholds

    def _traits(self, message: Message) -> _Traits:
        known: _Traits | None = message.traits
        if (
            known is not None
            and known.owner is self
            and known.text is message.text
            and known.reasoning is message.reasoning
            and known.calls is message.tool_calls
        ):
            return known
        made = _Traits(
            self,
            message.text,
            message.reasoning,
            message.tool_calls,
            _kind(message),
            _digest(message) if self._is_notable(message) else None,
        )
        message.traits = made
        return made

    def _is_notable(self, message: Message) -> bool:
        pattern = self._pattern
        if pattern is None:
            return False
        texts = [message.text, message.reasoning or "", message.name, *(call.name for call in message.tool_calls)]
        return any(pattern.search(text) for text in texts if text)

    def notable(self, message: Message) -> bool:
        """Whether the message contains a string that the template looks for."""
        return self._traits(message).notable is not None

    def lead(self, before: Sequence[Message]) -> list[Message] | None:
        """The system prompt and the notable messages; `None` if there are too many."""
        lead = [
            message
            for place, message in enumerate(before)
            if _is_system_prompt(message, place) or self.notable(message)
        ]
        return lead if len(lead) <= _MOST_NOTABLE else None

    def key(self, before: Sequence[Message], reply: Message, new: Sequence[Message], under: bytes) -> bytes:
        """The class of a turn's history and what follows it, under the tools and arguments that `under` identifies."""
        state = blake2b(under, digest_size=_SIZE)
        state.update(_root(before))
        kinds: set[str] = set()
        counts: dict[str, int] = {}
        last = -1
        for place, message in enumerate(before):
            traits = self._traits(message)
            kinds.add(traits.kind)
            counts[message.role] = counts.get(message.role, 0) + 1
            if traits.notable is not None:
                state.update(traits.notable)
                last = place
        shape = [
            sorted(kinds),
            [self._traits(message).kind for message in before[-2:]],
            sorted((role, min(count, self._max_count)) for role, count in counts.items()),
            min(len(before), self._max_count),
            [
                [count % divisor for count in (len(before), *counts.values())]
                for divisor in sorted(self.conditions.moduli)
            ],
            min(len(before) - last, self._max_count) if last >= 0 else -1,
        ]
        for message in (reply, *new):
            traits = self._traits(message)
            shape.append([traits.kind, (traits.notable or b"").hex()])
        state.update(repr(shape).encode())
        return state.digest()


def _is_system_prompt(message: Message, place: int) -> bool:
    return place == 0 and message.role == "system"


def _kind(message: Message) -> str:
    """The shape of a message: its role, and which fields it has."""
    flags = (
        bool(message.text.strip()),
        bool(message.reasoning),
        min(len(message.tool_calls), 2),
        bool(message.media),
        bool(message.name),
    )
    return f"{message.role}{flags}"


def _digest(message: Message) -> bytes:
    state = blake2b(message.role.encode(), digest_size=_SIZE)
    for text in (message.text, message.reasoning or "", message.name, *(call.name for call in message.tool_calls)):
        part = text.encode("utf-8", "surrogatepass")
        state.update(b"%d\x00" % len(part))
        state.update(part)
    return state.digest()


def _root(before: Sequence[Message]) -> bytes:
    """Identifies the beginning of a conversation: all before the first assistant message."""
    state = blake2b(digest_size=_SIZE)
    for message in before:
        if message.role == "assistant":
            break
        state.update(_digest(message))
    return state.digest()
