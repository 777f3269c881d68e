"""LFM2: `<|tool_call_start|>` around a list of calls in Python notation, or around JSON.

Strings have either kind of quotes and Python escapes. A template may print them without escapes, so a line end, or a
backslash that begins no escape, stands for itself. Only literals are parsed; nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from towline.tokens.parsing.base import ParsedCall
from towline.tokens.parsing.tagged import CallBlock, Scanner, TaggedFormat, unreadable_call
from towline.tokens.parsing.values import (
    DeclaredTools,
    calls_from_list,
    decode,
    decode_at,
    encode,
    make_call,
    named_arguments,
)

_NAME = re.compile(r"[^\s()\[\]{}'\",=:<>|]++")
_NUMBER = re.compile(r"-?+\d++(?:\.\d++)?+(?:[eE][+-]?+\d++)?+")
_LITERALS: dict[str, Any] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_CODE = re.compile(r"\\u([0-9a-fA-F]{4})")
_MAX_DEPTH = 64


class Lfm2(TaggedFormat):
    """LFM2 and LFM2.5."""

    name = "lfm2"
    tags = ("<|tool_call_start|>", "<|tool_call_end|>")
    thinking_space = ("", "", "")

    def read(self, scan: Scanner, at: int, inside: int, bound: int, declared: DeclaredTools) -> CallBlock:
        found = self._json(scan, inside, bound, declared) or self._pythonic(scan, inside, bound, declared)
        if found is not None:
            place = scan.skip(found[1])
            if scan.at(self.tags[1], place):
                return CallBlock(place + len(self.tags[1]), found[0])
        return unreadable_call(scan, inside, bound, self.tags[1])

    def _json(
        self, scan: Scanner, inside: int, bound: int, declared: DeclaredTools
    ) -> tuple[list[ParsedCall], int] | None:
        start = scan.skip(inside)
        if not scan.at("{", scan.skip(start, "[")):
            return None
        found = scan.json(start, bound)
        if found is None:
            return None
        calls = calls_from_list(found[0], declared)
        return (calls, found[1]) if calls else None

    def _pythonic(
        self, scan: Scanner, inside: int, bound: int, declared: DeclaredTools
    ) -> tuple[list[ParsedCall], int] | None:
        reader = _PythonReader(scan.text, scan.skip(inside), scan.reach(bound))
        try:
            parsed = [make_call(name, arguments, declared) for name, arguments in reader.calls()]
        except ValueError:
            return None
        calls = [one for one in parsed if one is not None]
        return (calls, reader.place) if calls and len(calls) == len(parsed) else None

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = []
        for call in calls:
            pairs = [f"{key}={_written(value)}" for key, value in named_arguments(call).items()]
            written.append(f"{call.name}({', '.join(pairs)})")
        return f"{self.tags[0]}[{', '.join(written)}]{self.tags[1]}"


def _written(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
        return f"'{escaped}'"
    if isinstance(value, dict | list):
        return encode(value)
    return repr(value) if value is None or isinstance(value, bool) else encode(value)


class _PythonReader:
    """Parses calls from `place` on. Raises `ValueError` at anything else."""

    def __init__(self, text: str, place: int, end: int):
        self.text, self.place, self.end = text, place, end

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        listed = self._take("[")
        calls = [self._call()]
        while listed and self._take(","):
            calls.append(self._call())
        if listed:
            self._need("]")
        return calls

    def _call(self) -> tuple[str, dict[str, Any]]:
        name = self._match(_NAME)
        self._need("(")
        arguments: dict[str, Any] = {}
        while not self._take(")"):
            if arguments:
                self._need(",")
            key = self._match(_NAME)
            self._need("=")
            arguments[key] = self._value(0)
        return name, arguments

    def _value(self, depth: int) -> Any:
        self._skip()
        sign = self.text[self.place : self.place + 1]
        if depth > _MAX_DEPTH or self.place >= self.end:
            raise ValueError("expected a value")
        if sign in ("'", '"'):
            return self._string(sign)
        if sign in ("[", "{") and depth == 0:
            # Templates print lists and objects as JSON, models sometimes in Python notation.
            found = decode_at(self.text, self.place)
            if found is not None and found[1] <= self.end:
                self.place = found[1]
                return found[0]
        if sign == "[":
            return self._items(depth)
        if sign == "{":
            return self._object(depth)
        number = _NUMBER.match(self.text, self.place)
        if number is not None:
            self.place = number.end()
            read = decode(number[0])
            if read is None:
                raise ValueError("not a number")
            return read[0]
        word = self._match(_NAME)
        if word not in _LITERALS:
            raise ValueError(f"{word} is not a literal")
        return _LITERALS[word]

    def _items(self, depth: int) -> list[Any]:
        self._need("[")
        items: list[Any] = []
        while not self._take("]"):
            if items:
                self._need(",")
            items.append(self._value(depth + 1))
        return items

    def _object(self, depth: int) -> dict[str, Any]:
        self._need("{")
        fields: dict[str, Any] = {}
        while not self._take("}"):
            if fields:
                self._need(",")
            key = self._value(depth + 1)
            if not isinstance(key, str):
                raise ValueError("a key must be a string")
            self._need(":")
            fields[key] = self._value(depth + 1)
        return fields

    def _string(self, quote: str) -> str:
        pieces = list[str]()
        place = self.place + 1
        while place < self.end:
            sign = self.text[place]
            if sign == quote:
                self.place = place + 1
                return "".join(pieces)
            if sign == "\\" and place + 1 < self.end:
                code = _CODE.match(self.text, place)
                if code is not None:
                    pieces.append(chr(int(code[1], 16)))
                    place = code.end()
                    continue
                following = self.text[place + 1]
                pieces.append(_ESCAPES.get(following, "\\" + following))
                place += 2
                continue
            pieces.append(sign)
            place += 1
        raise ValueError("a string is not closed")

    def _skip(self) -> None:
        while self.place < self.end and self.text[self.place] in " \t\r\n":
            self.place += 1

    def _take(self, sign: str) -> bool:
        self._skip()
        if self.place < self.end and self.text[self.place] == sign:
            self.place += 1
            return True
        return False

    def _need(self, sign: str) -> None:
        if not self._take(sign):
            raise ValueError(f"{sign} is missing")

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._skip()
        found = pattern.match(self.text, self.place, self.end)
        if found is None:
            raise ValueError("expected a name")
        self.place = found.end()
        return found[0]
