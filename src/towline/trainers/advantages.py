"""Group-relative advantages of sessions.

A group counts *sessions*: one with five traces is one sample, and all its traces carry its advantage. A session without a
score (failed infrastructure, or no evaluator) leaves the group; it is never a reward of 0. A group that is left with fewer
than two sessions, or with equal rewards, carries no gradient and is counted. Rewards that differ by rounding alone are
equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from towline.schema import Trace, Trajectory

Scale = Literal["std", "none"]
Values = npt.NDArray[np.float32]
REWARD_TOLERANCE = 1e-6
"""Rewards that differ by less, relative to the largest but at least 1, are equal: sums of the same parts in another
order."""


def reward_spread(rewards: npt.ArrayLike) -> float:
    """The standard deviation of rewards; 0 if they are equal but for rounding."""
    values = np.asarray(rewards, np.float64)
    if values.size == 0 or np.ptp(values) <= REWARD_TOLERANCE * max(1.0, float(np.abs(values).max())):
        return 0.0
    return float(values.std())


def centred(rewards: npt.ArrayLike, scale: Scale) -> npt.NDArray[np.float64]:
    """Rewards minus their mean, in units of their standard deviation with `std`; exactly 0 if they are equal."""
    values = np.asarray(rewards, np.float64)
    spread = reward_spread(values)
    if spread == 0.0:
        return np.zeros(values.shape)
    differences: npt.NDArray[np.float64] = (values - values.mean()) / (spread if scale == "std" else 1.0)
    return differences


@dataclass(slots=True)
class Advantages:
    """The advantage of every session that has one, by session id."""

    sessions: dict[str, float] = field(default_factory=dict)
    turns: dict[str, dict[str, float]] = field(default_factory=dict)
    """By session id, then turn id: added to the session's advantage, where turns have rewards."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The score of every session in a group of at least two."""
    unscored: int = 0
    """Sessions without a score."""
    small: int = 0
    """Groups of fewer than two scored sessions."""
    equal: int = 0
    """Groups in which all sessions have the same rewards, turn by turn."""


def group_advantages(
    groups: Mapping[str, Sequence[Trajectory]],
    *,
    scale: Scale = "std",
    turn_weight: float = 1.0,
    outcome_weight: float = 1.0,
    keep_equal: bool = False,
) -> Advantages:
    """Each group's rewards, centred on the mean and, with `std`, divided by the standard deviation.

    Per-turn rewards, where an evaluator gave any, are compared with those at the same position in the group's other
    sessions (first with first, second with second) and weighted by `turn_weight`; such a session's outcome is weighted by
    `outcome_weight`.
    """
    advantages = Advantages()
    for group in groups.values():
        scored = [
            (t, t.reward.score) for t in group if t.reward is not None and t.reward.score is not None and t.traces
        ]
        advantages.unscored += len(group) - len(scored)
        if len(scored) < 2:
            advantages.small += 1
            continue
        rewards = np.array([score for _, score in scored], np.float64)
        advantages.rewards |= {t.session_id: float(score) for t, score in scored}
        per_turn = {t.session_id: in_order for t, _ in scored if (in_order := turn_rewards(t))}
        turns = _turn_advantages(per_turn, scale, turn_weight) if per_turn else {}
        has_gradient = reward_spread(rewards) > 0.0 or any(
            value for values in turns.values() for value in values.values()
        )
        if not has_gradient and not keep_equal:
            advantages.equal += 1
            continue
        advantages.sessions |= {
            t.session_id: float(value) * (outcome_weight if t.session_id in per_turn else 1.0)
            for (t, _), value in zip(scored, centred(rewards, scale), strict=True)
        }
        advantages.turns |= turns
    return advantages


def token_advantages(trajectory: Trajectory, trace: Trace, advantages: Advantages) -> Values | None:
    """Per-token advantages of one of the trajectory's traces, 0 for untrained tokens; `None` if its session has none.

    Every trace carries the session's advantage, plus each turn's own where turns have rewards.
    """
    base = advantages.sessions.get(trajectory.session_id)
    if base is None:
        return None
    extra = advantages.turns.get(trajectory.session_id, {})
    by_index = {turn.index: extra.get(turn.id, 0.0) for turn in trajectory.turns}
    trained = trace.loss_mask == 1
    values = np.zeros(len(trace.token_ids), np.float32)
    values[trained] = base + np.array([by_index.get(int(index), 0.0) for index in trace.turn_ids[trained]], np.float32)
    return values


def turn_rewards(trajectory: Trajectory) -> list[tuple[str, float]]:
    """Turn ids with their rewards, in turn order."""
    given = trajectory.reward.per_turn if trajectory.reward is not None else {}
    turns = sorted(trajectory.turns, key=lambda turn: turn.index)
    return [(turn.id, given[turn.id]) for turn in turns if turn.id in given]


def _turn_advantages(
    per_turn: Mapping[str, Sequence[tuple[str, float]]], scale: Scale, weight: float
) -> dict[str, dict[str, float]]:
    advantages: dict[str, dict[str, float]] = {session: {} for session in per_turn}
    for position in range(max(map(len, per_turn.values()))):
        compared = {session: turns[position] for session, turns in per_turn.items() if position < len(turns)}
        differences = centred([value for _, value in compared.values()], scale)
        for (session, (turn, _)), difference in zip(compared.items(), differences, strict=True):
            advantages[session][turn] = weight * float(difference)
    return advantages
