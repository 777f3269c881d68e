"""ShareGPT-style lines: `{"conversations": [{"from", "value", "weight"}, …], "tools", …}`, one a training row.

Speakers are `system`, `human`, `gpt` and `tool`. Reasoning stands in `<think>` before the words, calls in `<tool_call>`
after them, results in `<tool_response>`; neighbouring messages of one speaker are one entry, as readers of the format
expect turns to alternate. `weight` is 0 where the row does not train what was said.
"""

from __future__ import annotations

import json
from typing import Any

from towline.datasets.conversation import Spoken, conversation, tools_of, trained_traces
from towline.datasets.rows import printable
from towline.schema import Trajectory

_SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}


def lines_of(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The lines of one session."""
    reward = trajectory.reward.score if trajectory.reward is not None else None
    return [
        {
            "id": f"{trajectory.session_id}/{trace.trace_id}",
            "task_id": trajectory.group_id,
            "conversations": _alternating(conversation(trajectory, trace)),
            "tools": json.dumps([tool.get("function", tool) for tool in tools_of(trajectory, trace)]),
            "reward": reward,
        }
        for trace in trained_traces(trajectory)
    ]


def _alternating(said: list[Spoken]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for spoken in said:
        entry: dict[str, Any] = {"from": _SPEAKERS[spoken.role], "value": _value(spoken)}
        if spoken.role == "assistant":
            entry["weight"] = int(spoken.trained)
        last = entries[-1] if entries else None
        if last is not None and last["from"] == entry["from"] and last.get("weight") == entry.get("weight"):
            last["value"] += "\n" + entry["value"]
        else:
            entries.append(entry)
    return entries


def _value(spoken: Spoken) -> str:
    if spoken.role == "tool":
        return f"<tool_response>\n{printable(spoken.text)}\n</tool_response>"
    parts = [f"<think>\n{spoken.reasoning}\n</think>"] if spoken.reasoning else []
    if spoken.text:
        parts.append(spoken.text)
    for call in spoken.calls:
        body = json.dumps({"name": call["name"], "arguments": call.get("arguments")}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return printable("\n".join(parts))
