"""Families with a renderer of their own in the `renderers` package.

A family is recognised by what it does, not by a model's name: on a set of probe conversations its renderer must give the
same text as the folder's own template, and its bridge the very ids of the sentinel. The bridge then continues a turn
without rendering any history, and its parser reads the replies. For each class of histories that the template can tell
apart, the bridge's ids are first compared with what the template writes. Where they differ, and whatever the bridge
refuses (an assistant message nobody sampled, a prefill, unknown template arguments), goes through the sentinel; how a
turn must have ended is the same for both.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from towline.arrays import Ids
from towline.conversation import Message, Tool, ToolCall
from towline.errors import ConfigError
from towline.tokens.bounded import Bounded
from towline.tokens.codec import Encoded, Frame, SpecialText, Unbridgeable
from towline.tokens.jinja import TemplateError
from towline.tokens.parser import Parsed, ParsedCall, Unwritable
from towline.tokens.template import SentinelCodec

_NOT_TRIED = {"default", "qwen3-vl", "gpt-oss"}
"""The generic one, the multimodal ones, and one that downloads a vocabulary of its own: the sentinel serves them."""
_RENDERERS = 32
"""Renderers that are kept, one for each set of template arguments that harnesses choose."""
_COMPARED = 16_384
"""Comparisons of a bridge with the template that are remembered."""
_STATUS_OK = "ok"
_REFUSALS = (ValueError, TypeError, KeyError, AttributeError, AssertionError, IndexError, NotImplementedError)
"""How renderers say that messages, arguments or a tokenizer are not theirs."""


class FamilyCodec(SentinelCodec):
    """A template whose family `renderers` knows."""

    def __init__(self, *arguments: Any, family: str, **options: Any):
        self.family = family
        self._renderers: Bounded[str, Any] = Bounded(_RENDERERS)
        self._agrees: Bounded[bytes, bool] = Bounded(_COMPARED)
        """Whether the bridge gives what the template writes, by the class of the history."""
        super().__init__(*arguments, **options)
        self.name = f"renderers:{family}"
        if self._renderer({}) is None:
            raise ConfigError(f"the family {family!r} is not known to renderers, or does not fit this tokenizer")

    @property
    def calls_as_text(self) -> bool:
        return False  # The family's own parser reads what no format here does.

    def _renderer(self, arguments: Mapping[str, Any]) -> Any:
        """The family's renderer under these template arguments; `None` if it does not know them."""
        key = repr(sorted(arguments.items()))
        if key not in self._renderers:
            self._renderers[key] = _create(self.tokenizer, self.family, arguments)
        return self._renderers[key]

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
        renderer = self._renderer(frame.arguments)
        sentinel = super().extend
        awkward = prefill or not self._ended(sampled) or any(self._is_awkward(message, frame) for message in new)
        if renderer is None or awkward or self.special_text is SpecialText.PLAIN:
            return sentinel(before, reply, tail, sampled, new, frame, prefill=prefill)
        self._check_fits(reply, sampled, new[0], frame)
        key = self._history_key(before, reply, new, frame, "bridge")
        agrees = self._agrees.get(key)
        if agrees is False:
            return sentinel(before, reply, tail, sampled, new, frame)
        ids = _bridged(renderer, tail, sampled, [self.fields(message) for message in new], frame)
        if ids is None:
            return sentinel(before, reply, tail, sampled, new, frame)
        if agrees is None:
            try:
                written = sentinel(before, reply, tail, sampled, new, frame)
            except Unbridgeable:
                written = None  # The template refuses such messages: there is nothing to compare with.
            agrees = self._agrees[key] = written is None or written.ids == ids
            if written is not None and not agrees:
                return written
        return Encoded(ids, special_text=self._count_special(new))

    def _is_awkward(self, message: Message, frame: Frame) -> bool:
        """Whether a message shows an image, or spells one: a bridge knows neither."""
        spelled = self.pictures.spelled.search(message.text) if self.pictures is not None else None
        return spelled is not None or bool(self.sees(message, frame))

    def _check_fits(self, reply: Message, sampled: Ids, first: Message, frame: Frame) -> None:
        """Raise if the turn's end opens another message than the one that follows."""
        try:
            seam = self._seam(reply, first, frame)
        except Unbridgeable:
            # A message that the template refuses here (a system message in the middle): the bridge may take it where
            # the end of a turn belongs to the turn.
            if not self._seam(reply, Message("user", "x"), frame).closes:
                raise
            return
        self._check_end(seam, sampled)

    def parse(self, text: str, prompt_tail: str, tools: Sequence[Tool]) -> Parsed:
        """Through the family's parser, unless Towline reads the same format itself."""
        if self.format.name != "plain":
            return super().parse(text, prompt_tail, tools)
        renderer = self._renderer({})
        response = renderer.parse_response(
            self.tokenizer.encode(text),
            tools=[tool.as_function() for tool in tools] or None,
            prompt_ids=self.tokenizer.encode(prompt_tail),
        )
        calls, malformed = [], []
        for call in response.tool_calls:
            if call.status == _STATUS_OK and call.name and isinstance(call.arguments, (dict, str)):
                calls.append(ParsedCall(call.name, call.arguments, call.id or ""))
            else:
                malformed.append(call.raw)
        shown = "\n".join(part for part in [response.content, *malformed] if part)
        open_ = response.reasoning_complete is False
        return Parsed(shown, response.reasoning_content, tuple(calls), tuple(malformed), open_)


def _create(tokenizer: Any, family: str, arguments: Mapping[str, Any]) -> Any:
    """A renderer that keeps all reasoning in place, or `None` if the tokenizer or the arguments do not fit it."""
    renderers = importlib.import_module("renderers")
    try:
        config = renderers.config_from_name(family)
        if "thinking_retention" in type(config).model_fields:
            config = config.model_copy(update={"thinking_retention": "all"})
        config = renderers.merge_chat_template_kwargs(config, dict(arguments))
        return renderers.create_renderer(tokenizer, config)
    except (*_REFUSALS, ImportError):
        return None


def recognise(codec: SentinelCodec) -> str | None:
    """The family whose renderer does what this template does on every probe that the template accepts."""
    base = importlib.import_module("renderers.base")
    base._populate_registry()
    shown = [(m, frame, ids) for m, frame in _probes() if (ids := _rendered(codec, m, frame)) is not None]
    continued = [probe for before, reply, new, frame in _turns() if (probe := _turn(codec, before, reply, new, frame))]
    if not shown or not continued:
        return None
    for family in base.RENDERER_REGISTRY:
        if family in _NOT_TRIED:
            continue
        renderer = _create(codec.tokenizer, family, {})
        if (
            renderer is not None
            and all(_shows(codec, renderer, *probe) for probe in shown)
            and all(_continues(codec, renderer, *probe) for probe in continued)
        ):
            return str(family)
    return None


def _bridged(renderer: Any, tail: Ids, sampled: Ids, new: list[dict[str, Any]], frame: Frame) -> list[int] | None:
    """What the family's bridge puts behind a turn; `None` if it refuses, or would change the turn itself."""
    previous, completion = tail.tolist(), sampled.tolist()
    try:
        bridged = renderer.bridge_to_next_turn(previous, completion, new, tools=frame.functions)
    except _REFUSALS:
        return None
    kept = len(previous) + len(completion)
    if bridged is None or bridged.token_ids[:kept] != previous + completion:
        return None
    return list(bridged.token_ids[kept:])


def _rendered(codec: SentinelCodec, messages: Sequence[Message], frame: Frame) -> list[int] | None:
    try:
        return codec.prompt(messages, frame).ids
    except TemplateError:
        return None


def _shows(codec: SentinelCodec, renderer: Any, messages: Sequence[Message], frame: Frame, ids: list[int]) -> bool:
    """Whether the renderer gives the template's text; where it splits a reply's text into tokens does not matter."""
    fields = [codec.fields(message) for message in messages]
    try:
        shown = renderer.render_ids(fields, tools=frame.functions, add_generation_prompt=True)
    except _REFUSALS:
        return False
    return codec.tokenizer.decode(shown) == codec.tokenizer.decode(ids)


def _turn(
    codec: SentinelCodec, before: Sequence[Message], reply: Message, new: Sequence[Message], frame: Frame
) -> tuple[Ids, Ids, Sequence[Message], Frame, list[int]] | None:
    """A turn with its prompt, what was sampled, and what the sentinel puts behind it."""
    prompt = _rendered(codec, before, frame)
    if prompt is None:
        return None
    try:
        sampled = np.asarray(codec.write(reply.text, reply.reasoning, reply.tool_calls, frame), np.int32)
        after = codec.extend(before, reply, np.asarray(prompt, np.int32), sampled, new, frame)
    except (Unbridgeable, Unwritable, TemplateError):
        return None
    return np.asarray(prompt, np.int32), sampled, new, frame, after.ids


def _continues(
    codec: SentinelCodec, renderer: Any, prompt: Ids, sampled: Ids, new: Sequence[Message], frame: Frame, ids: list[int]
) -> bool:
    return _bridged(renderer, prompt, sampled, [codec.fields(message) for message in new], frame) == ids


def _probes() -> list[tuple[list[Message], Frame]]:
    tool = Tool("lookup", "Looks up é.", {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]})
    system, user = Message("system", "Be brief."), Message("user", "What is\n\nthis?")
    calls = tuple(ToolCall(f"abcdefgh{i}", "lookup", {"s": f"v{i}", "n": i}) for i in (1, 2))
    results = [Message("tool", f"result {call.id}", tool_call_id=call.id, name="lookup") for call in calls]
    tools = Frame((tool,))
    return [
        ([system, user], Frame()),
        ([user], Frame()),
        ([user, Message("assistant", "An answer."), Message("user", "And?")], Frame()),
        ([system, user], tools),
        ([system, user, Message("assistant", "Looking.", None, calls[:1]), results[0]], tools),
        ([system, user, Message("assistant", "", None, calls), *results], tools),
        ([user, Message("assistant", "", "I think so.", calls[:1]), results[0]], tools),
    ]


def _turns() -> list[tuple[list[Message], Message, list[Message], Frame]]:
    """Turns to continue: before a user message, one result, two results, and both."""
    tool = Tool("lookup", "Looks up.", {"type": "object", "properties": {"s": {"type": "string"}}})
    frame, before = Frame((tool,)), [Message("system", "Be brief."), Message("user", "What is this?")]
    calls = tuple(ToolCall(f"functions.lookup:{i}", "lookup", {"s": f"v{i}"}) for i in (0, 1))
    results = [Message("tool", f" result {i}\n", tool_call_id=c.id, name="lookup") for i, c in enumerate(calls)]
    user = Message("user", "And\n\nthat? ")
    return [
        (before, Message("assistant", "An answer.", "A thought."), [user], frame),
        (before, Message("assistant", "", "A thought.", calls[:1]), results[:1], frame),
        (before, Message("assistant", "", "A thought.", calls), results, frame),
        (before, Message("assistant", "", "A thought.", calls), [*results, user], frame),
    ]
