"""Rows cut into prompt and response: nothing is lost on the way, and what is left out is counted."""

from __future__ import annotations

import numpy as np
import pytest

from support.trainers.trained_rows import trajectory
from towline.schema import SessionState, Trajectory, TurnRole
from towline.trainers.advantages import group_advantages, token_advantages
from towline.trainers.packing import (
    Dropped,
    ExtraTracesError,
    by_group,
    one_row,
    one_row_per_session,
    split_rows,
)


def with_roles(made: Trajectory, *roles: TurnRole) -> Trajectory:
    """The same session with another role for each of its conversations."""
    turns = [turn.model_copy(update={"role": role}) for turn, role in zip(made.turns, roles, strict=True)]
    traces = [trace.model_copy(update={"role": role}) for trace, role in zip(made.traces, roles, strict=True)]
    return Trajectory.model_validate(made.__dict__ | {"turns": turns, "traces": traces})


def test_prompt_and_response_together_are_the_trace() -> None:
    made = trajectory("s", 1.0)
    (row,) = split_rows(made)
    assert row.prompt_ids + row.response_ids == row.token_ids == made.traces[0].token_ids.tolist()
    assert len(row.prompt_ids) == 3
    assert row.response_mask == [1, 1, 1, 1]
    assert row.response_logprobs == [-1.0] * 4
    assert (row.session_id, row.group_id, row.reward, row.num_turns) == ("s", "g", 1.0, 1)


def test_a_tool_result_stays_in_the_response_and_out_of_the_mask() -> None:
    made = trajectory("s", 1.0)
    middle = np.array([0, 0, 0, 1, 0, 1, 1], np.uint8)
    trace = made.traces[0].model_copy(update={"loss_mask": middle})
    (row,) = split_rows(made.model_copy(update={"traces": [trace]}))
    assert row.response_mask == [1, 0, 1, 1]
    assert len(row.response_ids) == len(row.response_logprobs) == 4


def test_a_session_with_several_traces_is_refused_or_counted() -> None:
    made = trajectory("s", 1.0, chains=3)
    dropped = Dropped()
    with pytest.raises(ExtraTracesError, match=r"session s has 3 traces.*main_only"):
        one_row(made, "error", dropped)
    row = one_row(made, "main_only", dropped)
    assert row is not None
    assert row.trace.trace_id == "s/0"
    assert dropped == Dropped(sessions=0, traces=2, tokens=8)


def test_the_row_that_is_kept_is_of_the_main_conversation() -> None:
    made = with_roles(trajectory("s", 1.0, chains=2), TurnRole.SUBAGENT, TurnRole.MAIN)
    row = one_row(made, "main_only", Dropped())
    assert row is not None
    assert row.trace.trace_id == "s/1"
    only = with_roles(trajectory("s", 1.0, chains=2), TurnRole.SUBAGENT, TurnRole.SUBAGENT)
    dropped = Dropped()
    assert one_row(only, "main_only", dropped) is None
    assert dropped == Dropped(sessions=1, traces=2, tokens=8)


def test_a_session_without_samples_gives_no_row_and_is_counted() -> None:
    empty = Trajectory(session_id="broken", group_id="g", state=SessionState.FAILED, error="the sandbox did not start")
    dropped = Dropped()
    assert [row.session_id for row in one_row_per_session([empty, trajectory("s", 1.0)], "error", dropped)] == ["s"]
    assert dropped.sessions == 1


def test_every_trace_of_a_session_carries_the_sessions_advantage() -> None:
    sessions = [trajectory("a", 1.0, chains=3), trajectory("b", 0.0), trajectory("c", None)]
    found = group_advantages(by_group(sessions), scale="none")
    values = {
        row.trace.trace_id: token_advantages(row.trajectory, row.trace, found)
        for one in sessions
        for row in split_rows(one)
    }
    assert values["c/0"] is None
    for name in ("a/0", "a/1", "a/2"):
        assert values[name] is not None
        assert values[name].tolist() == [0, 0, 0, 0.5, 0.5, 0.5, 0.5]  # type: ignore[union-attr]
    assert values["b/0"].tolist() == [0, 0, 0, -0.5, -0.5, -0.5, -0.5]  # type: ignore[union-attr]


def test_a_turns_reward_is_added_at_its_own_tokens() -> None:
    sessions = [
        trajectory("a", 1.0, chains=2, per_turn={"a-0": 1.0, "a-1": 0.0}),
        trajectory("b", 0.0, chains=2, per_turn={"b-0": 0.0, "b-1": 0.0}),
    ]
    found = group_advantages(by_group(sessions), scale="none")
    first, second = (token_advantages(row.trajectory, row.trace, found) for row in split_rows(sessions[0]))
    assert first is not None
    assert second is not None
    assert first[3:].tolist() == [1.0] * 4
    assert second[3:].tolist() == [0.5] * 4
