"""On what of a history the text after a turn may depend.

A suffix is rendered from less than the history only where a comparison has shown that the rest does not matter, and a
comparison holds only for histories that the template cannot tell apart. `History.key` names such a class: equal keys mean
the same beginning, the same messages that bring a string the template looks for, and the same shape as far as the
template counts. A conversation of ordinary messages goes through a handful of keys, so the comparisons it takes do not
grow with it; every message that brings such a string makes a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from hashlib import blake2b
from typing import NamedTuple

from towline.conversation import Message
from towline.tokens.template_tests import TemplateTests

_SIZE = 16
_MOST_NOTABLE = 8
"""Messages beyond which a lead of notable messages saves little."""


class Scope(IntEnum):
    """How much of a history is rendered before a turn, from least to all."""

    REDUCED = 0
    """A stand-in for it."""
    NOTABLE = 1
    """The system prompt and the messages that bring a string the template looks for, with the real tools."""
    FULL = 2


class _Traits(NamedTuple):
    """What a template can tell of one message, and of which text that was found out."""

    owner: object
    text: str
    reasoning: str | None
    calls: object
    kind: str
    notable: bytes | None
    """A digest, if the message brings a string that the template looks for."""


class Dependence:
    """Reads histories as one template sees them."""

    def __init__(self, tests: TemplateTests):
        self.tests = tests
        self._pattern = tests.pattern()
        self._most = tests.thresholds

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
            _digest(message) if self._brings(message) else None,
        )
        message.traits = made
        return made

    def _brings(self, message: Message) -> bool:
        pattern = self._pattern
        if pattern is None:
            return False
        texts = [message.text, message.reasoning or "", message.name, *(call.name for call in message.tool_calls)]
        return any(pattern.search(text) for text in texts if text)

    def notable(self, message: Message) -> bool:
        """Whether the message brings a string that the template looks for."""
        return self._traits(message).notable is not None

    def lead(self, before: Sequence[Message]) -> list[Message] | None:
        """The system prompt and the notable messages; `None` if they are too many to be worth it."""
        lead = [message for place, message in enumerate(before) if _leads(message, place) or self.notable(message)]
        return lead if len(lead) <= _MOST_NOTABLE else None

    def key(self, before: Sequence[Message], reply: Message, new: Sequence[Message], under: bytes) -> bytes:
        """The class of a turn's history and what follows it, under the tools and arguments that `under` names."""
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
            sorted((role, min(count, self._most)) for role, count in counts.items()),
            min(len(before), self._most),
            [[count % divisor for count in (len(before), *counts.values())] for divisor in sorted(self.tests.moduli)],
            min(len(before) - last, self._most) if last >= 0 else -1,
        ]
        for message in (reply, *new):
            traits = self._traits(message)
            shape.append([traits.kind, (traits.notable or b"").hex()])
        state.update(repr(shape).encode())
        return state.digest()


def _leads(message: Message, place: int) -> bool:
    return place == 0 and message.role == "system"


def _kind(message: Message) -> str:
    """The shape of a message: who speaks, and what it carries."""
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
    """Names the beginning of a conversation: what came before the first assistant message."""
    state = blake2b(digest_size=_SIZE)
    for message in before:
        if message.role == "assistant":
            break
        state.update(_digest(message))
    return state.digest()
