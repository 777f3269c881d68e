"""Where the answer is in what an agent said: the last box, else what follows the last `answer:`, else the last line."""

from __future__ import annotations

import re
from enum import StrEnum

MOST = 2000
"""Characters of an answer; what is longer is none."""
_BOXES = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=[^\s{]))")
_LABEL = re.compile(
    r"(?:(?:the\s+)?(?:final|correct)\s+answer|(?<![\w])answer)\s*(?:is\b|[:=])\s*[:=]?\s*", re.IGNORECASE
)
_MARKS = re.compile(r"^(?:[\s>*_#`]|[-+]\s)+|[\s*_`]+$")


class Where(StrEnum):
    BOXED = "boxed"
    LABELLED = "labelled"
    LAST_LINE = "last_line"


def extract(text: str) -> tuple[str, Where] | None:
    """The answer and where it stood; `None` if there is no text at all."""
    if (boxed := _last_box(text)) is not None:
        return boxed.strip()[:MOST], Where.BOXED
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    labels = list(_LABEL.finditer(text))
    if labels:
        rest = text[labels[-1].end() :]
        # Markup may stand between the label and the answer, which may also be on the next line.
        line = next((line for line in rest.splitlines() if line.strip(" *_`#>-")), "")
        if line:
            return _plain(line)[:MOST], Where.LABELLED
    return _plain(lines[-1])[:MOST], Where.LAST_LINE


def shorter(line: str) -> list[str]:
    """What the answer may be in a sentence, most likely first: what stands after its last `=` or `is`, its one number."""
    found = []
    for mark in ("=", " is ", " are ", ": "):
        _, there, after = line.rpartition(mark)
        if there and after.strip():
            found.append(_plain(after))
    numbers = re.findall(r"(?<![\w.])[-+]?\$?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?%?", line)
    if len(numbers) == 1:
        found.append(numbers[0].rstrip(","))
    return found


def _last_box(text: str) -> str | None:
    boxes = list(_BOXES.finditer(text))
    if not boxes:
        return None
    last = boxes[-1]
    if not last[0].endswith("{"):
        return text[last.end() : last.end() + 1]
    depth = 1
    for index in range(last.end(), min(len(text), last.end() + 4 * MOST)):
        character = text[index]
        if text[index - 1] == "\\" and character in "{}":
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[last.end() : index]
    return None


def _plain(line: str) -> str:
    """A line without marks of emphasis, quotes and lists, and without the full stop that ends a sentence."""
    line = _MARKS.sub("", line).strip()
    return re.sub(r"(?<=[^.])\.$", "", line).strip()
