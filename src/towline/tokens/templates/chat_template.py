"""Chat templates: the model's own Jinja source, rendered as Hugging Face's tooling renders it.

The environment is sandboxed and immutable: a template comes with a model folder and is data, not trusted code.
The date that a template may print is the session's, so that a conversation does not change at midnight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from towline.errors import ConfigError, TowlineError
from towline.tokens.templates.conditions import find_conditions


class TemplateError(TowlineError):
    """The template refused the messages (`raise_exception`) or failed on them."""


_FAILURES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template may raise on messages that it does not expect."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment


class ChatTemplate:
    """One model's template, or its pair of templates with and without tools."""

    def __init__(self, source: str, *, tool_source: str | None = None, tokens: Mapping[str, str] | None = None):
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._tool_template = environment.from_string(tool_source) if tool_source else self._template
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"invalid chat template, line {error.lineno}: {error}") from error
        self.source = tool_source or source
        self.tokens = dict(tokens or {})
        self.conditions = find_conditions(environment, {source, self.source})
        """What the template's conditions look for in messages."""

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, Any], tokens: Mapping[str, str]) -> ChatTemplate:
        """The template of a model folder: `chat_template.jinja`, else the one in `tokenizer_config.json`."""
        path = folder / "chat_template.jinja"
        if path.is_file():
            return cls(path.read_text("utf-8"), tokens=tokens)
        value = config.get("chat_template")
        if isinstance(value, list):
            named = {entry["name"]: entry["template"] for entry in value}
            source = named.get("default") or next(iter(named.values()), None)
            if source:
                return cls(source, tool_source=named.get("tool_use"), tokens=tokens)
        if isinstance(value, str) and value:
            return cls(value, tokens=tokens)
        raise ConfigError(
            f"{folder} has no chat template: add chat_template.jinja, or `chat_template` in tokenizer_config.json"
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> str:
        template = self._tool_template if tools else self._template
        variables: dict[str, Any] = {
            **self.tokens,
            "strftime_now": lambda form: now().strftime(form),
            "documents": None,
            **(arguments or {}),
        }
        try:
            return template.render(
                variables, messages=messages, tools=tools or None, add_generation_prompt=generation_prompt
            )
        except TemplateError:
            raise
        except (jinja2.TemplateError, *_FAILURES) as error:
            raise TemplateError(f"the chat template failed: {error}") from error
