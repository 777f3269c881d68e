"""The conversation of one training row: its messages in order, and which of them the row trains.

Invariant: the messages are those of the path of turns that ends in the row's last turn, each once, as the harness sent
them and as the model said them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from towline.schema import BuilderName, Trace, Trajectory, Turn


@dataclass(frozen=True)
class Spoken:
    """One message."""

    message: dict[str, Any]
    """Neutral JSON: `role`, `text`, and where there are any `reasoning`, `tool_calls`, `tool_call_id`, `name`."""
    turn: Turn | None = None
    """The turn that sampled it; `None` for what the harness said."""
    trained: bool = False

    @property
    def role(self) -> str:
        return str(self.message["role"])

    @property
    def text(self) -> str:
        return str(self.message.get("text") or "")

    @property
    def reasoning(self) -> str:
        return str(self.message.get("reasoning") or "")

    @property
    def calls(self) -> list[dict[str, Any]]:
        return list(self.message.get("tool_calls") or [])


def path_of(trajectory: Trajectory, trace: Trace) -> list[Turn]:
    """The turns from the root to the row's last."""
    return [turn for turn, _ in trajectory.row_turns(trace)]


def conversation(trajectory: Trajectory, trace: Trace) -> list[Spoken]:
    trained = {int(index) for index in trace.turn_ids[trace.loss_mask == 1]}
    # Where every turn was rendered anew, earlier replies of the row stand among the messages of its last turn.
    stitched = trace.builder is BuilderName.MERGED
    said: list[Spoken] = []
    for turn, messages in trajectory.row_turns(trace):
        said.extend(Spoken(message, None, stitched and message.get("role") == "assistant") for message in messages)
        if turn.reply:
            said.append(Spoken({"role": "assistant", **turn.reply}, turn, turn.index in trained))
    return said


def tools_of(trajectory: Trajectory, trace: Trace) -> list[dict[str, Any]]:
    """The tools that were declared to the row's last turn."""
    path = path_of(trajectory, trace)
    return trajectory.tools.get(path[-1].tools_key, []) if path else []


def trained_traces(trajectory: Trajectory) -> list[Trace]:
    """The rows that train something."""
    return [trace for trace in trajectory.traces if trace.trained_tokens]
