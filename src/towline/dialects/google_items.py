"""Contents of a Google request, read into neutral messages.

Contents of the model that follow each other are one assistant message: a client may keep a streamed turn as it came, one
content for every piece. A user's content may hold function responses and text at once: each response becomes a `tool`
message, the rest one `user` message behind them. Field names are read in camel case and in snake case, as Google itself
reads them. A part of a kind that is not known is an error and not left out, because a model would miss it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from towline.conversation import Media, Message, ToolCall
from towline.dialects import media
from towline.dialects.google_fields import camel, field, needed_text
from towline.dialects.google_results import Results, result_text
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
from towline.dialects.sealed import unseal
from towline.dialects.sse import dump

_ROLES = {
    "user": "user",
    "model": "assistant",
    "assistant": "assistant",
    "function": "user",
    "tool": "user",
    "system": "system",
}
_KINDS = {"image": "image", "audio": "audio", "video": "video"}
_CARRIED = ("executableCode", "codeExecutionResult", "toolCall", "toolResponse")
"""What Google's own tools said and did: shown to the model as the JSON it is."""
_REMARKS = frozenset(
    (
        *("thought", "thoughtSignature", "partMetadata", "videoMetadata", "mediaResolution", "mediaProcessing"),
        *("speechMetadata", "audioTranscription"),
    )
)
"""Fields that say something about a part and are no data themselves."""
TEXT_ARGUMENTS = "__text__"
"""The one argument that stands for arguments which are a text and no object; on this wire they must be an object."""


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
    """Whether there are values in the item that Python's `==` does not tell apart (see `Known.literal`)."""
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
    """Whether an item is a content of the model."""
    return isinstance(item, dict) and item.get("role") in ("model", "assistant")


class Contents:
    """Reads contents one after the other behind the messages that are there already.

    `finish` must be called at the end: until then a turn of the model may still go on.
    """

    def __init__(self, messages: list[Message], starts: list[int]):
        self.messages = messages
        self.starts = starts
        """Of each message, the index of the first item that it was read from."""
        self._turn: _Turn | None = None

    def system(self, content: Any, index: int, where: str) -> None:
        """The system instruction; an empty one is none."""
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
    """Refuses a part whose data nobody has read."""
    for name, value in source.items():
        if value is not None and camel(name) not in _REMARKS:
            wrong_value(where, f"{quoted(name)} is not a kind of data that can stand here")


class _Shown:
    """Text and media of one message, in order."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.attached: list[Media] = []
        self._length = 0

    def add(self, source: Mapping[str, Any], where: str, *, again: bool = False) -> bool:
        """Take what a part shows; whether it showed anything. With `again`, media that is there already is left out."""
        item = read_media(source, self._length, where)
        if item is not None and not (again and any(item.digest == other.digest for other in self.attached)):
            self.attached.append(item)
        text = source.get("text")
        shown = as_text(text, path(where, "text")) if text is not None else _carried(source)
        if shown is not None:
            self.texts.append(shown)
            self._length += len(shown)
        return item is not None or shown is not None


class _Turn:
    """A turn of the model, put together from one content or several."""

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
        # A call without an id gets one of its place, so that its response can be told from others of the same name.
        id = optional_text(source, "id", where) or f"google{self._place:05d}{len(self._calls):03d}"
        arguments = read_arguments(source.get("args"), path(where, "args"))
        if not arguments and field(source, "partialArgs"):
            wrong_value(path(where, "partialArgs"), "arguments must be sent as a whole, in `args`")
        if isinstance(arguments, dict) and len(arguments) == 1:
            text = arguments.get(TEXT_ARGUMENTS)
            arguments = text if isinstance(text, str) else arguments
        return ToolCall(id, name, arguments)

    def message(self) -> Message:
        # What was sealed is what was sampled; thoughts in the open may be a client's own summary of them.
        reasoning = self._sealed or "".join(self._thoughts) or None
        shown = self._shown
        return Message("assistant", "".join(shown.texts), reasoning, tuple(self._calls), media=tuple(shown.attached))


def _unseal(signature: str) -> str | None:
    """Signatures are bytes to Google's clients, and some write them in the alphabet for URLs."""
    return unseal(signature.replace("-", "+").replace("_", "/"))


def _carried(source: Mapping[str, Any]) -> str | None:
    for name in _CARRIED:
        if (value := field(source, name)) is not None:
            return dump({name: value}).decode()
    return None


def _user(parts: Sequence[Any], where: str, before: Sequence[Message]) -> list[Message]:
    """The messages of a user's content, which may be none if all of it was said before."""
    sources = [_part(part, f"{where}.parts[{index}]") for index, part in enumerate(parts)]
    responses = [field(source, "functionResponse") for source in sources]
    results = Results(before, responses) if any(response is not None for response in responses) else None
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


def _response(response: Any, results: Results, where: str) -> Message | None:
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
    """The media of a part, if that is what it holds."""
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
