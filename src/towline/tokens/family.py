"""Families with a renderer of their own in the `renderers` package.

A family is recognised by what it renders, not by a model's name: its renderer must give the same ids as the folder's own
template on a set of probe conversations. Its bridge then continues a turn without rendering any history, and its parser
reads the replies. Whatever the bridge refuses (an assistant message nobody sampled, a prefill, unknown template
arguments) goes through the sentinel.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from towline.arrays import Ids
from towline.conversation import Message, Tool, ToolCall
from towline.errors import ConfigError
from towline.tokens.codec import Encoded, Frame, SpecialText
from towline.tokens.jinja import TemplateError
from towline.tokens.parser import Parsed, ParsedCall
from towline.tokens.template import SentinelCodec

_NOT_TRIED = {"default", "qwen3-vl", "gpt-oss"}
"""The generic one, the multimodal ones, and one that downloads a vocabulary of its own: the sentinel serves them."""
_STATUS_OK = "ok"


class FamilyCodec(SentinelCodec):
    """A template whose family `renderers` knows."""

    def __init__(self, *arguments: Any, family: str, **options: Any):
        self.family = family
        self._renderers: dict[str, Any] = {}
        super().__init__(*arguments, **options)
        self.name = f"renderers:{family}"
        if self._renderer({}) is None:
            raise ConfigError(f"the family {family!r} is not known to renderers, or does not fit this tokenizer")

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
        ended = len(sampled) > 0 and int(sampled[-1]) in self.stop_ids
        if renderer is None or prefill or not ended or self.special_text is SpecialText.PLAIN:
            return super().extend(before, reply, tail, sampled, new, frame, prefill=prefill)
        previous, completion = [int(id) for id in tail], [int(id) for id in sampled]
        bridged = renderer.bridge_to_next_turn(
            previous, completion, [self.fields(message) for message in new], tools=frame.functions
        )
        kept = len(previous) + len(completion)
        if bridged is None or bridged.token_ids[:kept] != previous + completion:
            return super().extend(before, reply, tail, sampled, new, frame, prefill=prefill)
        return Encoded(list(bridged.token_ids[kept:]), special_text=self._count_special(new))

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
    except (AssertionError, ValueError, TypeError, KeyError, AttributeError, ImportError):
        return None


def recognise(codec: SentinelCodec) -> str | None:
    """The family whose renderer gives this template's very ids on every probe that the template accepts."""
    base = importlib.import_module("renderers.base")
    base._populate_registry()
    expected = [(messages, frame, ids) for messages, frame in _probes() if (ids := _rendered(codec, messages, frame))]
    if not expected:
        return None
    for family in base.RENDERER_REGISTRY:
        if family in _NOT_TRIED:
            continue
        renderer = _create(codec.tokenizer, family, {})
        if renderer is not None and all(_same(codec, renderer, *probe) for probe in expected):
            return str(family)
    return None


def _rendered(codec: SentinelCodec, messages: Sequence[Message], frame: Frame) -> list[int] | None:
    try:
        return codec.prompt(messages, frame).ids
    except TemplateError:
        return None


def _same(codec: SentinelCodec, renderer: Any, messages: Sequence[Message], frame: Frame, ids: list[int]) -> bool:
    fields = [codec.fields(message) for message in messages]
    try:
        return bool(renderer.render_ids(fields, tools=frame.functions, add_generation_prompt=True) == ids)
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, IndexError, NotImplementedError):
        return False


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
