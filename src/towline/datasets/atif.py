"""Sessions in Harbor's Agent Trajectory Interchange Format, ATIF-v1.7.

The main chain is the document; further chains are its `subagent_trajectories`. A reply that a chain shares with an
earlier one, and does not train, is marked as copied context. `completion_token_ids` and `logprobs` are those of the
turn; of the prompt only what is new in it is given, as `metrics.extra.prompt_suffix_token_ids`: a turn's prompt is the
prompt before it, what was sampled there, and this suffix.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from towline.datasets.conversation import Spoken, conversation, path_of, tools_of, trained_traces
from towline.datasets.rows import printable
from towline.schema import Trace, Trajectory, Turn, TurnRole

VERSION = "ATIF-v1.7"


def document(trajectory: Trajectory) -> dict[str, Any]:
    """The session as one document; raises `ValueError` for one that trains nothing."""
    traces = trained_traces(trajectory)
    if not traces:
        raise ValueError(f"session {trajectory.session_id} trains nothing")
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
        _refer(made, trajectory, main, others)
    return made


def _chain(trajectory: Trajectory, trace: Trace) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    for spoken in conversation(trajectory, trace):
        if spoken.role == "tool":
            _observe(steps, spoken)
        else:
            steps.append({"step_id": len(steps) + 1, **_step(spoken, len(steps) + 1)})
    path = path_of(trajectory, trace)
    return {
        "schema_version": VERSION,
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
    tools = tools_of(trajectory, trace)
    return agent | ({"tool_definitions": tools} if tools else {})


def _step(spoken: Spoken, number: int) -> dict[str, Any]:
    text = printable(spoken.text)
    if spoken.role != "assistant":
        return {"source": "system" if spoken.role == "system" else "user", "message": text}
    step: dict[str, Any] = {"source": "agent", "message": text}
    if spoken.reasoning:
        step["reasoning_content"] = printable(spoken.reasoning)
    if spoken.calls:
        step["tool_calls"] = [_call(call, f"call_{number}_{place}") for place, call in enumerate(spoken.calls)]
    turn = spoken.turn
    if turn is None or not spoken.trained:
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


def _observe(steps: list[dict[str, Any]], spoken: Spoken) -> None:
    """Put a result to the latest step of the agent that made its call, else to the latest of all."""
    named = printable(str(spoken.message.get("tool_call_id") or ""))
    agents = [step for step in steps if step["source"] == "agent"]
    caller = next((step for step in reversed(agents) if named in _ids(step)), None)
    step = caller or (agents[-1] if agents else None)
    if step is None:
        steps.append({"step_id": len(steps) + 1, "source": "system", "message": printable(spoken.text)})
        return
    result = {"source_call_id": named if caller is not None else None, "content": printable(spoken.text)}
    step.setdefault("observation", {"results": []})["results"].append(result)


def _ids(step: dict[str, Any]) -> set[str]:
    return {call["tool_call_id"] for call in step.get("tool_calls", ())}


def _refer(made: dict[str, Any], trajectory: Trajectory, main: Trace, others: list[Trace]) -> None:
    """Name each sub-agent's chain at the step that it came from, where that is known."""
    agents = [step for step in made["steps"] if "metrics" in step]
    place = {turn.id: step for turn, step in zip(path_of(trajectory, main), agents, strict=False)}
    for trace in others:
        path = path_of(trajectory, trace)
        origin = next((turn.origin for turn in path if turn.origin is not None), None)
        if trace.role is TurnRole.SUBAGENT and origin in place:
            results = place[origin].setdefault("observation", {"results": []})["results"]
            results.append({"subagent_trajectory_ref": [{"trajectory_id": trace.trace_id}]})
