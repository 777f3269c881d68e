"""One input item of OpenAI's responses, read into a neutral message by itself.

What a model said in one turn comes back as several items: reasoning, a message, one item a call. Each is read into an
assistant message of its own here; `responses_grouping` puts them together. Fields that mean nothing to a model (`id`,
`status`, `phase`, `annotations`, what a vendor adds) are left out. What a provider did on its side is shown as the JSON
that it is. An item that holds what only its provider can read is refused, because a model would miss it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from towline.conversation import Message, Role, ToolCall
from towline.dialects import media
from towline.dialects import responses_native as native
from towline.dialects.reading import (
    as_object,
    as_text,
    check_depth,
    missing,
    optional_list,
    optional_text,
    path,
    quoted,
    read_arguments,
    required_text,
    wrong_value,
)
from towline.dialects.responses_content import read_content, read_media
from towline.dialects.responses_tools import NAMESPACE, found_tools, qualified
from towline.dialects.sealed import unseal
from towline.dialects.sse import dump


class Kind(Enum):
    """What part of a conversation an item is."""

    ASIDE = "aside"
    """It says nothing to the model by itself."""
    OTHERS = "others"
    """Words of a user or of the system."""
    RESULT = "result"
    THOUGHT = "thought"
    WORDS = "words"
    CALL = "call"


ADDITIONAL_TOOLS, CONFIGURATION, TOOL_SEARCH_OUTPUT = "additional_tools", "configuration_update", "tool_search_output"
REFERENCE = "item_reference"
_PICTURE = "image_generation_call"
_ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ASIDE = frozenset((ADDITIONAL_TOOLS, CONFIGURATION))
_DONE_ELSEWHERE = frozenset(
    (
        *("file_search_call", "computer_call", "web_search_call", "code_interpreter_call", _PICTURE, "mcp_call"),
        *("mcp_approval_request", "mcp_list_tools", "program"),
    )
)
_OUTPUTS = frozenset(("function_call_output", "custom_tool_call_output"))
_NATIVE_OUTPUTS = frozenset(("local_shell_call_output", "shell_call_output", "apply_patch_call_output"))
_SCREENSHOT = "computer_call_output"
_JSON_OUTPUTS = frozenset(("program_output", "mcp_approval_response"))
_RESULTS = _OUTPUTS | _NATIVE_OUTPUTS | _JSON_OUTPUTS | {_SCREENSHOT, TOOL_SEARCH_OUTPUT}
_CALLS = frozenset(("function_call", "custom_tool_call", *native.CALLS))
_REFUSED: Mapping[str, str] = {
    "compaction": "it holds history that only its provider can read",
    "compaction_summary": "it holds history that only its provider can read",
    "context_compaction": "it holds history that only its provider can read",
    "compaction_trigger": "nothing is compacted here; ask the model for a summary",
}
_LITERAL = _DONE_ELSEWHERE | _RESULTS - _OUTPUTS | frozenset(native.CALLS) | _ASIDE
"""Items whose values count as JSON and not only by Python's `==` (see `Known.literal`)."""
_NAMES_ONLY = ("id", "status", "fingerprint")
"""Fields of a provider's item that tell a model nothing."""


def type_of(item: Mapping[str, Any], where: str = "") -> str:
    """The type of an item: a message if it does not say, or a reference if it is no more than an id."""
    kind = optional_text(item, "type", where)
    return kind or (REFERENCE if "id" in item and "role" not in item else "message")


def kind_of(item: Mapping[str, Any]) -> Kind:
    """What part of a conversation an item is that was read."""
    kind = type_of(item)
    if kind == "message":
        return Kind.WORDS if item["role"] == "assistant" else Kind.OTHERS
    if kind == "reasoning":
        return Kind.THOUGHT
    if kind in _CALLS:
        return Kind.CALL
    if kind in _RESULTS:
        return Kind.RESULT
    return Kind.ASIDE if kind in _ASIDE else Kind.WORDS


def is_literal(item: Mapping[str, Any]) -> bool:
    """Whether values of an item that was read count as JSON and not only by Python's `==`."""
    return item.get("type") in _LITERAL or isinstance(item.get("arguments"), dict)


def read_item(item: Any, where: str) -> Message | None:
    """What the item at path `where` says; `None` if it says nothing to the model."""
    source = as_object(item, where)
    check_depth(source, where)
    kind = type_of(source, where)
    if kind == "message":
        return _message(source, where)
    if kind == "reasoning":
        return Message("assistant", reasoning=_reasoning(source, where))
    if kind in _CALLS:
        return Message("assistant", tool_calls=(_call(source, kind, where),))
    if kind in _RESULTS:
        return _result(source, kind, where)
    if kind in _DONE_ELSEWHERE:
        return _done_elsewhere(source, kind, where)
    if kind in _ASIDE:
        return None
    if kind in _REFUSED:
        wrong_value(where, _REFUSED[kind])
    if kind == REFERENCE:
        wrong_value(where, f"item {quoted(required_text(source, 'id', where))} is not stored; send the item itself")
    wrong_value(path(where, "type"), f"{quoted(kind)} is not a supported type of item")


def _message(source: Mapping[str, Any], where: str) -> Message:
    role = required_text(source, "role", where)
    if role not in _ROLES:
        wrong_value(path(where, "role"), f"{quoted(role)} is not one of {', '.join(_ROLES)}")
    if "content" not in source:
        missing(path(where, "content"))
    text, attached = read_content(source["content"], path(where, "content"))
    return Message(_ROLES[role], text, media=attached)


def _reasoning(source: Mapping[str, Any], where: str) -> str | None:
    """What was thought: sealed in `encrypted_content`, else its content, else its summary."""
    sealed = optional_text(source, "encrypted_content", where)
    texts = {name: _thoughts(source, name, where) for name in ("content", "summary")}
    opened = unseal(sealed) if sealed else None
    return opened or texts["content"] or texts["summary"] or None


def _thoughts(source: Mapping[str, Any], name: str, where: str) -> str:
    here = path(where, name)
    return "\n".join(
        as_text(as_object(part, f"{here}[{index}]").get("text"), f"{here}[{index}].text")
        for index, part in enumerate(optional_list(source, name, where) or ())
    )


def _call(source: Mapping[str, Any], kind: str, where: str) -> ToolCall:
    if kind in native.CALLS:
        own = native.CALLS[kind]
        # A search by the provider has no call id.
        id = optional_text(source, "call_id", where) or optional_text(source, "id", where) or ""
        return ToolCall(id, own.type, native.call_arguments(own, source, where))
    id = required_text(source, "call_id", where)
    name = qualified(required_text(source, "name", where), optional_text(source, NAMESPACE, where))
    if kind == "custom_tool_call":
        return ToolCall(id, name, optional_text(source, "input", where) or "", custom=True)
    return ToolCall(id, name, read_arguments(source.get("arguments"), path(where, "arguments")))


def _result(source: Mapping[str, Any], kind: str, where: str) -> Message:
    id = optional_text(source, "call_id", where) or ""
    if kind in _OUTPUTS:
        name = qualified(optional_text(source, "name", where) or "", optional_text(source, NAMESPACE, where))
        if not id and not name:
            missing(path(where, "call_id"))
        if "output" not in source:
            missing(path(where, "output"))
        text, attached = read_content(source["output"], path(where, "output"))
        return Message("tool", text, tool_call_id=id, name=name, media=attached)
    if kind == TOOL_SEARCH_OUTPUT:
        functions = [tool.as_function()["function"] for tool in found_tools(source, where)]
        return Message("tool", dump(functions).decode(), tool_call_id=id, name=native.TOOL_SEARCH.type)
    if kind in _NATIVE_OUTPUTS:
        # The id of a local shell's output is that of its call.
        id = id or optional_text(source, "id", where) or ""
        return Message("tool", native.result_text(source, kind, where), tool_call_id=id)
    if kind == _SCREENSHOT:
        where = path(where, "output")
        shown = as_object(source.get("output"), where)
        picture = read_media(shown, required_text(shown, "type", where), 0, where)
        return Message("tool", tool_call_id=id, media=(picture,))
    return Message("tool", _as_json(source), tool_call_id=id)


def _done_elsewhere(source: Mapping[str, Any], kind: str, where: str) -> Message:
    """What a provider did, as the JSON that it is; a picture that it made as a picture."""
    if kind != _PICTURE or not (data := optional_text(source, "result", where)):
        return Message("assistant", _as_json(source))
    form = optional_text(source, "output_format", where) or "png"
    picture = media.from_base64("image", data, f"image/{form}", 0, path(where, "result"))
    return Message("assistant", _as_json(source, "result"), media=(picture,))


def _as_json(source: Mapping[str, Any], *without: str) -> str:
    return dump({name: value for name, value in source.items() if name not in (*_NAMES_ONLY, *without)}).decode()
