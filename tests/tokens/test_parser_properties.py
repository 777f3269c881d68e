"""What holds for every reply: it can be written and read back, cut anywhere, garbled, and made hostile.

Nothing raises, nothing visible is lost or doubled, no call appears that was not written, and the work grows with the
length of the text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from towline.conversation import Tool
from towline.tokens.parser import FORMATS, Format, Parsed, ParsedCall
from towline.tokens.parsing.deepseek import marker

SPACE = " \t\r\n"
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
    "plain": [],
}
NAMED_VALUES = {"qwen3_coder", "glm"}
"""Formats with bare values, whose keys stand between brackets."""

# Quotes, escapes, brackets and whole words that mean something to JSON, XML or a template, but form no markup.
nasty = st.lists(
    st.sampled_from(
        [
            '"',
            "'",
            "\\",
            "\n",
            "\r\n",
            "\t",
            " ",
            "<",
            ">",
            "</",
            "<a>",
            "</b>",
            "<tool",
            "<|",
            "|>",
            "[",
            "]",
            "{",
            "}",
        ]
        + [
            "é",
            "日本",
            "😀",
            "\u2028",
            "\x00",
            "\x7f",
            "null",
            "True",
            "1.0",
            "-0",
            ";",
            "`",
            "```json",
            "=",
            ":",
            "&lt;",
        ]
        + ["{{ x }}", "\\n", '\\"', "function", "{}", '""', "[/", "to=x", "\ufffd"]
    ),
    max_size=8,
).map("".join)
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
words = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,11}", fullmatch=True)


def values(keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | numbers | nasty
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))


@st.composite
def replies(draw: st.DrawFn, format: str) -> tuple[str | None, str, list[ParsedCall], list[Tool]]:
    """Reasoning, text and calls, and the tools as a harness would declare them."""
    text = draw(nasty).strip(SPACE)
    reasoning = draw(st.none() | nasty.map(lambda drawn: drawn.strip(SPACE) or None))
    calls, tools = [], []
    for index in range(0 if format == "plain" else draw(st.integers(0, 3))):
        name = f"{draw(words)}{index}"
        keys = words if format in NAMED_VALUES else words | nasty
        arguments = draw(st.dictionaries(keys, values(nasty), max_size=4))
        native_id = f"functions.{name}:{index}" if format == "kimi" else ""
        if format == "mistral":
            native_id = draw(st.just("") | st.from_regex(r"[A-Za-z0-9]{9}", fullmatch=True))
        calls.append(ParsedCall(name, arguments, native_id))
        properties = {key: {"type": "string"} if isinstance(value, str) else {} for key, value in arguments.items()}
        tools.append(Tool(name, parameters={"type": "object", "properties": properties}))
    return reasoning, text, calls, tools


@pytest.mark.parametrize("format", sorted(FORMATS))
@given(data=st.data(), opened=st.booleans())
def test_what_is_written_is_read_back(format: str, data: st.DataObject, opened: bool) -> None:
    reasoning, text, calls, tools = data.draw(replies(format))
    for known in (tools, []):
        written = FORMATS[format].write(reasoning, text, calls, tools=known, reasoning_open=opened)
        read = FORMATS[format].parse(written, tools, reasoning_open=opened)
        # By their representations, which tell 1 from 1.0 and True.
        assert repr(read) == repr(Parsed(text, reasoning, tuple(calls), (), False))


@pytest.mark.parametrize("format", sorted(FORMATS))
@given(data=st.data())
def test_a_cut_reply_holds_no_call_that_was_not_finished(format: str, data: st.DataObject) -> None:
    reasoning, text, calls, tools = data.draw(replies(format))
    written = FORMATS[format].write(reasoning, text, calls, tools=tools)
    cut = written[: data.draw(st.integers(0, len(written)))]
    read = FORMATS[format].parse(cut, tools, reasoning_open=False)
    assert repr(read.calls) == repr(tuple(calls)[: len(read.calls)])
    assert all(raw in read.text for raw in read.malformed)
    if read.reasoning_open:
        assert not read.calls
        assert (reasoning or "").startswith(read.reasoning or "")


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
    """Written replies, markup and text in any order, with pieces taken out, and a mark of its own all over the place."""
    pieces = []
    for _ in range(draw(st.integers(1, 6))):
        if draw(st.booleans()):
            pieces.append(
                draw(st.sampled_from([*MARKUP[format], "<think>", "</think>", " ", "\n", "text", '"', "{", "}"]))
            )
            continue
        reasoning, text, calls, tools = draw(replies(format))
        marked = [ParsedCall(made.name, {"\x00": "\x00\x00"}, made.native_id) for made in calls]
        written = FORMATS[format].write(reasoning and "\x00", "\x00" * bool(text), [])
        if marked:
            written = written.replace("\x00", "") + FORMATS[format].write(None, "", marked, tools=tools)
        written = written.replace("\\u0000", "\x00")
        start = draw(st.integers(0, len(written)))
        pieces.append(written[:start] + written[draw(st.integers(start, min(len(written), start + 30))) :])
    text = "\x00".join(pieces)
    # Each mark is another character of the private use area: what became of each one can be told.
    marks = iter(range(0xE000, 0xF8FF))
    return "".join(chr(next(marks)) if char == "\x00" else char for char in text)


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
    return "\ue000" <= char <= "\uf8ff"


@pytest.mark.parametrize("format", sorted(FORMATS))
@given(data=st.data(), opened=st.booleans())
@example(data=None, opened=False)
def test_any_text_is_read(format: str, data: st.DataObject | None, opened: bool) -> None:
    texts = ["", "\ud800", "\x00"]
    if data is not None:
        pieces = st.sampled_from([*MARKUP[format], "<think>", "</think>"]) | st.text(max_size=5)
        texts = ["".join(data.draw(st.lists(pieces, max_size=12)))]
    for text in texts:
        FORMATS[format].parse(text, (), reasoning_open=opened)


def hostile(format: str) -> dict[str, Callable[[int], str]]:
    """Texts of about any length that lead a careless reader to go over the rest again and again, or too deep."""
    markup = MARKUP[format] or ["x"]
    bits = [*markup, *(one + two for one in markup for two in [*markup, '["', '{"a":', '{"a": "', " ", "\n", "\\"])]
    texts: dict[str, Callable[[int], str]] = {}
    for bit in bits:
        texts[f"{bit!r} all along"] = lambda size, bit=bit: bit * (size // len(bit))  # type: ignore[misc]
    opening = (
        FORMATS[format].write(None, "", [ParsedCall("f", {"k": "\x00"})]).split("\x00") if MARKUP[format] else ["", ""]
    )
    texts["one long value"] = lambda size: opening[0] + "x" * size + opening[1]
    texts["one long value that is not closed"] = lambda size: opening[0] + "x" * size
    texts["one long value of markup"] = lambda size: opening[0] + "".join(markup) * (size // len("".join(markup)))
    texts["space"] = lambda size: opening[0] + " " * size
    for deep in ("[", '{"a":', "[[],"):
        texts[f"{deep} nested"] = lambda size, deep=deep: opening[0][:-1] + deep * (size // len(deep))  # type: ignore[misc]
    return texts


def work(format: Format, text: str) -> int:
    """How many calls, of Python and of C functions, reading the text takes."""
    count = 0

    def counter(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counter)
    try:
        format.parse(text, (), reasoning_open=False)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_work_grows_with_the_length_of_hostile_text(format: str) -> None:
    for what, text in hostile(format).items():
        small, large = (work(FORMATS[format], text(size)) for size in (10_000, 40_000))
        assert large <= 4.5 * small + 5_000, what


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_hostile_text_of_200_kilobytes_is_read(format: str) -> None:
    for text in hostile(format).values():
        read = FORMATS[format].parse(text(200_000), (), reasoning_open=False)
        assert all(made.name for made in read.calls)
