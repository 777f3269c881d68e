"""Images, audio and files in messages: identified by the digest of their bytes, passed on as a URL.

The same image as a data URL in two spellings has one digest. A remote file is identified by its URL, since nothing is
fetched here. Only `data:`, `http:` and `https:` are passed on to an engine: any other scheme would let a harness name files
on the engine's machine.
"""

from __future__ import annotations

from binascii import a2b_base64
from collections.abc import Mapping
from hashlib import sha256
from typing import Any
from urllib.parse import unquote_to_bytes

from towline.conversation import Media
from towline.dialects.reading import path, quoted, required_text, wrong_value

_AUDIO_TYPES = {"mp3": "audio/mpeg", "wav": "audio/wav"}


def from_url(kind: str, url: str, offset: int, where: str) -> Media:
    """Media of a data URL or a remote URL."""
    scheme = url[:8].lower()
    if scheme.startswith("data:"):
        head, comma, data = url.partition(",")
        if not comma:
            wrong_value(where, "it is a data URL without data")
        content = _decode(data, where) if head.lower().endswith(";base64") else unquote_to_bytes(data)
        return Media(kind, sha256(content).hexdigest(), url, offset)
    if not scheme.startswith(("http://", "https://")):
        wrong_value(where, "expected a data URL or an http(s) URL")
    return Media(kind, sha256(url.encode()).hexdigest(), url, offset)


def from_base64(kind: str, data: str, mime: str, offset: int, where: str) -> Media:
    """Media whose bytes are in the request as base64."""
    return Media(kind, sha256(_decode(data, where)).hexdigest(), f"data:{mime};base64,{data}", offset)


def from_file_data(data: str, offset: int, where: str) -> Media:
    """A file given as a data URL or as base64."""
    if data[:5].lower() == "data:":
        return from_url("file", data, offset, where)
    return from_base64("file", data, "application/octet-stream", offset, where)


def from_input_audio(source: Mapping[str, Any], offset: int, where: str) -> Media:
    """OpenAI's `input_audio`: base64 `data` with a `format`."""
    data, form = required_text(source, "data", where), required_text(source, "format", where)
    if form not in _AUDIO_TYPES:
        wrong_value(path(where, "format"), f"{quoted(form)} is not one of {', '.join(_AUDIO_TYPES)}")
    return from_base64("audio", data, _AUDIO_TYPES[form], offset, path(where, "data"))


def _decode(data: str, where: str) -> bytes:
    compact = "".join(data.split())
    try:
        return a2b_base64(compact, strict_mode=True)
    except ValueError:
        wrong_value(where, "it is not valid base64")
