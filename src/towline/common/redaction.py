"""Keys taken out of text: the keys of sessions and of the service never reach a log or a stored trajectory.

A key has a fixed shape, so it is found wherever it stands, also in text that an agent printed. Token ids are never changed:
rows stay what the model saw.
"""

from __future__ import annotations

import re
from typing import Any

_SHAPE = r"(?<![A-Za-z0-9])(tlk?-)[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])"
_TEXT = re.compile(_SHAPE)
_BYTES = re.compile(_SHAPE.encode())
_UNFINISHED = re.compile(rb"(?<![A-Za-z0-9])t(?:l(?:k?(?:-[A-Za-z0-9_-]{0,43})?)?)?\Z")
"""What may be the beginning of a key at the end of a piece of a stream."""
MARK = "[redacted]"


def redact(text: str) -> str:
    """The text with every key replaced by a mark."""
    return _TEXT.sub(rf"\1{MARK}", text) if "tl" in text else text


def redact_bytes(data: bytes) -> bytes:
    return _BYTES.sub(rb"\1" + MARK.encode(), data)


def redact_value(value: Any) -> Any:
    """A JSON value with every key in its strings replaced; the same object if it has none."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        items = [redact_value(one) for one in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        fields = {redact(name): redact_value(one) for name, one in value.items()}
        same = all(name in value and fields[name] is value[name] for name in fields)
        return value if same else fields
    return value


class StreamRedactor:
    """Redacts a stream that comes in pieces: what may be the beginning of a key is held back until its end is known."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        data = self._held + data
        found = _UNFINISHED.search(data, max(0, len(data) - 50))
        cut = found.start() if found else len(data)
        self._held = data[cut:]
        return redact_bytes(data[:cut])

    def close(self) -> bytes:
        """What was held back to the end of the stream."""
        held, self._held = self._held, b""
        return redact_bytes(held)
