"""The rules of groups: sessions count, not traces; no score is no zero; equal rewards teach nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.trainers.trained_rows import trajectory
from towline.trainers.advantages import group_advantages
from towline.trainers.grpo.loss import padded_batches, training_rows


def test_a_session_counts_once_however_many_traces_it_has() -> None:
    group = [trajectory("a", 1.0, chains=5), trajectory("b", 0.0), trajectory("c", 0.0)]
    found = group_advantages({"g": group}, scale="none")
    assert found.sessions == pytest.approx({"a": 2 / 3, "b": -1 / 3, "c": -1 / 3})
    rows = training_rows(group, found)
    assert [row.session for row in rows] == ["a"] * 5 + ["b", "c"]
    for row in rows:
        trained = row.trace.loss_mask == 1
        assert row.advantages[trained] == pytest.approx(found.sessions[row.session])
        assert not row.advantages[~trained].any()


def test_an_unscored_session_leaves_its_group() -> None:
    group = [trajectory("a", 1.0), trajectory("b", None), trajectory("c", 0.0)]
    found = group_advantages({"g": group})
    assert set(found.sessions) == {"a", "c"}
    assert found.sessions == pytest.approx({"a": 1.0, "c": -1.0})
    assert found.unscored == 1
    lonely = group_advantages({"g": [trajectory("a", 1.0), trajectory("b", None)]})
    assert lonely.sessions == {}
    assert lonely.small == 1


def test_equal_rewards_carry_no_gradient_and_are_counted() -> None:
    found = group_advantages({"g": [trajectory(name, 1.0) for name in "abc"], "h": [trajectory("d", 0.0)]})
    assert found.sessions == {}
    assert (found.equal, found.small) == (1, 1)
    assert found.rewards == {"a": 1.0, "b": 1.0, "c": 1.0}
    # Rewards of turns count as well: equal ones change nothing, others do.
    for second, equal in ((1.0, 1), (0.0, 0)):
        turns = [trajectory("a", 0.0, per_turn={"a-0": 1.0}), trajectory("b", 0.0, per_turn={"b-0": second})]
        found = group_advantages({"g": turns})
        assert (found.equal, len(training_rows(turns, found))) == (equal, 0 if equal else 2)


def test_per_turn_rewards_are_compared_by_position_and_added() -> None:
    one = trajectory("a", 1.0, chains=2, per_turn={"a-0": 1.0, "a-1": 0.0})
    two = trajectory("b", 0.0, chains=2, per_turn={"b-0": 0.0, "b-1": 0.0})
    three = trajectory("c", 0.5)
    found = group_advantages({"g": [one, two, three]}, scale="none", turn_weight=2.0)
    assert found.turns == {
        "a": pytest.approx({"a-0": 1.0, "a-1": 0.0}),
        "b": pytest.approx({"b-0": -1.0, "b-1": 0.0}),
    }
    rows = training_rows([one, two, three], found)
    assert [float(row.advantages[-1]) for row in rows] == pytest.approx([0.5 + 1.0, 0.5, -0.5 - 1.0, -0.5, 0.0])


def test_the_outcome_can_be_weighted_against_per_turn_rewards() -> None:
    one = trajectory("a", 1.0, per_turn={"a-0": 1.0})
    two = trajectory("b", 0.0, per_turn={"b-0": 0.0})
    plain = trajectory("c", 0.5)
    found = group_advantages({"g": [one, two, plain]}, scale="none", outcome_weight=0.0)
    assert found.sessions == {"a": 0.0, "b": 0.0, "c": 0.0}
    assert found.turns == {"a": {"a-0": 0.5}, "b": {"b-0": -0.5}}
    without = group_advantages({"g": [trajectory("a", 1.0), trajectory("b", 0.0)]}, scale="none", outcome_weight=0.0)
    assert without.sessions == {"a": 0.5, "b": -0.5}


@given(
    st.lists(st.tuples(st.floats(-2, 2), st.integers(1, 4)), min_size=2, max_size=6), st.integers(8, 80), st.booleans()
)
def test_the_weights_of_all_batches_sum_to_one(sessions: list[tuple[float, int]], most: int, per_session: bool) -> None:
    group = [trajectory(f"s{n}", reward, chains=chains) for n, (reward, chains) in enumerate(sessions)]
    found = group_advantages({"g": group})
    rows = training_rows(group, found)
    if not rows:
        assert found.equal == 1
        return
    per = "session" if per_session else "token"
    made = list(padded_batches(rows, most, per=per))
    assert sum(float(batch.weights.sum()) for batch in made) == pytest.approx(1.0, abs=1e-5)
    assert sum(batch.trained for batch in made) == sum(row.trace.trained_tokens for row in rows)
    assert all(batch.inputs.numel() <= most or len(batch.inputs) == 1 for batch in made)
    by_session = {row.session for row in rows}
    if per_session:
        per_row = {name: 1 / len(by_session) for name in by_session}
        total = sum(per_row.values())
        assert np.isclose(total, 1.0)
