"""Contents of a Google request, read into neutral messages.

Consecutive model contents are one assistant message: a client may keep a streamed turn as it came, one content per chunk. A
user content may hold function responses and text at once: each response becomes a `tool` message, the rest one `user`
message after them. Field names are read in camel case and snake case, as Google itself does. A part of an unknown kind is
an error, because dropping it would hide content from the model.

Function responses come in any order, in one content or several, with ids or without (Google's Python client drops them),
and Gemini CLI sends those of a resumed session twice. An id names its call; without one, or with an unknown one, a response
answers the first open call of its name. A repeated response is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from towline.conversation import Media, Message, ToolCall
from towline.dialects import media
from towline.dialects.google.parameters import camel, field, needed_text
from towline.dialects.reading import (
    as_list,
    as_object,
    as_text,
    check_depth,
    missing,
    optional_flag,
    optional_text,
    path,
    quoted,
    read_arguments,
    required_text,
    wrong_value,
)
from towline.dialects.wire import dump, unseal

_OUTPUTS = frozenset(("output", "result", "content", "error"))
"""A response with one of these as its only field is the value of that field, if it is text."""


class FunctionResponses:
    """The calls of the model's last turn and the responses to them, as they are read."""

    def __init__(self, before: Sequence[Message], responses: Sequence[Any]):
        """`before` are the messages so far; `responses` all responses of the content that is being read."""
        self._open: list[ToolCall] = []
        self._given: list[Message] = []
        start = len(before)
        while start and before[start - 1].role != "assistant":
            start -= 1
        if start:
            self._open += before[start - 1].tool_calls
        for message in before[start:]:
            if message.role == "tool":
                self._close(self._named(message.tool_call_id))
                self._given.append(message)
        self._ids = {response.get("id") for response in responses if _has_id(response)}

    def take(self, response: Mapping[str, Any], text: str, attached: tuple[Media, ...], where: str) -> Message | None:
        """The response as a message; `None` if it repeats an earlier one."""
        id = optional_text(response, "id", where) or ""
        call = self._named(id)
        name = optional_text(response, "name", where) or (call.name if call else "")
        name = name or required_text(response, "name", where)
        call = call or self._first(name)
        if call is None and any(_same(message, id, name, text, attached) for message in self._given):
            return None
        self._close(call)
        message = Message("tool", text, tool_call_id=call.id if call else id, name=name, media=attached)
        self._given.append(message)
        return message

    def _named(self, id: str) -> ToolCall | None:
        return next((call for call in self._open if call.id == id), None) if id else None

    def _first(self, name: str) -> ToolCall | None:
        """The first open call of that name that no response of this content names by id."""
        return next((call for call in self._open if call.name == name and call.id not in self._ids), None)

    def _close(self, call: ToolCall | None) -> None:
        if call is not None:
            self._open.remove(call)


def _has_id(response: Any) -> bool:
    return isinstance(response, dict) and isinstance(response.get("id"), str)


def _same(message: Message, id: str, name: str, text: str, attached: tuple[Media, ...]) -> bool:
    return (
        (not id or message.tool_call_id == id)
        and message.name == name
        and message.text == text
        and message.media == attached
    )


def result_text(source: Mapping[str, Any], where: str) -> str:
    """The text of a response: that of its only field, or of the parts in it; anything else as JSON."""
    return _text(source.get("response"), optional_text(source, "name", where) or "")


def _text(response: Any, name: str) -> str:
    if not isinstance(response, dict):
        return _written(response)
    significant = {key: value for key, value in response.items() if not _is_insignificant(key, value, response, name)}
    if not significant and _OUTPUTS.issuperset(response):
        return ""
    if len(significant) == 1:
        ((key, value),) = significant.items()
        if key in _OUTPUTS:
            if isinstance(value, list) and value and all(_is_text(part) for part in value):
                return "".join(part["text"] for part in value)
            if isinstance(value, dict) and isinstance(value.get("content"), list):
                # The result of an MCP tool inside the result of the function.
                return _text(value, name)
            if key != "error" or isinstance(value, str):
                return _written(value)
    return _written(response)


def _is_insignificant(key: str, value: Any, response: Mapping[str, Any], name: str) -> bool:
    """Nulls, an MCP result's `isError: false`, and the function's own name next to its content."""
    if key == "name":
        return bool(value == name and "content" in response)
    return value is None or (key == "isError" and value is False)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _written(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else dump(value).decode()


_ROLES = {
    "user": "user",
    "model": "assistant",
    "assistant": "assistant",
    "function": "user",
    "tool": "user",
    "system": "system",
}
_KINDS = {"image": "image", "audio": "audio", "video": "video"}
_AS_JSON = ("executableCode", "codeExecutionResult", "toolCall", "toolResponse")
"""Parts of Google's own tools: shown to the model as JSON."""
_METADATA = frozenset(
    (
        *("thought", "thoughtSignature", "partMetadata", "videoMetadata", "mediaResolution", "mediaProcessing"),
        *("speechMetadata", "audioTranscription"),
    )
)
"""Fields with metadata about a part."""
TEXT_ARGUMENTS = "__text__"
"""The argument name under which text arguments travel, since this dialect only takes objects."""


def read_system(content: Any, where: str) -> str:
    """System text: a content, a list of parts, one part, or a string."""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        parts = [content] if "text" in content and "parts" not in content else _parts(content, where)
    else:
        parts = as_list(content, where)
    texts = []
    for index, part in enumerate(parts):
        here = f"{where}.parts[{index}]"
        texts.append(part if isinstance(part, str) else as_text(as_object(part, here).get("text"), path(here, "text")))
    return "\n".join(texts)


def holds_numbers(item: Any) -> bool:
    """Whether the item has values that Python's `==` does not tell apart (see `ReadCache.literal`)."""
    values = [item]
    while values:
        value = values.pop()
        if isinstance(value, (bool, int, float)):
            return True
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
    return False


def is_model(item: Any) -> bool:
    """Whether an item is a model content."""
    return isinstance(item, dict) and item.get("role") in ("model", "assistant")


class ContentsReader:
    """Reads contents one by one and appends them to the messages.

    `finish` must be called at the end: until then a turn of the model may still continue.
    """

    def __init__(self, messages: list[Message], starts: list[int]):
        self.messages = messages
        self.starts = starts
        """Per message, the index of the first item that it was read from."""
        self._turn: _Turn | None = None

    def system(self, content: Any, index: int, where: str) -> None:
        """The system instruction; an empty one is skipped."""
        check_depth(content, where)
        text = read_system(content, where)
        if text:
            self._add(Message("system", text), index)

    def read(self, item: Any, index: int, where: str) -> None:
        """One content."""
        if isinstance(item, str):
            item = {"parts": [item]}
        source = as_object(item, where)
        check_depth(source, where)
        name = optional_text(source, "role", where) or "user"
        if name not in _ROLES:
            wrong_value(path(where, "role"), f"{quoted(name)} is not one of user, model")
        role = _ROLES[name]
        if role == "assistant":
            if self._turn is None:
                self._turn = _Turn(len(self.messages))
                self.starts.append(index)
            self._turn.add(_parts(source, where), where)
            return
        self.finish()
        if role == "system":
            self._add(Message("system", read_system(source, where)), index)
            return
        for message in _user(_parts(source, where), where, self.messages):
            self._add(message, index)

    def finish(self) -> None:
        if self._turn is not None:
            self.messages.append(self._turn.message())
            self._turn = None

    def _add(self, message: Message, index: int) -> None:
        self.messages.append(message)
        self.starts.append(index)


def _parts(source: Mapping[str, Any], where: str) -> list[Any]:
    parts = source.get("parts")
    if parts is None:
        missing(path(where, "parts"))
    return [parts] if isinstance(parts, dict) else as_list(parts, path(where, "parts"))


def _part(part: Any, where: str) -> dict[str, Any]:
    return {"text": part} if isinstance(part, str) else as_object(part, where)


def _check_empty(source: Mapping[str, Any], where: str) -> None:
    """Refuse a part with data that was not read."""
    for name, value in source.items():
        if value is not None and camel(name) not in _METADATA:
            wrong_value(where, f"{quoted(name)} is not a supported kind of data here")


class _Shown:
    """Text and media of one message, in order."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.attached: list[Media] = []
        self._length = 0

    def add(self, source: Mapping[str, Any], where: str, *, again: bool = False) -> bool:
        """Add the text and media of a part; returns whether it has any. With `again`, known media is skipped."""
        item = read_media(source, self._length, where)
        if item is not None and not (again and any(item.digest == other.digest for other in self.attached)):
            self.attached.append(item)
        text = source.get("text")
        shown = as_text(text, path(where, "text")) if text is not None else _as_json(source)
        if shown is not None:
            self.texts.append(shown)
            self._length += len(shown)
        return item is not None or shown is not None


class _Turn:
    """A turn of the model, from one content or several."""

    def __init__(self, place: int):
        self._place = place
        self._shown = _Shown()
        self._thoughts: list[str] = []
        self._sealed: str | None = None
        self._calls: list[ToolCall] = []

    def add(self, parts: Sequence[Any], where: str) -> None:
        for index, part in enumerate(parts):
            here = f"{where}.parts[{index}]"
            source = _part(part, here)
            signature = field(source, "thoughtSignature")
            if self._sealed is None and isinstance(signature, str):
                self._sealed = _unseal(signature)
            thought = source.get("text") if optional_flag(source, "thought", here) else None
            if thought is not None:
                self._thoughts.append(as_text(thought, path(here, "text")))
                continue
            shown = self._shown.add(source, here)
            if (call := field(source, "functionCall")) is not None:
                self._calls.append(self._call(call, path(here, "functionCall")))
            elif not shown:
                _check_empty(source, here)

    def _call(self, call: Any, where: str) -> ToolCall:
        source = as_object(call, where)
        name = required_text(source, "name", where)
        # A call without an id gets one from its position, to tell its response from others of the same name.
        id = optional_text(source, "id", where) or f"google{self._place:05d}{len(self._calls):03d}"
        arguments = read_arguments(source.get("args"), path(where, "args"))
        if not arguments and field(source, "partialArgs"):
            wrong_value(path(where, "partialArgs"), "send complete arguments in `args`")
        if isinstance(arguments, dict) and len(arguments) == 1:
            text = arguments.get(TEXT_ARGUMENTS)
            arguments = text if isinstance(text, str) else arguments
        return ToolCall(id, name, arguments)

    def message(self) -> Message:
        # The sealed text is what was sampled; open thoughts may be a summary by the client.
        reasoning = self._sealed or "".join(self._thoughts) or None
        shown = self._shown
        return Message("assistant", "".join(shown.texts), reasoning, tuple(self._calls), media=tuple(shown.attached))


def _unseal(signature: str) -> str | None:
    """Signatures are bytes to Google's clients; some encode them in URL-safe base64."""
    return unseal(signature.replace("-", "+").replace("_", "/"))


def _as_json(source: Mapping[str, Any]) -> str | None:
    for name in _AS_JSON:
        if (value := field(source, name)) is not None:
            return dump({name: value}).decode()
    return None


def _user(parts: Sequence[Any], where: str, before: Sequence[Message]) -> list[Message]:
    """The messages of a user content; none if it only repeats earlier responses."""
    sources = [_part(part, f"{where}.parts[{index}]") for index, part in enumerate(parts)]
    responses = [field(source, "functionResponse") for source in sources]
    results = FunctionResponses(before, responses) if any(response is not None for response in responses) else None
    messages: list[Message] = []
    shown = _Shown()
    repeated = False
    for index, (source, response) in enumerate(zip(sources, responses, strict=True)):
        here = f"{where}.parts[{index}]"
        if response is not None and results is not None:
            message = _response(response, results, path(here, "functionResponse"))
            repeated = message is None
            if message is not None:
                messages.append(message)
        if not shown.add(source, here, again=repeated) and response is None:
            _check_empty(source, here)
    if shown.texts or shown.attached or results is None:
        messages.append(Message("user", "".join(shown.texts), media=tuple(shown.attached)))
    return messages


def _response(response: Any, results: FunctionResponses, where: str) -> Message | None:
    source = as_object(response, where)
    text = result_text(source, where)
    attached = []
    for index, part in enumerate(as_list(field(source, "parts") or [], path(where, "parts"))):
        here = f"{where}.parts[{index}]"
        item = read_media(as_object(part, here), len(text), here)
        if item is None:
            _check_empty(part, here)
        else:
            attached.append(item)
    return results.take(source, text, tuple(attached), where)


def read_media(source: Mapping[str, Any], offset: int, where: str) -> Media | None:
    """The media of a part, if it has any."""
    if (data := field(source, "inlineData")) is not None:
        where = path(where, "inlineData")
        mime = needed_text(as_object(data, where), "mimeType", where)
        content = "".join(needed_text(data, "data", where).split()).replace("-", "+").replace("_", "/")
        content += "=" * (-len(content) % 4)
        return media.from_base64(_KINDS.get(mime.split("/")[0], "file"), content, mime, offset, path(where, "data"))
    if (file := field(source, "fileData")) is not None:
        where = path(where, "fileData")
        uri = needed_text(as_object(file, where), "fileUri", where)
        mime = as_text(field(file, "mimeType") or "", path(where, "mimeType"))
        return media.from_url(_KINDS.get(mime.split("/")[0], "file"), uri, offset, path(where, "fileUri"))
    return None
