"""Encoding line by line gives the ids of the whole, or is not done at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from support.tokens.conversations import real
from towline.tokens.tokenizer import LineCache, Tokenizer, _pieces, can_split_at_lines

NAMES = ("qwen3", "qwen2_5", "llama3_2")
SPACES = ["\n", "\n", "\n", "\r", "\r\n", " ", "  ", "\t", "\x0b", "\x0c", "\x1c", "\x85", "\xa0", "\u2028", "\u3000"]
WORDS = [
    "a",
    "The",
    "x1",
    "12",
    "1234",
    "'s",
    "):",
    "/",
    "//",
    "_",
    "é",
    "e\u0301",
    "\u0301",
    "日本",
    "😀",
    "\u200b",
    "(",
]
SPECIAL = ["<|im_end|>", "<|im_start|>", "<tool_call>", "<|eot_id|>", "<|endoftext|>"]
TEXT = st.lists(st.sampled_from([*SPACES * 2, *WORDS, *SPECIAL]), max_size=24).map("".join) | st.text(max_size=30)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
EXTRA = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    """A tokenizer's parts, with a vocabulary that merges over the ends of lines."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    lines = ["a b\n", "ab /\n\n", "x\n /a", "\n\n  ", "a\n", "//\n/", " \n a", "12\n"] * 8
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(lines, trainer)
    document: dict[str, Any] = json.loads(backend.to_str())
    return document


def made(small: dict[str, Any], pattern: str, **changes: Any) -> tokenizers.Tokenizer:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    parts = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, BYTES]}}
    return tokenizers.Tokenizer.from_str(json.dumps({**small, **parts, **changes}))


def whole(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXT)
def test_the_ids_are_those_of_the_whole_text(name: str, text: str) -> None:
    tokenizer = real(name).tokenizer
    assert can_split_at_lines(tokenizer.backend)
    expected = whole(tokenizer.backend, text)
    assert tokenizer.encode(text) == expected
    # And once more, from memory: as a whole, and within another text.
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode(f"a\n{text}") == whole(tokenizer.backend, f"a\n{text}")


@given(text=TEXT)
def test_families_whose_words_may_end_in_slashes(small: dict[str, Any], text: str) -> None:
    backend = made(small, EXTRA)
    assert can_split_at_lines(backend)
    assert Tokenizer(backend).encode(text) == whole(backend, text)


def test_real_source_text() -> None:
    tokenizer = real("qwen3").tokenizer
    for path in sorted(Path(json.__file__).parent.glob("*.py")):
        text = path.read_text("utf-8")
        assert tokenizer.encode(text) == whole(tokenizer.backend, text)
        crlf = text.replace("\n", "\r\n")
        assert tokenizer.encode(crlf) == whole(tokenizer.backend, crlf)


TEXTS = ["a b\n\n  a\n/a\n", "x\n /a\n\n\n a b\n", "ab /\n//\n12\n  \n a", "12\n34\na \n\nb"]


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        # GPT-2's: white space before a word is matched across the line end.
        (r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", {}),
        (r"\s+(?!\S)|\s*[\r\n]+|\p{L}+", {}),
        (r"\p{L}+|\s+", {}),
        (r"(?<=\n)a|\p{L}+|\n+", {}),
        (r"[\s\S]+", {}),
        (EXTRA, {"normalizer": {"type": "Replace", "pattern": {"String": "\n"}, "content": " "}}),
        (EXTRA, {"pre_tokenizer": None}),
        (EXTRA, {"pre_tokenizer": BYTES | {"use_regex": True}}),
    ],
)
def test_tokenizers_that_see_across_lines_are_not_split(
    small: dict[str, Any], pattern: str, changes: dict[str, Any]
) -> None:
    backend = made(small, pattern, **changes)
    assert not can_split_at_lines(backend)
    for text in TEXTS:
        assert Tokenizer(backend).encode(text) == whole(backend, text)


def test_splitting_where_it_is_not_proven_is_detected(small: dict[str, Any]) -> None:
    backend = made(small, r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    careless = LineCache(lambda text: whole(backend, text), bytes_of=[1] * 1000)
    for text in TEXTS:
        for piece in _pieces(text):
            careless.encode(piece)
    assert any(careless.encode(text) != whole(backend, text) for text in TEXTS)


@pytest.mark.parametrize("token", [{"content": "a\nb"}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}])
def test_added_tokens_that_depend_on_their_neighbours(small: dict[str, Any], token: dict[str, Any]) -> None:
    backend = made(small, EXTRA)
    added = tokenizers.AddedToken(**{"content": "<x>", **token})
    backend.add_tokens([added])
    assert not can_split_at_lines(backend)
    text = "a\n<x>\n a\nb\n"
    assert Tokenizer(backend).encode(text) == whole(backend, text)


def test_the_cache_is_bounded_and_can_be_disabled() -> None:
    calls: list[str] = []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return [1] * len(text)

    lines = LineCache(encode, bytes_of=[0, 1], max_bytes=16 * 300)
    assert len(lines.encode("one\ntwo\none\n")) == 12
    assert len(lines.encode("two\none\n")) == 8
    assert calls == ["one\ntwo\none\n"], "lines that were learned together are known one by one"
    for number in range(1000):
        # What is used stays; the rest is forgotten in the end.
        assert len(lines.encode(f"one\n{number}\n")) == 5 + len(str(number))
    assert all("one" not in text for text in calls[1:])
    assert len(lines._young) + len(lines._old) < 40
    lines.encode("two\n")
    assert calls[-1] == "two\n"
    long = "x" * 5000
    assert lines.encode(long) == lines.encode(long) == [1] * 5000
    assert calls.count(long) == 2, "what would fill the memory by itself is not remembered"

    tokenizer = Tokenizer(real("qwen3").tokenizer.backend)
    tokenizer.limit_cache(0)
    assert tokenizer.encode("a\nb") == tokenizer.encode("a\nb") == whole(tokenizer.backend, "a\nb")


def test_saved_truncation_and_padding_are_disabled(small: dict[str, Any]) -> None:
    backend = made(small, EXTRA)
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(backend.to_str()))
    text = "a b 12 34 /\n" * 4
    assert tokenizer.encode(text) == tokenizer.encode_plain(text) == whole(made(small, EXTRA), text)
