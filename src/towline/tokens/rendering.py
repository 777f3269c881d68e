"""What a chat template is given, and what comes of it: messages to text, and text to ids.

Texts that spell special tokens and images are put in as the settings and the engine say; how the template wants content,
calls and their ids, the self-check has found out.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from towline.conversation import Media, Message, ToolCall
from towline.images import Placeholder
from towline.tokens.codec import Encoded, Frame, SpecialText
from towline.tokens.dependence import Scope
from towline.tokens.jinja import ChatTemplate, TemplateError
from towline.tokens.media import in_order, parts
from towline.tokens.pictures import Encoding, Pictures
from towline.tokens.selfcheck import STAND_IN, TemplateCheck
from towline.tokens.settle import bare_id
from towline.tokens.tokenizer import Tokenizer


class TemplateRenderer:
    """One template with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, special_text: SpecialText):
        self.tokenizer = tokenizer
        self.template = template
        self.special_text = special_text
        self.check = TemplateCheck()
        self.pictures: Pictures | None = None
        """How the template shows images, if it does."""
        self._sentinel = "TOWLINE" + secrets.token_hex(8)
        self._mark = "\ue0f5" + secrets.token_hex(8)
        """Stands around special-token text that is to stay plain; like the sentinel, no message can hold it."""
        self._reasoning_fields = _reasoning_fields(template.source)

    # What the template is given

    def fields(self, message: Message, shown: Sequence[Media] = ()) -> dict[str, Any]:
        """A message as the template wants it, with the images that it is to show."""
        plain = self._stays_plain(message)
        content: Any = [
            {"type": "text", "text": self._marked(part, plain)} if isinstance(part, str) else {"type": part.kind}
            for part in (parts(message, shown) if message.media else [message.text])
        ]
        if not shown and not self.check.part_content:
            content = content[0]["text"]
        fields: dict[str, Any] = {"role": message.role, "content": content}
        if message.role == "assistant":
            if message.reasoning and not (self.check.one_thought and message.text and message.tool_calls):
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

    def _stays_plain(self, message: Message) -> re.Pattern[str] | None:
        """What text of a message is never a token of its own, though it spells one."""
        if self.special_text is SpecialText.PLAIN and message.role in ("user", "tool"):
            return self.tokenizer.added_pattern
        return self.pictures.spelled if self.pictures is not None else None

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

    def sees(self, message: Message, frame: Frame) -> list[Media]:
        if not message.media or not frame.images or message.role not in self.check.image_roles:
            return []
        return [item for item in in_order(message) if self._placeholder(item, frame) is not None]

    def _placeholder(self, item: Media, frame: Frame) -> Placeholder | None:
        found = frame.images.get(item.digest) if item.kind == "image" else None
        return found if found is not None and (self.pictures is None or self.pictures.fits(found)) else None

    def _shown(self, messages: Sequence[Message], frame: Frame) -> list[tuple[Media, Placeholder]]:
        return [(item, frame.images[item.digest]) for message in messages for item in self.sees(message, frame)]

    # Rendering

    def _fields(self, messages: Sequence[Message], frame: Frame) -> list[dict[str, Any]]:
        return [self.fields(message, self.sees(message, frame)) for message in messages]

    def _render(
        self, messages: Sequence[Message], frame: Frame, *, prefill: bool = False, scope: Scope = Scope.FULL
    ) -> str:
        functions = frame.functions
        if scope is Scope.REDUCED and functions and not self.check.needs_tools:
            functions = [STAND_IN.as_function()]
        if prefill:
            last = messages[-1]
            open_message = Message("assistant", last.text + self._sentinel, last.reasoning)
            text = self.template.render(
                self._fields([*messages[:-1], open_message], frame),
                functions,
                generation_prompt=False,
                arguments=frame.arguments,
                now=frame.now,
            )
            at = text.rfind(self._sentinel)
            if at < 0:
                raise TemplateError("the template does not keep the text of a prefilled assistant message")
            return text[:at]
        return self.template.render(self._fields(messages, frame), functions, arguments=frame.arguments, now=frame.now)

    def prompt(self, messages: Sequence[Message], frame: Frame, *, prefill: bool = False) -> Encoded:
        text = self._render(messages, frame, prefill=prefill)
        made = self._encode(text, self._shown(messages, frame))
        return Encoded(made.ids, special_text=self._count_special(messages), images=made.images)

    def _encode(self, text: str, shown: Sequence[tuple[Media, Placeholder]] = ()) -> Encoding:
        if shown and self.pictures is not None:
            return self.pictures.encode(text, self._mark, shown)
        if self._mark not in text:
            return Encoding(self.tokenizer.encode(text), [])
        ids: list[int] = []
        for index, piece in enumerate(text.split(self._mark)):
            ids += self.tokenizer.encode_plain(piece) if index % 2 else self.tokenizer.encode(piece)
        return Encoding(ids, [])

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
