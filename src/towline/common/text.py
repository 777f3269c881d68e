"""Text that is safe in a file name, a log line or a terminal."""

from __future__ import annotations

import json
import re

_SLUG_LENGTH = 60


def slug(text: str, default: str = "session") -> str:
    """The text as the beginning of an id: letters, digits, `.`, `_` and `-`, at most 60 characters."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:_SLUG_LENGTH] or default


def one_line(text: object, most: int = 300) -> str:
    """The text on one line, cut to `most` characters."""
    return " ".join(str(text).split())[:most]


def visible(text: str, *, lines: bool = False) -> str:
    """The text with non-printing characters made visible; `lines` keeps line breaks, after a mark."""
    if lines:
        return "↵\n".join(visible(line) for line in text.split("\n"))
    return re.sub(r"[^ -~]", _picture, text)


def inert(text: str) -> str:
    """The text with all characters made visible that a terminal acts on; line breaks and tabs stay."""
    return re.sub(r"[^ -~\n\t]", _picture, text)


def ascii_json(text: str) -> str:
    """JSON in ASCII: every other character, those that a terminal acts on included, as an escape."""
    return re.sub(r"[^\x00-~]", lambda match: json.dumps(match[0])[1:-1], text)


def _picture(match: re.Match[str]) -> str:
    character = match[0]
    code = ord(character)
    if character.isprintable():
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
