"""The oracle: the prompt that a plain server would show the model, computed without `towline.tokens`.

It renders a model's own chat template with Jinja as Hugging Face's `apply_chat_template` does, and encodes the text with
the `tokenizers` library. The template is probed for the message form it expects: content as text or parts, arguments as an
object or JSON text, and the name of the reasoning field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from jinja2 import nodes
from jinja2.parser import Parser

from towline.errors import ConfigError, TowlineError

HfMessage = dict[str, Any]
"""A message in the form that Hugging Face chat templates take."""
_PROBE, _OTHER = "ORACLEPROBE", "ORACLEOTHER"
_TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks up.",
        "parameters": {"type": "object", "properties": {"s": {"type": "string"}}},
    },
}
_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateRefused(TowlineError):
    """The template refuses the messages."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` blocks, which mark assistant output and print it unchanged."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class Oracle:
    """One model's template and tokenizer, used as Hugging Face does."""

    def __init__(self, backend: tokenizers.Tokenizer, sources: Mapping[str, str], tokens: Mapping[str, str]):
        """`sources`: the template as `default`, and optionally one for requests with tools as `tool_use`."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        self.backend = backend
        self.source = sources["default"]
        self.tokens = dict(tokens)
        self._default = environment.from_string(self.source)
        self._with_tools = environment.from_string(sources.get("tool_use", self.source))

    @classmethod
    def of_folder(cls, folder: Path, template: Path | None = None) -> Oracle:
        """The oracle of a folder with `tokenizer.json` and `tokenizer_config.json`."""
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        given = config.get("chat_template")
        own = folder / "chat_template.jinja"
        if template is not None or own.is_file():
            sources = {"default": (template or own).read_text("utf-8")}
        elif isinstance(given, list):
            sources = {entry["name"]: entry["template"] for entry in given}
        elif isinstance(given, str):
            sources = {"default": given}
        else:
            raise ConfigError(f"{folder} has no chat template")
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        return cls(backend, sources, special_tokens(config))

    # Rendering

    def render(
        self,
        messages: Sequence[HfMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        now: datetime | None = None,
        generation: bool = True,
    ) -> str:
        """The prompt text. `TemplateRefused` if the template refuses the messages."""
        clock = now or datetime.now()
        template = self._with_tools if tools else self._default
        shown = [self._fields(message) for message in messages]
        try:
            return template.render(
                messages=shown,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generation,
                strftime_now=clock.strftime,
                **self.tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TemplateRefused(str(error)) from error

    def continued(
        self, messages: Sequence[HfMessage], tools: Sequence[Mapping[str, Any]] = (), *, now: datetime | None = None
    ) -> str:
        """The prompt text if the last message is an assistant message that the model continues."""
        last = messages[-1]
        marked = {**last, "content": f"{last['content']}{_PROBE}"}
        text = self.render([*messages[:-1], marked], tools, now=now, generation=False)
        if _PROBE not in text:
            raise TemplateRefused("the template does not show the text of the last message")
        return text[: text.rindex(_PROBE)]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    @cached_property
    def added(self) -> dict[str, int]:
        """Every added token by its text."""
        return {token.content: id for id, token in self.backend.get_added_tokens_decoder().items()}

    # The message form that the template expects

    def _fields(self, message: HfMessage) -> HfMessage:
        fields = {name: value for name, value in message.items() if name not in ("reasoning", "tool_calls")}
        if self._wants_parts:
            fields["content"] = [{"type": "text", "text": message["content"]}]
        calls = message.get("tool_calls")
        # A template that accepts only one of text and reasoning beside a call gets the text.
        if message.get("reasoning") and not (self._one_thought and calls and message["content"]):
            fields |= dict.fromkeys(self._reasoning_fields, message["reasoning"])
        if calls:
            fields["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": self._arguments(call["arguments"])},
                }
                for call in calls
            ]
        return fields

    def _arguments(self, arguments: Any) -> Any:
        return json.dumps(arguments, ensure_ascii=False) if self._wants_text else arguments

    @cached_property
    def _reasoning_fields(self) -> list[str]:
        read = [name for name in _REASONING if re.search(rf"[.\[]\s*['\"]?{name}\b|['\"]{name}['\"] in", self.source)]
        return read or ["reasoning_content"]

    @cached_property
    def _wants_parts(self) -> bool:
        self.__dict__["_wants_parts"] = False
        return not self.shows([{"role": "user", "content": _PROBE}], _PROBE)

    @cached_property
    def _wants_text(self) -> bool:
        self.__dict__["_wants_text"] = False
        return not self.shows(_called(), _PROBE, tools=(_TOOL,))

    @cached_property
    def _one_thought(self) -> bool:
        self.__dict__["_one_thought"] = False
        asked, called, result = _called()
        full = {**called, "content": _OTHER, "reasoning": _PROBE}
        return self.shows([asked, called, result], "", (_TOOL,)) and not self.shows([asked, full, result], "", (_TOOL,))

    def shows(
        self, messages: Sequence[HfMessage], text: str, tools: Sequence[Mapping[str, Any]] = (), **options: Any
    ) -> bool:
        """Whether the template accepts the messages and shows `text`."""
        try:
            return text in self.render(messages, tools, **options)
        except TemplateRefused:
            return False


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens of `tokenizer_config.json`: strings, or objects with their `content`."""
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def _called() -> list[HfMessage]:
    call = {"id": "zyxwvuts1", "name": "lookup", "arguments": {"s": _PROBE}}
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "y", "tool_call_id": "zyxwvuts1", "name": "lookup"},
    ]
