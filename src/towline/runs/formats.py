"""How a session is written for training on files: as messages, Parquet rows, ShareGPT lines, and ATIF documents.

Messages. The messages of a row are those of the path of turns that ends in its last turn, each once, as the harness sent
them and as the model sampled them.

Parquet. One row per trace with trained tokens, messages and tokens side by side; `datasets.load_dataset("parquet", …)`
reads it. Columns have one type, so values with free keys (tools, metadata, tool-call arguments) are JSON text.

ShareGPT. One line per row: `{"conversations": [{"from", "value", "weight"}, …], "tools", …}` with the speakers `system`,
`human`, `gpt` and `tool`. Reasoning is in `<think>` before the text, calls in `<tool_call>` after it, results in
`<tool_response>`. Adjacent messages of one speaker are one entry, as readers of the format expect alternating turns.
`weight` is 0 for replies that the row does not train.

ATIF. Harbor's Agent Trajectory Interchange Format, ATIF-v1.7. The main chain is the document; the other chains are its
`subagent_trajectories`. A reply that a chain shares with an earlier one, and does not train, is marked as copied context.
`completion_token_ids` and `logprobs` are those of the turn. A turn's prompt is the previous prompt, the tokens sampled
there, and `metrics.extra.prompt_suffix_token_ids`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from towline.schema import BuilderName, Trace, Trajectory, Turn, TurnRole
from towline.schema.files import dump_json


@dataclass(frozen=True)
class DatasetMessage:
    """One message of a row."""

    content: dict[str, Any]
    """Neutral JSON: `role`, `text`, and where present `reasoning`, `tool_calls`, `tool_call_id`, `name`."""
    turn: Turn | None = None
    """The turn that sampled it; `None` for messages of the harness."""
    trained: bool = False

    @property
    def role(self) -> str:
        return str(self.content["role"])

    @property
    def text(self) -> str:
        return str(self.content.get("text") or "")

    @property
    def reasoning(self) -> str:
        return str(self.content.get("reasoning") or "")

    @property
    def calls(self) -> list[dict[str, Any]]:
        return list(self.content.get("tool_calls") or [])


def row_path(trajectory: Trajectory, trace: Trace) -> list[Turn]:
    """The turns from the root to the last turn of the row."""
    return [turn for turn, _ in trajectory.row_turns(trace)]


def row_messages(trajectory: Trajectory, trace: Trace) -> list[DatasetMessage]:
    """The messages of a row in order, each with the turn that sampled it and whether the row trains it."""
    trained = {int(index) for index in trace.turn_ids[trace.loss_mask == 1]}
    # The merged builder renders every turn afresh: earlier replies of the row are among the messages of its last turn.
    stitched = trace.builder is BuilderName.MERGED
    messages_of_row: list[DatasetMessage] = []
    for turn, messages in trajectory.row_turns(trace):
        messages_of_row.extend(
            DatasetMessage(message, None, stitched and message.get("role") == "assistant") for message in messages
        )
        if turn.reply:
            messages_of_row.append(DatasetMessage({"role": "assistant", **turn.reply}, turn, turn.index in trained))
    return messages_of_row


def row_tools(trajectory: Trajectory, trace: Trace) -> list[dict[str, Any]]:
    """The tools declared to the last turn of the row."""
    path = row_path(trajectory, trace)
    return trajectory.tools.get(path[-1].tools_key, []) if path else []


def trained_traces(trajectory: Trajectory) -> list[Trace]:
    """The rows with trained tokens."""
    return [trace for trace in trajectory.traces if trace.trained_tokens]


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
PARQUET_SCHEMA = pa.schema(
    [
        ("task_id", pa.string()),
        ("sample", pa.int64()),
        ("session_id", pa.string()),
        ("trace_id", pa.string()),
        ("role", pa.string()),
        ("traces", pa.int64()),  # rows of this session: divide by it to weight sessions equally
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


def parquet_rows(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The Parquet rows of one session, one per trace with trained tokens."""
    traces = trained_traces(trajectory)
    return [_parquet_row(trajectory, trace, len(traces)) for trace in traces]


def parquet_batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=PARQUET_SCHEMA)


def _parquet_row(trajectory: Trajectory, trace: Trace, traces: int) -> dict[str, Any]:
    metadata, reward = trajectory.metadata, trajectory.reward
    return {
        "task_id": trace.group_id,
        "sample": metadata.get("sample", 0),
        "session_id": trace.rollout_id,
        "trace_id": trace.trace_id,
        "role": trace.role.value,
        "traces": traces,
        "messages": [chat_message(message) for message in row_messages(trajectory, trace)],
        "tools": _json(row_tools(trajectory, trace)),
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


def chat_message(message: DatasetMessage) -> dict[str, Any]:
    """A message in the shape of chat templates and chat APIs, with an extra key `trained` that they ignore."""
    return {
        "role": message.role,
        "content": printable(message.text),
        "reasoning_content": printable(message.reasoning) or None,
        "tool_calls": [
            {
                "id": printable(str(call.get("id") or "")),
                "type": "function",
                "function": {"name": printable(str(call["name"])), "arguments": arguments_text(call)},
            }
            for call in message.calls
        ]
        or None,
        "tool_call_id": message.content.get("tool_call_id"),
        "name": message.content.get("name"),
        "trained": message.trained,
    }


def arguments_text(call: dict[str, Any]) -> str:
    """The arguments as JSON text; those of a freeform call, or that are not JSON, verbatim."""
    arguments = call.get("arguments")
    return (
        printable(arguments)
        if isinstance(arguments, str)
        else printable(json.dumps(arguments or {}, ensure_ascii=False))
    )


def printable(text: str) -> str:
    """The text with lone surrogates replaced, which UTF-8 cannot encode (a harness may cut a string between two)."""
    return text.encode("utf-8", "replace").decode()


def _json(value: Any) -> str:
    return dump_json(value).decode()


_SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}


def sharegpt_lines(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The ShareGPT lines of one session."""
    reward = trajectory.reward.score if trajectory.reward is not None else None
    return [
        {
            "id": f"{trajectory.session_id}/{trace.trace_id}",
            "task_id": trajectory.group_id,
            "conversations": _alternating(row_messages(trajectory, trace)),
            "tools": json.dumps([tool.get("function", tool) for tool in row_tools(trajectory, trace)]),
            "reward": reward,
        }
        for trace in trained_traces(trajectory)
    ]


def _alternating(messages: list[DatasetMessage]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for message in messages:
        entry: dict[str, Any] = {"from": _SPEAKERS[message.role], "value": _sharegpt_text(message)}
        if message.role == "assistant":
            entry["weight"] = int(message.trained)
        last = entries[-1] if entries else None
        if last is not None and last["from"] == entry["from"] and last.get("weight") == entry.get("weight"):
            last["value"] += "\n" + entry["value"]
        else:
            entries.append(entry)
    return entries


def _sharegpt_text(message: DatasetMessage) -> str:
    if message.role == "tool":
        return f"<tool_response>\n{printable(message.text)}\n</tool_response>"
    parts = [f"<think>\n{message.reasoning}\n</think>"] if message.reasoning else []
    if message.text:
        parts.append(message.text)
    for call in message.calls:
        body = json.dumps({"name": call["name"], "arguments": call.get("arguments")}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return printable("\n".join(parts))


ATIF_VERSION = "ATIF-v1.7"


def atif_document(trajectory: Trajectory) -> dict[str, Any]:
    """The session as one document; raises `ValueError` for a session without trained tokens."""
    traces = trained_traces(trajectory)
    if not traces:
        raise ValueError(f"session {trajectory.session_id} has no trained tokens")
    main = next((trace for trace in traces if trace.role is TurnRole.MAIN), traces[0])
    others = [trace for trace in traces if trace is not main]
    made = _chain(trajectory, main)
    reward = trajectory.reward
    made["session_id"] = trajectory.session_id
    made["extra"] |= {
        "task_id": trajectory.group_id,
        "reward": reward.score if reward is not None else None,
        "reward_components": reward.components if reward is not None else {},
        "end_reason": trajectory.end_reason.value if trajectory.end_reason else None,
        "metadata": trajectory.metadata,
    }
    if others:
        made["subagent_trajectories"] = [_chain(trajectory, trace) for trace in others]
        _refer_to_subagents(made, trajectory, main, others)
    return made


def _chain(trajectory: Trajectory, trace: Trace) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    for message in row_messages(trajectory, trace):
        if message.role == "tool":
            _add_tool_result(steps, message)
        else:
            steps.append({"step_id": len(steps) + 1, **_step(message, len(steps) + 1)})
    path = row_path(trajectory, trace)
    return {
        "schema_version": ATIF_VERSION,
        "trajectory_id": trace.trace_id,
        "agent": _agent(trajectory, trace, path),
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(turn.prompt_length for turn in path),
            "total_completion_tokens": sum(len(turn.sampled) for turn in path),
            "total_cached_tokens": sum(turn.cached_tokens for turn in path),
            "total_steps": len(steps),
        },
        "extra": {"role": trace.role.value, "trained_tokens": trace.trained_tokens, "truncated": trace.truncated},
    }


def _agent(trajectory: Trajectory, trace: Trace, path: list[Turn]) -> dict[str, Any]:
    agent: dict[str, Any] = {
        "name": str(trajectory.metadata.get("harness") or "unknown"),
        "version": str(trajectory.metadata.get("harness_version") or "unknown"),
        "model_name": path[-1].model or "unknown",
    }
    tools = row_tools(trajectory, trace)
    return agent | ({"tool_definitions": tools} if tools else {})


def _step(message: DatasetMessage, number: int) -> dict[str, Any]:
    text = printable(message.text)
    if message.role != "assistant":
        return {"source": "system" if message.role == "system" else "user", "message": text}
    step: dict[str, Any] = {"source": "agent", "message": text}
    if message.reasoning:
        step["reasoning_content"] = printable(message.reasoning)
    if message.calls:
        step["tool_calls"] = [_call(call, f"call_{number}_{place}") for place, call in enumerate(message.calls)]
    turn = message.turn
    if turn is None or not message.trained:
        step["is_copied_context"] = True
    if turn is not None:
        step["timestamp"] = datetime.fromtimestamp(turn.started, UTC).isoformat()
        step["llm_call_count"] = 1
        step["metrics"] = {
            "prompt_tokens": turn.prompt_length,
            "completion_tokens": len(turn.sampled),
            "cached_tokens": turn.cached_tokens,
            "completion_token_ids": turn.sampled.tolist(),
            "logprobs": turn.logprobs.tolist(),
            "extra": {
                "prompt_suffix_token_ids": turn.suffix.tolist(),
                "policy_versions": sorted(set(turn.versions.tolist())),
                "finish_reason": turn.finish,
            },
        }
    return step


def _call(call: dict[str, Any], fallback: str) -> dict[str, Any]:
    arguments = call.get("arguments")
    return {
        "tool_call_id": printable(str(call.get("id") or fallback)),
        "function_name": printable(str(call["name"])),
        "arguments": arguments if isinstance(arguments, dict) else {"input": printable(str(arguments or ""))},
    }


def _add_tool_result(steps: list[dict[str, Any]], message: DatasetMessage) -> None:
    """Attach a tool result to the agent step that made the call, or to the latest agent step."""
    named = printable(str(message.content.get("tool_call_id") or ""))
    agents = [step for step in steps if step["source"] == "agent"]
    caller = next((step for step in reversed(agents) if named in _ids(step)), None)
    step = caller or (agents[-1] if agents else None)
    if step is None:
        steps.append({"step_id": len(steps) + 1, "source": "system", "message": printable(message.text)})
        return
    result = {"source_call_id": named if caller is not None else None, "content": printable(message.text)}
    step.setdefault("observation", {"results": []})["results"].append(result)


def _ids(step: dict[str, Any]) -> set[str]:
    return {call["tool_call_id"] for call in step.get("tool_calls", ())}


def _refer_to_subagents(made: dict[str, Any], trajectory: Trajectory, main: Trace, others: list[Trace]) -> None:
    """Refer to each sub-agent's chain at the step that started it, where that is known."""
    agents = [step for step in made["steps"] if "metrics" in step]
    place = {turn.id: step for turn, step in zip(row_path(trajectory, main), agents, strict=False)}
    for trace in others:
        path = row_path(trajectory, trace)
        origin = next((turn.origin for turn in path if turn.origin is not None), None)
        if trace.role is TurnRole.SUBAGENT and origin in place:
            results = place[origin].setdefault("observation", {"results": []})["results"]
            results.append({"subagent_trajectory_ref": [{"trajectory_id": trace.trace_id}]})
