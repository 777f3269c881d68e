"""What an Anthropic body says besides its messages and tools: sampling, thinking, the choice of a tool.

A field is either understood and checked, or refused because the answer would be another without it, or its name is
recorded as ignored. Parameters that would bias sampling away from the model's own distribution are only recorded
(`Sampling.other`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from towline.conversation import Sampling
from towline.dialects.base import Declared
from towline.dialects.reading import (
    INT32,
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
_UNDERSTOOD_IN = {
    "thinking": frozenset(("type", "display")),
    "output_config": frozenset(("effort", "format")),
    "tool_choice": frozenset(("type", "name", "disable_parallel_tool_use")),
}
_REFUSED = {
    "thread": "no conversations are stored here; send all messages",
    "compaction": "conversations are not summarised here",
    "safeguards": "safety checks are not run here",
}
_THINKING = ("enabled", "disabled", "adaptive", "between_tools")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_MOST_STOPS = 64
_MOST_IGNORED = 64


def refuse(body: Mapping[str, Any]) -> None:
    """Refuses what cannot be left out: the provider would answer something else."""
    for name, reason in _REFUSED.items():
        if body.get(name) is not None:
            wrong_value(name, reason)


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
    config = optional_object(body, "output_config") or {}
    for source, name, where in ((body, "output_format", ""), (config, "format", "output_config")):
        if (shape := optional_object(source, name, where)) is not None:
            check_depth(shape, path(where, name))
            other["output_format"] = shape
    choice = optional_object(body, "tool_choice")
    if choice and optional_flag(choice, "disable_parallel_tool_use", "tool_choice"):
        other["disable_parallel_tool_use"] = True
    return other


def read_template_args(body: Mapping[str, Any]) -> dict[str, Any]:
    """`thinking` and `effort`, for templates that know them. Adaptive thinking is the template's own default."""
    arguments: dict[str, Any] = {}
    if (thinking := optional_object(body, "thinking")) is not None:
        kind = required_text(thinking, "type", "thinking")
        if kind not in _THINKING:
            wrong_value("thinking.type", f"{quoted(kind)} is not one of {', '.join(_THINKING)}")
        optional_integer(thinking, "budget_tokens", 1, INT32, "thinking")
        if kind in ("enabled", "disabled"):
            arguments["enable_thinking"] = kind == "enabled"
    config = optional_object(body, "output_config") or {}
    if (effort := optional_text(config, "effort", "output_config")) is not None:
        arguments["reasoning_effort"] = effort
    return arguments


def read_wire(body: Mapping[str, Any]) -> dict[str, Any]:
    """What shapes the answer: whether thinking is shown."""
    wire: dict[str, Any] = {}
    thinking = optional_object(body, "thinking") or {}
    if optional_text(thinking, "display", "thinking") == "omitted":
        wire["omit_thinking"] = True
    return wire


def read_ignored(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the fields that have no effect."""
    names = [name for name in body.keys() - _UNDERSTOOD if body[name] is not None]
    for outer, understood in _UNDERSTOOD_IN.items():
        inner = body.get(outer) or {}
        names += [f"{outer}.{name}" for name in inner.keys() - understood if inner[name] is not None]
    return tuple(name[:64] for name in sorted(names)[:_MOST_IGNORED])


def read_tool_choice(body: Mapping[str, Any], declared: Declared) -> str | dict[str, Any] | None:
    """`none`, `auto`, `required`, or `{"name": …}`; nothing for a tool that is left out."""
    choice = optional_object(body, "tool_choice")
    if choice is None:
        return None
    kind = required_text(choice, "type", "tool_choice")
    if kind in _CHOICES:
        if kind == "any" and not body.get("tools"):
            wrong_value("tool_choice", "a tool use is required, but no tools are declared")
        return _CHOICES[kind]
    if kind != "tool":
        wrong_value("tool_choice.type", f"{quoted(kind)} is not one of auto, any, tool, none")
    name = required_text(choice, "name", "tool_choice")
    if any(tool.name == name for tool in declared.tools):
        return {"name": name}
    if all(item.get("name") != name for item in body.get("tools") or ()):
        wrong_value("tool_choice.name", f"no tool named {quoted(name)} is declared")
    return None
