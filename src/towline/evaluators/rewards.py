"""From a verifier's output or files to a `Reward`. A score is a finite number that was actually given, or an error.

Text and files are parsed by `hostile/score_text.py`, in a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from towline.evaluators.base import EvaluationError
from towline.evaluators.hostile.score_text import (
    MAX_SCORES,
    finite_number,
    last_number,
    last_object,
    matched_number,
    named_scores,
    parse_number,
    reward_files,
    short,
)
from towline.schema import Reward, Trajectory

__all__ = [
    "MAX_SCORES",
    "finite_number",
    "last_number",
    "last_object",
    "main_reward",
    "matched_number",
    "parse_number",
    "reward_files",
    "to_reward",
]

_PARTS = ("reward", "components", "per_turn")


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
        raise EvaluationError(f"{what} must be an object of numbers, not {short(value)}")
    return named_scores(value, f"{what}.")


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
