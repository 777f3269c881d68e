"""Server-sent events and JSON as they go onto the wire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from towline import exact_json

_LINE_BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
"""Characters that JSON leaves bare and that line readers built on `str.splitlines` take for the end of a line."""

CONTENT_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
"""What ends a stream of OpenAI's."""


def dump(value: Any) -> bytes:
    """JSON for the wire. A lone surrogate or an integer past 64 bits, which a model may sample, is written as well."""
    return exact_json.dumps(value)


def dump_arguments(arguments: dict[str, Any] | str) -> str:
    """The arguments of a call as the string that OpenAI's dialects carry."""
    return arguments if isinstance(arguments, str) else dump(arguments).decode()


def event(value: Any, name: str = "") -> bytes:
    """One event with a JSON value."""
    data = dump(value)
    for raw, escaped in _LINE_BREAKS:
        if raw in data:
            data = data.replace(raw, escaped)
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n" if name else b"data: " + data + b"\n\n"


def comment(text: str) -> bytes:
    """A line that every client skips: it keeps the connection alive and means nothing."""
    return b": " + text.encode() + b"\n\n"


def pieces(text: str, most: int = 4, least: int = 64) -> Iterator[str]:
    """The text in about `most` pieces of at least `least` characters, cut after spaces where there are any.

    The whole turn is known when it is streamed; pieces are there because clients show and assemble deltas.
    """
    size = max(least, -(-len(text) // most))
    start = 0
    while len(text) - start > size:
        cut = text.rfind(" ", start + size // 2, start + size) + 1 or start + size
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]
