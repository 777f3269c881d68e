"""Regular expressions of tenants, on RE2: matching takes time linear in the text, whatever the pattern.

RE2 has no look-around, no back-references, no possessive quantifiers and no repetition beyond 1000: constructs that need
backtracking, or a machine as large as their count. A pattern with one of them is refused where it is loaded, with the
construct in the error. `\\d`, `\\w`, `\\s` and `\\b` are ASCII; `$` is the very end of the text unless `(?m)` is set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Protocol

import re2

MAX_PATTERN = 2000
"""Longest pattern, in characters."""
_MEMORY = 4 * 1024 * 1024
"""Bytes of the compiled machine; a pattern that needs more is refused."""
_REFUSED = {
    "(?=": "look-ahead `(?=…)`",
    "(?!": "negative look-ahead `(?!…)`",
    "(?<=": "look-behind `(?<=…)`",
    "(?<!": "negative look-behind `(?<!…)`",
    "(?>": "the atomic group `(?>…)`",
    "(?P=": "the back-reference `(?P=…)`",
    "(?#": "the comment `(?#…)`",
    "(?x": "the flag `x`",
    "(?a": "the flag `a`",
    "(?u": "the flag `u`",
    "(?L": "the flag `L`",
    "\\Z": "`\\Z` (write `\\z`)",
}
_BACK_REFERENCE = re.compile(r"invalid escape sequence: \\([1-9])")
_POSSESSIVE = re.compile(r"bad repetition operator: ([*+?}]\+)")


class TextPattern(Protocol):
    """What removes text: a `LinearPattern`, or a pattern of ours that is known to be linear."""

    def sub(self, replacement: str, text: str, /) -> str: ...


class LinearPattern:
    """A compiled pattern with the methods of `re.Pattern` that Towline uses."""

    __slots__ = ("_compiled", "groups", "pattern")

    def __init__(self, pattern: str):
        self.pattern = pattern
        self._compiled = _compile(pattern)
        self.groups: int = self._compiled.groups

    def sub(self, replacement: str, text: str) -> str:
        """The text with every match replaced, literally."""
        data, by = _encoded(text), replacement.encode()
        parts, at = [], 0
        for match in self._compiled.finditer(data):
            start, end = match.span()
            if start == end:
                continue
            parts += [data[at:start], by]
            at = end
        if not at:
            return text
        return b"".join([*parts, data[at:]]).decode("utf-8", "surrogatepass")

    def search(self, text: str) -> bool:
        """Whether the pattern matches anywhere in the text."""
        return self._compiled.search(_encoded(text)) is not None

    def last(self, text: str) -> tuple[str, ...] | None:
        """The last match and its groups; a group that did not take part is empty."""
        found = None
        for found in self._compiled.finditer(_encoded(text)):  # noqa: B007  only the last counts
            pass
        if found is None:
            return None
        parts: Iterator[bytes | None] = (found.group(index) for index in range(self.groups + 1))
        return tuple((part or b"").decode("utf-8", "replace") for part in parts)

    def __repr__(self) -> str:
        return f"LinearPattern({self.pattern!r})"


def compile_pattern(pattern: str) -> LinearPattern:
    """The compiled pattern; `ValueError` naming what RE2 does not take."""
    return LinearPattern(pattern)


@lru_cache(maxsize=512)
def _compile(pattern: str) -> Any:
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"a pattern of {len(pattern)} characters exceeds the limit of {MAX_PATTERN}")
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MEMORY
    try:
        return re2.compile(pattern.encode(), options)
    except UnicodeEncodeError as error:
        raise ValueError(f"{pattern!r} is not Unicode text") from error
    except re2.error as error:
        raise ValueError(f"{pattern!r} {_reason(pattern, _said(error))}") from error


def _said(error: Exception) -> str:
    first = error.args[0] if error.args else ""
    return first.decode("utf-8", "replace") if isinstance(first, bytes) else str(first)


def _reason(pattern: str, said: str) -> str:
    for construct, name in _REFUSED.items():
        if construct in pattern and construct[:3] in said:
            return f"uses {name}, which RE2 does not support: it cannot be matched in linear time; rewrite it without"
    if found := _BACK_REFERENCE.search(said):
        return f"uses the back-reference `\\{found[1]}`, which RE2 does not support: rewrite it without"
    if found := _POSSESSIVE.search(said):
        return (
            f"uses the possessive quantifier `{found[1]}`, which RE2 does not support: `{found[1][0]}` is as fast here"
        )
    return f"is not a regular expression that RE2 accepts: {said}"


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
