"""LFM2: `<|tool_call_start|>` around a list of calls in Python's notation, or around JSON.

Strings stand in either kind of quotes with Python's escapes; a template may print them with none, so that a line end
or a backslash that begins no escape stands for itself. Only literals are read, nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from towline.tokens.parsing.base import ParsedCall
from towline.tokens.parsing.scan import Scan
from towline.tokens.parsing.tagged import Block, Tagged, broken
from towline.tokens.parsing.values import Offered, call, call_from_object, decode, decode_at, encode

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_NAME = re.compile(r"[^\s()\[\]{}'\",=:<>|]++")
_NUMBER = re.compile(r"-?+\d++(?:\.\d++)?+(?:[eE][+-]?+\d++)?+")
_WORDS: dict[str, Any] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_CODE = re.compile(r"\\u([0-9a-fA-F]{4})")
_DEEPEST = 64


class Lfm2(Tagged):
    name = "lfm2"
    thinking_space = ("", "", "")

    def opening(self, scan: Scan, start: int) -> int:
        return scan.find(_OPEN, start)

    def inside(self, scan: Scan, at: int) -> int:
        return at + len(_OPEN)

    def read(self, scan: Scan, at: int, inside: int, bound: int, offered: Offered) -> Block:
        found = self._json(scan, inside, bound, offered) or self._pythonic(scan, inside, bound, offered)
        if found is not None:
            place = scan.skip(found[1])
            if scan.at(_CLOSE, place):
                return Block(place + len(_CLOSE), found[0])
        return broken(scan, inside, bound, _CLOSE)

    def _json(self, scan: Scan, inside: int, bound: int, offered: Offered) -> tuple[list[ParsedCall], int] | None:
        start = scan.skip(inside)
        if not scan.at("{", scan.skip(start, "[")):
            return None
        found = scan.json(start, bound)
        if found is None:
            return None
        listed = found[0] if isinstance(found[0], list) else [found[0]]
        calls = [made for item in listed if (made := call_from_object(item, offered)) is not None]
        return (calls, found[1]) if calls and len(calls) == len(listed) else None

    def _pythonic(self, scan: Scan, inside: int, bound: int, offered: Offered) -> tuple[list[ParsedCall], int] | None:
        reader = _Reader(scan.text, scan.skip(inside), scan.reach(bound))
        try:
            made = [call(name, arguments, offered) for name, arguments in reader.calls()]
        except ValueError:
            return None
        calls = [one for one in made if one is not None]
        return (calls, reader.place) if calls and len(calls) == len(made) else None

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = []
        for made in calls:
            if isinstance(made.arguments, str):
                raise ValueError("arguments are keywords")
            pairs = [f"{key}={_written(value)}" for key, value in made.arguments.items()]
            written.append(f"{made.name}({', '.join(pairs)})")
        return f"{_OPEN}[{', '.join(written)}]{_CLOSE}"


def _written(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
        return f"'{escaped}'"
    if isinstance(value, dict | list):
        return encode(value)
    return repr(value) if value is None or isinstance(value, bool) else encode(value)


class _Reader:
    """Reads calls from `place` on. Raises `ValueError` at what is none."""

    def __init__(self, text: str, place: int, end: int):
        self.text, self.place, self.end = text, place, end

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        listed = self._take("[")
        made = [self._call()]
        while listed and self._take(","):
            made.append(self._call())
        if listed:
            self._need("]")
        return made

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
        if depth > _DEEPEST or self.place >= self.end:
            raise ValueError("no value")
        if sign in ("'", '"'):
            return self._string(sign)
        if sign in ("[", "{") and depth == 0:
            # Templates print lists and objects as JSON, models at times as Python does.
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
        if word not in _WORDS:
            raise ValueError(f"{word} is no literal")
        return _WORDS[word]

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
                raise ValueError("a key is a string")
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
            raise ValueError("no name")
        self.place = found.end()
        return found[0]
