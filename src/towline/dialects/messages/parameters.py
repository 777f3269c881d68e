"""The fields of an Anthropic body besides its messages: tools, sampling, thinking, tool choice.

A field is either understood and checked, or refused because the answer would differ without it, or its name is recorded as
ignored. Parameters that would bias sampling away from the model's own distribution are only recorded (`Sampling.other`).

Most tool declarations carry their schema. Some of Anthropic's own tools are run by the client under a name and schema that
its models know; other models get both from here. Tools that only the provider could run are left out and recorded. A
deferred tool is not offered until a `tool_reference` in the messages shows its definition, so that the conversation
continues under the tools it began with; if the provider was to search deferred tools, all of them are offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from towline.conversation import Sampling, Tool
from towline.dialects.base import CachedTools
from towline.dialects.reading import (
    INT32,
    as_object,
    as_text,
    check_depth,
    ignored_names,
    json_source,
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
from towline.dialects.wire import dump

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
    "thread": "conversations are not stored here: send all messages",
    "compaction": "conversations are not compacted here",
    "safeguards": "safety checks are not run here",
}
_THINKING = ("enabled", "disabled", "adaptive", "between_tools")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_MAX_STOPS = 64
_MAX_IGNORED = 64


def refuse(body: Mapping[str, Any]) -> None:
    """Refuse fields that cannot be ignored: the provider would answer differently."""
    for name, reason in _REFUSED.items():
        if body.get(name) is not None:
            wrong_value(name, reason)


def read_sampling(body: Mapping[str, Any], *, counted: bool) -> Sampling:
    """The sampling settings of the body; `max_tokens` is required unless tokens are only counted."""
    most = optional_integer(body, "max_tokens", 1, INT32)
    if most is None and not counted:
        missing("max_tokens")
    stops = optional_list(body, "stop_sequences") or []
    if len(stops) > _MAX_STOPS:
        wrong_value("stop_sequences", f"expected at most {_MAX_STOPS} sequences")
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
    """`thinking` and `effort`, for templates that support them. Adaptive thinking is the template's default."""
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
    """What determines the shape of the answer: whether thinking is shown."""
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
    return ignored_names(names)


def read_tool_choice(body: Mapping[str, Any], declared: CachedTools) -> str | dict[str, Any] | None:
    """`none`, `auto`, `required`, or `{"name": …}`; `None` for a tool that is left out."""
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


Definitions = Mapping[str, Mapping[str, Any]]
"""Every declared tool by its name, as sent."""

_FIELDS = frozenset(
    ("name", "description", "input_schema", "cache_control", "type", "defer_loading", "eager_input_streaming")
)
_SEARCH = "tool_search_tool_"

_TEXT: dict[str, Any] = {"type": "string"}
_WHOLE: dict[str, Any] = {"type": "integer"}


def _schema(required: Sequence[str], commands: Sequence[str] = (), **properties: dict[str, Any]) -> dict[str, Any]:
    command = {"command": {"type": "string", "enum": list(commands)}} if commands else {}
    return {"type": "object", "properties": {**command, **properties}, "required": list(required)}


_VIEW = {"type": "array", "items": _WHOLE, "description": "First and last line to view; -1 is the end of the file."}
_EDITING = {"file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": _WHOLE, "insert_text": _TEXT}
_EDITS = ("view", "create", "str_replace", "insert")
_UNDOING = (
    "View, create and edit text files, and undo the last edit of one.",
    _schema(("command", "path"), (*_EDITS, "undo_edit"), path=_TEXT, **_EDITING, view_range=_VIEW),
)
_CLIENT_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash_": (
        "Run a command in a bash shell that stays open between calls.",
        _schema((), command=_TEXT, restart={"type": "boolean", "description": "Start a new shell instead."}),
    ),
    "text_editor_20241022": _UNDOING,
    "text_editor_20250124": _UNDOING,
    "text_editor_": (
        "View, create and edit text files.",
        _schema(("command", "path"), _EDITS, path=_TEXT, **_EDITING, view_range=_VIEW),
    ),
    "memory_": (
        "Keep notes in files of a folder that outlasts the conversation.",
        _schema(
            ("command",),
            (*_EDITS, "delete", "rename"),
            path=_TEXT,
            **_EDITING,
            view_range=_VIEW,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
}
"""Description and schema of tools that Anthropic defines and clients run, by prefix of their type."""


def read_tools(body: Mapping[str, Any], cached: CachedTools) -> CachedTools:
    """The offered tools; `cached` itself if the declarations are unchanged."""
    tools = optional_list(body, "tools")
    if not tools:
        return cached.without_tools()
    source = json_source(tools)
    if cached.unchanged(source):
        return cached
    offered: list[Tool] = []
    ignored: list[str] = []
    searched = _searched(tools)
    for index, item in enumerate(tools):
        where = f"tools[{index}]"
        check_depth(as_object(item, where), where)
        tool = _tool(item, where)
        if tool is None:
            ignored.append(f"{where}:{item['type'][:64]}")
        elif optional_flag(item, "defer_loading", where) and not searched:
            ignored.append(f"{where}:deferred")
        else:
            offered.append(tool)
    return CachedTools(source, tuple(offered), tuple(ignored[:_MAX_IGNORED]))


def definitions(body: Mapping[str, Any]) -> Definitions:
    """The declared tools by name; the declarations were checked before."""
    return {item["name"]: item for item in body.get("tools") or () if isinstance(item.get("name"), str)}


def deferred(body: Mapping[str, Any]) -> tuple[Tool, ...]:
    """The deferred tools, which messages may show; the declarations were checked before."""
    waiting = [item for item in body.get("tools") or () if item.get("defer_loading")]
    if not waiting or _searched(body["tools"]):
        return ()
    return tuple(tool for item in waiting if (tool := _tool(item, "")) is not None)


def describe(name: str, declared: Mapping[str, Any] | None, where: str) -> str:
    """A tool as messages show it, in one line: the format that Claude Code announces to the model.

    Empty for a tool that does not run here; only the name for one that is not declared.
    """
    shown: dict[str, Any] = {"name": name}
    if declared is not None:
        tool = _tool(declared, where)
        if tool is None:
            return ""
        shown = {"description": tool.description, "name": tool.name, "parameters": tool.parameters}
    return f"<function>{dump(shown).decode()}</function>\n"


def _searched(tools: Sequence[Any]) -> bool:
    """Whether the provider is asked to search the deferred tools."""
    kinds = (item.get("type") for item in tools if isinstance(item, dict))
    return any(isinstance(kind, str) and kind.startswith(_SEARCH) for kind in kinds)


def _tool(item: Mapping[str, Any], where: str) -> Tool | None:
    """The tool of a declaration; `None` if only the provider can run it."""
    kind = optional_text(item, "type", where) or "custom"
    schema = optional_object(item, "input_schema", where)
    description = optional_text(item, "description", where) or ""
    extra = {key: value for key, value in item.items() if key not in _FIELDS and value is not None}
    if schema is None and kind != "custom":
        own = next((shape for start, shape in _CLIENT_TOOLS.items() if kind.startswith(start)), None)
        if own is None:
            return None
        description, schema = description or own[0], own[1]
        extra["type"] = kind
    return Tool(required_text(item, "name", where), description, schema or {}, extra=extra)
