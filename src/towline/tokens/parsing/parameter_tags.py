"""Formats that write each argument as a bare value between tags of its own: Qwen3-Coder, Seed-OSS, GLM.

The tool's schema tells the type of a bare value (`values.typed_value`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from towline.tokens.parsing.base import SPACE, ParsedCall
from towline.tokens.parsing.tagged import CallBlock, Scanner, TaggedFormat, unreadable_call
from towline.tokens.parsing.values import DeclaredTools, bare, make_call, named_arguments, typed_value

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"([^<>\n]++)>")


class Qwen3Coder(TaggedFormat):
    """Qwen3-Coder, Qwen3.5 and later, Nemotron 3: `<function=name>` with bare `<parameter=key>` values.

    A value stands between one newline on each side, which is not part of it. The models sometimes leave out the
    surrounding `<tool_call>`; a complete `<function=…>…</function>` is a call without it too.
    """

    name = "qwen3_coder"
    tags = ("<tool_call>", "</tool_call>")
    around: ClassVar[str] = "\n"
    """What surrounds a value and is not part of it."""

    def opening(self, scan: Scanner, start: int) -> int:
        return min(scan.find(self.tags[0], start), scan.find(_FUNCTION, start))

    def inside(self, scan: Scanner, at: int) -> int:
        after = at + len(self.tags[0]) if scan.at(self.tags[0], at) else at
        function = scan.skip(after)
        return function + len(_FUNCTION) if scan.at(_FUNCTION, function) else after

    def read(self, scan: Scanner, at: int, inside: int, bound: int, declared: DeclaredTools) -> CallBlock:
        wrapped = scan.at(self.tags[0], at)
        name = _NAME.match(scan.text, inside) if scan.at(_FUNCTION, inside - len(_FUNCTION)) else None
        if name is None:
            return unreadable_call(scan, inside, bound, self.tags[1]) if wrapped else CallBlock(inside, [])
        found = self._parameters(scan, name.end(), scan.reach(bound))
        if found is not None:
            values, stop = found
            closing = scan.skip(stop)
            if scan.at(self.tags[1], closing):
                stop = closing + len(self.tags[1])
            if stop > closing or not wrapped:
                title = name[1].strip(SPACE)
                schema = declared.parameters(title)
                call = make_call(title, {key: typed_value(text, schema, key) for key, text in values}, declared)
                if call is not None:
                    return CallBlock(stop, [call])
        return unreadable_call(scan, inside, bound, self.tags[1] if wrapped else _FUNCTION_END)

    def _parameters(self, scan: Scanner, start: int, reach: int) -> tuple[list[tuple[str, str]], int] | None:
        """Keys with their text, and where the function ends."""
        spans = []
        place = scan.skip(start)
        while scan.at(_PARAMETER, place):
            key = _NAME.match(scan.text, place + len(_PARAMETER))
            stop = scan.find(_PARAMETER_END, key.end()) if key else scan.end
            if key is None or stop >= reach:
                return None
            spans.append((key[1].strip(SPACE), key.end(), stop))
            place = scan.skip(stop + len(_PARAMETER_END))
        if not scan.at(_FUNCTION_END, place):
            return None
        values = [(key, scan.text[a:b].removeprefix(self.around).removesuffix(self.around)) for key, a, b in spans]
        return values, place + len(_FUNCTION_END)

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = []
        for call in calls:
            parameters = [
                f"{_PARAMETER}{key}>{self.around}{bare(value)}{self.around}{_PARAMETER_END}\n"
                for key, value in named_arguments(call).items()
            ]
            function = f"{_FUNCTION}{call.name}>\n{''.join(parameters)}{_FUNCTION_END}"
            written.append(f"{self.tags[0]}\n{function}\n{self.tags[1]}")
        return "\n\n" * bool(after) + "\n".join(written)


class SeedOss(Qwen3Coder):
    """Seed-OSS: the same in `<seed:tool_call>`, nothing trimmed.

    The template prints values that are not strings as Python does, also lists and objects.
    """

    name = "seed_oss"
    tags = ("<seed:tool_call>", "</seed:tool_call>")
    thinking = (("<seed:think>", "</seed:think>"),)
    thinking_space = ("", "", "\n")
    around = ""


_GLM_VALUE, _GLM_VALUE_END = "<arg_value>", "</arg_value>"
_GLM_NAME = re.compile(r'[^\s<>{}"]++')
_GLM_KEY = re.compile(r"<arg_key>([^<>]++)</arg_key>")


class Glm(TaggedFormat):
    """GLM 4.5 and later: `<tool_call>name` with `<arg_key>` and bare `<arg_value>` pairs, on lines of their own or not."""

    name = "glm"
    tags = ("<tool_call>", "</tool_call>")
    thinking_space = ("", "", "\n")

    def read(self, scan: Scanner, at: int, inside: int, bound: int, declared: DeclaredTools) -> CallBlock:
        name = _GLM_NAME.match(scan.text, scan.skip(inside))
        found = self._values(scan, name.end(), scan.reach(bound)) if name else None
        if name is not None and found is not None:
            schema = declared.parameters(name[0])
            call = make_call(name[0], {key: typed_value(text, schema, key) for key, text in found[0]}, declared)
            if call is not None:
                return CallBlock(found[1], [call])
        return unreadable_call(scan, inside, bound, self.tags[1])

    def _values(self, scan: Scanner, start: int, reach: int) -> tuple[list[tuple[str, str]], int] | None:
        """Keys with their text, and where the call ends."""
        spans = []
        place = scan.skip(start)
        while key := _GLM_KEY.match(scan.text, place):
            value = scan.skip(key.end())
            stop = scan.find(_GLM_VALUE_END, value) if scan.at(_GLM_VALUE, value) else scan.end
            if stop >= reach:
                return None
            spans.append((key[1].strip(SPACE), value + len(_GLM_VALUE), stop))
            place = scan.skip(stop + len(_GLM_VALUE_END))
        if not scan.at(self.tags[1], place):
            return None
        return [(key, scan.text[a:b]) for key, a, b in spans], place + len(self.tags[1])

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = []
        for call in calls:
            pairs = [
                f"<arg_key>{key}</arg_key>\n{_GLM_VALUE}{bare(value)}{_GLM_VALUE_END}\n"
                for key, value in named_arguments(call).items()
            ]
            written.append(f"\n{self.tags[0]}{call.name}\n{''.join(pairs)}{self.tags[1]}")
        return "".join(written)
