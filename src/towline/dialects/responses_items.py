"""Input items of OpenAI's responses, read into neutral messages.

What a model said in one turn comes back as several items: reasoning, a message, one item a call. They are put together
again into the one assistant message that was sent. A new assistant message begins with an item that a turn would not have
had after what is there: reasoning after words, words after words or calls. A call that was sampled in the same turn as
the last assistant message joins it even behind results of its siblings, since the ids that Towline gave name the turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from towline.conversation import Media, Message, Role, ToolCall
from towline.dialects import media
from towline.dialects.reading import (
    as_list,
    as_object,
    as_text,
    check_depth,
    optional_list,
    optional_text,
    path,
    quoted,
    read_arguments,
    required_text,
    wrong_type,
    wrong_value,
)
from towline.dialects.sealed import unseal
from towline.dialects.sse import dump

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "summary_text": "text"}
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUTS = frozenset(("function_call_output", "custom_tool_call_output"))
_PROVIDER_CALLS = frozenset(
    (
        *("file_search_call", "computer_call", "web_search_call", "tool_search_call", "image_generation_call"),
        *("code_interpreter_call", "local_shell_call", "shell_call", "apply_patch_call", "mcp_call", "program"),
        *("mcp_approval_request", "mcp_list_tools", "compaction", "compaction_summary", "context_compaction"),
    )
)
"""Things a provider did: shown to the model as the JSON they are."""
_PROVIDER_OUTPUTS = frozenset(
    (
        *("computer_call_output", "local_shell_call_output", "shell_call_output", "apply_patch_call_output"),
        *("tool_search_output", "program_output", "mcp_approval_response"),
    )
)
SILENT = frozenset(("additional_tools", "compaction_trigger", "configuration_update"))
"""Items that say nothing to the model by themselves."""
_MINTED = 9
"""Length of the part of a minted call id that names its turn."""


def add_item(messages: list[Message], item: Any, where: str) -> bool:
    """Put an item behind `messages`; whether it began a new message (else it joined the last assistant message)."""
    if isinstance(item, str):
        messages.append(Message("user", item))
        return True
    source = as_object(item, where)
    check_depth(source, where)
    kind = optional_text(source, "type", where) or "message"
    if kind == "message":
        return _add_message(messages, source, where)
    if kind == "reasoning":
        return _add_reasoning(messages, _reasoning(source, where))
    if kind in _CALLS:
        return _add_call(messages, _call(source, kind, where))
    if kind in _OUTPUTS:
        id = required_text(source, "call_id", where)
        text, attached = _output(source.get("output"), path(where, "output"))
        messages.append(Message("tool", text, tool_call_id=id, media=attached))
        return True
    if kind in _PROVIDER_OUTPUTS:
        messages.append(Message("tool", _as_json(source), tool_call_id=optional_text(source, "call_id", where) or ""))
        return True
    if kind in _PROVIDER_CALLS:
        return _add_words(messages, _as_json(source), ())
    if kind == "item_reference":
        wrong_value(where, f"item {quoted(required_text(source, 'id', where))} is not stored; send the item itself")
    wrong_value(path(where, "type"), f"{quoted(kind)} is not a supported type of item")


def holds_objects(item: Any) -> bool:
    """Whether values of the item count as JSON and not only by Python's `==` (see `Known.literal`)."""
    return isinstance(item, dict) and item.get("type") in (*_PROVIDER_CALLS, *_PROVIDER_OUTPUTS, *_CALLS)


def _as_json(source: Mapping[str, Any]) -> str:
    """An item of the provider's without what names it only."""
    return dump({name: value for name, value in source.items() if name not in ("id", "status")}).decode()


def _add_message(messages: list[Message], source: Mapping[str, Any], where: str) -> bool:
    name = required_text(source, "role", where)
    if name not in _ROLES:
        wrong_value(path(where, "role"), f"{quoted(name)} is not one of {', '.join(_ROLES)}")
    text, attached = _output(source.get("content"), path(where, "content"))
    role = _ROLES[name]
    if role == "assistant":
        return _add_words(messages, text, attached)
    messages.append(Message(role, text, media=attached))
    return True


def _add_words(messages: list[Message], text: str, attached: tuple[Media, ...]) -> bool:
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant" and not last.text and not last.tool_calls:
        messages[-1] = replace(last, text=text, media=attached, fingerprint=None)
        return False
    messages.append(Message("assistant", text, media=attached))
    return True


def _add_reasoning(messages: list[Message], reasoning: str | None) -> bool:
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant" and not last.text and not last.tool_calls:
        together = "\n".join(filter(None, (last.reasoning, reasoning))) or None
        messages[-1] = replace(last, reasoning=together, fingerprint=None)
        return False
    messages.append(Message("assistant", "", reasoning))
    return True


def _add_call(messages: list[Message], call: ToolCall) -> bool:
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant":
        messages[-1] = replace(last, tool_calls=(*last.tool_calls, call), fingerprint=None)
        return False
    place = len(messages) - 1
    while place >= 0 and messages[place].role == "tool":
        place -= 1
    if place >= 0 and (siblings := messages[place].tool_calls) and _same_turn(siblings[-1].id, call.id):
        messages[place] = replace(messages[place], tool_calls=(*siblings, call), fingerprint=None)
        return False
    messages.append(Message("assistant", "", None, (call,)))
    return True


def _same_turn(one: str, other: str) -> bool:
    a, b = ("".join(filter(str.isalnum, id)) for id in (one, other))
    return a != b and len(a) == len(b) and a.startswith("call") and a[:_MINTED] == b[:_MINTED]


def _reasoning(source: Mapping[str, Any], where: str) -> str | None:
    """What was thought: sealed in `encrypted_content`, else its content, else its summary."""
    sealed = optional_text(source, "encrypted_content", where)
    if sealed and (text := unseal(sealed)) is not None:
        return text or None
    for name in ("content", "summary"):
        parts = optional_list(source, name, where)
        if parts:
            here = path(where, name)
            texts = [
                as_text(as_object(part, f"{here}[{index}]").get("text"), f"{here}[{index}].text")
                for index, part in enumerate(parts)
            ]
            return "\n".join(texts) or None
    return None


def _call(source: Mapping[str, Any], kind: str, where: str) -> ToolCall:
    id = required_text(source, "call_id", where)
    name = qualified(required_text(source, "name", where), optional_text(source, "namespace", where))
    if kind == "custom_tool_call":
        return ToolCall(id, name, optional_text(source, "input", where) or "", custom=True)
    return ToolCall(id, name, read_arguments(source.get("arguments"), path(where, "arguments")))


def qualified(name: str, namespace: str | None) -> str:
    """A tool of a namespace under one name."""
    return f"{namespace}.{name}" if namespace else name


def _output(content: Any, where: str) -> tuple[str, tuple[Media, ...]]:
    """Text and media of a message or of a tool's output."""
    if content is None:
        return "", ()
    if isinstance(content, str):
        return content, ()
    if not isinstance(content, list):
        wrong_type(where, "a string or an array of parts", content)
    texts: list[str] = []
    attached: list[Media] = []
    length = 0
    for index, part in enumerate(as_list(content, where)):
        here = f"{where}[{index}]"
        if isinstance(part, str):
            texts.append(part)
            length += len(part)
            continue
        kind = required_text(as_object(part, here), "type", here)
        if kind in _TEXTS:
            text = as_text(part.get(_TEXTS[kind]), path(here, _TEXTS[kind]))
            texts.append(text)
            length += len(text)
        else:
            attached.append(_media(part, kind, length, here))
    return "".join(texts), tuple(attached)


def _media(part: Mapping[str, Any], kind: str, offset: int, where: str) -> Media:
    if kind in ("input_image", "computer_screenshot"):
        url = part.get("image_url")
        if isinstance(url, dict):
            url = url.get("url")
        if url is None:
            wrong_value(where, "no files are stored here, so `image_url` is needed")
        return media.from_url("image", as_text(url, path(where, "image_url")), offset, path(where, "image_url"))
    if kind == "input_file":
        data = optional_text(part, "file_data", where)
        if data:
            if data[:5].lower() == "data:":
                return media.from_url("file", data, offset, path(where, "file_data"))
            return media.from_base64("file", data, "application/octet-stream", offset, path(where, "file_data"))
        url = optional_text(part, "file_url", where)
        if url:
            return media.from_url("file", url, offset, path(where, "file_url"))
        wrong_value(where, "no files are stored here, so `file_data` or `file_url` is needed")
    if kind == "input_audio":
        here = path(where, "input_audio")
        source = as_object(part.get("input_audio"), here)
        form = required_text(source, "format", here)
        return media.from_base64("audio", required_text(source, "data", here), f"audio/{form}", offset, here)
    wrong_value(path(where, "type"), f"{quoted(kind)} is not a supported type of part")
