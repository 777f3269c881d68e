"""Tools of OpenAI's that have item types of their own and run at the client.

To a model they are functions like any other, under the name of their type. A call is written as the item that the client
expects and read back to the arguments that were sampled. Arguments that do not fit such an item go out as an ordinary
function call, so that the client sees them and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from towline.conversation import Tool
from towline.dialects.reading import as_object, as_text, optional_object, optional_text, path, read_arguments
from towline.dialects.sse import dump


@dataclass(frozen=True, slots=True)
class Native:
    """One such tool: how it is declared to a model, and the shape of its items."""

    type: str
    """Of its declaration, and its name to a model."""
    call: str
    """The type of the item that calls it."""
    holds: str
    """The field of that item which holds the arguments."""
    prefix: str
    """What ids of such items begin with."""
    description: str
    parameters: Mapping[str, Any]
    fits: Callable[[Mapping[str, Any]], bool]
    """Whether arguments can be written as such an item."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """What stands beside the arguments, and means nothing when it comes back."""
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
TOOL_SEARCH = Native(
    type="tool_search",
    call="tool_search_call",
    holds="arguments",
    prefix="tsc",
    description="Search for further tools.",
    parameters=_schema(["query"], query=_TEXT),
    fits=lambda arguments: True,
    beside={"execution": "client"},
)
LOCAL_SHELL = Native(
    type="local_shell",
    call="local_shell_call",
    holds="action",
    prefix="lsh",
    description="Run a command in the local shell.",
    parameters=_schema(["command"], command=_SEVERAL, timeout_ms=_WHOLE, working_directory=_TEXT),
    fits=lambda arguments: _texts(arguments.get("command")),
    implied={"type": "exec", "env": {}},
)
SHELL = Native(
    type="shell",
    call="shell_call",
    holds="action",
    prefix="sh",
    description="Run commands in the shell, one after the other.",
    parameters=_schema(["commands"], commands=_SEVERAL, timeout_ms=_WHOLE, max_output_length=_WHOLE),
    fits=lambda arguments: _texts(arguments.get("commands")),
)
APPLY_PATCH = Native(
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
NATIVE: Mapping[str, Native] = {native.type: native for native in (TOOL_SEARCH, LOCAL_SHELL, SHELL, APPLY_PATCH)}
CALLS: Mapping[str, Native] = {native.call: native for native in NATIVE.values()}


def declared(item: Mapping[str, Any], where: str) -> Tool | None:
    """The tool that a declaration offers, if it is one of these and runs at the client."""
    native = NATIVE.get(str(item.get("type")))
    if native is None or not _runs_at_client(native, item):
        return None
    return Tool(
        native.type,
        optional_text(item, "description", where) or native.description,
        optional_object(item, "parameters", where) or dict(native.parameters),
        extra={key: value for key, value in item.items() if key not in ("description", "parameters")},
    )


def _runs_at_client(native: Native, item: Mapping[str, Any]) -> bool:
    """A search is the provider's unless the declaration says otherwise; a shell is the client's unless it does."""
    if native is TOOL_SEARCH:
        return item.get("execution") == "client"
    environment = item.get("environment")
    return environment is None or (isinstance(environment, dict) and environment.get("type") == "local")


def call_item(native: Native, arguments: dict[str, Any] | str) -> dict[str, Any] | None:
    """The item of a call; `None` if the arguments do not fit."""
    if isinstance(arguments, str) or not native.fits(arguments):
        return None
    return {"type": native.call, **native.beside, native.holds: {**native.implied, **arguments}}


def call_arguments(native: Native, item: Mapping[str, Any], where: str) -> dict[str, Any] | str:
    """The arguments of a call, without what clients fill in."""
    where = path(where, native.holds)
    if native is TOOL_SEARCH:
        return read_arguments(item.get(native.holds), where)
    held = as_object(item.get(native.holds), where)
    return {
        name: value
        for name, value in held.items()
        if value is not None and not (name in native.implied and value == native.implied[name])
    }


def result_text(item: Mapping[str, Any], kind: str, where: str) -> str:
    """What a result of one of these tools says; those of a search are read where tools are."""
    output = item.get("output")
    if kind == "local_shell_call_output":
        return as_text(output, path(where, "output"))
    if kind == "apply_patch_call_output":
        return dump({"status": item.get("status"), "output": output}).decode()
    return dump(output).decode()
