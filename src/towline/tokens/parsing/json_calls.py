"""Formats that write a call as a JSON object, alone or in a list: Hermes, Llama 3, Mistral, GigaChat, Apertus, Apriel,
Command R7B, Nemotron.

A list of calls is one piece of text: if one call in it cannot be parsed, the whole list stays in the text.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from towline.conversation import Tool
from towline.tokens.parsing.base import SPACE, ParsedCall, ParsedReply
from towline.tokens.parsing.tagged import CallBlock, Scanner, TaggedFormat, unreadable_call
from towline.tokens.parsing.values import (
    DeclaredTools,
    bare,
    call_from_object,
    calls_from_list,
    encode,
    is_call_object,
    make_call,
)

_PYTHON_TAG = "<|python_tag|>"
_ATTEMPTED_CALL = re.compile(r'\{[ \t\r\n]*+"(?:name|parameters|arguments)"[ \t\r\n]*+:')
_MISTRAL_ID, _MISTRAL_ARGUMENTS = "[CALL_ID]", "[ARGS]"
_MISTRAL_WORD = re.compile(r"[^\s\[\]{}]++")
_RESPONSE, _RESPONSE_END = "<|START_RESPONSE|>", "<|END_RESPONSE|>"
_COMMAND_KEYS = frozenset(("tool_call_id", "tool_name", "parameters"))


class Hermes(TaggedFormat):
    """Hermes, Qwen2.5, Qwen3: `<tool_call>` around a JSON object with `name` and `arguments`."""

    name = "hermes"
    tags = ("<tool_call>", "</tool_call>")

    def read(self, scan: Scanner, at: int, inside: int, bound: int, declared: DeclaredTools) -> CallBlock:
        found = scan.json(scan.skip(inside), bound)
        if found is not None:
            place = scan.skip(found[1])
            call = call_from_object(found[0], declared)
            if call is not None and scan.at(self.tags[1], place):
                return CallBlock(place + len(self.tags[1]), [call])
        return unreadable_call(scan, inside, bound, self.tags[1])

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        open, close = self.tags
        written = [f"{open}\n{encode({'name': call.name, 'arguments': call.arguments})}\n{close}" for call in calls]
        return "\n" * bool(after) + "\n".join(written)


class GigaChat(TaggedFormat):
    """GigaChat 3: `<|function_call|>` and a JSON object with `name` and `arguments`; only its end closes it."""

    name = "gigachat"
    tags = ("<|function_call|>", "")

    def read(self, scan: Scanner, at: int, inside: int, bound: int, declared: DeclaredTools) -> CallBlock:
        found = scan.json(scan.skip(inside), bound)
        call = call_from_object(found[0], declared) if found else None
        return CallBlock(found[1], [call]) if found and call else CallBlock(bound, None)

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        return "".join(f"{self.tags[0]}{encode({'name': call.name, 'arguments': call.arguments})}" for call in calls)


class Llama3(TaggedFormat):
    """Llama 3: a bare JSON object with `name` and `parameters` at the very start, or after `<|python_tag|>`.

    Several calls follow one another, separated by `;`. A bare object that is not a call is an answer in JSON: text, not an
    error.
    """

    name = "llama3"

    def opening(self, scan: Scanner, start: int) -> int:
        if start in (scan.start, scan.taken):
            place = scan.skip(start)
            if scan.at("{", place):
                return place
        return scan.find(_PYTHON_TAG, start)

    def inside(self, scan: Scanner, at: int) -> int:
        return scan.skip(at + len(_PYTHON_TAG)) if scan.at(_PYTHON_TAG, at) else at + 1

    def read(self, scan: Scanner, at: int, inside: int, bound: int, declared: DeclaredTools) -> CallBlock:
        tagged = scan.at(_PYTHON_TAG, at)
        start = inside if tagged else at
        found = scan.json(start, bound) if scan.at("{", start) else None
        if found is None:
            return CallBlock(bound, None if tagged or _ATTEMPTED_CALL.match(scan.text, at) else [])
        value, stop = found
        if not tagged and not (is_call_object(value) and ("parameters" in value or "arguments" in value)):
            return CallBlock(stop, [])
        call = call_from_object(value, declared)
        if call is None:
            return CallBlock(stop, None)
        after = scan.skip(stop)
        following = scan.skip(after, ";")
        if following > after:
            following = scan.skip(following)
            if following == scan.end or scan.at("{", following) or scan.at(_PYTHON_TAG, following):
                stop = following
        return CallBlock(stop, [call])

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = [encode({"name": call.name, "parameters": call.arguments}) for call in calls]
        return _PYTHON_TAG * bool(after) + "; ".join(written)


class Mistral(TaggedFormat):
    """Mistral: `[TOOL_CALLS]` and a JSON list of calls, or one call as `name[ARGS]{…}` or `name[CALL_ID]id[ARGS]{…}`.

    Only the end of its JSON closes a call.
    """

    name = "mistral"
    tags = ("[TOOL_CALLS]", "")
    thinking = (("[THINK]", "[/THINK]"), ("<think>", "</think>"))
    thinking_space = ("", "", "")
    native_ids = True

    def read(self, scan: Scanner, at: int, inside: int, bound: int, declared: DeclaredTools) -> CallBlock:
        place = scan.skip(inside)
        if scan.at("[", place) or scan.at("{", place):
            found = scan.json(place, bound)
            return CallBlock(bound, None) if found is None else CallBlock(found[1], calls_from_list(found[0], declared))
        return self._named(scan, place, bound, declared)

    def _named(self, scan: Scanner, place: int, bound: int, declared: DeclaredTools) -> CallBlock:
        name = _MISTRAL_WORD.match(scan.text, place)
        if name is None:
            return CallBlock(bound, None)
        place, native_id = scan.skip(name.end()), ""
        if scan.at(_MISTRAL_ID, place):
            given = _MISTRAL_WORD.match(scan.text, scan.skip(place, _MISTRAL_ID))
            native_id = given[0] if given else ""
            place = scan.skip(given.end() if given else place)
        marked = scan.at(_MISTRAL_ARGUMENTS, place)
        body = place + len(_MISTRAL_ARGUMENTS) if marked else place
        start = scan.skip(body)
        custom = marked and declared.custom(name[0])
        found = scan.json(start, bound) if scan.at("{", start) or (marked and scan.at('"', start)) else None
        if custom and (found is None or isinstance(found[0], str) or scan.skip(found[1]) < bound):
            found = (scan.text[body:bound], bound)
        call = make_call(name[0], found[0], declared, native_id) if found else None
        return CallBlock(found[1], [call]) if call and found else CallBlock(bound, None)

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        written = []
        for call in calls:
            native_id = f"{_MISTRAL_ID}{call.native_id}" if call.native_id else ""
            written.append(f"{self.tags[0]}{call.name}{native_id}{_MISTRAL_ARGUMENTS}{bare(call.arguments)}")
        return "".join(written)


class JsonListFormat(TaggedFormat):
    """All calls of a turn in one JSON list between two tags."""

    ends_turn: ClassVar[bool] = False
    """The closing tag may be the end-of-turn token itself, which is not part of the text."""

    @abstractmethod
    def read_item(self, value: Any, declared: DeclaredTools) -> ParsedCall | None:
        """The call of one list item."""

    @abstractmethod
    def write_item(self, call: ParsedCall, place: int) -> dict[str, Any]:
        """The list item of a call, the `place`-th of its turn."""

    def read(self, scan: Scanner, at: int, inside: int, bound: int, declared: DeclaredTools) -> CallBlock:
        found = scan.json(scan.skip(inside), bound)
        if found is not None and isinstance(found[0], list):
            place = scan.skip(found[1])
            calls = [call for item in found[0] if (call := self.read_item(item, declared)) is not None]
            if calls and len(calls) == len(found[0]):
                if scan.at(self.tags[1], place):
                    return CallBlock(place + len(self.tags[1]), calls)
                if self.ends_turn and place == scan.end:
                    return CallBlock(place, calls)
        return unreadable_call(scan, inside, bound, self.tags[1])

    def write_calls(self, calls: Sequence[ParsedCall], after: str) -> str:
        items = [encode(self.write_item(call, place)) for place, call in enumerate(calls)]
        return f"{self.before(after)}{self.tags[0]}[{', '.join(items)}]{self.tags[1]}"

    def before(self, after: str) -> str:
        """What is written between the text `after` and the list."""
        return ""


class Apertus(JsonListFormat):
    """Apertus: `<|tools_prefix|>` and a list of objects with one key each, the name of the tool.

    The template writes results directly after `<|tools_suffix|>`, so a turn with calls ends there.
    """

    name = "apertus"
    tags = ("<|tools_prefix|>", "<|tools_suffix|>")
    ends_turn = True
    thinking = (("<|inner_prefix|>", "<|inner_suffix|>"),)
    thinking_space = ("", "", "")

    def read_item(self, value: Any, declared: DeclaredTools) -> ParsedCall | None:
        if not isinstance(value, dict) or len(value) != 1:
            return None
        ((name, arguments),) = value.items()
        return make_call(name, arguments, declared)

    def write_item(self, call: ParsedCall, place: int) -> dict[str, Any]:
        return {call.name: call.arguments}


class Nemotron(JsonListFormat):
    """Nemotron Nano v2: `<TOOLCALL>` around a list of calls."""

    name = "nemotron"
    tags = ("<TOOLCALL>", "</TOOLCALL>")

    def read_item(self, value: Any, declared: DeclaredTools) -> ParsedCall | None:
        return call_from_object(value, declared)

    def write_item(self, call: ParsedCall, place: int) -> dict[str, Any]:
        return {"name": call.name, "arguments": call.arguments}

    def before(self, after: str) -> str:
        return "\n" * bool(after)


class Apriel(Nemotron):
    """Apriel: `<tool_calls>` around a list. The prompt begins the reasoning, `[BEGIN FINAL RESPONSE]` ends it."""

    name = "apriel"
    tags = ("<tool_calls>", "</tool_calls>")
    thinking = (("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"), ("<thinking>", "</thinking>"))
    thinking_space = ("\n", "\n", "\n")


class CommandR7B(JsonListFormat):
    """Command R7B: `<|START_ACTION|>` and a list of calls, or `<|START_RESPONSE|>` and text.

    A call's `tool_call_id` is its number in the conversation, which templates count again from the start; it is not kept.
    """

    name = "command_r7b"
    tags = ("<|START_ACTION|>", "<|END_ACTION|>")
    thinking = (("<|START_THINKING|>", "<|END_THINKING|>"),)
    thinking_space = ("", "", "")

    def parse(self, text: str, tools: Sequence[Tool], *, reasoning_open: bool) -> ParsedReply:
        read = super().parse(text, tools, reasoning_open=reasoning_open)
        stripped = read.text.strip(SPACE)
        # The prompt of other Command templates opens the response. A call that cannot be parsed keeps its whole text.
        end = "" if any(raw.endswith(_RESPONSE_END) for raw in read.malformed) else _RESPONSE_END
        text = stripped.removeprefix(_RESPONSE).removesuffix(end)
        return replace(read, text=text) if text != stripped else read

    def read_item(self, value: Any, declared: DeclaredTools) -> ParsedCall | None:
        if not isinstance(value, dict) or not _COMMAND_KEYS.issuperset(value):
            return None
        return make_call(value.get("tool_name"), value.get("parameters", {}), declared)

    def write(
        self,
        reasoning: str | None,
        text: str,
        calls: Sequence[ParsedCall],
        *,
        tools: Sequence[Tool] = (),
        reasoning_open: bool = False,
    ) -> str:
        """Like every format; a reply without calls is a response, and text next to calls is written bare."""
        written = super().write(reasoning, text, calls, tools=tools, reasoning_open=reasoning_open)
        return written if calls or not text else f"{written[: -len(text)]}{_RESPONSE}{text}{_RESPONSE_END}"

    def write_item(self, call: ParsedCall, place: int) -> dict[str, Any]:
        return {"tool_call_id": str(place), "tool_name": call.name, "parameters": call.arguments}
