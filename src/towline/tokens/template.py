"""Continuing any chat template: the sentinel.

To continue after a turn, its assistant message is replaced by one of the same shape that carries a sentinel, the
template renders that with the new messages, and only the text behind the last sentinel is used: from the first
end-of-turn token `E` on, encoded anchored at `E`. So whatever the template does to history cannot touch what was
sampled. What the self-check found the text after a turn not to depend on is not rendered.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from towline.arrays import Ids
from towline.conversation import Media, Message, Tool, ToolCall
from towline.images import Placeholder
from towline.schema import ForkReason
from towline.tokens.bounded import Bounded
from towline.tokens.codec import Encoded, Frame, SpecialText, Unbridgeable
from towline.tokens.jinja import ChatTemplate, TemplateError
from towline.tokens.media import in_order, parts
from towline.tokens.parser import FORMATS, Parsed, ParsedCall, detect
from towline.tokens.pictures import Encoding, Pictures
from towline.tokens.selfcheck import CALLED, STAND_IN, TemplateCheck, find_out
from towline.tokens.settle import bare_id
from towline.tokens.tokenizer import Tokenizer

_SEAMS = 512
"""Seams that are remembered: harnesses choose the template's arguments, so there may be any number."""
_OPENED = re.compile(r"<think>\s*$|\[THINK\]\s*$")


@dataclass(frozen=True, slots=True)
class _Shape:
    """Where the sentinel stands in an assistant message."""

    speaks: bool
    """In its content."""
    calls: int | None
    """In the arguments of so many calls; `None` is all that there are."""


_SHAPES = (_Shape(False, None), _Shape(True, None), _Shape(False, 1), _Shape(True, 0))
"""In order of trying: a template may drop one kind of content, refuse several calls, or show content behind results."""


@dataclass(slots=True)
class _Seam:
    """How a template goes on after an assistant message of one kind."""

    shape: _Shape
    closing: str
    """What the template itself writes between the sentinel and `E`."""
    end: str
    end_id: int
    closes: bool
    """`E` ends the assistant's message; otherwise it opens the next one."""


class SentinelCodec:
    """Any Jinja template with any tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        stop_ids: frozenset[int],
        *,
        closers: frozenset[int] = frozenset(),
        format: str | None = None,
        special_text: SpecialText = SpecialText.ENGINE,
    ):
        """`closers` are ids that may end a message in history without ending a turn when sampled."""
        self.tokenizer = tokenizer
        self.template = template
        self.name = "sentinel"
        self.stop_ids = stop_ids
        self.end_ids = stop_ids | closers
        self.special_text = special_text
        self.format = FORMATS[format or detect(template.source)]
        self._sentinel = "TOWLINE" + secrets.token_hex(8)
        self._probe = "TOWLINE" + secrets.token_hex(8)
        self._mark = "\ue0f5" + secrets.token_hex(8)
        """Stands around special-token text that is to stay plain; like the sentinel, no message can hold it."""
        self._ends = {text: id for id in self.end_ids if (text := tokenizer.token_of(id))}
        self._end_pattern = re.compile("|".join(map(re.escape, sorted(self._ends, key=len, reverse=True))) or r"(?!)")
        self._reasoning_fields = _reasoning_fields(template.source)
        self._seams: Bounded[tuple[Any, ...], _Seam] = Bounded(_SEAMS)
        self.check = TemplateCheck()
        self.pictures: Pictures | None = None
        """How the template shows images, if it does."""
        find_out(self)
        if self.check.image:
            self.pictures = Pictures(tokenizer, self.check.image, self.check.image_roles)
        self.short_call_ids = self.check.short_call_ids

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

    def _stand_in(self, reply: Message, shape: _Shape) -> Message:
        """An assistant message like `reply`, with the sentinel where its own words were."""
        calls = tuple(ToolCall(call.id, call.name, {"s": self._sentinel}) for call in reply.tool_calls)
        return Message("assistant", self._sentinel if shape.speaks else "", None, calls[: shape.calls])

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
        self, messages: Sequence[Message], frame: Frame, *, prefill: bool = False, reduced: bool = False
    ) -> str:
        functions = frame.functions
        if reduced and functions and not self.check.needs_tools:
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

    # The seam

    def _after(
        self,
        before: Sequence[Message],
        reply: Message,
        shape: _Shape,
        new: Sequence[Message],
        frame: Frame,
        *,
        prefill: bool = False,
        reduced: bool = True,
    ) -> str:
        """The text behind the last sentinel; `reduced` leaves out what it does not depend on."""
        lead = self._lead(before) if reduced else before
        messages = [*lead, self._stand_in(reply, shape), *new]
        text = self._render(messages, frame, prefill=prefill, reduced=reduced)
        at = text.rfind(self._sentinel)
        if at < 0 or self._probe in text[:at]:
            raise TemplateError("the template does not show the assistant's message before what follows it")
        return text[at + len(self._sentinel) :]

    def _lead(self, before: Sequence[Message]) -> list[Message]:
        """As much of the history as the text after a turn depends on."""
        if self.check.needs_history:
            return list(before)
        lead = [before[0]] if self.check.needs_system and before and before[0].role == "system" else []
        called = self.check.needs_calls and any(message.role == "tool" for message in before)
        return [*lead, Message("user", "x"), *(CALLED if called else ())]

    def _seam(self, reply: Message, first: Message, frame: Frame) -> _Seam:
        """How the template closes a message of this kind, learned once with harmless content."""
        kind = (bool(reply.text.strip()), min(len(reply.tool_calls), 2), first.role, bool(frame.tools))
        key = (*kind, repr(sorted(frame.arguments.items())))
        if key not in self._seams:
            self._seams[key] = self._learn(reply, first, frame)
        return self._seams[key]

    def _learn(self, reply: Message, first: Message, frame: Frame) -> _Seam:
        following = Message(first.role, self._probe, tool_call_id=first.tool_call_id, name=first.name)
        refusal: TemplateError | None = None
        for shape in _SHAPES if reply.tool_calls else _SHAPES[-1:]:
            try:
                after = self._after([Message("user", "x")], reply, shape, [following], frame)
            except TemplateError as error:
                refusal = refusal or error
                continue
            found = self._end_pattern.search(after)
            if found is not None:
                end = found.group()
                return _Seam(shape, after[: found.start()], end, self._ends[end], self._closes(reply, shape, frame))
        reason = str(refusal or "no end-of-turn token follows the assistant's message in the template")
        raise Unbridgeable(ForkReason.TEMPLATE_REWRITE, reason)

    def _closes(self, reply: Message, shape: _Shape, frame: Frame) -> bool:
        """Whether the end belongs to the assistant's message: there is one even when nothing follows."""
        try:
            text = self.template.render(
                self._fields((Message("user", "x"), self._stand_in(reply, shape)), frame),
                frame.functions,
                generation_prompt=False,
                arguments=frame.arguments,
                now=frame.now,
            )
        except TemplateError:
            return False
        return self._end_pattern.search(text, text.rfind(self._sentinel)) is not None

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
        try:
            seam = self._seam(reply, new[0], frame)
            # A template may number the images, from the first of the conversation on.
            reduced = not (frame.images and any(self.sees(message, frame) for message in (*before, *new)))
            after = self._after(before, reply, seam.shape, new, frame, prefill=prefill, reduced=reduced)
            expected = seam.closing + seam.end
            if not after.startswith(expected):
                raise TemplateError("the template closes this message in another way")
            made = self._encode(after[len(seam.closing) :], self._shown(new, frame))
        except TemplateError as error:
            raise Unbridgeable(ForkReason.TEMPLATE_REWRITE, str(error)) from error
        ids = made.ids
        if not ids or ids[0] != seam.end_id:
            raise Unbridgeable(ForkReason.TEMPLATE_REWRITE, f"{seam.end!r} does not encode to a token of its own")
        special = self._count_special(new)
        if not self._ended(sampled):
            return Encoded(ids, forced=1, special_text=special, images=made.images)
        self._check_end(seam, sampled)
        return Encoded(ids[1:], special_text=special, images=[image.moved(-1) for image in made.images])

    def _ended(self, sampled: Ids) -> bool:
        return len(sampled) > 0 and int(sampled[-1]) in self.stop_ids

    def _check_end(self, seam: _Seam, sampled: Ids) -> None:
        """Raise if the turn ended on one id and the next message opens with another."""
        last = int(sampled[-1])
        if last != seam.end_id and not seam.closes:
            raise Unbridgeable(
                ForkReason.STOP_MISMATCH,
                f"the turn ended on id {last}, the next message opens with {seam.end!r}",
            )

    def rewrites(self, before: Sequence[Message], reply: Message, new: Sequence[Message], frame: Frame) -> bool:
        sentinel = self._sentinel
        # Words where there were none would make it a message of another kind, which some templates show in another way.
        said_nothing = not reply.text.strip() and bool(reply.tool_calls)
        marked = Message(
            "assistant",
            reply.text if said_nothing else reply.text + sentinel,
            reply.reasoning,
            tuple(ToolCall(call.id, call.name, {"s": sentinel}) for call in reply.tool_calls),
        )
        try:
            seen = self._render(before, frame)
            later = self._render([*before, marked, *new], frame)
        except TemplateError:
            return True
        if not later.startswith(seen):
            return True
        said = later[len(seen) : later.find(sentinel, len(seen))]
        return (reply.reasoning or "").strip() not in said

    # Replies

    def parse(self, text: str, prompt_tail: str, tools: Sequence[Tool]) -> Parsed:
        return self.format.parse(text, tools, reasoning_open=_OPENED.search(prompt_tail) is not None)

    def write(self, text: str, reasoning: str | None, calls: Sequence[ToolCall], frame: Frame) -> list[int]:
        reply = Message("assistant", text, reasoning, tuple(calls))
        opened = _OPENED.search(self._render([Message("user", "x")], frame)) is not None
        body = self.format.write(
            reasoning,
            text,
            [ParsedCall(call.name, call.arguments, call.id) for call in calls],
            tools=frame.tools,
            reasoning_open=opened,
        )
        follow = Message("tool", "x", tool_call_id=calls[0].id, name=calls[0].name) if calls else Message("user", "x")
        try:
            end = self._seam(reply, follow, frame).end_id
        except (Unbridgeable, TemplateError):
            end = min(self.stop_ids)
        if end not in self.stop_ids:
            end = self._sampled_end(calls)
        return [*self.tokenizer.encode(body), end]

    def _sampled_end(self, calls: Sequence[ToolCall]) -> int:
        """The id that a model samples where the template shows another in history (gpt-oss)."""
        for name in ("<|call|>",) if calls else ("<|return|>",):
            id = self.tokenizer.id_of(name)
            if id in self.stop_ids:
                return int(id)
        return min(self.stop_ids)

    # For the self-check

    def shown(self, messages: Sequence[Message], frame: Frame) -> str:
        """The rendered text; empty if the template refuses the messages."""
        try:
            return self._render(messages, frame)
        except TemplateError:
            return ""

    def text_after(
        self, history: Sequence[Message], reply: Message, new: Sequence[Message], frame: Frame
    ) -> str | None:
        """The text after a reply with nothing left out before it; `None` if the template refuses the messages."""
        try:
            return self._after(history, reply, self._seam(reply, new[0], frame).shape, new, frame, reduced=False)
        except (TemplateError, Unbridgeable):
            return None


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
