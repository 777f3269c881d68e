"""Text and media inside the items of OpenAI's responses: the content of messages and the output of tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from towline.conversation import Media
from towline.dialects import media
from towline.dialects.reading import (
    as_object,
    as_text,
    optional_text,
    path,
    quoted,
    required_text,
    wrong_type,
    wrong_value,
)

_TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
"""Types of parts that are text, and the field that holds it."""
_IMAGES = ("input_image", "computer_screenshot")
_AUDIO_TYPES = {"mp3": "audio/mpeg", "wav": "audio/wav"}


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
    """An image, sound or file; a part of a type that is not known is an error, because a model would miss it."""
    if kind in _IMAGES:
        return _image(part, offset, where)
    if kind == "input_file":
        return _file(part, offset, where)
    if kind != "input_audio":
        wrong_value(path(where, "type"), f"{quoted(kind)} is not a supported type of part")
    where = path(where, kind)
    source = as_object(part.get(kind), where)
    data, form = required_text(source, "data", where), required_text(source, "format", where)
    if form not in _AUDIO_TYPES:
        wrong_value(path(where, "format"), f"{quoted(form)} is not one of {', '.join(_AUDIO_TYPES)}")
    return media.from_base64("audio", data, _AUDIO_TYPES[form], offset, path(where, "data"))


def _image(part: Mapping[str, Any], offset: int, where: str) -> Media:
    url, where_url = part.get("image_url"), path(where, "image_url")
    if isinstance(url, dict):
        # The shape of chat completions, which some clients send here too.
        url, where_url = url.get("url"), path(where_url, "url")
    if url is None:
        wrong_value(where, "no files are stored here, so `image_url` is needed")
    return media.from_url("image", as_text(url, where_url), offset, where_url)


def _file(part: Mapping[str, Any], offset: int, where: str) -> Media:
    if data := optional_text(part, "file_data", where):
        if data[:5].lower() == "data:":
            return media.from_url("file", data, offset, path(where, "file_data"))
        return media.from_base64("file", data, "application/octet-stream", offset, path(where, "file_data"))
    if url := optional_text(part, "file_url", where):
        return media.from_url("file", url, offset, path(where, "file_url"))
    wrong_value(where, "no files are stored here, so `file_data` or `file_url` is needed")
