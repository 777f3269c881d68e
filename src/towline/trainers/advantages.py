"""What each session of a group did better than the others: the rules that a trainer must not get wrong.

A group counts *sessions*: one with five traces is one sample, and its advantage is spread over all of them. A session
without a score (its infrastructure failed, or nobody judged it) leaves the group; it is never a 0. A group that is left with
fewer than two sessions, or with equal rewards, carries no gradient and is counted as such.
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


@dataclass(slots=True)
class Advantages:
    """The advantage of every session that has one, by session id."""

    sessions: dict[str, float] = field(default_factory=dict)
    turns: dict[str, dict[str, float]] = field(default_factory=dict)
    """By session, then by turn id: what comes on top of the session's own, where turns have rewards."""
    rewards: dict[str, float] = field(default_factory=dict)
    unscored: int = 0
    """Sessions that had no score."""
    small: int = 0
    """Groups of fewer than two scored sessions."""
    equal: int = 0
    """Groups whose sessions all got the same, turn by turn."""


def group_advantages(
    groups: Mapping[str, Sequence[Trajectory]],
    *,
    scale: Scale = "std",
    turn_weight: float = 1.0,
    outcome_weight: float = 1.0,
    keep_equal: bool = False,
) -> Advantages:
    """Rewards of each group, centred on its mean and, with `std`, divided by its standard deviation.

    Per-turn rewards, where an evaluator gave any, are compared with those of the same place in the group's other sessions
    (the first with the first, the second with the second) and weighted by `turn_weight`; what such a session's outcome
    counts beside them is `outcome_weight`.
    """
    found = Advantages()
    for group in groups.values():
        scored = [
            (t, t.reward.score) for t in group if t.reward is not None and t.reward.score is not None and t.traces
        ]
        found.unscored += len(group) - len(scored)
        if len(scored) < 2:
            found.small += 1
            continue
        rewards = np.array([score for _, score in scored], np.float64)
        found.rewards |= {t.session_id: float(score) for t, score in scored}
        per_turn = {t.session_id: in_order for t, _ in scored if (in_order := turn_rewards(t))}
        turns = _turn_advantages(per_turn, scale, turn_weight) if per_turn else {}
        spread = float(rewards.std())
        teaches = spread > 0.0 or any(value for values in turns.values() for value in values.values())
        if not teaches and not keep_equal:
            found.equal += 1
            continue
        centred = (rewards - rewards.mean()) / (spread if scale == "std" and spread > 0 else 1.0)
        found.sessions |= {
            t.session_id: float(value) * (outcome_weight if t.session_id in per_turn else 1.0)
            for (t, _), value in zip(scored, centred, strict=True)
        }
        found.turns |= turns
    return found


def token_advantages(trajectory: Trajectory, trace: Trace, advantages: Advantages) -> Values | None:
    """The advantage of every token of one of the trajectory's rows, 0 where nothing is trained; `None` if its session has
    none.

    All rows of a session carry the session's advantage, and each token its turn's on top of it, where turns have rewards.
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
    """Turn ids with their rewards, in the order of the turns."""
    given = trajectory.reward.per_turn if trajectory.reward is not None else {}
    turns = sorted(trajectory.turns, key=lambda turn: turn.index)
    return [(turn.id, given[turn.id]) for turn in turns if turn.id in given]


def _turn_advantages(
    per_turn: Mapping[str, Sequence[tuple[str, float]]], scale: Scale, weight: float
) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {session: {} for session in per_turn}
    for place in range(max(map(len, per_turn.values()))):
        here = {session: turns[place] for session, turns in per_turn.items() if place < len(turns)}
        values = np.array([value for _, value in here.values()], np.float64)
        spread = float(values.std())
        divisor = spread if scale == "std" and spread > 0 else 1.0
        for session, (turn, value) in here.items():
            found[session][turn] = weight * (value - float(values.mean())) / divisor
    return found
