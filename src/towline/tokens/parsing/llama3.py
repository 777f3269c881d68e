"""Llama 3: a bare JSON object with `name` and `parameters` at the very start, or after `<|python_tag|>`.

Several calls stand one after another, with `;` between them. A bare object that is no call is an answer in JSON, which
is text and not an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from towline.tokens.parsing.base import ParsedCall
from towline.tokens.parsing.scan import Scan
from towline.tokens.parsing.tagged import Block, Tagged
from towline.tokens.parsing.values import Offered, call_from_object, encode, is_call_object

_TAG = "<|python_tag|>"
_ATTEMPT = re.compile(r'\{[ \t\r\n]*+"(?:name|parameters|arguments)"[ \t\r\n]*+:')


class Llama3(Tagged):
    name = "llama3"

    def opening(self, scan: Scan, start: int) -> int:
        if start in (scan.start, scan.taken):
            place = scan.skip(start)
            if scan.at("{", place):
                return place
        return scan.find(_TAG, start)

    def inside(self, scan: Scan, at: int) -> int:
        return scan.skip(at + len(_TAG)) if scan.at(_TAG, at) else at + 1

    def read(self, scan: Scan, at: int, inside: int, bound: int, offered: Offered) -> Block:
        tagged = scan.at(_TAG, at)
        start = inside if tagged else at
        found = scan.json(start, bound) if scan.at("{", start) else None
        if found is None:
            return Block(bound, None if tagged or _ATTEMPT.match(scan.text, at) else [])
        value, stop = found
        if not tagged and not (is_call_object(value) and ("parameters" in value or "arguments" in value)):
            return Block(stop, [])
        made = call_from_object(value, offered)
        if made is None:
            return Block(stop, None)
        after = scan.skip(stop)
        following = scan.skip(after, ";")
        if following > after:
            following = scan.skip(following)
            if following == scan.end or scan.at("{", following) or scan.at(_TAG, following):
                stop = following
        return Block(stop, [made])

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = [encode({"name": made.name, "parameters": made.arguments}) for made in calls]
        return _TAG * bool(after) + "; ".join(written)
