"""A session as the `response` of NeMo Gym: the items of its conversation, in the shape of OpenAI's Responses.

The items of a model call end with one that carries the call's tokens: `prompt_token_ids` (everything before),
`generation_token_ids` and `generation_log_probs`. They are cut out of one exact row, so each prompt starts with the
prompt and generation before it, token for token; that is what NeMo RL checks. A call that the row does not train carries
no tokens: those are part of the next prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from towline.schema import Trajectory, Turn
from towline.schema.checks import runs
from towline.trainers.groups import cut_short
from towline.trainers.packing import SplitRow, one_temperature

Item = dict[str, Any]


def response_of(row: SplitRow, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to `asked`, the row's `responses_create_params`."""
    trajectory = row.trajectory
    short = cut_short(trajectory)
    return {
        "id": f"resp_{trajectory.session_id}",
        "object": "response",
        "created_at": trajectory.created,
        "model": asked.get("model") or next((turn.model for turn in trajectory.turns), ""),
        "status": "incomplete" if short else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if short else None,
        "instructions": asked.get("instructions"),
        "metadata": asked.get("metadata"),
        "output": items_of(row),
        "parallel_tool_calls": asked.get("parallel_tool_calls", True),
        "temperature": one_temperature(row),
        "top_p": row.trace.top_p,
        "tool_choice": "auto",
        "tools": _tools(trajectory, row),
        "usage": _usage(row),
    }


def items_of(row: SplitRow) -> list[Item]:
    by_index = {turn.index: turn for turn in row.trajectory.turns}
    since = {turn.index: messages for turn, messages in row.trajectory.row_turns(row.trace)}
    tokens, trace = row.trace.token_ids, row.trace
    items: list[Item] = []
    for index, start, end in runs(trace.turn_ids):
        if index < 0:
            continue
        turn = by_index[index]
        # What the first call was given is the row's own input.
        items += (
            [_said(message, turn, number) for number, message in enumerate(since.get(index, turn.messages))]
            if items
            else []
        )
        items += _replied(turn)
        if trace.loss_mask[start:end].all():
            items[-1] |= {
                "prompt_token_ids": tokens[:start].tolist(),
                "generation_token_ids": tokens[start:end].tolist(),
                "generation_log_probs": trace.logprobs[start:end].tolist(),
            }
    return items


def _said(message: Mapping[str, Any], turn: Turn, number: int) -> Item:
    """What the harness put into the conversation."""
    text = str(message.get("text") or "")
    if message["role"] == "tool":
        return {"type": "function_call_output", "call_id": str(message.get("tool_call_id") or ""), "output": text}
    if message["role"] == "assistant":
        return _message(f"msg_{turn.id}_{number}", text)
    return {"type": "message", "role": message["role"], "content": text}


def _replied(turn: Turn) -> list[Item]:
    """What the model said in one call: at least one item."""
    reply = turn.reply
    items: list[Item] = []
    if reply.get("reasoning"):
        summary = [{"type": "summary_text", "text": reply["reasoning"]}]
        items.append({"type": "reasoning", "id": f"rs_{turn.id}", "summary": summary})
    calls = reply.get("tool_calls") or []
    if reply.get("text") or not calls:
        items.append(_message(f"msg_{turn.id}", str(reply.get("text") or "")))
    for call in calls:
        arguments = call["arguments"]
        if call.get("custom"):
            arguments = {"input": arguments}
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{turn.id}_{call['id']}",
                "call_id": call["id"],
                "name": call["name"],
                "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
                "status": "completed",
            }
        )
    return items


def _message(name: str, text: str) -> Item:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": name, "role": "assistant", "status": "completed", "content": content}


def _tools(trajectory: Trajectory, row: SplitRow) -> list[Item]:
    """The tools that the harness declared to the row's last call."""
    last = next(turn for turn in trajectory.turns if turn.index == int(row.trace.turn_ids.max()))
    return [
        {
            "type": "function",
            "name": tool["function"]["name"],
            "description": tool["function"].get("description") or None,
            "parameters": tool["function"].get("parameters") or {},
            "strict": False,
        }
        for tool in trajectory.tools.get(last.tools_key, [])
    ]


def _usage(row: SplitRow) -> dict[str, Any]:
    """Tokens of the row's calls as a provider would bill them."""
    indices = {int(index) for index in row.trace.turn_ids if index >= 0}
    turns = [turn for turn in row.trajectory.turns if turn.index in indices]
    prompt, sampled = sum(turn.prompt_length for turn in turns), sum(len(turn.sampled) for turn in turns)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": sum(turn.cached_tokens for turn in turns)},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }
