"""The tools of a responses body: declarations, also those inside input items, and the tool choice.

A tool of a namespace is offered as `namespace.name`; `functions` is the namespace of tools that have none. Tools that run at
the provider are left out and recorded. What only the wire needs of a declaration is in `Tool.extra`: an answer is written
from the tools alone, also long after its request.

Some of OpenAI's tools have item types of their own and run at the client. To a model they are functions like any other,
named by their type. A call is written as the item that the client expects and read back to the sampled arguments. Arguments
that do not fit such an item go out as an ordinary function call, so that the client sees them and reports what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from towline.conversation import Tool
from towline.dialects.base import CachedTools
from towline.dialects.chat.parameters import read_choice_mode
from towline.dialects.reading import (
    as_list,
    as_object,
    as_text,
    check_depth,
    json_source,
    optional_list,
    optional_object,
    optional_text,
    path,
    quoted,
    read_arguments,
    required_text,
    wrong_type,
    wrong_value,
)
from towline.dialects.wire import dump


@dataclass(frozen=True, slots=True)
class NativeTool:
    """A tool with item types of its own: how it is declared to a model, and the format of its items."""

    type: str
    """Type of its declaration, and its name for a model."""
    call: str
    """Type of the item that calls it."""
    holds: str
    """Field of that item that holds the arguments."""
    prefix: str
    """Prefix of the ids of such items."""
    description: str
    parameters: Mapping[str, Any]
    fits: Callable[[Mapping[str, Any]], bool]
    """Whether arguments can be written as such an item."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Fixed fields next to the arguments, ignored when they come back."""
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the item."""


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def _is_operation(arguments: Mapping[str, Any]) -> bool:
    needed = ["path"] if arguments.get("type") == "delete_file" else ["path", "diff"]
    known = arguments.get("type") in ("create_file", "update_file", "delete_file")
    return known and all(isinstance(arguments.get(name), str) for name in needed)


def _schema(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


_TEXT = {"type": "string"}
_WHOLE = {"type": "integer"}
_SEVERAL = {"type": "array", "items": _TEXT}
TOOL_SEARCH = NativeTool(
    type="tool_search",
    call="tool_search_call",
    holds="arguments",
    prefix="tsc",
    description="Search for further tools.",
    parameters=_schema(["query"], query=_TEXT),
    fits=lambda arguments: True,
    beside={"execution": "client"},
)
LOCAL_SHELL = NativeTool(
    type="local_shell",
    call="local_shell_call",
    holds="action",
    prefix="lsh",
    description="Run a command in the local shell.",
    parameters=_schema(["command"], command=_SEVERAL, timeout_ms=_WHOLE, working_directory=_TEXT),
    fits=lambda arguments: _texts(arguments.get("command")),
    implied={"type": "exec", "env": {}},
)
SHELL = NativeTool(
    type="shell",
    call="shell_call",
    holds="action",
    prefix="sh",
    description="Run commands in the shell, one after the other.",
    parameters=_schema(["commands"], commands=_SEVERAL, timeout_ms=_WHOLE, max_output_length=_WHOLE),
    fits=lambda arguments: _texts(arguments.get("commands")),
)
APPLY_PATCH = NativeTool(
    type="apply_patch",
    call="apply_patch_call",
    holds="operation",
    prefix="apc",
    description="Create, update or delete a file. `diff` is what to change in the V4A format; a deletion has none.",
    parameters=_schema(
        ["type", "path"],
        type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
        path=_TEXT,
        diff=_TEXT,
    ),
    fits=_is_operation,
)
NATIVE_TOOLS: Mapping[str, NativeTool] = {
    native.type: native for native in (TOOL_SEARCH, LOCAL_SHELL, SHELL, APPLY_PATCH)
}
NATIVE_CALLS: Mapping[str, NativeTool] = {native.call: native for native in NATIVE_TOOLS.values()}


def native_tool(item: Mapping[str, Any], where: str) -> Tool | None:
    """The native tool of a declaration, if it is one and runs at the client."""
    native = NATIVE_TOOLS.get(str(item.get("type")))
    if native is None or not _runs_at_client(native, item):
        return None
    return Tool(
        native.type,
        optional_text(item, "description", where) or native.description,
        optional_object(item, "parameters", where) or dict(native.parameters),
        extra={key: value for key, value in item.items() if key not in ("description", "parameters")},
    )


def _runs_at_client(native: NativeTool, item: Mapping[str, Any]) -> bool:
    """A search runs at the provider unless the declaration says otherwise; a shell runs at the client unless it does."""
    if native is TOOL_SEARCH:
        return item.get("execution") == "client"
    environment = item.get("environment")
    return environment is None or (isinstance(environment, dict) and environment.get("type") == "local")


def native_call_item(native: NativeTool, arguments: dict[str, Any] | str) -> dict[str, Any] | None:
    """The item of a call; `None` if the arguments do not fit."""
    if isinstance(arguments, str) or not native.fits(arguments):
        return None
    return {"type": native.call, **native.beside, native.holds: {**native.implied, **arguments}}


def native_call_arguments(native: NativeTool, item: Mapping[str, Any], where: str) -> dict[str, Any] | str:
    """The arguments of a call, without the fields that clients add."""
    where = path(where, native.holds)
    if native is TOOL_SEARCH:
        return read_arguments(item.get(native.holds), where)
    held = as_object(item.get(native.holds), where)
    return {
        name: value
        for name, value in held.items()
        if value is not None and not (name in native.implied and value == native.implied[name])
    }


def native_result_text(item: Mapping[str, Any], kind: str, where: str) -> str:
    """The text of a native tool's result; search results are read as tools."""
    output = item.get("output")
    if kind == "local_shell_call_output":
        return as_text(output, path(where, "output"))
    if kind == "apply_patch_call_output":
        return dump({"status": item.get("status"), "output": output}).decode()
    return dump(output).decode()


NAMESPACE = "namespace"
_PLAIN = "functions"
"""The namespace of tools that have none."""
_READ = frozenset(("type", "name", "description", "parameters", "format", NAMESPACE, "cache_control", "defer_loading"))
"""Fields of a declaration that are not kept in `extra`. Cache markers mean nothing."""


def qualified(name: str, namespace: str | None) -> str:
    """The name of a namespaced tool for a model."""
    return f"{namespace}.{name}" if namespace and namespace != _PLAIN else name


def read_tools(
    body: Mapping[str, Any], added: Sequence[tuple[str, Mapping[str, Any]]], cached: CachedTools
) -> CachedTools:
    """The declared tools, those of `additional_tools` items last; `cached` itself if nothing changed.

    `added` are these items with their paths.
    """
    lists = [("tools", optional_list(body, "tools") or [])]
    for where, item in added:
        where = path(where, "tools")
        lists.append((where, as_list(item.get("tools"), where)))
    if not any(tools for _, tools in lists):
        return cached.without_tools()
    source = json_source(lists)
    if cached.unchanged(source):
        return cached
    read: dict[str, Tool] = {}
    ignored: list[str] = []
    for where, tools in lists:
        for index, item in enumerate(tools):
            here = f"{where}[{index}]"
            check_depth(as_object(item, here), here)
            offered = read_declaration(item, here, ignored)
            ignored += [f"{here}:{tool.name[:64]}" for tool in offered if read.setdefault(tool.name, tool) is not tool]
    return CachedTools(source, tuple(read.values()), tuple(ignored))


def read_declaration(item: Mapping[str, Any], where: str, ignored: list[str]) -> list[Tool]:
    """The tools of one declaration; what it leaves out is added to `ignored`."""
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
    own = native_tool(item, where)
    if own is not None:
        return [own]
    if kind not in ("function", "custom"):
        ignored.append(f"{where}:{kind[:64]}")
        return []
    if item.get("defer_loading"):
        # There is no search here that would find the tool later: it is offered from the start.
        ignored.append(f"{where}.defer_loading")
    # The format of chat completions, which some clients send here too.
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
    """The tools of a `tool_search_output` item."""
    where = path(where, "tools")
    return [
        tool
        for index, one in enumerate(as_list(item.get("tools"), where))
        for tool in read_declaration(as_object(one, f"{where}[{index}]"), f"{where}[{index}]", [])
    ]


def namespace_of(tool: Tool) -> tuple[str, str | None]:
    """The name and namespace of a tool on the wire."""
    namespace = tool.extra[NAMESPACE]["name"] if NAMESPACE in tool.extra else _PLAIN
    return (tool.name, None) if namespace == _PLAIN else (tool.name.removeprefix(f"{namespace}."), namespace)


def read_tool_choice(body: Mapping[str, Any], declared: CachedTools) -> str | dict[str, Any] | None:
    """`none`, `auto`, `required`, `{"name": …}` for one tool, or `{"mode": …, "names": […]}` for some of them."""
    choice, where = body.get("tool_choice"), "tool_choice"
    if choice is None:
        return None
    names = {tool.name for tool in declared.tools}
    if isinstance(choice, str):
        return read_choice_mode(choice, declared, where)
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


def _chosen(choice: Mapping[str, Any], names: set[str], declared: CachedTools, where: str) -> str | None:
    """The tool that a choice names; `None` for one that was declared but left out."""
    kind = required_text(choice, "type", where)
    if kind not in ("function", "custom"):
        if kind in names and kind in NATIVE_TOOLS:
            return kind
        if any(entry.endswith(f":{kind[:64]}") for entry in declared.ignored):
            return None
        wrong_value(path(where, "type"), f"no tool of type {quoted(kind)} is declared")
    name = qualified(required_text(choice, "name", where), optional_text(choice, NAMESPACE, where))
    if name not in names:
        wrong_value(path(where, "name"), f"no tool named {quoted(name)} is declared")
    return name
