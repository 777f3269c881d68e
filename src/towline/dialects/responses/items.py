"""Input items of OpenAI's responses, read one by one and grouped to messages.

What a model produced in one turn comes back as several items: reasoning, a message, one item per call. Each is read into an
assistant message of its own, and `TurnGrouping` joins those of one turn to the one message that was sent. Fields that mean
nothing to a model (`id`, `status`, `phase`, `annotations`, vendor extensions) are dropped. What a provider did itself is
shown as JSON. An item that only its provider can read is refused, because the model would miss it.

Ids of items that Towline wrote name their answer, which decides the grouping wherever the items are. Without them the order
does: a turn is reasoning, then text, then calls, so whatever could not come next in a turn begins a new one. After results,
only a further call can belong to the same turn, if its minted call id says so. In doubt, two consecutive turns are kept
apart: what was split can be joined later, what was merged cannot be taken apart.

Invariant: which message an item joins depends on the items before it alone, so reading can resume at any item.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from towline.conversation import Media, Message, Role, ToolCall
from towline.dialects import media
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
    wrong_type,
    wrong_value,
)
from towline.dialects.responses.tools import (
    NAMESPACE,
    NATIVE_CALLS,
    TOOL_SEARCH,
    found_tools,
    native_call_arguments,
    native_result_text,
    qualified,
)
from towline.dialects.wire import dump, unseal

_TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
"""Types of text parts, and the field that holds the text."""
_IMAGES = ("input_image", "computer_screenshot")


def read_content(content: Any, where: str) -> tuple[str, tuple[Media, ...]]:
    """Text and media of a string or of an array of parts; `null` is the empty string."""
    if content is None:
        return "", ()
    if isinstance(content, str):
        return content, ()
    if not isinstance(content, list):
        wrong_type(where, "a string or an array of parts", content)
    texts: list[str] = []
    attached: list[Media] = []
    length = 0
    for index, part in enumerate(content):
        here = f"{where}[{index}]"
        kind = required_text(as_object(part, here), "type", here)
        if kind not in _TEXTS:
            attached.append(read_media(part, kind, length, here))
            continue
        text = as_text(part.get(_TEXTS[kind]), path(here, _TEXTS[kind]))
        texts.append(text)
        length += len(text)
    return "".join(texts), tuple(attached)


def read_media(part: Mapping[str, Any], kind: str, offset: int, where: str) -> Media:
    """An image, audio or file; a part of an unknown type is an error, because a model would miss it."""
    if kind in _IMAGES:
        return _image(part, offset, where)
    if kind == "input_file":
        return _file(part, offset, where)
    if kind != "input_audio":
        wrong_value(path(where, "type"), f"{quoted(kind)} is not a supported type of part")
    where = path(where, kind)
    source = as_object(part.get(kind), where)
    return media.from_input_audio(source, offset, where)


def _image(part: Mapping[str, Any], offset: int, where: str) -> Media:
    url, where_url = part.get("image_url"), path(where, "image_url")
    if isinstance(url, dict):
        # The format of chat completions, which some clients send here too.
        url, where_url = url.get("url"), path(where_url, "url")
    if url is None:
        wrong_value(where, "files are not stored here: send `image_url`")
    return media.from_url("image", as_text(url, where_url), offset, where_url)


def _file(part: Mapping[str, Any], offset: int, where: str) -> Media:
    if data := optional_text(part, "file_data", where):
        return media.from_file_data(data, offset, path(where, "file_data"))
    if url := optional_text(part, "file_url", where):
        return media.from_url("file", url, offset, path(where, "file_url"))
    wrong_value(where, "files are not stored here: send `file_data` or `file_url`")


class ItemKind(Enum):
    """The role of an item in a conversation."""

    ASIDE = "aside"
    """No content for the model."""
    INPUT = "input"
    """A user or system message."""
    RESULT = "result"
    """The result of a call."""
    REASONING = "reasoning"
    """Reasoning of the model."""
    TEXT = "text"
    """Text of the model."""
    CALL = "call"
    """A tool call of the model."""


ADDITIONAL_TOOLS, CONFIGURATION, TOOL_SEARCH_OUTPUT = "additional_tools", "configuration_update", "tool_search_output"
REFERENCE = "item_reference"
_GENERATED_IMAGE = "image_generation_call"
_ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ASIDE = frozenset((ADDITIONAL_TOOLS, CONFIGURATION))
_PROVIDER_ITEMS = frozenset(
    (
        *(
            "file_search_call",
            "computer_call",
            "web_search_call",
            "code_interpreter_call",
            _GENERATED_IMAGE,
            "mcp_call",
        ),
        *("mcp_approval_request", "mcp_list_tools", "program"),
    )
)
_OUTPUTS = frozenset(("function_call_output", "custom_tool_call_output"))
_NATIVE_OUTPUTS = frozenset(("local_shell_call_output", "shell_call_output", "apply_patch_call_output"))
_SCREENSHOT = "computer_call_output"
_JSON_OUTPUTS = frozenset(("program_output", "mcp_approval_response"))
_RESULTS = _OUTPUTS | _NATIVE_OUTPUTS | _JSON_OUTPUTS | {_SCREENSHOT, TOOL_SEARCH_OUTPUT}
_CALLS = frozenset(("function_call", "custom_tool_call", *NATIVE_CALLS))
_REFUSED: Mapping[str, str] = {
    "compaction": "it holds history that only its provider can read",
    "compaction_summary": "it holds history that only its provider can read",
    "context_compaction": "it holds history that only its provider can read",
    "compaction_trigger": "compaction is not available here: ask the model for a summary",
}
_LITERAL = _PROVIDER_ITEMS | _RESULTS - _OUTPUTS | frozenset(NATIVE_CALLS) | _ASIDE
"""Items that are compared by their JSON, not only by `==` (see `ReadCache.literal`)."""
_METADATA = ("id", "status", "fingerprint")
"""Fields of a provider's item that mean nothing to a model."""


def type_of(item: Mapping[str, Any], where: str = "") -> str:
    """The type of an item. Without a type it is a reference if it only has an id, else a message."""
    kind = optional_text(item, "type", where)
    return kind or (REFERENCE if "id" in item and "role" not in item else "message")


def kind_of(item: Mapping[str, Any]) -> ItemKind:
    """The role of an item that was read."""
    kind = type_of(item)
    if kind == "message":
        return ItemKind.TEXT if item["role"] == "assistant" else ItemKind.INPUT
    if kind == "reasoning":
        return ItemKind.REASONING
    if kind in _CALLS:
        return ItemKind.CALL
    if kind in _RESULTS:
        return ItemKind.RESULT
    return ItemKind.ASIDE if kind in _ASIDE else ItemKind.TEXT


def is_literal(item: Mapping[str, Any]) -> bool:
    """Whether an item that was read must be compared by its JSON, not only by `==`."""
    return item.get("type") in _LITERAL or isinstance(item.get("arguments"), dict)


def read_item(item: Any, where: str) -> Message | None:
    """The message of the item at path `where`; `None` if it has no content for the model."""
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
    if kind in _PROVIDER_ITEMS:
        return _provider_item(source, kind, where)
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
    """The reasoning: sealed in `encrypted_content`, else its content, else its summary."""
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
    if kind in NATIVE_CALLS:
        own = NATIVE_CALLS[kind]
        # A search by the provider has no call id.
        id = optional_text(source, "call_id", where) or optional_text(source, "id", where) or ""
        return ToolCall(id, own.type, native_call_arguments(own, source, where))
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
        return Message("tool", dump(functions).decode(), tool_call_id=id, name=TOOL_SEARCH.type)
    if kind in _NATIVE_OUTPUTS:
        # The id of a local shell's output is that of its call.
        id = id or optional_text(source, "id", where) or ""
        return Message("tool", native_result_text(source, kind, where), tool_call_id=id)
    if kind == _SCREENSHOT:
        where = path(where, "output")
        shown = as_object(source.get("output"), where)
        image = read_media(shown, required_text(shown, "type", where), 0, where)
        return Message("tool", tool_call_id=id, media=(image,))
    return Message("tool", _as_json(source), tool_call_id=id)


def _provider_item(source: Mapping[str, Any], kind: str, where: str) -> Message:
    """What a provider did, as JSON; a generated image as an image."""
    if kind != _GENERATED_IMAGE or not (data := optional_text(source, "result", where)):
        return Message("assistant", _as_json(source))
    form = optional_text(source, "output_format", where) or "png"
    image = media.from_base64("image", data, f"image/{form}", 0, path(where, "result"))
    return Message("assistant", _as_json(source, "result"), media=(image,))


def _as_json(source: Mapping[str, Any], *without: str) -> str:
    return dump({name: value for name, value in source.items() if name not in (*_METADATA, *without)}).decode()


_OURS = re.compile(r"[a-z]+_([0-9a-z]+)x([0-9]+)")
_MINTED = re.compile(r"(call[0-9a-z]{5,}|c[0-9a-z]{5})([0-9]{3})")
"""A call id that Towline minted: the turn, and the call's position in it."""
_FOLLOW = {
    ItemKind.REASONING: (ItemKind.REASONING, ItemKind.TEXT, ItemKind.CALL),
    ItemKind.TEXT: (ItemKind.CALL,),
    ItemKind.CALL: (ItemKind.CALL,),
}
"""What can come next in a turn."""


def item_id(prefix: str, answer: str, place: int) -> str:
    """The id of an item of ours; answer ids are lower-case hexadecimal."""
    return f"{prefix}_{answer}x{place}"


def parse_item_id(id: object) -> tuple[str, int] | None:
    """The answer, and the position in it, that an id of ours names."""
    found = _OURS.fullmatch(id) if isinstance(id, str) else None
    return (found[1], int(found[2])) if found else None


class TurnGrouping:
    """Groups items to messages, appended to existing ones."""

    def __init__(self, messages: list[Message], starts: list[int]):
        """`starts[i]` is the index of the first item of message `i`."""
        self._messages = messages
        self.starts = starts
        places = (place for place in reversed(range(len(messages))) if messages[place].role == "assistant")
        self._last = next(places, -1)
        """Index of the last assistant message, the only one that an item can join."""
        self._joined: dict[int, list[Message]] = {}
        """Per message, what joined it. Joined at the end: a turn may have very many calls."""

    def add(self, message: Message, items: Sequence[Any], index: int) -> None:
        """Add the message of `items[index]`."""
        assistant = message.role == "assistant"
        if assistant and _continues_turn(items, index):
            self._joined.setdefault(self._last, []).append(message)
            return
        if assistant:
            self._last = len(self._messages)
        self._messages.append(message)
        self.starts.append(index)

    def messages(self) -> list[Message]:
        """All messages; nothing can be added afterwards."""
        for place, parts in self._joined.items():
            self._messages[place] = _joined_message(self._messages[place], parts)
        return self._messages


def _continues_turn(items: Sequence[Any], index: int) -> bool:
    """Whether the item continues the turn before it."""
    apart = False
    for before in reversed(range(index)):
        if isinstance(items[before], tuple):
            return False
        kind = kind_of(items[before])
        if kind in _FOLLOW:
            return _same_turn(items[before], items[index], apart)
        if kind is ItemKind.INPUT:
            return False
        apart = apart or kind is ItemKind.RESULT
    return False


def _same_turn(before: Mapping[str, Any], item: Mapping[str, Any], apart: bool) -> bool:
    one, other = parse_item_id(before.get("id")), parse_item_id(item.get("id"))
    if one and other:
        return one[0] == other[0] and one[1] < other[1]
    kinds = kind_of(before), kind_of(item)
    if not apart:
        return kinds[1] in _FOLLOW[kinds[0]]
    return kinds == (ItemKind.CALL, ItemKind.CALL) and _called_joined_message(
        before.get("call_id"), item.get("call_id")
    )


def _called_joined_message(one: object, other: object) -> bool:
    """Whether two calls were sampled in the same turn."""
    if not isinstance(one, str) or not isinstance(other, str):
        return False
    # Some harnesses strip characters that are not alphanumeric, some insert them.
    first, second = (_MINTED.fullmatch("".join(filter(str.isalnum, id))) for id in (one, other))
    return bool(first and second and first[1] == second[1] and int(first[2]) < int(second[2]))


def _joined_message(first: Message, rest: Sequence[Message]) -> Message:
    parts = [first, *rest]
    return replace(
        first,
        text="".join(part.text for part in parts),
        reasoning="\n".join(part.reasoning for part in parts if part.reasoning) or None,
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
        media=tuple(item for part in parts for item in part.media),
        fingerprint=None,
    )
