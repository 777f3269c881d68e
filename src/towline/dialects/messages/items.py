"""Messages of an Anthropic request, read into neutral messages.

A user message may hold tool results and text at once: each result becomes a `tool` message, the rest one `user` message
after them. An assistant message is one neutral message: text blocks joined, thinking as reasoning, tool uses as calls; only
results of tools that ran at the provider occur inside it, and split it. Signatures, cache markers, citations and the like
mean nothing to a model and are dropped, so that a harness may add, move or remove them freely. A block of an unknown type is
an error, because dropping it would hide content from the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from towline.conversation import Media, Message, ToolCall
from towline.dialects import media
from towline.dialects.messages.parameters import Definitions, describe
from towline.dialects.reading import (
    as_object,
    as_text,
    check_depth,
    missing,
    optional_text,
    path,
    quoted,
    read_arguments,
    required_text,
    wrong_type,
    wrong_value,
)
from towline.dialects.wire import dump, unseal

Block = tuple[Mapping[str, Any], str, str]
"""A block, its type and its path."""

UNPARSED = "unparsed_arguments"
"""The argument name under which arguments travel that are not a JSON object, since a tool use only takes objects."""
_ROLES = ("user", "assistant", "system", "developer")
_CALLS = frozenset(("tool_use", "server_tool_use", "mcp_tool_use"))
_UNSHOWN = frozenset(("fallback", "mcp_tool_listing"))
"""Bookkeeping of the provider, which its models do not see either."""
_CHANGES = frozenset(("tool_addition", "tool_removal"))
_REFERENCES = _CHANGES | {"tool_reference"}
_TEXTUAL = frozenset(("text", "thinking", "redacted_thinking", "image", "document", "search_result", "compaction"))
"""Blocks of which only strings are read."""


def read_item(item: Any, where: str, tools: Definitions) -> list[Message]:
    """The neutral messages of one message; none if it only has settings."""
    source = as_object(item, where)
    check_depth(source, where)
    role = source.get("role")
    if role is None:
        missing(path(where, "role"))
    if as_text(role, path(where, "role")) not in _ROLES:
        wrong_value(path(where, "role"), f"{quoted(role)} is not one of {', '.join(_ROLES)}")
    content = source.get("content")
    if content is None:
        if role == "system" and source.get("output_config") is not None:
            return []
        missing(path(where, "content"))
    where = path(where, "content")
    if role in ("system", "developer"):
        return [Message("system", read_system(content, where, tools))]
    blocks = _blocks(content, where)
    return _assistant(blocks) if role == "assistant" else _user(blocks, tools)


def read_system(content: Any, where: str, tools: Definitions) -> str:
    """System text, given as a string or as blocks; blocks are joined by line breaks."""
    texts = []
    for block, kind, here in _blocks(content, where):
        if kind == "text":
            texts.append(_text(block, here))
        elif kind in _CHANGES:
            texts.append(_changed_tool(block, kind, here, tools))
        else:
            wrong_value(path(here, "type"), f"{quoted(kind)} is not supported in system text")
    return "\n".join(texts)


def joined(before: Message, after: Message) -> Message:
    """Two consecutive assistant messages as one turn."""
    thoughts = [thought for thought in (before.reasoning, after.reasoning) if thought]
    return Message(
        "assistant", before.text + after.text, "\n".join(thoughts) or None, before.tool_calls + after.tool_calls
    )


def is_assistant(item: Any) -> bool:
    return isinstance(item, dict) and item.get("role") == "assistant"


def holds_values(item: Mapping[str, Any]) -> bool:
    """Whether the item must be compared by its JSON, not only by `==` (see `ReadCache.literal`)."""
    return any(
        block["type"] not in _TEXTUAL
        and (block["type"] != "tool_result" or any(part["type"] not in _TEXTUAL for part in _parts(block)))
        for block in _parts(item)
    )


def refers_to_tools(item: Mapping[str, Any]) -> bool:
    """Whether the text of an item depends on the declared tools."""
    return any(
        block["type"] in _REFERENCES
        or (block["type"] == "tool_result" and any(part["type"] in _REFERENCES for part in _parts(block)))
        for block in _parts(item)
    )


def _parts(source: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The blocks of an item that was read."""
    content = source.get("content")
    return content if isinstance(content, list) else []


def _blocks(content: Any, where: str) -> Iterator[Block]:
    if isinstance(content, str):
        yield {"text": content}, "text", where
        return
    if not isinstance(content, list):
        wrong_type(where, "a string or an array of blocks", content)
    for index, block in enumerate(content):
        here = f"{where}[{index}]"
        yield as_object(block, here), required_text(block, "type", here), here


def _assistant(blocks: Iterable[Block]) -> list[Message]:
    messages: list[Message] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []

    def turn() -> Message:
        message = Message("assistant", "".join(texts), "\n".join(filter(None, thoughts)) or None, tuple(calls))
        for part in (texts, thoughts, calls):
            part.clear()
        return message

    for block, kind, where in blocks:
        if kind == "text":
            texts.append(_text(block, where))
        elif kind == "thinking":
            thoughts.append(_thinking(block, where))
        elif kind == "redacted_thinking":
            thoughts.append(unseal(as_text(block.get("data"), path(where, "data"))) or "")
        elif kind in _CALLS:
            calls.append(_call(block, where))
        elif kind.endswith("_tool_result"):
            if texts or thoughts or calls:
                messages.append(turn())
            messages.append(_provider_result(block, where))
        elif kind == "compaction":
            texts.append(optional_text(block, "content", where) or "")
        elif kind not in _UNSHOWN:
            wrong_value(path(where, "type"), f"{quoted(kind)} is not a supported block of an assistant message")
    if texts or thoughts or calls or not messages:
        messages.append(turn())
    return messages


def _thinking(block: Mapping[str, Any], where: str) -> str:
    """The thinking itself, or what its signature holds if the thinking was omitted."""
    return optional_text(block, "thinking", where) or unseal(optional_text(block, "signature", where) or "") or ""


def _call(block: Mapping[str, Any], where: str) -> ToolCall:
    name = required_text(block, "name", where)
    arguments = read_arguments(block.get("input"), path(where, "input"))
    if isinstance(arguments, dict) and len(arguments) == 1 and isinstance(arguments.get(UNPARSED), str):
        arguments = arguments[UNPARSED]
    return ToolCall(optional_text(block, "id", where) or "", name, arguments)


def _provider_result(block: Mapping[str, Any], where: str) -> Message:
    """The result of a tool that ran at the provider: its text, or its JSON."""
    id = required_text(block, "tool_use_id", where)
    content = block.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if isinstance(content, str) or content is None:
        text = content or ""
    else:
        text = "".join(texts) if texts and len(texts) == len(parts) else dump(content).decode()
    return Message("tool", text, tool_call_id=id)


def _user(blocks: Iterable[Block], tools: Definitions) -> list[Message]:
    messages: list[Message] = []
    shown = _Shown(tools)
    for block, kind, where in blocks:
        if kind == "tool_result":
            messages.append(_result(block, where, tools))
        else:
            shown.add(block, kind, where)
    text, attached = shown.finish()
    # Next to results, empty text is not a message.
    if text or attached or not messages:
        messages.append(Message("user", text, media=attached))
    return messages


def _result(block: Mapping[str, Any], where: str, tools: Definitions) -> Message:
    """A tool result. Only its text says whether it is an error; no template has a field for it."""
    id = required_text(block, "tool_use_id", where)
    shown = _Shown(tools)
    content = block.get("content")
    for part in () if content is None else _blocks(content, path(where, "content")):
        shown.add(*part)
    text, attached = shown.finish()
    return Message("tool", text, tool_call_id=id, media=attached)


class _Shown:
    """What blocks show a model: text, and media at their positions in it."""

    def __init__(self, tools: Definitions):
        self._tools = tools
        self._texts: list[str] = []
        self._media: list[Media] = []
        self._length = 0
        self._listing = False
        """Inside a run of tool references, which form one list."""

    def finish(self) -> tuple[str, tuple[Media, ...]]:
        self._end_list()
        return "".join(self._texts), tuple(self._media)

    def add(self, block: Mapping[str, Any], kind: str, where: str) -> None:
        if kind == "tool_reference":
            self._refer(required_text(block, "tool_name", where), where)
            return
        self._end_list()
        if kind == "text":
            self._write(_text(block, where))
        elif kind in ("image", "document"):
            self._attach(block, kind, where)
        elif kind == "search_result":
            found = _blocks(block.get("content"), path(where, "content"))
            head = (optional_text(block, field, where) for field in ("title", "source"))
            self._write("\n".join(filter(None, (*head, *(_text(part, here) for part, _, here in found)))))
        elif kind == "compaction":
            self._write(optional_text(block, "content", where) or "")
        elif kind == "browser_state":
            self._write(dump({key: block[key] for key in ("tabs", "state_changes") if key in block}).decode())
        elif kind in _CHANGES:
            self._write(_changed_tool(block, kind, where, self._tools))
        else:
            wrong_value(path(where, "type"), f"{quoted(kind)} is not a supported block of a user message")

    def _write(self, text: str) -> None:
        self._texts.append(text)
        self._length += len(text)

    def _refer(self, name: str, where: str) -> None:
        if not self._listing:
            self._write("<functions>\n")
            self._listing = True
        self._write(describe(name, self._tools.get(name), where))

    def _end_list(self) -> None:
        if self._listing:
            self._write("</functions>")
            self._listing = False

    def _attach(self, block: Mapping[str, Any], kind: str, where: str) -> None:
        for field in ("title", "context"):
            if head := optional_text(block, field, where):
                self._write(f"{head}\n")
        where = path(where, "source")
        source = as_object(block.get("source"), where)
        form = required_text(source, "type", where)
        name = "image" if kind == "image" else "file"
        if form == "base64":
            mime, data = required_text(source, "media_type", where), required_text(source, "data", where)
            self._media.append(media.from_base64(name, data, mime, self._length, path(where, "data")))
        elif form == "url":
            url = required_text(source, "url", where)
            self._media.append(media.from_url(name, url, self._length, path(where, "url")))
        elif form == "text" and kind == "document":
            self._write(as_text(source.get("data"), path(where, "data")))
        elif form == "content" and kind == "document":
            for part, inner, here in _blocks(source.get("content"), path(where, "content")):
                if inner not in ("text", "image"):
                    wrong_value(path(here, "type"), f"{quoted(inner)} is not supported in a document")
                self.add(part, inner, here)
        elif form == "file":
            wrong_value(path(where, "type"), "files are not stored here: send the data itself")
        else:
            wrong_value(path(where, "type"), f"{quoted(form)} is not a supported source")


def _changed_tool(block: Mapping[str, Any], kind: str, where: str, tools: Definitions) -> str:
    """Text that tells a model that a tool was added or removed. Tools of remote MCP servers are not run here."""
    where = path(where, "tool")
    changed = as_object(block.get("tool"), where)
    form = required_text(changed, "type", where)
    if form.startswith("mcp_"):
        return ""
    definition: Mapping[str, Any] | None
    if form == "tool_definition":
        where = path(where, "definition")
        definition = as_object(changed.get("definition"), where)
        name = optional_text(definition, "name", where) or ""
    else:
        name = required_text(changed, "name", where)
        definition = tools.get(name)
    if kind == "tool_removal":
        return f"The tool {name} is no longer available."
    line = describe(name, definition, where)
    return f"<functions>\n{line}</functions>" if line else ""


def _text(block: Mapping[str, Any], where: str) -> str:
    return as_text(block.get("text"), path(where, "text"))
