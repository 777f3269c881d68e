"""Trajectories without keys: an agent that prints its environment prints its session's key.

Only text is changed, which people read. Token ids are what the model saw, and stay.
"""

from __future__ import annotations

from towline.common.redaction import redact, redact_value
from towline.schema import Trajectory, Turn


def without_keys(trajectory: Trajectory) -> Trajectory:
    """The trajectory with every key in its messages, replies and errors replaced by a mark."""
    return trajectory.model_copy(
        update={
            "turns": [_turn(turn) for turn in trajectory.turns],
            "error": None if trajectory.error is None else redact(trajectory.error),
            "metadata": redact_value(trajectory.metadata),
        }
    )


def _turn(turn: Turn) -> Turn:
    fields = {"messages": turn.messages, "reply": turn.reply, "requested": turn.requested}
    clean = {name: redact_value(value) for name, value in fields.items()}
    changed = {name: value for name, value in clean.items() if value is not fields[name]}
    return turn.model_copy(update=changed) if changed else turn
