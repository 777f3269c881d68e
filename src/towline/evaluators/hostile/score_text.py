"""Scores in the output and the files of a verifier. The code under test may have written any of it.

A score is a finite number that was actually given, or an `EvaluationError`; nothing here turns a missing, empty or malformed
score into 0. They run in killable workers: what takes too long is the agent's doing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from towline.common.untrusted.patterns import compile_pattern
from towline.evaluators.hostile.failures import EvaluationError

MAX_SCORES = 10_000
"""Maximum number of scores in one reward."""
_LONGEST = 512
"""Longest name of a score, in characters."""
_LONGEST_NUMBER = 1000
"""Longest number that is read, in characters."""
_WORD = re.compile(r"[-+.\w]+")
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|(?i:nan|inf(?:inity)?))(?!\w|\.\d)")
"""A number as programs print it. Its cost is the square of the length, so it only ever sees one short word."""
_MAX_OBJECTS = 64
"""Lines from the end of an output that are tried as JSON."""


def finite_number(value: Any, what: str) -> float:
    """A finite number; booleans are refused."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EvaluationError(f"{what} is {short(value)}, not a number")
    try:
        result = float(value)
    except OverflowError as error:
        raise EvaluationError(f"{what} is too large for a float") from error
    if not math.isfinite(result):
        raise EvaluationError(f"{what} is {result}, not a finite number")
    return result


def parse_number(text: str, what: str) -> float:
    """A text that is exactly one number."""
    text = text.strip()
    try:
        value = float(text) if len(text) <= _LONGEST_NUMBER else None
    except ValueError:
        value = None
    if value is None:
        raise EvaluationError(f"{what} is {short(text[:300])}, not a number")
    return finite_number(value, what)


def last_number(text: str) -> float:
    """The last number in an output; `nan` and `inf` too, so that an earlier number does not pass for the last one."""
    for line in reversed(text.splitlines()):
        for word in reversed(_WORD.findall(line)):
            if len(word) > _LONGEST_NUMBER:
                if not word.strip("+-.0123456789eE"):
                    raise EvaluationError(f"the last number in the output is too long: {len(word)} characters")
            elif found := _NUMBER.findall(word):
                return finite_number(float(found[-1]), "the last number in the output")
    raise EvaluationError(f"the output contains no number: {short(text[-300:])}")


def matched_number(text: str, pattern: str) -> float:
    """The number in the first group (or all) of a pattern's last match."""
    groups = compile_pattern(f"(?m){pattern}").last(text)
    if groups is None:
        raise EvaluationError(f"the pattern {pattern!r} matches nothing in the output: {short(text[-300:])}")
    part = groups[1] if len(groups) > 1 else groups[0]
    return parse_number(part, f"the match of {pattern!r}")


def last_object(text: str) -> dict[str, Any]:
    """The output as a JSON object, or the last line that is one."""
    for candidate in _objects(text):
        return candidate
    raise EvaluationError(f"no line of the output is a JSON object: {short(text[-300:])}")


def json_rewards(text: str) -> tuple[dict[str, Any], list[float]]:
    """The object that was printed last, and the different finite rewards that all printed objects give, lowest first."""
    given = [one["reward"] for one in _objects(text) if isinstance(one.get("reward"), int | float)]
    numbers = {float(one) for one in given if not isinstance(one, bool) and abs(one) < 2**53}
    return last_object(text), sorted(numbers)


def _objects(text: str) -> list[dict[str, Any]]:
    found = []
    lines = [line.strip() for line in text.splitlines()]
    candidates = [line for line in reversed(lines) if line.startswith("{")][:_MAX_OBJECTS]
    for candidate in (text.strip(), *candidates) if text.lstrip().startswith("{") else candidates:
        try:
            value = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def reward_files(as_json: bytes | None, as_text: bytes | None) -> dict[str, float]:
    """Harbor's rule: `reward.json` (an object of finite numbers) if it exists, else `reward.txt` (one number)."""
    if as_json is not None:
        if not as_json.strip():
            raise EvaluationError("reward.json is empty")
        try:
            value = json.loads(as_json)
        except (ValueError, RecursionError) as error:
            raise EvaluationError(f"reward.json is not JSON: {error}") from error
        if not isinstance(value, dict) or not value:
            raise EvaluationError(f"reward.json must be an object of numbers, not {short(value)}")
        return named_scores(value, "reward.json: ")
    if as_text is not None:
        if not as_text.strip():
            raise EvaluationError("reward.txt is empty")
        return {"reward": parse_number(as_text.decode("utf-8", "replace"), "reward.txt")}
    raise EvaluationError("the tests wrote neither reward.json nor reward.txt")


def named_scores(value: Mapping[Any, Any], what: str) -> dict[str, float]:
    """Numbers by name, if the names can be stored."""
    if len(value) > MAX_SCORES:
        raise EvaluationError(f"{len(value)} scores exceed the limit of {MAX_SCORES} per reward")
    named = {}
    for name, part in value.items():
        name = str(name)
        if len(name) > _LONGEST or any("\ud800" <= character <= "\udfff" for character in name):
            raise EvaluationError(f"{short(name)} is not a valid name of a score: it is too long, or not Unicode text")
        named[name] = finite_number(part, f"{what}{name}")
    return named


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
