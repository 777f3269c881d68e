"""Dataset formats: messages, masks and references agree with the turns they come from."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from towline.runs import formats as atif
from towline.runs import formats as rows
from towline.runs import formats as sharegpt
from towline.runs.dataset import DuplicateRule, fingerprint
from towline.schema import EndReason, ForkReason, Reward, SessionState, Trace, Trajectory, Turn, TurnRole

CALL = {"id": "c1", "name": "bash", "arguments": {"command": "ls 🪢"}, "custom": False}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]


def turn(index: int, parent: Turn | None, messages: list[Any], reply: dict[str, Any], **fields: Any) -> Turn:
    before = parent.prompt_length + len(parent.sampled) if parent else 0
    sampled = np.array([100 + index, 200 + index], np.int32)
    return Turn(
        id=f"t{index}",
        index=index,
        parent=parent.id if parent else None,
        prompt_length=before + 2,
        suffix=np.array([index, index + 1], np.int32),
        sampled=sampled,
        logprobs=np.array([-0.5, -1.0], np.float32),
        versions=np.array([3, 4], np.int32),
        finish="stop",
        model="tiny",
        messages=messages,
        reply={"role": "assistant", "finish": "stop", **reply},
        tools_key="k",
        **fields,
    )


def trace(name: str, path: list[Turn], trained: set[int], **fields: Any) -> Trace:
    columns: dict[str, list[Any]] = {
        k: [] for k in ("token_ids", "loss_mask", "logprobs", "policy_versions", "turn_ids")
    }
    for one in path:
        columns["token_ids"] += [*one.suffix, *one.sampled]
        columns["loss_mask"] += [0, 0] + [int(one.index in trained)] * 2
        columns["logprobs"] += [0, 0, *one.logprobs]
        columns["policy_versions"] += [-1, -1, *one.versions]
        columns["turn_ids"] += [-1, -1, one.index, one.index]
    kinds = (np.int32, np.uint8, np.float32, np.int32, np.int32)
    arrays = {k: np.array(v, kind) for (k, v), kind in zip(columns.items(), kinds, strict=True)}
    return Trace(trace_id=name, rollout_id="s", group_id="task", finish_reason="stop", **arrays, **fields)


def session(**fields: Any) -> Trajectory:
    """A main chain of two turns, an edit of history that shares the first, and a sub-agent that came from the first."""
    system, user = {"role": "system", "text": "Be good."}, {"role": "user", "text": "List. \ud800"}
    first = turn(0, None, [system, user], {"text": "", "reasoning": "I look.", "tool_calls": [CALL]})
    result = {"role": "tool", "text": "a.txt", "tool_call_id": "c1", "name": "bash"}
    last = turn(1, first, [result], {"text": "One file."}, started=1.5, cached_tokens=4)
    edited = turn(2, first, [{**result, "text": "b.txt"}], {"text": "Another."}, reason=ForkReason.HISTORY_EDITED)
    helper = turn(
        3, None, [{"role": "user", "text": "Help."}], {"text": "Helped."}, role=TurnRole.SUBAGENT, origin="t0"
    )
    traces = [
        trace("main", [first, last], {0, 1}),
        trace("edit", [first, edited], {2}, parent_trace="main"),
        trace("helper", [helper], {3}, role=TurnRole.SUBAGENT, parent_trace="main"),
    ]
    made = Trajectory(
        session_id="s",
        group_id="task",
        turns=[first, last, edited, helper],
        traces=traces,
        state=SessionState.DONE,
        end_reason=EndReason.EXITED,
        tools={"k": TOOLS},
        metadata={"harness": "h", "harness_version": "1.2", "sample": 4, **fields},
    )
    return made.with_reward(Reward(value=1.0, components={"tests": 1.0}))


def test_parquet_rows_hold_messages_and_tokens_of_their_path() -> None:
    made = rows.parquet_rows(session())
    batch = rows.parquet_batch(made).to_pylist()
    assert [row["trace_id"] for row in batch] == ["main", "edit", "helper"]
    main, edit, helper = batch
    assert [(m["role"], m["content"], m["trained"]) for m in main["messages"]] == [
        ("system", "Be good.", False),
        ("user", "List. ?", False),
        ("assistant", "", True),
        ("tool", "a.txt", False),
        ("assistant", "One file.", True),
    ]
    # The reply that both rows go through is trained in one of them.
    assert [m["trained"] for m in edit["messages"] if m["role"] == "assistant"] == [False, True]
    call = main["messages"][2]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == CALL["arguments"]
    assert main["messages"][2]["reasoning_content"] == "I look."
    assert main["messages"][3]["tool_call_id"] == "c1"
    assert main["token_ids"] == [0, 1, 100, 200, 1, 2, 101, 201]
    assert main["loss_mask"] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert (main["reward"], main["traces"], main["sample"], main["trained_tokens"]) == (1.0, 3, 4, 4)
    assert json.loads(main["tools"]) == TOOLS
    assert json.loads(main["components"]) == {"tests": 1.0}
    assert helper["role"] == "subagent"


def test_sharegpt_conversations_alternate_with_weights() -> None:
    main, edit, _ = sharegpt.sharegpt_lines(session())
    assert [entry["from"] for entry in main["conversations"]] == ["system", "human", "gpt", "tool", "gpt"]
    assert [entry.get("weight") for entry in edit["conversations"]] == [None, None, 0, None, 1]
    printed = main["conversations"][2]["value"]
    assert printed.startswith("<think>\nI look.\n</think>\n<tool_call>\n")
    assert (
        json.loads(printed.split("<tool_call>\n")[1].removesuffix("\n</tool_call>"))["arguments"] == CALL["arguments"]
    )
    assert main["conversations"][3]["value"] == "<tool_response>\na.txt\n</tool_response>"
    assert json.loads(main["tools"])[0]["name"] == "bash"


def test_atif_document_is_valid() -> None:
    made = json.loads(json.dumps(atif.atif_document(session())))
    assert made["schema_version"] == "ATIF-v1.7"
    assert (made["session_id"], made["agent"]["name"], made["agent"]["version"]) == ("s", "h", "1.2")
    assert made["agent"]["tool_definitions"] == TOOLS
    assert made["extra"]["reward"] == 1.0
    documents = [made, *made["subagent_trajectories"]]
    assert [one["trajectory_id"] for one in documents] == ["main", "edit", "helper"]
    for one in documents:
        assert [step["step_id"] for step in one["steps"]] == list(range(1, len(one["steps"]) + 1))
        for step in one["steps"]:
            agents_only = {"metrics", "tool_calls", "reasoning_content", "model_name"}
            assert step["source"] == "agent" or not agents_only & step.keys()
            known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
            results = step.get("observation", {"results": []})["results"]
            assert {r["source_call_id"] for r in results if r.get("source_call_id")} <= known
    steps = made["steps"]
    assert [step["source"] for step in steps] == ["system", "user", "agent", "agent"]
    assert steps[2]["tool_calls"][0]["function_name"] == "bash"
    assert steps[2]["observation"]["results"][0] == {"source_call_id": "c1", "content": "a.txt"}
    # The sub-agent is named where it came from.
    assert steps[2]["observation"]["results"][1]["subagent_trajectory_ref"] == [{"trajectory_id": "helper"}]
    assert steps[3]["metrics"]["completion_token_ids"] == [101, 201]
    assert steps[3]["metrics"]["logprobs"] == [-0.5, -1.0]
    assert steps[3]["metrics"]["prompt_tokens"] == 6
    assert "is_copied_context" not in steps[3]
    edit = documents[1]["steps"]
    assert [step.get("is_copied_context") for step in edit] == [None, None, True, None]


def test_duplicate_rules() -> None:
    one, two = session(), session()
    other_context = Trajectory.model_validate(
        one.__dict__ | {"turns": [_context(t) for t in one.turns], "traces": [_context(t) for t in one.traces]}
    )
    assert fingerprint(one, DuplicateRule.TRAINED) == fingerprint(two, DuplicateRule.TRAINED)
    assert fingerprint(one, DuplicateRule.TRAINED) == fingerprint(other_context, DuplicateRule.TRAINED)
    assert fingerprint(one, DuplicateRule.WHOLE) != fingerprint(other_context, DuplicateRule.WHOLE)
    assert fingerprint(one, DuplicateRule.TRAINED) != fingerprint(session(harness="another"), DuplicateRule.TRAINED)
    renamed = one.model_copy(update={"session_id": "other"})
    assert fingerprint(one, DuplicateRule.KEEP) != fingerprint(renamed, DuplicateRule.KEEP)


def _context(record: Any) -> Any:
    if isinstance(record, Turn):
        return record.model_copy(update={"suffix": record.suffix + 7})
    return record.model_copy(
        update={"token_ids": np.where(record.turn_ids < 0, record.token_ids + 7, record.token_ids).astype(np.int32)}
    )
