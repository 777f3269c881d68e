"""The summary of an ended session and the one definition of usable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from towline.schema import (
    EndReason,
    FailureReason,
    FailureTally,
    FidelityReport,
    Reward,
    RewardStatus,
    SessionResult,
    SessionState,
    SessionSummary,
    Trace,
    Trajectory,
    Turn,
    unusable_reason,
)

UNSCORED = Reward(value=0, status=RewardStatus.FAILED, error="the evaluator failed")


def trajectory(trained: bool = True, **fields: Any) -> Trajectory:
    ids, zeros = np.array([1, 2], np.int32), np.zeros(2, np.float32)
    turn = Turn(
        id="t",
        index=0,
        prompt_length=1,
        suffix=ids[:1],
        sampled=ids[1:],
        logprobs=zeros[1:],
        versions=ids[:1],
        finish="stop",
    )
    trace = Trace(
        trace_id="r", rollout_id="s", group_id="a", token_ids=ids, loss_mask=np.array([0, 1], np.uint8), logprobs=zeros,
        policy_versions=np.array([-1, 1], np.int32), turn_ids=np.array([-1, 0], np.int32),
    )  # fmt: skip
    own = {"turns": [turn], "traces": [trace]} if trained else {"error": "no model call"}
    report = FidelityReport(turns=int(trained), trained_tokens=int(trained))
    ended = {"state": SessionState.DONE, "end_reason": EndReason.EXITED, "report": report}
    return Trajectory(**{"session_id": "s", "group_id": "a", **ended, **own, **fields})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"reward": Reward(value=0)}, None),
        ({"reward": UNSCORED}, "unscored"),
        ({"trained": False}, "untrained"),
        ({"trained": False, "reward": UNSCORED}, "unscored"),
        ({"state": SessionState.CANCELLED}, "cancelled"),
        ({"state": SessionState.LOST}, "internal"),
        ({"state": SessionState.FAILED, "error": "x", "failure": FailureReason.SANDBOX}, "sandbox"),
    ],
)
def test_usable_has_one_definition(fields: dict[str, Any], reason: str | None) -> None:
    """A trajectory and its summary agree on why a session is not usable."""
    ended = trajectory(**fields)
    summary = SessionSummary.of(ended, sample=3, attempt=2)
    assert (unusable_reason(ended), unusable_reason(summary)) == (reason, reason)
    assert summary.usable == (reason is None)
    assert (summary.session_id, summary.task_id, summary.sample, summary.attempt) == ("s", "a", 3, 2)
    assert summary.error == (ended.error or (ended.reward.error if ended.reward else None))


def test_a_trainer_can_require_a_score() -> None:
    assert unusable_reason(trajectory(), need_score=True) == "unscored"
    assert unusable_reason(trajectory(reward=Reward(value=0)), need_score=True) is None


def test_results_extend_the_summary() -> None:
    result = SessionResult.of(trajectory(reward=Reward(value=0.5)), finished=1.0, notes=["n"])
    assert (result.reward, result.usable, result.notes) == (0.5, True, ["n"])
    assert SessionResult.model_validate_json(result.model_dump_json()) == result


def test_failures_are_counted_by_reason() -> None:
    tally = FailureTally()
    tally.add_ended(3)
    tally.add_failed(FailureReason.ENGINE, "one\nerror")
    assert (tally.share, tally.as_json(), tally.exceeds(0.25), tally.exceeds(0.2)) == (0.25, {"engine": 1}, False, True)
    assert "engine 1. Most frequent error: one error" in tally.message(0.2)
