"""What travels over the wire: JSON, server-sent events, and sealed reasoning.

Sealed texts are opaque strings that clients carry and send back unchanged: signatures of thinking, encrypted reasoning. They
hold the reasoning itself, compressed, so that a client that keeps only the signature still sends the reasoning back. They
are neither secret nor authenticated: whatever a harness sends is unsealed with size limits, and foreign texts give nothing.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from typing import Any

from towline.common import exact_json
from towline.dialects.base import Response
from towline.errors import ApiError

JSON_HEADERS = {"content-type": "application/json"}
CONTENT_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
"""The end of an OpenAI stream."""
_LINE_BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
"""Characters that JSON leaves unescaped and that line readers built on `str.splitlines` take for a line end."""
_DEFAULT_RETRY = 1.0
"""Seconds that a client waits if the error does not say."""
_SEAL_MARK = b"TWL1"
_MAX_SEALED = 4 * 1024 * 1024


def dump(value: Any) -> bytes:
    """JSON for the wire. Also serializes lone surrogates and integers beyond 64 bits, which a model may sample."""
    return exact_json.dumps(value)


def dump_arguments(arguments: dict[str, Any] | str) -> str:
    """The arguments of a call as the string that OpenAI's dialects use."""
    return arguments if isinstance(arguments, str) else dump(arguments).decode()


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] = JSON_HEADERS) -> Response:
    return Response(status, dump(body), dict(headers))


def retry_seconds(error: ApiError) -> float:
    """Seconds after which the client may retry."""
    return max(0.0, _DEFAULT_RETRY if error.retry_after is None else error.retry_after)


def event(value: Any, name: str = "") -> bytes:
    """One event with a JSON value."""
    data = dump(value)
    for raw, escaped in _LINE_BREAKS:
        if raw in data:
            data = data.replace(raw, escaped)
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n" if name else b"data: " + data + b"\n\n"


def comment(text: str) -> bytes:
    """A line that every client skips; keeps the connection alive."""
    return b": " + text.encode() + b"\n\n"


def pieces(text: str, most: int = 4, least: int = 64) -> Iterator[str]:
    """The text in about `most` pieces of at least `least` characters, split after spaces where possible.

    The whole turn is known when it is streamed; it is split because clients display and assemble deltas.
    """
    size = max(least, -(-len(text) // most))
    start = 0
    while len(text) - start > size:
        cut = text.rfind(" ", start + size // 2, start + size) + 1 or start + size
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def seal(text: str) -> str:
    return b64encode(_SEAL_MARK + zlib.compress(text.encode("utf-8", "surrogatepass"), 1)).decode()


def unseal(sealed: str) -> str | None:
    """The text that was sealed; `None` for anything else."""
    if len(sealed) > _MAX_SEALED:
        return None
    try:
        data = b64decode(sealed, validate=True)
        if not data.startswith(_SEAL_MARK):
            return None
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data[len(_SEAL_MARK) :], _MAX_SEALED)
        return text.decode("utf-8", "surrogatepass") if unpacker.eof else None
    except (ValueError, zlib.error):
        return None
