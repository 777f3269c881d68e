"""Messages to text through the chat template, and text to ids.

Text that spells special tokens is encoded as the settings say, images as the engine says. The self-check has found out how
the template wants content, calls and call ids.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from towline.common.images import ImagePlaceholder
from towline.conversation import Media, Message, ToolCall
from towline.tokens.codec import EncodedPrompt, RenderContext, SpecialText
from towline.tokens.graph.tool_results import bare_id
from towline.tokens.templates.chat_template import ChatTemplate, TemplateError
from towline.tokens.templates.history_scope import HistoryScope
from towline.tokens.templates.media import EncodedText, ImagePlaceholders, content_parts, media_in_order
from towline.tokens.templates.self_check import PLACEHOLDER_TOOL, TemplateCheck
from towline.tokens.tokenizer import Tokenizer


class TemplateRenderer:
    """One template with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, special_text: SpecialText):
        self.tokenizer = tokenizer
        self.template = template
        self.special_text = special_text
        self.check = TemplateCheck()
        self.image_placeholders: ImagePlaceholders | None = None
        """How the template shows images; `None` if it does not."""
        self._sentinel = "TOWLINE" + secrets.token_hex(8)
        self._mark = "\ue0f5" + secrets.token_hex(8)
        """Surrounds special-token text that stays plain. Random like the sentinel, so no message contains it."""
        self._reasoning_fields = _reasoning_fields(template.source)

    # Message fields for the template

    def fields(self, message: Message, shown: Sequence[Media] = ()) -> dict[str, Any]:
        """A message as the template wants it, with the images that are `shown`."""
        plain = self._plain_pattern(message)
        content: Any = [
            {"type": "text", "text": self._marked(part, plain)} if isinstance(part, str) else {"type": part.kind}
            for part in (content_parts(message, shown) if message.media else [message.text])
        ]
        if not shown and not self.check.part_content:
            content = content[0]["text"]
        fields: dict[str, Any] = {"role": message.role, "content": content}
        if message.role == "assistant":
            if message.reasoning and not (self.check.no_reasoning_with_calls and message.text and message.tool_calls):
                for name in self._reasoning_fields:
                    fields[name] = message.reasoning
            if message.tool_calls:
                fields["tool_calls"] = [self._call_fields(call) for call in message.tool_calls]
        elif message.role == "tool":
            fields["tool_call_id"] = self._call_id(message.tool_call_id)
            fields["name"] = message.name
        elif message.name:
            fields["name"] = message.name
        return fields

    def _plain_pattern(self, message: Message) -> re.Pattern[str] | None:
        """Matches text of a message that is encoded as plain text although it spells a token."""
        if self.special_text is SpecialText.PLAIN and message.role in ("user", "tool"):
            return self.tokenizer.added_pattern
        return self.image_placeholders.spelled if self.image_placeholders is not None else None

    def _marked(self, text: str, plain: re.Pattern[str] | None) -> str:
        return text if plain is None else plain.sub(lambda match: f"{self._mark}{match.group()}{self._mark}", text)

    def _call_fields(self, call: ToolCall) -> dict[str, Any]:
        arguments: Any = call.arguments
        if isinstance(arguments, str) and not self.check.string_arguments:
            arguments = {"input": arguments} if call.custom else _object_or_text(arguments)
        elif not isinstance(arguments, str) and self.check.string_arguments:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {
            "id": self._call_id(call.id),
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _call_id(self, id: str) -> str:
        if not self.check.short_call_ids or (len(id) == 9 and id.isalnum()):
            return id
        return bare_id(id)[-9:].rjust(9, "0")

    # Images

    def sees(self, message: Message, context: RenderContext) -> list[Media]:
        if not message.media or not context.images or message.role not in self.check.image_roles:
            return []
        return [item for item in media_in_order(message) if self._placeholder(item, context) is not None]

    def _placeholder(self, item: Media, context: RenderContext) -> ImagePlaceholder | None:
        found = context.images.get(item.digest) if item.kind == "image" else None
        return (
            found
            if found is not None and (self.image_placeholders is None or self.image_placeholders.fits(found))
            else None
        )

    def _shown(self, messages: Sequence[Message], context: RenderContext) -> list[tuple[Media, ImagePlaceholder]]:
        return [(item, context.images[item.digest]) for message in messages for item in self.sees(message, context)]

    # Rendering

    def _fields(self, messages: Sequence[Message], context: RenderContext) -> list[dict[str, Any]]:
        return [self.fields(message, self.sees(message, context)) for message in messages]

    def _render(
        self,
        messages: Sequence[Message],
        context: RenderContext,
        *,
        prefill: bool = False,
        scope: HistoryScope = HistoryScope.FULL,
    ) -> str:
        functions = context.functions
        if scope is HistoryScope.REDUCED and functions and not self.check.needs_tools:
            functions = [PLACEHOLDER_TOOL.as_function()]
        if prefill:
            last = messages[-1]
            open_message = Message("assistant", last.text + self._sentinel, last.reasoning)
            text = self.template.render(
                self._fields([*messages[:-1], open_message], context),
                functions,
                generation_prompt=False,
                arguments=context.arguments,
                now=context.now,
            )
            at = text.rfind(self._sentinel)
            if at < 0:
                raise TemplateError("the template drops the text of a prefilled assistant message")
            return text[:at]
        return self.template.render(
            self._fields(messages, context), functions, arguments=context.arguments, now=context.now
        )

    def prompt(self, messages: Sequence[Message], context: RenderContext, *, prefill: bool = False) -> EncodedPrompt:
        text = self._render(messages, context, prefill=prefill)
        made = self._encode(text, self._shown(messages, context))
        return EncodedPrompt(made.ids, special_text=self._count_special(messages), images=made.images)

    def shown(self, messages: Sequence[Message], context: RenderContext) -> str:
        """The rendered text; empty if the template refuses the messages."""
        try:
            return self._render(messages, context)
        except TemplateError:
            return ""

    def rewrites(
        self, before: Sequence[Message], reply: Message, new: Sequence[Message], context: RenderContext
    ) -> bool:
        sentinel = self._sentinel
        # Text where there was none would make it another kind of message, which some templates show differently.
        no_text = not reply.text.strip() and bool(reply.tool_calls)
        marked = Message(
            "assistant",
            reply.text if no_text else reply.text + sentinel,
            reply.reasoning,
            tuple(ToolCall(call.id, call.name, {"s": sentinel}) for call in reply.tool_calls),
        )
        try:
            seen = self._render(before, context)
            later = self._render([*before, marked, *new], context)
        except TemplateError:
            return True
        if not later.startswith(seen):
            return True
        shown = later[len(seen) : later.find(sentinel, len(seen))]
        return (reply.reasoning or "").strip() not in shown

    def _encode(self, text: str, shown: Sequence[tuple[Media, ImagePlaceholder]] = ()) -> EncodedText:
        if shown and self.image_placeholders is not None:
            return self.image_placeholders.encode(text, self._mark, shown)
        if self._mark not in text:
            return EncodedText(self.tokenizer.encode(text), [])
        ids: list[int] = []
        for index, piece in enumerate(text.split(self._mark)):
            ids += self.tokenizer.encode_plain(piece) if index % 2 else self.tokenizer.encode(piece)
        return EncodedText(ids, [])

    def _count_special(self, messages: Sequence[Message]) -> int:
        pattern = self.tokenizer.added_pattern
        return sum(len(pattern.findall(m.text)) for m in messages if m.role in ("user", "tool"))


def _reasoning_fields(source: str) -> list[str]:
    names = [name for name in ("reasoning_content", "thinking") if re.search(rf"\b{name}\b", source)]
    if re.search(r"message\.reasoning\b|message\[['\"]reasoning['\"]\]|get\(['\"]reasoning['\"]\)", source):
        names.append("reasoning")
    return names or ["reasoning_content"]


def _object_or_text(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, Mapping) else text
