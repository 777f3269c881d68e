"""Model families with a renderer of their own in the `renderers` package.

A family is detected by behaviour, not by model name: on a set of probe conversations its renderer must give the same text
as the folder's own template, and its bridge exactly the ids of the sentinel. The bridge then continues a turn without
rendering any history, and its parser reads the replies. For each class of histories that the template can tell apart, the
bridge's ids are first compared with what the template writes. Where they differ, and for everything the bridge refuses (an
assistant message that was not sampled, a prefill, unknown template arguments), the sentinel is used; both apply the same
rule for how a turn must have ended.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from towline.common.arrays import Ids
from towline.common.mappings import BoundedDict
from towline.conversation import Message, Tool, ToolCall
from towline.errors import ConfigError
from towline.tokens.codec import CannotContinue, EncodedPrompt, RenderContext, SpecialText
from towline.tokens.parsing.base import ParsedCall, ParsedReply, UnwritableReply
from towline.tokens.templates.chat_template import TemplateError
from towline.tokens.templates.sentinel import SentinelCodec

_SKIPPED_FAMILIES = {"default", "qwen3-vl", "gpt-oss"}
"""Not used: the generic one, a multimodal one, and one that downloads its own vocabulary. The sentinel serves them."""
_MAX_RENDERERS = 32
"""Cached renderers, one per set of template arguments that harnesses choose."""
_MAX_COMPARED = 16_384
"""Cached comparisons of a bridge with the template."""
_STATUS_OK = "ok"
_REFUSALS = (ValueError, TypeError, KeyError, AttributeError, AssertionError, IndexError, NotImplementedError)
"""What renderers raise on messages, arguments or tokenizers that they do not support."""


class FamilyCodec(SentinelCodec):
    """A template whose family the `renderers` package supports."""

    def __init__(self, *arguments: Any, family: str, **options: Any):
        self.family = family
        self._renderers: BoundedDict[str, Any] = BoundedDict(_MAX_RENDERERS)
        self._agrees: BoundedDict[bytes, bool] = BoundedDict(_MAX_COMPARED)
        """Whether the bridge gives what the template writes, per class of histories."""
        super().__init__(*arguments, **options)
        self.name = f"renderers:{family}"
        if self._renderer({}) is None:
            raise ConfigError(
                f"the renderers package does not know the family {family!r}, or it does not fit this tokenizer"
            )

    @property
    def calls_as_text(self) -> bool:
        return False  # The family's own parser reads formats that `parsing` does not know.

    def _renderer(self, arguments: Mapping[str, Any]) -> Any:
        """The family's renderer for these template arguments; `None` if it does not support them."""
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
        context: RenderContext,
        *,
        prefill: bool = False,
    ) -> EncodedPrompt:
        renderer = self._renderer(context.arguments)
        sentinel = super().extend
        unsupported = prefill or not self._ended(sampled) or any(self._has_image(message, context) for message in new)
        if renderer is None or unsupported or self.special_text is SpecialText.PLAIN:
            return sentinel(before, reply, tail, sampled, new, context, prefill=prefill)
        self._check_fits(reply, sampled, new[0], context)
        key = self._history_key(before, reply, new, context, "bridge")
        agrees = self._agrees.get(key)
        if agrees is False:
            return sentinel(before, reply, tail, sampled, new, context)
        ids = _bridged(renderer, tail, sampled, [self.fields(message) for message in new], context)
        if ids is None:
            return sentinel(before, reply, tail, sampled, new, context)
        if agrees is None:
            try:
                written = sentinel(before, reply, tail, sampled, new, context)
            except CannotContinue:
                written = None  # The template refuses such messages: there is nothing to compare with.
            agrees = self._agrees[key] = written is None or written.ids == ids
            if written is not None and not agrees:
                return written
        return EncodedPrompt(ids, special_text=self._count_special(new))

    def _has_image(self, message: Message, context: RenderContext) -> bool:
        """Whether a message shows an image or spells an image token: a bridge supports neither."""
        spelled = self.image_placeholders.spelled.search(message.text) if self.image_placeholders is not None else None
        return spelled is not None or bool(self.sees(message, context))

    def _check_fits(self, reply: Message, sampled: Ids, first: Message, context: RenderContext) -> None:
        """Raise if the turn's end token opens a different message than the one that follows."""
        try:
            seam = self._seam(reply, first, context)
        except CannotContinue:
            # The template refuses this message here (a system message in the middle): the bridge may accept it if the
            # end of a turn belongs to the turn.
            if not self._seam(reply, Message("user", "x"), context).closes:
                raise
            return
        self._check_end(seam, sampled)

    def parse(self, text: str, prompt_tail: str, tools: Sequence[Tool]) -> ParsedReply:
        """Use the family's parser, unless `parsing` supports the format."""
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
        reasoning_open = response.reasoning_complete is False
        return ParsedReply(shown, response.reasoning_content, tuple(calls), tuple(malformed), reasoning_open)


def _create(tokenizer: Any, family: str, arguments: Mapping[str, Any]) -> Any:
    """A renderer that keeps all reasoning in place; `None` if it does not support the tokenizer or the arguments."""
    renderers = importlib.import_module("renderers")
    try:
        config = renderers.config_from_name(family)
        if "thinking_retention" in type(config).model_fields:
            config = config.model_copy(update={"thinking_retention": "all"})
        config = renderers.merge_chat_template_kwargs(config, dict(arguments))
        return renderers.create_renderer(tokenizer, config)
    except (*_REFUSALS, ImportError):
        return None


def detect_family(codec: SentinelCodec) -> str | None:
    """The family whose renderer matches this template on every probe that the template accepts."""
    base = importlib.import_module("renderers.base")
    base._populate_registry()
    shown = [(m, context, ids) for m, context in _probes() if (ids := _rendered(codec, m, context)) is not None]
    continued = [
        probe for before, reply, new, context in _turns() if (probe := _turn(codec, before, reply, new, context))
    ]
    if not shown or not continued:
        return None
    for family in base.RENDERER_REGISTRY:
        if family in _SKIPPED_FAMILIES:
            continue
        renderer = _create(codec.tokenizer, family, {})
        if (
            renderer is not None
            and all(_shows(codec, renderer, *probe) for probe in shown)
            and all(_continues(codec, renderer, *probe) for probe in continued)
        ):
            return str(family)
    return None


def _bridged(
    renderer: Any, tail: Ids, sampled: Ids, new: list[dict[str, Any]], context: RenderContext
) -> list[int] | None:
    """The ids that the family's bridge puts after a turn; `None` if it refuses, or would change the turn itself."""
    previous, completion = tail.tolist(), sampled.tolist()
    try:
        bridged = renderer.bridge_to_next_turn(previous, completion, new, tools=context.functions)
    except _REFUSALS:
        return None
    kept = len(previous) + len(completion)
    if bridged is None or bridged.token_ids[:kept] != previous + completion:
        return None
    return list(bridged.token_ids[kept:])


def _rendered(codec: SentinelCodec, messages: Sequence[Message], context: RenderContext) -> list[int] | None:
    try:
        return codec.prompt(messages, context).ids
    except TemplateError:
        return None


def _shows(
    codec: SentinelCodec, renderer: Any, messages: Sequence[Message], context: RenderContext, ids: list[int]
) -> bool:
    """Whether the renderer gives the template's text; how it splits a reply into tokens does not matter."""
    fields = [codec.fields(message) for message in messages]
    try:
        shown = renderer.render_ids(fields, tools=context.functions, add_generation_prompt=True)
    except _REFUSALS:
        return False
    return codec.tokenizer.decode(shown) == codec.tokenizer.decode(ids)


def _turn(
    codec: SentinelCodec, before: Sequence[Message], reply: Message, new: Sequence[Message], context: RenderContext
) -> tuple[Ids, Ids, Sequence[Message], RenderContext, list[int]] | None:
    """A turn with its prompt, its sampled ids, and the ids that the sentinel puts after it."""
    prompt = _rendered(codec, before, context)
    if prompt is None:
        return None
    try:
        sampled = np.asarray(codec.write(reply.text, reply.reasoning, reply.tool_calls, context), np.int32)
        after = codec.extend(before, reply, np.asarray(prompt, np.int32), sampled, new, context)
    except (CannotContinue, UnwritableReply, TemplateError):
        return None
    return np.asarray(prompt, np.int32), sampled, new, context, after.ids


def _continues(
    codec: SentinelCodec,
    renderer: Any,
    prompt: Ids,
    sampled: Ids,
    new: Sequence[Message],
    context: RenderContext,
    ids: list[int],
) -> bool:
    return _bridged(renderer, prompt, sampled, [codec.fields(message) for message in new], context) == ids


def _probes() -> list[tuple[list[Message], RenderContext]]:
    tool = Tool("lookup", "Looks up é.", {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]})
    system, user = Message("system", "Be brief."), Message("user", "What is\n\nthis?")
    calls = tuple(ToolCall(f"abcdefgh{i}", "lookup", {"s": f"v{i}", "n": i}) for i in (1, 2))
    results = [Message("tool", f"result {call.id}", tool_call_id=call.id, name="lookup") for call in calls]
    tools = RenderContext((tool,))
    return [
        ([system, user], RenderContext()),
        ([user], RenderContext()),
        ([user, Message("assistant", "An answer."), Message("user", "And?")], RenderContext()),
        ([system, user], tools),
        ([system, user, Message("assistant", "Looking.", None, calls[:1]), results[0]], tools),
        ([system, user, Message("assistant", "", None, calls), *results], tools),
        ([user, Message("assistant", "", "I think so.", calls[:1]), results[0]], tools),
    ]


def _turns() -> list[tuple[list[Message], Message, list[Message], RenderContext]]:
    """Turns to continue: before a user message, one result, two results, and both."""
    tool = Tool("lookup", "Looks up.", {"type": "object", "properties": {"s": {"type": "string"}}})
    context, before = RenderContext((tool,)), [Message("system", "Be brief."), Message("user", "What is this?")]
    calls = tuple(ToolCall(f"functions.lookup:{i}", "lookup", {"s": f"v{i}"}) for i in (0, 1))
    results = [Message("tool", f" result {i}\n", tool_call_id=c.id, name="lookup") for i, c in enumerate(calls)]
    user = Message("user", "And\n\nthat? ")
    return [
        (before, Message("assistant", "An answer.", "A thought."), [user], context),
        (before, Message("assistant", "", "A thought.", calls[:1]), results[:1], context),
        (before, Message("assistant", "", "A thought.", calls), results, context),
        (before, Message("assistant", "", "A thought.", calls), [*results, user], context),
    ]
