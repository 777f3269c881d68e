"""The codec of a model that is rendered elsewhere: by a chat server that takes messages.

There is no prompt to make and no reply to read here; the server does both and tells what it will. Prompts are empty until
it has answered, every request is one of its own, and rows are stitched afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from towline.arrays import Ids
from towline.conversation import Media, Message, Tool, ToolCall
from towline.schema import ForkReason
from towline.tokens.codec import Encoded, Frame, Unbridgeable
from towline.tokens.media import in_order
from towline.tokens.parser import FORMATS, Parsed
from towline.tokens.tokenizer import Tokenizer


class ElsewhereCodec:
    """Stands in for a codec where only a chat server knows the template."""

    name = "elsewhere"
    short_call_ids = False
    calls_as_text = False

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int] = frozenset()):
        self.tokenizer = tokenizer
        self.stop_ids = self.end_ids = stop_ids

    def sees(self, message: Message, frame: Frame) -> list[Media]:
        return [item for item in in_order(message) if item.kind == "image"]

    def prompt(self, messages: Sequence[Message], frame: Frame, *, prefill: bool = False) -> Encoded:
        return Encoded([])

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
        raise Unbridgeable(ForkReason.TEMPLATE_REWRITE, "the prompt is rendered elsewhere")

    def rewrites(self, before: Sequence[Message], reply: Message, new: Sequence[Message], frame: Frame) -> bool:
        return True

    def parse(self, text: str, prompt_tail: str, tools: Sequence[Tool]) -> Parsed:
        return FORMATS["plain"].parse(text, tools, reasoning_open=False)

    def write(self, text: str, reasoning: str | None, calls: Sequence[ToolCall], frame: Frame) -> list[int]:
        return self.tokenizer.encode(text)
