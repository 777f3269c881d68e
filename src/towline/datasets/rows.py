"""Sessions as rows of a Parquet dataset: one row a trace that trains something, messages and tokens side by side.

`datasets.load_dataset("parquet", …)` reads it. What has free keys (tools, metadata, arguments of calls) is text of JSON:
columns of a dataset have one type.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from towline.datasets.conversation import Spoken, conversation, tools_of, trained_traces
from towline.schema import Trace, Trajectory
from towline.schema.files import dump_json

_CALL = pa.struct(
    [
        ("id", pa.string()),
        ("type", pa.string()),
        ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())])),
    ]
)
_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("reasoning_content", pa.string()),
        ("tool_calls", pa.list_(_CALL)),
        ("tool_call_id", pa.string()),
        ("name", pa.string()),
        ("trained", pa.bool_()),
    ]
)
SCHEMA = pa.schema(
    [
        ("task_id", pa.string()),
        ("sample", pa.int64()),
        ("session_id", pa.string()),
        ("trace_id", pa.string()),
        ("role", pa.string()),
        ("traces", pa.int64()),  # rows of this session: divide by it to weigh sessions alike
        ("messages", pa.list_(_MESSAGE)),
        ("tools", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
        ("policy_versions", pa.list_(pa.int32())),
        ("turn_ids", pa.list_(pa.int32())),
        ("trained_tokens", pa.int64()),
        ("reward", pa.float64()),
        ("components", pa.string()),
        ("turn_rewards", pa.string()),
        ("harness", pa.string()),
        ("end_reason", pa.string()),
        ("finish_reason", pa.string()),
        ("truncated", pa.bool_()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int64()),
        ("temperatures", pa.list_(pa.float32())),  # per token: 1 for context, 0 for a greedy turn
        ("sampling", pa.string()),  # per turn
        ("metadata", pa.string()),
    ]
)


def rows_of(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The rows of one session."""
    traces = trained_traces(trajectory)
    return [_row(trajectory, trace, len(traces)) for trace in traces]


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def _row(trajectory: Trajectory, trace: Trace, traces: int) -> dict[str, Any]:
    metadata, reward = trajectory.metadata, trajectory.reward
    return {
        "task_id": trace.group_id,
        "sample": metadata.get("sample", 0),
        "session_id": trace.rollout_id,
        "trace_id": trace.trace_id,
        "role": trace.role.value,
        "traces": traces,
        "messages": [chat_message(spoken) for spoken in conversation(trajectory, trace)],
        "tools": _json(tools_of(trajectory, trace)),
        "token_ids": trace.token_ids,
        "loss_mask": trace.loss_mask,
        "logprobs": trace.logprobs,
        "policy_versions": trace.policy_versions,
        "turn_ids": trace.turn_ids,
        "trained_tokens": trace.trained_tokens,
        "reward": trace.reward,
        "components": _json(reward.components if reward is not None else {}),
        "turn_rewards": _json(trace.turn_rewards),
        "harness": str(metadata.get("harness", "")),
        "end_reason": trajectory.end_reason.value if trajectory.end_reason else None,
        "finish_reason": trace.finish_reason,
        "truncated": trace.truncated,
        "temperature": trace.temperature,
        "top_p": trace.top_p,
        "top_k": trace.top_k,
        "temperatures": trace.temperatures,
        "sampling": _json(trace.sampling),
        "metadata": _json(metadata),
    }


def chat_message(spoken: Spoken) -> dict[str, Any]:
    """A message as chat templates and chat APIs have it. Whether it is trained is a key of its own, which they ignore."""
    return {
        "role": spoken.role,
        "content": printable(spoken.text),
        "reasoning_content": printable(spoken.reasoning) or None,
        "tool_calls": [
            {
                "id": printable(str(call.get("id") or "")),
                "type": "function",
                "function": {"name": printable(str(call["name"])), "arguments": arguments_text(call)},
            }
            for call in spoken.calls
        ]
        or None,
        "tool_call_id": spoken.message.get("tool_call_id"),
        "name": spoken.message.get("name"),
        "trained": spoken.trained,
    }


def arguments_text(call: dict[str, Any]) -> str:
    """The arguments as JSON text; those of a freeform call, or such as are no JSON, as they are."""
    arguments = call.get("arguments")
    return (
        printable(arguments)
        if isinstance(arguments, str)
        else printable(json.dumps(arguments or {}, ensure_ascii=False))
    )


def printable(text: str) -> str:
    """The text with what UTF-8 cannot hold (a harness that cuts a string between surrogates) replaced."""
    return text.encode("utf-8", "replace").decode()


def _json(value: Any) -> str:
    return dump_json(value).decode()
