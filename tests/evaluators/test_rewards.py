"""Scores from files and output: a finite number that is really there, or an error."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.evaluators.evaluator_rig import a_trajectory
from towline.evaluators import rewards
from towline.evaluators.base import EvaluationError

finite = st.floats(allow_nan=False, allow_infinity=False)


@given(finite)
def test_a_number_comes_back_as_it_was_written(number: float) -> None:
    assert rewards.last_number(f"run 12 of v3.4: {number!r}\n") == number
    assert rewards.matched_number(f"reward = {number!r}\nlater 7", r"reward = (\S+)") == number
    assert rewards.reward_files(None, f" {number!r}\n".encode()) == {"reward": number}
    assert rewards.reward_files(json.dumps({"reward": number, "style": 1}).encode(), b"5")["reward"] == number
    assert rewards.to_reward({"reward": number}, "x", a_trajectory()).value == number
    assert rewards.last_object(f"noise {{\n{json.dumps({'reward': number})}\n")["reward"] == number


@pytest.mark.parametrize("last", ["nan", "NaN", "-inf", "Infinity", "1e999", "1" + "0" * 400])
def test_a_last_number_that_is_not_finite_is_an_error_and_not_the_one_before_it(last: str) -> None:
    with pytest.raises(EvaluationError, match="not a finite number"):
        rewards.last_number(f"accuracy 0.9\nreward: {last}\n")
    assert rewards.last_number(f"{last} infinite info nan_count 0.5") == 0.5


@given(st.one_of(st.none(), st.binary(max_size=40)), st.one_of(st.none(), st.binary(max_size=40)))
def test_reward_files_give_finite_numbers_or_an_error(as_json: bytes | None, as_text: bytes | None) -> None:
    try:
        found = rewards.reward_files(as_json, as_text)
    except EvaluationError:
        return
    assert found
    assert all(math.isfinite(value) for value in found.values())


@pytest.mark.parametrize(
    ("as_json", "as_text", "reason"),
    [
        (None, None, "neither"),
        (b"", b"1", "reward.json is empty"),
        (b"  \n", None, "reward.json is empty"),
        (None, b" \n", "reward.txt is empty"),
        (None, b"nan", "finite"),
        (None, b"inf", "finite"),
        (None, b"1 2", "not a number"),
        (b"[1]", b"1", "object"),
        (b"{}", b"1", "object"),
        (b'{"reward": NaN}', b"1", "finite"),
        (b'{"reward": "1"}', b"1", "not a number"),
        (b'{"reward": true}', None, "not a number"),
        (b'{"reward": 1, "note": "x"}', None, "note"),
        (b'{"reward": 1e999}', None, "finite"),
        (b"[" * 100_000, None, "not JSON"),
    ],
)
def test_a_broken_file_is_never_0(as_json: bytes | None, as_text: bytes | None, reason: str) -> None:
    with pytest.raises(EvaluationError, match=reason):
        rewards.reward_files(as_json, as_text)


def test_the_outcome_among_named_rewards() -> None:
    assert rewards.main_reward({"reward": 0.5, "style": 1}) == 0.5
    assert rewards.main_reward({"accuracy": 0.25}) == 0.25
    with pytest.raises(EvaluationError, match="named `reward`"):
        rewards.main_reward({"a": 1, "b": 2})
