"""What holds for every reply: it can be written and read back, cut anywhere, garbled, and made hostile.

Nothing raises, nothing visible is lost or doubled, no call appears that was not written, and the work grows with the
length of the text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from towline.conversation import Tool
from towline.tokens.parsing import tagged as tagged_module
from towline.tokens.parsing import values as values_module
from towline.tokens.parsing.base import OutputFormat, ParsedCall, ParsedReply
from towline.tokens.parsing.registry import FORMATS
from towline.tokens.parsing.sections import marker

SPACE = " \t\r\n"
MARK = "\ue000"
"""The first character of the private use area, a run of which lets a test follow each character of a text."""
DSML, M3 = "\uff5cDSML\uff5c", "]<]minimax[>["
MARKUP: dict[str, list[str]] = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}'],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=k>", "</parameter>"],
    "llama3": ["<|python_tag|>", '{"name": "f", "parameters": {}}', ";"],
    "deepseek": [
        *(marker(f"tool {what}") for what in ("calls begin", "calls end", "call begin", "call end", "sep")),
        "function",
        "f\n```json\n",
        "```",
    ],
    "gptoss": [
        *(f"<|{what}|>" for what in ("start", "channel", "message", "end", "call", "return", "constrain")),
        *("assistant", "analysis", "commentary", "final", " to=functions.f ", "<|channel|>final<|message|>"),
    ],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "f", "[THINK]", "[/THINK]"],
    "glm": ["<tool_call>", "</tool_call>", "f\n", "<arg_key>k</arg_key>", "<arg_value>", "</arg_value>"],
    "kimi": [
        *(f"<|tool_{what}|>" for what in ("calls_section_begin", "calls_section_end", "call_begin", "call_end")),
        *("<|tool_call_argument_begin|>", "functions.f:0"),
    ],
    "apertus": ["<|tools_prefix|>", "<|tools_suffix|>", "[", "]", '{"f": {}}'],
    "apriel": ["<tool_calls>", "</tool_calls>", "[", "]", '{"name": "f", "arguments": {}}'],
    "nemotron": ["<TOOLCALL>", "</TOOLCALL>", "[", "]", '{"name": "f", "arguments": {}}'],
    "command_r7b": [
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        '[{"tool_name": "f"}]',
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
    ],
    "gigachat": ["<|function_call|>", '{"name": "f", "arguments": {}}'],
    "functionary_3_1": ["<function=f>", "</function>", "<|python_tag|>", "{}"],
    "functionary_3_2": [">>>all\n", ">>>f\n", "{}", "all\n"],
    "dsml": [
        *(f"<{DSML}tool_calls>", f"</{DSML}tool_calls>", f'<{DSML}invoke name="f">', f"</{DSML}invoke>"),
        *(f'<{DSML}parameter name="k" string="true">', f"</{DSML}parameter>", f'<{DSML}invoke name="f"/>', "{}"),
    ],
    "minimax_m2": [
        *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', "</invoke>", '<parameter name="k">'),
        "</parameter>",
    ],
    "minimax_m3": [
        *(f"{M3}<tool_call>", f"{M3}</tool_call>", f'{M3}<invoke name="f">', f"{M3}</invoke>", f"{M3}<k>", f"{M3}</k>"),
        *(f"{M3}<item>", f"{M3}</item>", M3),
    ],
    "seed_oss": [
        *("<seed:tool_call>", "</seed:tool_call>", "<function=f>", "</function>", "<parameter=k>", "</parameter>"),
    ],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>", "[f(", "k=", "'", ")]", ", ", '{"name": "f"}'],
    "plain": [],
}
NAMED_VALUES = {"qwen3_coder", "glm", "dsml", "minimax_m2", "minimax_m3", "seed_oss", "lfm2"}
"""Formats that write keys bare in their markup."""

# Quotes, escapes, brackets and words that mean something to JSON, XML or a template, but form no markup.
NASTY = """
" ' \\ \\n \\" < > </ <a> </b> <tool <| |> [ ] [/ { } {} "" {{x}} ; : = & ` ```json function to=x null True 1.0 -0 é 日本 😀
"""
nasty = st.lists(
    st.sampled_from([*NASTY.split(), " ", "\n", "\t", "\r\n", "\x00", "\x7f", "\u2028", "\ufffd"]), max_size=8
).map("".join)
numbers = (
    st.integers()
    | st.integers(10**19, 10**60)
    | st.integers(-(10**60), -(10**19))
    | st.floats(allow_nan=False, allow_infinity=False)
)
words = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,11}", fullmatch=True)


def values(keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | numbers | nasty
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))


scalars = st.booleans() | numbers
elements = (
    nasty
    | scalars
    | st.lists(scalars, min_size=1, max_size=3)
    | st.dictionaries(
        words.filter(lambda word: word != "item"), scalars | st.lists(scalars, min_size=1), min_size=1, max_size=3
    )
)
"""Values that are read back from elements without a schema: strings inside others may be numbers."""


@st.composite
def replies(draw: st.DrawFn, format: str) -> tuple[str | None, str, list[ParsedCall], list[Tool]]:
    """Reasoning, text and calls, and the tools as a harness would declare them."""
    text = draw(nasty).strip(SPACE)
    reasoning = draw(st.none() | nasty.map(lambda drawn: drawn.strip(SPACE) or None))
    if not FORMATS[format].thinking:
        reasoning = None
    calls, tools = [], []
    for index in range(0 if format == "plain" else draw(st.integers(0, 3))):
        name = f"{draw(words)}{index}"
        keys = words if format in NAMED_VALUES else words | nasty
        inner = elements if format == "minimax_m3" else values(nasty)
        arguments = draw(st.dictionaries(keys, inner, max_size=4))
        native_id = f"functions.{name}:{index}" if format == "kimi" else ""
        if format == "mistral":
            native_id = draw(st.just("") | st.from_regex(r"[A-Za-z0-9]{9}", fullmatch=True))
        calls.append(ParsedCall(name, arguments, native_id))
        # A first element `item` makes it a list.
        arguments.pop("item", None)
        properties = {key: {"type": "string"} if isinstance(value, str) else {} for key, value in arguments.items()}
        tools.append(Tool(name, parameters={"type": "object", "properties": properties}))
    return reasoning, text, calls, tools


@pytest.mark.parametrize("format", sorted(FORMATS))
@given(data=st.data(), opened=st.booleans())
def test_written_replies_parse_back(format: str, data: st.DataObject, opened: bool) -> None:
    reasoning, text, calls, tools = data.draw(replies(format))
    for known in (tools, []):
        written = FORMATS[format].write(reasoning, text, calls, tools=known, reasoning_open=opened)
        read = FORMATS[format].parse(written, tools, reasoning_open=opened)
        # By their representations, which tell 1 from 1.0 and True.
        assert repr(read) == repr(ParsedReply(text, reasoning, tuple(calls), (), False))


@pytest.mark.parametrize("format", sorted(FORMATS))
@given(data=st.data())
def test_a_truncated_reply_has_no_unfinished_call(format: str, data: st.DataObject) -> None:
    reasoning, text, calls, tools = data.draw(replies(format))
    written = FORMATS[format].write(reasoning, text, calls, tools=tools)
    cut = written[: data.draw(st.integers(0, len(written)))]
    read = FORMATS[format].parse(cut, tools, reasoning_open=False)
    assert repr(read.calls) == repr(tuple(calls)[: len(read.calls)])
    assert all(raw in read.text for raw in read.malformed)
    if read.reasoning_open:
        assert not read.calls
        assert (read.reasoning or "") in cut


def leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield str(value)


@st.composite
def garbled(draw: st.DrawFn, format: str) -> str:
    """Replies, markup and text in any order, with stretches taken out of them, and marks all over the place."""
    pieces = []
    for _ in range(draw(st.integers(1, 6))):
        if draw(st.booleans()):
            pieces.append(
                draw(st.sampled_from([*MARKUP[format], "<think>", "</think>", " ", "\n", '"', "{", "}", "x"]))
            )
            continue
        count = 0 if format == "plain" else draw(st.integers(0, 3))
        calls = [ParsedCall(f"f{MARK}", {MARK: MARK, f"{MARK}{MARK}": {"n": [MARK, 1]}}) for _ in range(count)]
        thought = draw(st.sampled_from([None, MARK])) if FORMATS[format].thinking else None
        written = FORMATS[format].write(thought, draw(st.sampled_from(["", MARK])), calls)
        start = draw(st.integers(0, len(written)))
        pieces.append(written[:start] + written[draw(st.integers(start, min(len(written), start + 30))) :])
    marks = iter(range(ord(MARK), 0xF8FF))
    return "".join(chr(next(marks)) if char == MARK else char for char in MARK.join(pieces))


@pytest.mark.parametrize("format", sorted(FORMATS))
@given(data=st.data(), opened=st.booleans())
def test_nothing_is_lost_or_doubled(format: str, data: st.DataObject, opened: bool) -> None:
    text = data.draw(garbled(format))
    read = FORMATS[format].parse(text, (), reasoning_open=opened)
    kept = [read.text, read.reasoning or ""]
    for made in read.calls:
        kept += [made.native_id if format == "kimi" else made.name + made.native_id, *leaves(made.arguments)]
    everything = "".join(kept)
    assert sorted(filter(is_mark, everything)) == sorted(filter(is_mark, text))
    assert all(raw in read.text for raw in read.malformed)
    json.dumps([made.arguments for made in read.calls], allow_nan=False).encode()


def is_mark(char: str) -> bool:
    return MARK <= char <= "\uf8ff"


@pytest.mark.parametrize("format", sorted(FORMATS))
@given(data=st.data(), opened=st.booleans())
@example(data=None, opened=False)
def test_any_text_is_parsed(format: str, data: st.DataObject | None, opened: bool) -> None:
    texts = ["", "\ud800", "\x00"]
    if data is not None:
        pieces = st.sampled_from([*MARKUP[format], "<think>", "</think>"]) | st.text(max_size=5)
        texts = ["".join(data.draw(st.lists(pieces, max_size=12)))]
    for text in texts:
        FORMATS[format].parse(text, (), reasoning_open=opened)


def hostile(format: str, size: int, *, pairs: bool) -> Iterator[tuple[str, str]]:
    """Texts that lead a careless reader to go over the rest again and again, or too deep, each with what it is."""
    markup = MARKUP[format] or ["x"]
    tails = ["", '["', '{"a": "', " ", *(markup if pairs else [])]
    for bit in (one + two for one in markup for two in tails):
        yield f"{bit!r} all along", bit * (size // len(bit))
    calls = [] if format == "plain" else [ParsedCall("f", {"k": MARK, "l": MARK})]
    before, between, after = [*FORMATS[format].write(None, "", calls).split(MARK), "", ""][:3]
    everything = "".join(markup)
    yield "one long value", before + "x" * size + after
    yield "a value that is not closed", before + "x" * size
    yield "a value of markup", before + everything * (size // len(everything)) + after
    yield "space", before + " " * size
    yield "calls that all end in the last one", before * (size // (len(before) + 1)) + after
    opened, more = before * (size // 2 // (len(before) + 1)), between * (size // 2 // (len(between) + 1))
    yield "many calls opened, then one that is long and not closed", opened + more
    for deep in ("[", '{"a":', "[[],"):
        yield f"{deep} nested", before[:-1] + deep * (size // len(deep))


class Counted(str):
    """A text that counts the characters which are gone over in it."""

    work = 0

    def find(self, *arguments: Any) -> int:
        found = super().find(*arguments)
        self.work += (found if found >= 0 else len(self)) - (arguments[1] if len(arguments) > 1 else 0)
        return found

    def __getitem__(self, key: Any) -> str:
        taken = super().__getitem__(key)
        self.work += len(taken)
        return taken


def work(format: OutputFormat, text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many functions reading the text calls, and how many characters it looks for markers, takes or decodes."""
    counted, count = Counted(text), 0

    def counter(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    def decode_at(text: str, start: int) -> tuple[Any, int] | None:
        nonlocal count
        found = values_module.decode_at(text, start)
        count += (found[1] if found else len(text)) - start
        return found

    monkeypatch.setattr(tagged_module, "decode_at", decode_at)
    before = sys.getprofile()
    sys.setprofile(counter)
    try:
        format.parse(counted, (), reasoning_open=False)
    finally:
        sys.setprofile(before)
    return count + counted.work


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_work_is_linear_in_hostile_text(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for (what, small), (_, large) in zip(
        hostile(format, 10_000, pairs=True), hostile(format, 40_000, pairs=True), strict=True
    ):
        once = work(FORMATS[format], small, monkeypatch)
        assert work(FORMATS[format], large, monkeypatch) <= 5 * once, what


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_hostile_text_of_200_kilobytes_is_read(format: str) -> None:
    for what, text in hostile(format, 200_000, pairs=False):
        read = FORMATS[format].parse(text, (), reasoning_open=False)
        assert len("".join(read.malformed)) <= len(read.text), what
