"""Continuing any chat template: the sentinel.

To continue after a turn, its assistant message is replaced by one of the same shape that carries a sentinel, the
template renders that with the new messages, and only the text behind the last sentinel is used: from the first
end-of-turn token `E` on, encoded anchored at `E`. So whatever the template does to history cannot touch what was
sampled. Less than the whole history is rendered only where the text after a turn was compared, for these messages, with
what the whole history gives (`dependence`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from towline.arrays import Ids
from towline.conversation import Message, Tool, ToolCall
from towline.schema import ForkReason
from towline.tokens.bounded import Bounded
from towline.tokens.codec import Encoded, Frame, SpecialText, Unbridgeable
from towline.tokens.dependence import Dependence, Scope
from towline.tokens.jinja import ChatTemplate, TemplateError
from towline.tokens.parser import FORMATS, Parsed, ParsedCall, detect
from towline.tokens.pictures import Pictures
from towline.tokens.rendering import TemplateRenderer
from towline.tokens.selfcheck import CALLED, find_out
from towline.tokens.tokenizer import Tokenizer

_SEAMS = 512
"""Seams that are remembered: harnesses choose the template's arguments, so there may be any number."""
_SCOPES = 16_384
"""Results of comparisons that are remembered, a few for each conversation."""
_ASKED = Message("user", "x")
"""Stands for a history that does not matter."""
_THINKING = ("<think>", "[THINK]")
"""Tags of reasoning that a template may write whatever its format of calls is."""


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
    """What the template itself writes between the sentinel and `E`, with stand-ins for the ids of the calls."""
    end: str
    end_id: int
    closes: bool
    """`E` ends the assistant's message; otherwise it opens the next one."""
    ids: tuple[str, ...] = ()
    """The stand-ins, by the calls' order."""
    moves: bool = False
    """Words or reasoning of a message with calls are shown behind it: a stand-in must not have them."""

    def expected(self, ids: Sequence[str]) -> str:
        """What stands between the sentinel and `E` for calls with these ids."""
        closing = self.closing
        for stand_in, id in zip(self.ids, ids, strict=False):
            closing = closing.replace(stand_in, id)
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
        """`closers` are ids that may end a message in history without ending a turn when sampled."""
        super().__init__(tokenizer, template, special_text)
        self.name = "sentinel"
        self.stop_ids = stop_ids
        self.end_ids = stop_ids | closers
        self.format = FORMATS[format or detect(template.source)]
        self._probe = "TOWLINE" + secrets.token_hex(8)
        self._words = "TOWLINE" + secrets.token_hex(8)
        self._probe_id = secrets.token_hex(4)[:7]
        """Begins the stand-ins for call ids: they have nine characters, which every template takes."""
        self._ends = {text: id for id in self.end_ids if (text := tokenizer.token_of(id))}
        self._end_pattern = re.compile("|".join(map(re.escape, sorted(self._ends, key=len, reverse=True))) or r"(?!)")
        self._seams: Bounded[tuple[Any, ...], _Seam] = Bounded(_SEAMS)
        self._dependence = Dependence(template.tests)
        self._scopes: Bounded[bytes, Scope] = Bounded(_SCOPES)
        """How much of a history must be rendered, as comparisons have shown."""
        find_out(self)
        if self.check.image:
            self.pictures = Pictures(tokenizer, self.check.image, self.check.image_roles)
        self.short_call_ids = self.check.short_call_ids

    @property
    def calls_as_text(self) -> bool:
        return self.format.name == "plain"

    # The seam

    def _stand_in(self, reply: Message, shape: _Shape, *, words: bool = False) -> Message:
        """An assistant message like `reply`, with the sentinel where its own words were, or with `words` behind them."""
        calls = tuple(ToolCall(call.id, call.name, {"s": self._sentinel}) for call in reply.tool_calls)
        own = reply.text if words else ""
        thought = reply.reasoning if words else None
        return Message("assistant", own + self._sentinel if shape.speaks else own, thought, calls[: shape.calls])

    def _after(
        self,
        before: Sequence[Message],
        reply: Message,
        shape: _Shape,
        new: Sequence[Message],
        frame: Frame,
        *,
        prefill: bool = False,
        scope: Scope = Scope.REDUCED,
        words: bool = False,
    ) -> str:
        """The text behind the last sentinel, with as much of the history before it as `scope` says.

        With `words` the reply keeps its own, unless the template does not show the sentinel behind them.
        """
        lead = self._lead(before, scope)
        if words and scope is not Scope.REDUCED:
            try:
                stand_in = self._stand_in(reply, shape, words=True)
                return self._behind([*lead, stand_in, *new], frame, prefill=prefill, scope=scope)
            except TemplateError:
                pass
        return self._behind([*lead, self._stand_in(reply, shape), *new], frame, prefill=prefill, scope=scope)

    def _behind(self, messages: Sequence[Message], frame: Frame, *, prefill: bool, scope: Scope) -> str:
        text = self._render(messages, frame, prefill=prefill, scope=scope)
        at = text.rfind(self._sentinel)
        if at < 0 or self._probe in text[:at]:
            raise TemplateError("the template does not show the assistant's message before what follows it")
        return text[at + len(self._sentinel) :]

    def _lead(self, before: Sequence[Message], scope: Scope) -> Sequence[Message]:
        """The history, or what stands for it."""
        if scope is Scope.FULL or self.check.needs_history:
            return before
        if scope is Scope.NOTABLE:
            notable = self._dependence.lead(before)
            if notable is None:
                return before
            lead = [*notable] if any(message.role == "user" for message in notable) else [*notable, _ASKED]
        else:
            lead = [before[0]] if self.check.needs_system and before and before[0].role == "system" else []
            lead.append(_ASKED)
        called = self.check.needs_calls and any(message.role == "tool" for message in before)
        return [*lead, *(CALLED if called else ())]

    def _suffix(
        self,
        before: Sequence[Message],
        reply: Message,
        seam: _Seam,
        new: Sequence[Message],
        frame: Frame,
        *,
        prefill: bool = False,
    ) -> str:
        """The text behind the reply as the whole history gives it, from no more of it than that takes.

        A history of a class that was not seen before is rendered in full once, to compare. What the template refuses in
        full cannot be compared; then the least that it takes is all there is.
        """

        def after(scope: Scope) -> str:
            words = not seam.moves
            return self._after(before, reply, seam.shape, new, frame, prefill=prefill, scope=scope, words=words)

        if self.check.needs_history or (frame.images and any(self.sees(m, frame) for m in (*before, *new))):
            # A template may number the images, from the first of the conversation on.
            return after(Scope.FULL)
        key = self._history_key(before, reply, new, frame, f"{seam.shape}{prefill}")
        known = self._scopes.get(key)
        if known is not None:
            return after(known)
        refusal: TemplateError | None = None
        full: str | None = None
        try:
            full = after(Scope.FULL)
        except TemplateError as error:
            refusal = error
        for scope in (Scope.REDUCED, Scope.NOTABLE):
            try:
                text = after(scope)
            except TemplateError:
                continue
            if full is None or text == full:
                self._scopes[key] = scope
                return text
        if full is None:
            raise refusal or TemplateError("the template refuses the messages")
        self._scopes[key] = Scope.FULL
        return full

    def _history_key(
        self, before: Sequence[Message], reply: Message, new: Sequence[Message], frame: Frame, way: str
    ) -> bytes:
        """Names the class of histories for which one comparison of this way to continue holds."""
        return self._dependence.key(before, reply, new, frame.digest + way.encode())

    def _seam(self, reply: Message, first: Message, frame: Frame, *, own: bool = False) -> _Seam:
        """How the template closes a message of this kind, learned once with harmless content.

        The seam holds for any call ids; with `own` it is learned with the reply's.
        """
        kind = (bool(reply.text.strip()), len(reply.tool_calls), first.role, bool(frame.tools))
        key: tuple[Any, ...] = (*kind, repr(sorted(frame.arguments.items())))
        if own:
            key = (*key, *((call.id, call.name) for call in reply.tool_calls))
        if key not in self._seams:
            self._seams[key] = self._learn(reply, first, frame) if own else self._learn_neutral(reply, first, frame)
        return self._seams[key]

    def _learn_neutral(self, reply: Message, first: Message, frame: Frame) -> _Seam:
        """A seam with stand-ins for the ids of the calls, unless the template wants ids of its own making."""
        if not reply.tool_calls:
            return self._learn(reply, first, frame)
        ids = tuple(f"{self._probe_id}{place:02d}"[-9:] for place in range(len(reply.tool_calls)))
        stand_ins = dict(zip((call.id for call in reply.tool_calls), ids, strict=True))
        calls = tuple(replace(call, id=id) for call, id in zip(reply.tool_calls, ids, strict=True))
        answered = replace(first, tool_call_id=stand_ins.get(first.tool_call_id, first.tool_call_id))
        try:
            return replace(self._learn(replace(reply, tool_calls=calls), answered, frame), ids=ids)
        except Unbridgeable:
            return self._learn(reply, first, frame)

    def _learn(self, reply: Message, first: Message, frame: Frame) -> _Seam:
        following = Message(first.role, self._probe, tool_call_id=first.tool_call_id, name=first.name)
        refusal: TemplateError | None = None
        for shape in _SHAPES if reply.tool_calls else _SHAPES[-1:]:
            try:
                after = self._after([_ASKED], reply, shape, [following], frame)
            except TemplateError as error:
                refusal = refusal or error
                continue
            found = self._end_pattern.search(after)
            if found is not None:
                end = found.group()
                closes, moves = self._closes(reply, shape, frame), self._moves(reply, shape, following, frame)
                return _Seam(shape, after[: found.start()], end, self._ends[end], closes, moves=moves)
        reason = str(refusal or "no end-of-turn token follows the assistant's message in the template")
        raise Unbridgeable(ForkReason.TEMPLATE_REWRITE, reason)

    def _moves(self, reply: Message, shape: _Shape, following: Message, frame: Frame) -> bool:
        """Whether the template shows what a message with calls says behind the calls."""
        if shape.speaks:
            return False
        saying = replace(reply, text=self._words, reasoning=self._words)
        try:
            return self._words in self._after([_ASKED], saying, shape, [following], frame, scope=Scope.FULL, words=True)
        except TemplateError:
            return False

    def _closes(self, reply: Message, shape: _Shape, frame: Frame) -> bool:
        """Whether the end belongs to the assistant's message: there is one even when nothing follows."""
        try:
            text = self.template.render(
                self._fields((_ASKED, self._stand_in(reply, shape)), frame),
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
            seam, after = self._joined(before, reply, new, frame, prefill=prefill)
            made = self._encode(after, self._shown(new, frame))
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

    def _joined(
        self, before: Sequence[Message], reply: Message, new: Sequence[Message], frame: Frame, *, prefill: bool
    ) -> tuple[_Seam, str]:
        """How the reply is closed, and the text from its end on."""
        ids = [self._call_id(call.id) for call in reply.tool_calls]
        for own in (False, True):
            seam = self._seam(reply, new[0], frame, own=own)
            after = self._suffix(before, reply, seam, new, frame, prefill=prefill)
            expected = seam.expected(ids)
            if after.startswith(expected + seam.end):
                return seam, after[len(expected) :]
        raise TemplateError("the template closes this message in another way")

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

    def _thinks(self, prompt: str) -> bool:
        """Whether a prompt has opened the reasoning."""
        return prompt.rstrip().endswith((*_THINKING, *(tag for tag, _ in self.format.thinking)))

    def parse(self, text: str, prompt_tail: str, tools: Sequence[Tool]) -> Parsed:
        return self.format.parse(text, tools, reasoning_open=self._thinks(prompt_tail))

    def write(self, text: str, reasoning: str | None, calls: Sequence[ToolCall], frame: Frame) -> list[int]:
        reply = Message("assistant", text, reasoning, tuple(calls))
        opened = self._thinks(self._render([_ASKED], frame))
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
            seam = self._seam(reply, new[0], frame)
            return self._after(history, reply, seam.shape, new, frame, scope=Scope.FULL, words=not seam.moves)
        except (TemplateError, Unbridgeable):
            return None
