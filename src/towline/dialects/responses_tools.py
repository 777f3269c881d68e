"""The tools of a responses body: declarations, those inside input items too, and the choice among them.

A tool of a namespace is offered as `namespace.name`; `functions` is where tools are that have no namespace. Tools that
run at the provider are left out and recorded. What only the wire needs of a declaration is in `Tool.extra`: an answer is
written from the tools alone, also long after its request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from towline import exact_json
from towline.conversation import Tool
from towline.dialects import responses_native as native
from towline.dialects.base import Declared
from towline.dialects.reading import (
    as_list,
    as_object,
    check_depth,
    optional_list,
    optional_object,
    optional_text,
    path,
    quoted,
    required_text,
    wrong_type,
    wrong_value,
)

NAMESPACE = "namespace"
_PLAIN = "functions"
"""The namespace of tools that have none."""
_READ = frozenset(("type", "name", "description", "parameters", "format", NAMESPACE, "cache_control", "defer_loading"))
"""Fields of a declaration that are not kept as they are. Cache markers come and go without meaning."""
_MODES = ("none", "auto", "required")


def qualified(name: str, namespace: str | None) -> str:
    """What a model calls a tool of a namespace."""
    return f"{namespace}.{name}" if namespace and namespace != _PLAIN else name


def read_tools(body: Mapping[str, Any], added: Sequence[tuple[str, Mapping[str, Any]]], known: Declared) -> Declared:
    """The declared tools, those of `additional_tools` items last; `known` itself if nothing changed.

    `added` are such items with their paths.
    """
    lists = [("tools", optional_list(body, "tools") or [])]
    for where, item in added:
        where = path(where, "tools")
        lists.append((where, as_list(item.get("tools"), where)))
    if not any(tools for _, tools in lists):
        return known if not known.source else Declared()
    try:
        source = exact_json.dumps(lists)
    except TypeError:
        source = b""
    if source and source == known.source:
        return known
    read: dict[str, Tool] = {}
    ignored: list[str] = []
    for where, tools in lists:
        for index, item in enumerate(tools):
            here = f"{where}[{index}]"
            check_depth(as_object(item, here), here)
            offered = read_declaration(item, here, ignored)
            ignored += [f"{here}:{tool.name[:64]}" for tool in offered if read.setdefault(tool.name, tool) is not tool]
    return Declared(source, tuple(read.values()), tuple(ignored))


def read_declaration(item: Mapping[str, Any], where: str, ignored: list[str]) -> list[Tool]:
    """The tools that one declaration offers; what it leaves out is added to `ignored`."""
    kind = required_text(item, "type", where)
    if kind != NAMESPACE:
        return _tool(item, kind, where, ignored)
    name, inner = required_text(item, "name", where), path(where, "tools")
    about = {"name": name, "description": optional_text(item, "description", where) or ""}
    tools = []
    for index, one in enumerate(as_list(item.get("tools"), inner)):
        here = f"{inner}[{index}]"
        for tool in _tool(as_object(one, here), required_text(one, "type", here), here, ignored):
            tool.name = qualified(tool.name, name)
            tool.extra[NAMESPACE] = about
            tools.append(tool)
    return tools


def _tool(item: Mapping[str, Any], kind: str, where: str, ignored: list[str]) -> list[Tool]:
    own = native.declared(item, where)
    if own is not None:
        return [own]
    if kind not in ("function", "custom"):
        ignored.append(f"{where}:{kind[:64]}")
        return []
    if item.get("defer_loading"):
        # There is no search at this end that would bring the tool up later: it is offered from the start.
        ignored.append(f"{where}.defer_loading")
    # The nesting of chat completions, which some clients send here too.
    nested = item.get(kind)
    source: Mapping[str, Any] = nested if isinstance(nested, dict) else item
    name = required_text(source, "name", where)
    description = optional_text(source, "description", where) or ""
    extra = {key: value for key, value in source.items() if key not in _READ and value is not None}
    if kind == "custom":
        form = optional_object(source, "format", where)
        return [Tool(name, description, custom=True, extra=extra if form is None else {**extra, "format": form})]
    return [Tool(name, description, optional_object(source, "parameters", where) or {}, extra=extra)]


def found_tools(item: Mapping[str, Any], where: str) -> list[Tool]:
    """The tools that a `tool_search_output` item brings up."""
    where = path(where, "tools")
    return [
        tool
        for index, one in enumerate(as_list(item.get("tools"), where))
        for tool in read_declaration(as_object(one, f"{where}[{index}]"), f"{where}[{index}]", [])
    ]


def namespace_of(tool: Tool) -> tuple[str, str | None]:
    """The name of a tool on the wire and its namespace there, if it has one."""
    namespace = tool.extra[NAMESPACE]["name"] if NAMESPACE in tool.extra else _PLAIN
    return (tool.name, None) if namespace == _PLAIN else (tool.name.removeprefix(f"{namespace}."), namespace)


def read_tool_choice(body: Mapping[str, Any], declared: Declared) -> str | dict[str, Any] | None:
    """`none`, `auto`, `required`, `{"name": …}` for one tool, or `{"mode": …, "names": […]}` for some of them."""
    choice, where = body.get("tool_choice"), "tool_choice"
    if choice is None:
        return None
    names = {tool.name for tool in declared.tools}
    if isinstance(choice, str):
        if choice not in _MODES:
            wrong_value(where, f"{quoted(choice)} is not one of {', '.join(_MODES)}")
        if choice == "required" and not names and not declared.ignored:
            wrong_value(where, "a tool call is required, but no tools are declared")
        return choice
    if not isinstance(choice, dict):
        wrong_type(where, "a string or an object", choice)
    check_depth(choice, where)
    if required_text(choice, "type", where) != "allowed_tools":
        name = _chosen(choice, names, declared, where)
        return None if name is None else {"name": name}
    mode = required_text(choice, "mode", where)
    if mode not in ("auto", "required"):
        wrong_value(path(where, "mode"), f"{quoted(mode)} is not one of auto, required")
    where = path(where, "tools")
    allowed = [
        _chosen(as_object(one, f"{where}[{index}]"), names, declared, f"{where}[{index}]")
        for index, one in enumerate(as_list(choice.get("tools"), where))
    ]
    return {"mode": mode, "names": [name for name in allowed if name is not None]}


def _chosen(choice: Mapping[str, Any], names: set[str], declared: Declared, where: str) -> str | None:
    """The tool that a choice names; `None` for one that was declared and left out."""
    kind = required_text(choice, "type", where)
    if kind not in ("function", "custom"):
        if kind in names and kind in native.NATIVE:
            return kind
        if any(entry.endswith(f":{kind[:64]}") for entry in declared.ignored):
            return None
        wrong_value(path(where, "type"), f"no tool of type {quoted(kind)} is declared")
    name = qualified(required_text(choice, "name", where), optional_text(choice, NAMESPACE, where))
    if name not in names:
        wrong_value(path(where, "name"), f"no tool named {quoted(name)} is declared")
    return name
