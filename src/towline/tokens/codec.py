"""The codec of one model: messages to prompt ids, sampled ids to replies, and the seam between turns.

Invariant of `extend`: the ids it returns are what follows `prompt + sampled` of the turn that is continued. Nothing that
was sampled is rendered or encoded again; where that is impossible, it raises `CannotContinue` and the caller forks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol

from towline.common.arrays import Ids
from towline.common.images import ImagePlaceholder, PlacedImage
from towline.conversation import Media, Message, Tool, ToolCall
from towline.errors import TowlineError
from towline.schema import ForkReason
from towline.tokens.graph import fingerprint
from towline.tokens.parsing.base import ParsedReply
from towline.tokens.tokenizer import Tokenizer


class SpecialText(StrEnum):
    """How text in a user message or tool result that spells a special token is encoded."""

    ENGINE = "engine"
    """As that token, like an engine that encodes the rendered prompt."""
    PLAIN = "plain"
    """As plain text."""


class CannotContinue(TowlineError):
    """A turn cannot be continued in place; `reason` is why the conversation forks."""

    def __init__(self, reason: ForkReason, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass
class RenderContext:
    """What a conversation is rendered with: tools, template arguments, the session's clock, the engine's images."""

    tools: tuple[Tool, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    now: Callable[[], datetime] = datetime.now
    images: Mapping[str, ImagePlaceholder] = field(default_factory=dict)
    """What the engine puts into a prompt for each image, by digest."""

    @cached_property
    def functions(self) -> list[dict[str, Any]] | None:
        return [tool.as_function() for tool in self.tools] or None

    @cached_property
    def digest(self) -> bytes:
        """Identifies the tools and arguments."""
        return fingerprint.root_key(self.tools, self.arguments).encode()


@dataclass(slots=True)
class EncodedPrompt:
    """Prompt ids encoded from messages."""

    ids: list[int]
    forced: int = 0
    """How many leading ids close a turn that did not end by itself; they were not sampled."""
    special_text: int = 0
    """How often new user or tool text spelled a special token."""
    images: list[PlacedImage] = field(default_factory=list)


class ModelCodec(Protocol):
    """Converts between messages and token ids for one model."""

    tokenizer: Tokenizer
    name: str
    """Which codec this is, for reports: `sentinel`, or the family's name."""
    stop_ids: frozenset[int]
    """Ids that end a turn when they are sampled."""
    end_ids: frozenset[int]
    """Ids that end a message in a prompt: `stop_ids`, and ids that occur in history only."""
    short_call_ids: bool
    """Tool-call ids must be nine alphanumeric characters (Mistral's templates require it)."""

    @property
    def calls_as_text(self) -> bool:
        """The template's tool-call format is unknown: calls that the model writes reach the harness as text."""
        ...

    def sees(self, message: Message, context: RenderContext) -> list[Media]:
        """The media of a message that the model sees, in order; for all others it sees a marker."""
        ...

    def prompt(self, messages: Sequence[Message], context: RenderContext, *, prefill: bool = False) -> EncodedPrompt:
        """Render and encode everything. With `prefill` the last message is an assistant message, left open."""
        ...

    def extend(
        self,
        before: Sequence[Message],
        reply: Message,
        tail: Ids,
        sampled: Ids,
        new: Sequence[Message],
        context: RenderContext,
        *,
        prefill: bool = False,
    ) -> EncodedPrompt:
        """The ids that follow a turn: `before` and `reply` are its messages, `tail` the last ids of its prompt."""
        ...

    def rewrites(
        self, before: Sequence[Message], reply: Message, new: Sequence[Message], context: RenderContext
    ) -> bool:
        """Whether the template renders `before + reply` differently once `new` follows."""
        ...

    def parse(self, text: str, prompt_tail: str, tools: Sequence[Tool]) -> ParsedReply:
        """Parse a reply from the decoded text of the sampled ids, without the end of the turn."""
        ...

    def write(self, text: str, reasoning: str | None, calls: Sequence[ToolCall], context: RenderContext) -> list[int]:
        """The ids that a model of this family would sample for a reply, its end of turn included."""
        ...
