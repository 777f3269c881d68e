"""Where in a message the answer is, and whether it is an expected one. Runs in a worker: the message is hostile."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

from towline.evaluators.answers.compare import AnswerComparison

MAX_ANSWER_CHARS = 2000
"""Longest answer, in characters."""
_BOXES = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=[^\s{]))")
_LABEL = re.compile(
    r"(?:(?:the\s+)?(?:final|correct)\s+answer|(?<![\w])answer)\s*(?:is\b|[:=])\s*[:=]?\s*", re.IGNORECASE
)
_NAME = re.compile(r"[^=<>\d]*[A-Za-z)}\]][^=<>]*")
"""What may stand before an `=` as the name of an answer: no bare number, no other relation."""
_NUMBERS = re.compile(r"(?<![\w.])[-+]?\$?\d[\d,]{0,400}(?:\.\d{1,400})?(?:[eE][-+]?\d{1,9})?%?")
_ATTACHED = re.compile(r"\d\s*[-+*/^=<>~!]|[*/^=<>~\\]\s*[-+]?\$?\d|[-+]\s+\d")
"""A number that is part of a formula."""
_HEDGE = re.compile(
    r"\b(?:not|isn|aren|wasn|no|never|neither|nor|either|or|cannot|can|can't|don|doesn|won|maybe|perhaps|possibly|unless|"
    r"between|least|most|than|except|wrong|incorrect|false|unknown|guess|range|anything|any|every|all)\b|n't",
    re.IGNORECASE,
)
_HEDGE_SIGNS = (
    "\\pm",
    "\\mp",
    "±",
    "∓",
    "\\neq",
    "\\ne ",
    "≠",
    "!=",
    "<",
    ">",
    "≤",
    "≥",
    "\\le",
    "\\ge",
    "\\lor",
    "?",
    "|",
)
_MARKS = re.compile(r"^(?:[\s>*_#`]|[-+]\s)+|[\s*_`]+$")


class AnswerLocation(StrEnum):
    """Where in a message the answer was found."""

    BOXED = "boxed"
    """In the last `\\boxed{}`."""
    LABELLED = "labelled"
    """After the last `answer:` or `the final answer is`."""
    LAST_LINE = "last_line"
    """In the last line."""


def extract_answer(text: str) -> tuple[str, AnswerLocation] | None:
    """The answer and its location; `None` if there is no text at all."""
    if (boxed := _last_box(text)) is not None:
        return boxed.strip()[:MAX_ANSWER_CHARS], AnswerLocation.BOXED
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    labels = list(_LABEL.finditer(text))
    if labels:
        rest = text[labels[-1].end() :]
        # Markup may separate the label from the answer, which may also be on the next line.
        line = next((line for line in rest.splitlines() if line.strip(" *_`#>-")), "")
        if line:
            return _plain(line)[:MAX_ANSWER_CHARS], AnswerLocation.LABELLED
    return _plain(lines[-1])[:MAX_ANSWER_CHARS], AnswerLocation.LAST_LINE


def shorter_candidates(line: str, lenient: bool = False) -> list[str]:
    """Candidates for the answer in a sentence, most likely first: after its last `=` or `is`, its only number.

    A sentence that denies, hedges or relates (`not 5`, `\\pm 1`, `7 = 5`, `5 or 6`) has none, unless `lenient`: what it says
    as a whole is then the answer, and it is not the number in it.
    """
    if not lenient and hedged(line):
        return []
    found = []
    for mark in ("=", " is ", " are ", ": "):
        before, there, after = line.rpartition(mark)
        if there and after.strip() and (lenient or mark != "=" or _NAME.fullmatch(before.strip())):
            found.append(_plain(after))
    numbers = _NUMBERS.findall(line)
    if len(numbers) == 1 and (lenient or not _ATTACHED.search(line)):
        found.append(numbers[0].rstrip(","))
    return found


def hedged(line: str) -> bool:
    """Whether a sentence denies or hedges what it says, or gives more than one value."""
    return bool(_HEDGE.search(line)) or any(sign in line for sign in _HEDGE_SIGNS)


def _last_box(text: str) -> str | None:
    boxes = list(_BOXES.finditer(text))
    if not boxes:
        return None
    last = boxes[-1]
    if not last[0].endswith("{"):
        return text[last.end() : last.end() + 1]
    depth = 1
    for index in range(last.end(), min(len(text), last.end() + 4 * MAX_ANSWER_CHARS)):
        character = text[index]
        if text[index - 1] == "\\" and character in "{}":
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[last.end() : index]
    return None


def _plain(line: str) -> str:
    """A line without markup for emphasis, quotes and lists, and without a final full stop."""
    line = _MARKS.sub("", line).strip()
    return re.sub(r"(?<=[^.])\.$", "", line).strip()


Pair = tuple[Any, Any]
"""Two trees of `expressions`, which sympy is to compare."""


def judge_answer(
    text: str, expected: list[str], tolerance: float, strict: bool, lenient: bool, decided: list[tuple[Pair, bool]]
) -> tuple[bool, str | None, str | None, list[Pair], bool]:
    """Whether the text gives an expected answer; what was found, and where; pairs that are still to be decided; and whether
    it hedges. `decided` has the pairs that sympy has compared."""
    known = dict(decided)
    open_pairs: list[Pair] = []

    def undecided(one: Any, two: Any) -> bool:
        pair = (one, two)
        if pair in known:
            return known[pair]
        open_pairs.append(pair)
        return False

    compare = AnswerComparison(tolerance, undecided)
    found = extract_answer(text)
    if found is None or (strict and found[1] is AnswerLocation.LAST_LINE):
        return False, None, None, [], False
    candidates = [found[0]]
    if found[1] is not AnswerLocation.BOXED:
        candidates += shorter_candidates(found[0], lenient)
    right = any(compare.equal(_boxless(one), candidate) for candidate in candidates for one in expected)
    hedges = False
    if not right and not open_pairs and not lenient and found[1] is not AnswerLocation.BOXED:
        easy = [*candidates, *shorter_candidates(found[0], True)]
        hedges = any(compare.equal(_boxless(one), candidate) for candidate in easy for one in expected)
    return right, found[0], found[1].value, [] if right else list(dict.fromkeys(open_pairs)), hedges


def _boxless(expected: str) -> str:
    """An expected answer without the `\\boxed{}` that some rows wrap it in."""
    found = extract_answer(expected) if "boxed" in expected else None
    return found[0] if found else expected
