"""The codec of a model whose prompts a chat server renders from messages.

There is no prompt to make and no reply to parse here: the server does both and reports what it chooses to. Prompts are
empty until the server has answered, no request continues another in place, and rows are stitched afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from towline.common.arrays import Ids
from towline.conversation import Media, Message, Tool, ToolCall
from towline.schema import ForkReason
from towline.tokens.codec import CannotContinue, EncodedPrompt, RenderContext
from towline.tokens.parsing.base import ParsedReply
from towline.tokens.parsing.registry import FORMATS
from towline.tokens.templates.media import media_in_order
from towline.tokens.tokenizer import Tokenizer


class ServerRenderedCodec:
    """Stands in for a codec where only the chat server knows the template."""

    name = "elsewhere"
    short_call_ids = False
    calls_as_text = False

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int] = frozenset()):
        self.tokenizer = tokenizer
        self.stop_ids = self.end_ids = stop_ids

    def sees(self, message: Message, context: RenderContext) -> list[Media]:
        return [item for item in media_in_order(message) if item.kind == "image"]

    def prompt(self, messages: Sequence[Message], context: RenderContext, *, prefill: bool = False) -> EncodedPrompt:
        return EncodedPrompt([])

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
        raise CannotContinue(ForkReason.TEMPLATE_REWRITE, "the chat server renders the prompt")

    def rewrites(
        self, before: Sequence[Message], reply: Message, new: Sequence[Message], context: RenderContext
    ) -> bool:
        return True

    def parse(self, text: str, prompt_tail: str, tools: Sequence[Tool]) -> ParsedReply:
        return FORMATS["plain"].parse(text, tools, reasoning_open=False)

    def write(self, text: str, reasoning: str | None, calls: Sequence[ToolCall], context: RenderContext) -> list[int]:
        return self.tokenizer.encode(text)
