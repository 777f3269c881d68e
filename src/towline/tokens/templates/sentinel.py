"""Continuing any chat template: the sentinel.

To continue after a turn, its assistant message is replaced by one of the same shape that carries a sentinel, the
template renders it with the new messages, and only the text after the last sentinel is used: from the first end-of-turn
token `E` on, encoded anchored at `E`. So whatever the template does to history cannot change what was sampled. Less than
the whole history is rendered only where the result was compared, for these messages, with that of the whole history
(`history_scope`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from towline.common.arrays import Ids
from towline.common.mappings import BoundedDict
from towline.conversation import Message, Tool, ToolCall
from towline.schema import ForkReason
from towline.tokens.codec import CannotContinue, EncodedPrompt, RenderContext, SpecialText
from towline.tokens.parsing.base import ParsedCall, ParsedReply
from towline.tokens.parsing.registry import FORMATS, detect_format
from towline.tokens.templates.chat_template import ChatTemplate, TemplateError
from towline.tokens.templates.history_scope import HistoryClassifier, HistoryScope
from towline.tokens.templates.media import ImagePlaceholders
from towline.tokens.templates.renderer import TemplateRenderer
from towline.tokens.templates.self_check import PLACEHOLDER_CALL, run_self_check
from towline.tokens.tokenizer import Tokenizer

_MAX_SEAMS = 512
"""Cached seams: harnesses choose the template arguments, so there may be any number."""
_MAX_SCOPES = 16_384
"""Cached results of comparisons, a few per conversation."""
_PLACEHOLDER_USER = Message("user", "x")
"""Placeholder for a history that does not matter."""
_THINKING = ("<think>", "[THINK]")
"""Reasoning tags that a template may write whatever its tool-call format."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Where in an assistant message the sentinel is."""

    in_text: bool
    """In its content."""
    calls: int | None
    """In the arguments of this many calls; `None` for all."""


_SHAPES = (_Shape(False, None), _Shape(True, None), _Shape(False, 1), _Shape(True, 0))
"""In the order they are tried: a template may drop content, refuse several calls, or show content after results."""


@dataclass(slots=True)
class _Seam:
    """How a template continues after an assistant message of one kind."""

    shape: _Shape
    closing: str
    """What the template writes between the sentinel and `E`, with placeholders for the call ids."""
    end: str
    end_id: int
    closes: bool
    """`E` ends the assistant message; otherwise it opens the next one."""
    ids: tuple[str, ...] = ()
    """The placeholders, in the order of the calls."""
    moves: bool = False
    """The template shows text or reasoning of a message with calls after the calls: the sentinel message has none."""

    def expected(self, ids: Sequence[str]) -> str:
        """The text between the sentinel and `E` for calls with these ids."""
        closing = self.closing
        for placeholder, id in zip(self.ids, ids, strict=False):
            closing = closing.replace(placeholder, id)
        return closing


class SentinelCodec(TemplateRenderer):
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
        """`closers` are ids that end a message in history but do not end a turn when sampled."""
        super().__init__(tokenizer, template, special_text)
        self.name = "sentinel"
        self.stop_ids = stop_ids
        self.end_ids = stop_ids | closers
        self.format = FORMATS[format or detect_format(template.source)]
        self._probe = "TOWLINE" + secrets.token_hex(8)
        self._words = "TOWLINE" + secrets.token_hex(8)
        self._probe_id = secrets.token_hex(4)[:7]
        """Prefix of placeholder call ids; these have nine characters, which every template accepts."""
        self._ends = {text: id for id in self.end_ids if (text := tokenizer.token_of(id))}
        self._end_pattern = re.compile("|".join(map(re.escape, sorted(self._ends, key=len, reverse=True))) or r"(?!)")
        self._seams: BoundedDict[tuple[Any, ...], _Seam] = BoundedDict(_MAX_SEAMS)
        self._classifier = HistoryClassifier(template.conditions)
        self._scopes: BoundedDict[bytes, HistoryScope] = BoundedDict(_MAX_SCOPES)
        """How much of a history must be rendered, as comparisons have shown."""
        run_self_check(self)
        if self.check.image:
            self.image_placeholders = ImagePlaceholders(tokenizer, self.check.image, self.check.image_roles)
        self.short_call_ids = self.check.short_call_ids

    @property
    def calls_as_text(self) -> bool:
        return self.format.name == "plain"

    # The seam

    def _with_sentinel(self, reply: Message, shape: _Shape, *, keep_text: bool = False) -> Message:
        """An assistant message like `reply` with the sentinel in place of its text, or after its text if `keep_text`."""
        calls = tuple(ToolCall(call.id, call.name, {"s": self._sentinel}) for call in reply.tool_calls)
        own = reply.text if keep_text else ""
        thought = reply.reasoning if keep_text else None
        return Message("assistant", own + self._sentinel if shape.in_text else own, thought, calls[: shape.calls])

    def _after(
        self,
        before: Sequence[Message],
        reply: Message,
        shape: _Shape,
        new: Sequence[Message],
        context: RenderContext,
        *,
        prefill: bool = False,
        scope: HistoryScope = HistoryScope.REDUCED,
        keep_text: bool = False,
    ) -> str:
        """The text after the last sentinel, with as much of the history before it as `scope` says.

        With `keep_text` the reply keeps its text, unless the template then does not show the sentinel.
        """
        lead = self._lead(before, scope)
        if keep_text and scope is not HistoryScope.REDUCED:
            try:
                marked = self._with_sentinel(reply, shape, keep_text=True)
                return self._text_after_sentinel([*lead, marked, *new], context, prefill=prefill, scope=scope)
            except TemplateError:
                pass
        return self._text_after_sentinel(
            [*lead, self._with_sentinel(reply, shape), *new], context, prefill=prefill, scope=scope
        )

    def _text_after_sentinel(
        self, messages: Sequence[Message], context: RenderContext, *, prefill: bool, scope: HistoryScope
    ) -> str:
        text = self._render(messages, context, prefill=prefill, scope=scope)
        at = text.rfind(self._sentinel)
        if at < 0 or self._probe in text[:at]:
            raise TemplateError("the template does not show the assistant message before the messages that follow it")
        return text[at + len(self._sentinel) :]

    def _lead(self, before: Sequence[Message], scope: HistoryScope) -> Sequence[Message]:
        """The history, or its placeholder."""
        if scope is HistoryScope.FULL or self.check.needs_history:
            return before
        if scope is HistoryScope.NOTABLE:
            notable = self._classifier.lead(before)
            if notable is None:
                return before
            lead = [*notable] if any(message.role == "user" for message in notable) else [*notable, _PLACEHOLDER_USER]
        else:
            lead = [before[0]] if self.check.needs_system and before and before[0].role == "system" else []
            lead.append(_PLACEHOLDER_USER)
        called = self.check.needs_calls and any(message.role == "tool" for message in before)
        return [*lead, *(PLACEHOLDER_CALL if called else ())]

    def _suffix(
        self,
        before: Sequence[Message],
        reply: Message,
        seam: _Seam,
        new: Sequence[Message],
        context: RenderContext,
        *,
        prefill: bool = False,
    ) -> str:
        """The text after the reply as the whole history gives it, rendered from as little of it as suffices.

        A history of a new class is rendered in full once, to compare. Where the template refuses the full history, nothing
        can be compared, and the least scope that it accepts is used.
        """

        def after(scope: HistoryScope) -> str:
            keep_text = not seam.moves
            return self._after(
                before, reply, seam.shape, new, context, prefill=prefill, scope=scope, keep_text=keep_text
            )

        if self.check.needs_history or (context.images and any(self.sees(m, context) for m in (*before, *new))):
            # A template may number the images from the start of the conversation.
            return after(HistoryScope.FULL)
        key = self._history_key(before, reply, new, context, f"{seam.shape}{prefill}")
        known = self._scopes.get(key)
        if known is not None:
            return after(known)
        refusal: TemplateError | None = None
        full: str | None = None
        try:
            full = after(HistoryScope.FULL)
        except TemplateError as error:
            refusal = error
        for scope in (HistoryScope.REDUCED, HistoryScope.NOTABLE):
            try:
                text = after(scope)
            except TemplateError:
                continue
            if full is None or text == full:
                self._scopes[key] = scope
                return text
        if full is None:
            raise refusal or TemplateError("the template refuses the messages")
        self._scopes[key] = HistoryScope.FULL
        return full

    def _history_key(
        self, before: Sequence[Message], reply: Message, new: Sequence[Message], context: RenderContext, way: str
    ) -> bytes:
        """Identifies the class of histories for which one comparison of this way to continue holds."""
        return self._classifier.key(before, reply, new, context.digest + way.encode())

    def _seam(self, reply: Message, first: Message, context: RenderContext, *, own: bool = False) -> _Seam:
        """How the template closes a message of this kind, learned once with placeholder content.

        The seam holds for any call ids; with `own` it is learned with those of the reply.
        """
        kind = (bool(reply.text.strip()), len(reply.tool_calls), first.role, bool(context.tools))
        key: tuple[Any, ...] = (*kind, repr(sorted(context.arguments.items())))
        if own:
            key = (*key, *((call.id, call.name) for call in reply.tool_calls))
        if key not in self._seams:
            self._seams[key] = (
                self._learn_seam(reply, first, context) if own else self._learn_seam_any_ids(reply, first, context)
            )
        return self._seams[key]

    def _learn_seam_any_ids(self, reply: Message, first: Message, context: RenderContext) -> _Seam:
        """A seam with placeholder call ids, unless the template only accepts certain ids."""
        if not reply.tool_calls:
            return self._learn_seam(reply, first, context)
        ids = tuple(f"{self._probe_id}{place:02d}"[-9:] for place in range(len(reply.tool_calls)))
        placeholders = dict(zip((call.id for call in reply.tool_calls), ids, strict=True))
        calls = tuple(replace(call, id=id) for call, id in zip(reply.tool_calls, ids, strict=True))
        answered = replace(first, tool_call_id=placeholders.get(first.tool_call_id, first.tool_call_id))
        try:
            return replace(self._learn_seam(replace(reply, tool_calls=calls), answered, context), ids=ids)
        except CannotContinue:
            return self._learn_seam(reply, first, context)

    def _learn_seam(self, reply: Message, first: Message, context: RenderContext) -> _Seam:
        following = Message(first.role, self._probe, tool_call_id=first.tool_call_id, name=first.name)
        refusal: TemplateError | None = None
        for shape in _SHAPES if reply.tool_calls else _SHAPES[-1:]:
            try:
                after = self._after([_PLACEHOLDER_USER], reply, shape, [following], context)
            except TemplateError as error:
                refusal = refusal or error
                continue
            found = self._end_pattern.search(after)
            if found is not None:
                end = found.group()
                closes, moves = self._closes(reply, shape, context), self._moves_text(reply, shape, following, context)
                return _Seam(shape, after[: found.start()], end, self._ends[end], closes, moves=moves)
        reason = str(refusal or "the template writes no end-of-turn token after the assistant message")
        raise CannotContinue(ForkReason.TEMPLATE_REWRITE, reason)

    def _moves_text(self, reply: Message, shape: _Shape, following: Message, context: RenderContext) -> bool:
        """Whether the template shows the text of a message with calls after the calls."""
        if shape.in_text:
            return False
        worded = replace(reply, text=self._words, reasoning=self._words)
        try:
            return self._words in self._after(
                [_PLACEHOLDER_USER], worded, shape, [following], context, scope=HistoryScope.FULL, keep_text=True
            )
        except TemplateError:
            return False

    def _closes(self, reply: Message, shape: _Shape, context: RenderContext) -> bool:
        """Whether the end token belongs to the assistant message: it is written even if nothing follows."""
        try:
            text = self.template.render(
                self._fields((_PLACEHOLDER_USER, self._with_sentinel(reply, shape)), context),
                context.functions,
                generation_prompt=False,
                arguments=context.arguments,
                now=context.now,
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
        context: RenderContext,
        *,
        prefill: bool = False,
    ) -> EncodedPrompt:
        try:
            seam, after = self._text_from_end(before, reply, new, context, prefill=prefill)
            made = self._encode(after, self._shown(new, context))
        except TemplateError as error:
            raise CannotContinue(ForkReason.TEMPLATE_REWRITE, str(error)) from error
        ids = made.ids
        if not ids or ids[0] != seam.end_id:
            raise CannotContinue(ForkReason.TEMPLATE_REWRITE, f"{seam.end!r} does not encode to a single token")
        special = self._count_special(new)
        if not self._ended(sampled):
            return EncodedPrompt(ids, forced=1, special_text=special, images=made.images)
        self._check_end(seam, sampled)
        return EncodedPrompt(ids[1:], special_text=special, images=[image.moved(-1) for image in made.images])

    def _text_from_end(
        self,
        before: Sequence[Message],
        reply: Message,
        new: Sequence[Message],
        context: RenderContext,
        *,
        prefill: bool,
    ) -> tuple[_Seam, str]:
        """The seam after the reply, and the text from its end token on."""
        ids = [self._call_id(call.id) for call in reply.tool_calls]
        for own in (False, True):
            seam = self._seam(reply, new[0], context, own=own)
            after = self._suffix(before, reply, seam, new, context, prefill=prefill)
            expected = seam.expected(ids)
            if after.startswith(expected + seam.end):
                return seam, after[len(expected) :]
        raise TemplateError("the template closes this message differently")

    def _ended(self, sampled: Ids) -> bool:
        return len(sampled) > 0 and int(sampled[-1]) in self.stop_ids

    def _check_end(self, seam: _Seam, sampled: Ids) -> None:
        """Raise if the turn ended on one id and the next message opens with another."""
        last = int(sampled[-1])
        if last != seam.end_id and not seam.closes:
            raise CannotContinue(
                ForkReason.STOP_MISMATCH,
                f"the turn ended on id {last}, the next message opens with {seam.end!r}",
            )

    # Replies

    def _opens_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends with open reasoning."""
        return prompt.rstrip().endswith((*_THINKING, *(tag for tag, _ in self.format.thinking)))

    def parse(self, text: str, prompt_tail: str, tools: Sequence[Tool]) -> ParsedReply:
        return self.format.parse(text, tools, reasoning_open=self._opens_reasoning(prompt_tail))

    def write(self, text: str, reasoning: str | None, calls: Sequence[ToolCall], context: RenderContext) -> list[int]:
        reply = Message("assistant", text, reasoning, tuple(calls))
        opened = self._opens_reasoning(self._render([_PLACEHOLDER_USER], context))
        body = self.format.write(
            reasoning,
            text,
            [ParsedCall(call.name, call.arguments, call.id) for call in calls],
            tools=context.tools,
            reasoning_open=opened,
        )
        follow = Message("tool", "x", tool_call_id=calls[0].id, name=calls[0].name) if calls else Message("user", "x")
        try:
            end = self._seam(reply, follow, context).end_id
        except (CannotContinue, TemplateError):
            end = min(self.stop_ids)
        if end not in self.stop_ids:
            end = self._sampled_end(calls)
        return [*self.tokenizer.encode(body), end]

    def _sampled_end(self, calls: Sequence[ToolCall]) -> int:
        """The id that a model samples where the template writes another one in history (gpt-oss)."""
        for name in ("<|call|>",) if calls else ("<|return|>",):
            id = self.tokenizer.id_of(name)
            if id in self.stop_ids:
                return int(id)
        return min(self.stop_ids)

    # For the self-check

    def text_after(
        self, history: Sequence[Message], reply: Message, new: Sequence[Message], context: RenderContext
    ) -> str | None:
        """The text after a reply, rendered with the full history; `None` if the template refuses the messages."""
        try:
            seam = self._seam(reply, new[0], context)
            return self._after(
                history, reply, seam.shape, new, context, scope=HistoryScope.FULL, keep_text=not seam.moves
            )
        except (TemplateError, CannotContinue):
            return None
