"""Tools of an Anthropic request: those that are offered, those that are deferred, and those that run at the provider.

Most declarations carry their schema. Some of Anthropic's own tools are run by the client under a name and a schema that
its models know by heart; other models are told both here. Tools that only the provider could run are left out, with a
record. A deferred tool is offered to nobody until a `tool_reference` in the messages shows its definition, so that the
conversation goes on under the tools it began with; where the provider was to search for deferred tools, all are
offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from towline import exact_json
from towline.conversation import Tool
from towline.dialects.base import Declared
from towline.dialects.reading import (
    as_object,
    check_depth,
    optional_flag,
    optional_list,
    optional_object,
    optional_text,
    required_text,
)
from towline.dialects.sse import dump

Definitions = Mapping[str, Mapping[str, Any]]
"""Every declared tool by its name, as sent."""

_FIELDS = frozenset(
    ("name", "description", "input_schema", "cache_control", "type", "defer_loading", "eager_input_streaming")
)
_MOST_IGNORED = 64
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
"""Description and schema of tools that Anthropic defines and clients run, by the start of their type."""


def read_tools(body: Mapping[str, Any], known: Declared) -> Declared:
    """The offered tools; `known` itself if the declarations are the same."""
    tools = optional_list(body, "tools")
    if not tools:
        return known if not known.source else Declared()
    try:
        source = exact_json.dumps(tools)
    except TypeError:
        source = b""
    if source and source == known.source:
        return known
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
    return Declared(source, tuple(offered), tuple(ignored[:_MOST_IGNORED]))


def definitions(body: Mapping[str, Any]) -> Definitions:
    """The declared tools by name. The declarations have been read."""
    return {item["name"]: item for item in body.get("tools") or () if isinstance(item.get("name"), str)}


def deferred(body: Mapping[str, Any]) -> tuple[Tool, ...]:
    """The tools that messages may show. The declarations have been read."""
    waiting = [item for item in body.get("tools") or () if item.get("defer_loading")]
    if not waiting or _searched(body["tools"]):
        return ()
    return tuple(tool for item in waiting if (tool := _tool(item, "")) is not None)


def describe(name: str, declared: Mapping[str, Any] | None, where: str) -> str:
    """A tool as messages show it, one line: the form that Claude Code promises the model.

    Nothing for a tool that does not run here; only the name of one that is not declared.
    """
    shown: dict[str, Any] = {"name": name}
    if declared is not None:
        tool = _tool(declared, where)
        if tool is None:
            return ""
        shown = {"description": tool.description, "name": tool.name, "parameters": tool.parameters}
    return f"<function>{dump(shown).decode()}</function>\n"


def _searched(tools: Sequence[Any]) -> bool:
    """Whether the provider is to search among the deferred tools."""
    kinds = (item.get("type") for item in tools if isinstance(item, dict))
    return any(isinstance(kind, str) and kind.startswith(_SEARCH) for kind in kinds)


def _tool(item: Mapping[str, Any], where: str) -> Tool | None:
    """The tool that a declaration is of; `None` if only the provider can run it."""
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
