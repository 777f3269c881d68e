"""From a verifier's output or files to a `Reward`. A score is a finite number that was actually given, or an error.

Nothing here turns a missing, empty or malformed score into 0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from towline.evaluators.base import EvaluationError
from towline.schema import Reward, Trajectory

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|(?i:nan|inf(?:inity)?))(?!\w|\.\d)")
"""A number as programs print it; `nan` and `inf` too, so that an earlier number does not pass for the last one."""
_PARTS = ("reward", "components", "per_turn")
MAX_SCORES = 10_000
"""Maximum number of scores in one reward."""
_LONGEST = 512
"""Longest name of a score, in characters."""


def finite_number(value: Any, what: str) -> float:
    """A finite number; booleans are refused."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EvaluationError(f"{what} is {_short(value)}, not a number")
    try:
        result = float(value)
    except OverflowError as error:
        raise EvaluationError(f"{what} is too large for a float") from error
    if not math.isfinite(result):
        raise EvaluationError(f"{what} is {result}, not a finite number")
    return result


def parse_number(text: str, what: str) -> float:
    """A text that is exactly one number."""
    try:
        value = float(text.strip())
    except ValueError as error:
        raise EvaluationError(f"{what} is {_short(text)}, not a number") from error
    return finite_number(value, what)


def last_number(text: str) -> float:
    """The last number in an output."""
    found = [match[0] for match in _NUMBER.finditer(text)]
    if not found:
        raise EvaluationError(f"the output contains no number: {_short(text[-300:])}")
    return finite_number(float(found[-1]), "the last number in the output")


def matched_number(text: str, pattern: str) -> float:
    """The number in the first group (or all) of a pattern's last match."""
    matches = list(re.finditer(pattern, text, re.MULTILINE))
    if not matches:
        raise EvaluationError(f"the pattern {pattern!r} matches nothing in the output: {_short(text[-300:])}")
    last = matches[-1]
    part = last[1] if last.re.groups else last[0]
    return parse_number(part or "", f"the match of {pattern!r}")


def last_object(text: str) -> dict[str, Any]:
    """The output as a JSON object, or the last line that is one."""
    for candidate in (text, *reversed(text.splitlines())):
        candidate = candidate.strip()
        if candidate.startswith("{"):
            try:
                value = json.loads(candidate)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                return value
    raise EvaluationError(f"no line of the output is a JSON object: {_short(text[-300:])}")


def to_reward(value: Any, evaluator: str, trajectory: Trajectory) -> Reward:
    """A reward from a number, a `Reward`, or an object `{"reward", "components", "per_turn"}`."""
    if isinstance(value, Reward):
        _check_turns(value.per_turn, trajectory)
        return value if value.evaluator else value.model_copy(update={"evaluator": evaluator})
    if isinstance(value, bool):
        return Reward(value=float(value), evaluator=evaluator)
    if not isinstance(value, Mapping):
        return Reward(value=finite_number(value, "the reward"), evaluator=evaluator)
    unknown = [str(name) for name in value if name not in _PARTS]
    if unknown or "reward" not in value:
        wrong = f"has an unknown field {unknown[0]!r}" if unknown else "has no `reward`"
        raise EvaluationError(f"the score {wrong}; its fields are: {', '.join(_PARTS)}")
    return Reward(
        value=finite_number(value["reward"], "reward"),
        components=_scores(value.get("components"), "components"),
        per_turn=_by_turn(_scores(value.get("per_turn"), "per_turn"), trajectory),
        evaluator=evaluator,
    )


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
            raise EvaluationError(f"reward.json must be an object of numbers, not {_short(value)}")
        return _named(value, "reward.json: ")
    if as_text is not None:
        if not as_text.strip():
            raise EvaluationError("reward.txt is empty")
        return {"reward": parse_number(as_text.decode("utf-8", "replace"), "reward.txt")}
    raise EvaluationError("the tests wrote neither reward.json nor reward.txt")


def main_reward(rewards: Mapping[str, float]) -> float:
    """The main one of named rewards: `reward`, or the only one."""
    if "reward" in rewards:
        return rewards["reward"]
    if len(rewards) == 1:
        return next(iter(rewards.values()))
    raise EvaluationError(
        f"none of the rewards {', '.join(sorted(rewards))} is named `reward`, so the outcome is ambiguous"
    )


def _scores(value: Any, what: str) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise EvaluationError(f"{what} must be an object of numbers, not {_short(value)}")
    return _named(value, f"{what}.")


def _named(value: Mapping[Any, Any], what: str) -> dict[str, float]:
    """Numbers by name, if the names can be stored: the code under test may have written anything."""
    if len(value) > MAX_SCORES:
        raise EvaluationError(f"{len(value)} scores exceed the limit of {MAX_SCORES} per reward")
    named = {}
    for name, part in value.items():
        name = str(name)
        if len(name) > _LONGEST or any("\ud800" <= character <= "\udfff" for character in name):
            raise EvaluationError(f"{_short(name)} is not a valid name of a score: it is too long, or not Unicode text")
        named[name] = finite_number(part, f"{what}{name}")
    return named


def _by_turn(scores: dict[str, float], trajectory: Trajectory) -> dict[str, float]:
    """Rewards by turn id; a turn may also be identified by its index."""
    indices = {str(turn.index): turn.id for turn in trajectory.turns}
    ids = {turn.id for turn in trajectory.turns}
    named = {name if name in ids else indices.get(name, name): score for name, score in scores.items()}
    if len(named) != len(scores):
        raise EvaluationError("per_turn names one turn twice, by its id and by its index")
    _check_turns(named, trajectory)
    return named


def _check_turns(scores: Mapping[str, float], trajectory: Trajectory) -> None:
    unknown = set(scores) - {turn.id for turn in trajectory.turns}
    if unknown:
        raise EvaluationError(f"per_turn names the unknown turn {min(unknown)!r}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
