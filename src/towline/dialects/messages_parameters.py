"""What an Anthropic body says besides its messages: tools, sampling, thinking.

A field is either understood and checked, or its name is recorded as ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from towline.conversation import Sampling, Tool
from towline.dialects.base import Declared
from towline.dialects.reading import (
    INT32,
    as_object,
    as_text,
    check_depth,
    missing,
    optional_flag,
    optional_integer,
    optional_list,
    optional_number,
    optional_object,
    optional_text,
    path,
    quoted,
    required_text,
    wrong_value,
)

_UNDERSTOOD = frozenset(
    (
        *("model", "messages", "system", "max_tokens", "stream", "stop_sequences", "temperature", "top_p", "top_k"),
        *("tools", "tool_choice", "thinking", "output_config", "output_format"),
    )
)
_TOOL_FIELDS = frozenset(
    ("name", "description", "input_schema", "cache_control", "type", "defer_loading", "eager_input_streaming")
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_MOST_STOPS = 64
_MOST_IGNORED = 64


def read_sampling(body: Mapping[str, Any], *, counted: bool) -> Sampling:
    """What the body asks of the sampler; `max_tokens` is needed unless tokens are only counted."""
    most = optional_integer(body, "max_tokens", 1, INT32)
    if most is None and not counted:
        missing("max_tokens")
    stops = optional_list(body, "stop_sequences") or []
    if len(stops) > _MOST_STOPS:
        wrong_value("stop_sequences", f"expected at most {_MOST_STOPS} sequences")
    for index, stop in enumerate(stops):
        if not as_text(stop, f"stop_sequences[{index}]").strip():
            wrong_value(f"stop_sequences[{index}]", "each stop sequence must contain non-whitespace")
    return Sampling(
        temperature=optional_number(body, "temperature", 0, 1),
        top_p=optional_number(body, "top_p", 0, 1),
        top_k=optional_integer(body, "top_k", 0, INT32),
        max_tokens=most,
        stop=tuple(stops),
        other=_constraints(body),
    )


def _constraints(body: Mapping[str, Any]) -> dict[str, Any]:
    other: dict[str, Any] = {}
    for source, name in ((body, "output_format"), (optional_object(body, "output_config") or {}, "format")):
        if (shape := optional_object(source, name)) is not None:
            check_depth(shape, name)
            other["output_format"] = shape
    choice = optional_object(body, "tool_choice")
    if choice and optional_flag(choice, "disable_parallel_tool_use", "tool_choice"):
        other["disable_parallel_tool_use"] = True
    return other


def read_template_args(body: Mapping[str, Any]) -> dict[str, Any]:
    """`thinking` and its effort, for templates that know them."""
    arguments: dict[str, Any] = {}
    if (thinking := optional_object(body, "thinking")) is not None:
        kind = required_text(thinking, "type", "thinking")
        if kind not in ("enabled", "disabled", "adaptive"):
            wrong_value("thinking.type", f"{quoted(kind)} is not one of enabled, disabled, adaptive")
        optional_integer(thinking, "budget_tokens", 1, INT32, "thinking")
        if kind == "disabled":
            arguments["enable_thinking"] = False
    config = optional_object(body, "output_config") or {}
    if (effort := optional_text(config, "effort", "output_config")) is not None:
        arguments["reasoning_effort"] = effort
    return arguments


def read_ignored(body: Mapping[str, Any]) -> tuple[str, ...]:
    names = sorted(name for name in body.keys() - _UNDERSTOOD if body[name] is not None)
    return tuple(name[:64] for name in names[:_MOST_IGNORED])


def read_tools(body: Mapping[str, Any], known: Declared) -> Declared:
    """The declared tools; `known` itself if the declarations are the same. Tools that run at the provider are left out."""
    tools = optional_list(body, "tools")
    if not tools:
        return known if not known.source else Declared()
    try:
        source = orjson.dumps(tools)
    except TypeError:
        source = b""
    if source and source == known.source:
        return known
    read: list[Tool] = []
    ignored: list[str] = []
    for index, item in enumerate(tools):
        where = f"tools[{index}]"
        check_depth(as_object(item, where), where)
        kind = optional_text(item, "type", where) or "custom"
        schema = optional_object(item, "input_schema", where)
        if kind != "custom" and schema is None:
            ignored.append(f"{where}:{kind[:64]}")
            continue
        read.append(
            Tool(
                required_text(item, "name", where),
                optional_text(item, "description", where) or "",
                schema or {},
                extra={key: value for key, value in item.items() if key not in _TOOL_FIELDS and value is not None},
            )
        )
    return Declared(source, tuple(read), tuple(ignored))


def read_tool_choice(body: Mapping[str, Any], declared: Declared) -> str | dict[str, Any] | None:
    choice = optional_object(body, "tool_choice")
    if choice is None:
        return None
    kind = required_text(choice, "type", "tool_choice")
    if kind in _CHOICES:
        return _CHOICES[kind]
    if kind != "tool":
        wrong_value("tool_choice.type", f"{quoted(kind)} is not one of auto, any, tool, none")
    name = required_text(choice, "name", "tool_choice")
    if all(tool.name != name for tool in declared.tools):
        wrong_value(path("tool_choice", "name"), f"no tool named {quoted(name)} is declared")
    return {"name": name}
