"""Mistral: `[TOOL_CALLS]` and a JSON list of calls, or one call as `name[ARGS]{…}` or `name[CALL_ID]id[ARGS]{…}`.

Nothing closes a call but the end of its JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from towline.tokens.parsing.base import ParsedCall
from towline.tokens.parsing.scan import Scan
from towline.tokens.parsing.tagged import Block, Tagged
from towline.tokens.parsing.values import Offered, call, call_from_object, encode

_OPEN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_WORD = re.compile(r"[^\s\[\]{}]++")


class Mistral(Tagged):
    name = "mistral"
    thinking = (("[THINK]", "[/THINK]"), ("<think>", "</think>"))
    thinking_space = ("", "", "")
    native_ids = True

    def opening(self, scan: Scan, start: int) -> int:
        return scan.find(_OPEN, start)

    def inside(self, scan: Scan, at: int) -> int:
        return at + len(_OPEN)

    def read(self, scan: Scan, at: int, inside: int, bound: int, offered: Offered) -> Block:
        place = scan.skip(inside)
        if scan.at("[", place) or scan.at("{", place):
            return self._listed(scan, place, bound, offered)
        return self._named(scan, place, bound, offered)

    def _listed(self, scan: Scan, place: int, bound: int, offered: Offered) -> Block:
        found = scan.json(place, bound)
        if found is None:
            return Block(bound, None)
        listed = found[0] if isinstance(found[0], list) else [found[0]]
        calls = [call_from_object(value, offered) for value in listed]
        good = [made for made in calls if made is not None]
        # A list is one piece of text: with a call in it that cannot be read, it stays as it is.
        return Block(found[1], good if good and len(good) == len(calls) else None)

    def _named(self, scan: Scan, place: int, bound: int, offered: Offered) -> Block:
        name = _WORD.match(scan.text, place)
        if name is None:
            return Block(bound, None)
        place, native_id = scan.skip(name.end()), ""
        if scan.at(_ID, place):
            given = _WORD.match(scan.text, scan.skip(place, _ID))
            native_id = given[0] if given else ""
            place = scan.skip(given.end() if given else place)
        marked = scan.at(_ARGUMENTS, place)
        body = place + len(_ARGUMENTS) if marked else place
        start = scan.skip(body)
        custom = marked and offered.custom(name[0])
        found = scan.json(start, bound) if scan.at("{", start) or (marked and scan.at('"', start)) else None
        if custom and (found is None or isinstance(found[0], str) or scan.skip(found[1]) < bound):
            found = (scan.text[body:bound], bound)
        made = call(name[0], found[0], offered, native_id) if found else None
        return Block(found[1], [made]) if made and found else Block(bound, None)

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = []
        for made in calls:
            arguments = made.arguments if isinstance(made.arguments, str) else encode(made.arguments)
            native_id = f"{_ID}{made.native_id}" if made.native_id else ""
            written.append(f"{_OPEN}{made.name}{native_id}{_ARGUMENTS}{arguments}")
        return "".join(written)
