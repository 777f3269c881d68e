"""The codec of one model: messages to prompt ids, sampled ids to replies, and the seam between turns.

Invariant of `extend`: the ids it returns are what follows `prompt + sampled` of the turn that is continued. Nothing that
was sampled is rendered or encoded again; if that cannot be had, it raises `Unbridgeable` and the caller forks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol

from towline.arrays import Ids
from towline.conversation import Media, Message, Tool, ToolCall
from towline.errors import TowlineError
from towline.images import Placed, Placeholder
from towline.schema import ForkReason
from towline.tokens import fingerprint
from towline.tokens.parser import Parsed
from towline.tokens.tokenizer import Tokenizer


class SpecialText(StrEnum):
    """What becomes of text in a user message or tool result that spells a special token."""

    ENGINE = "engine"
    """It becomes that token, as in an engine that encodes the rendered prompt."""
    PLAIN = "plain"
    """It stays plain text."""


class Unbridgeable(TowlineError):
    """A turn cannot be continued in place; `reason` is why the conversation forks."""

    def __init__(self, reason: ForkReason, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass
class Frame:
    """What a conversation stands under: tools, template arguments, the session's clock and the engine's eyes."""

    tools: tuple[Tool, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    now: Callable[[], datetime] = datetime.now
    images: Mapping[str, Placeholder] = field(default_factory=dict)
    """What the engine puts into a prompt for an image, by digest."""

    @cached_property
    def functions(self) -> list[dict[str, Any]] | None:
        return [tool.as_function() for tool in self.tools] or None

    @cached_property
    def digest(self) -> bytes:
        """Names the tools and arguments."""
        return fingerprint.root_key(self.tools, self.arguments).encode()


@dataclass(slots=True)
class Encoded:
    """Prompt ids made from messages."""

    ids: list[int]
    forced: int = 0
    """How many leading ids close a turn that did not end by itself; they were never sampled."""
    special_text: int = 0
    """How often new user or tool text spelled a special token."""
    images: list[Placed] = field(default_factory=list)


class Codec(Protocol):
    """One model's way between messages and ids."""

    tokenizer: Tokenizer
    name: str
    """How the codec was chosen, for reports: `sentinel`, or the family's name."""
    stop_ids: frozenset[int]
    """Ids that end a turn when they are sampled."""
    end_ids: frozenset[int]
    """Ids that end a message in a prompt: those, and what stands in history only."""
    short_call_ids: bool
    """Tool-call ids must be nine alphanumeric characters (Mistral's templates insist)."""

    @property
    def calls_as_text(self) -> bool:
        """The template's format of calls is not known: what the model writes as a call reaches the harness as text."""
        ...

    def sees(self, message: Message, frame: Frame) -> list[Media]:
        """The media of a message that the model gets to see, in order; of all others it sees a marker."""
        ...

    def prompt(self, messages: Sequence[Message], frame: Frame, *, prefill: bool = False) -> Encoded:
        """Render and encode everything. With `prefill` the last message is an assistant's, left open."""
        ...

    def extend(
        self,
        before: Sequence[Message],
        reply: Message,
        tail: Ids,
        sampled: Ids,
        new: Sequence[Message],
        frame: Frame,
        *,
        prefill: bool = False,
    ) -> Encoded:
        """What follows a turn: `before` and `reply` are its messages, `tail` the last ids of its prompt."""
        ...

    def rewrites(self, before: Sequence[Message], reply: Message, new: Sequence[Message], frame: Frame) -> bool:
        """Whether the template renders `before + reply` differently once `new` follows."""
        ...

    def parse(self, text: str, prompt_tail: str, tools: Sequence[Tool]) -> Parsed:
        """A reply from the decoded text of the sampled ids, without the end of the turn."""
        ...

    def write(self, text: str, reasoning: str | None, calls: Sequence[ToolCall], frame: Frame) -> list[int]:
        """The ids that a model of this family would sample for a reply, its end of turn included."""
        ...
