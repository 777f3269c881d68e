"""Tinker's own `Datum`s from real sessions: targets are the next tokens, and nothing untrained has an advantage."""

from __future__ import annotations

import numpy as np
import pytest
from tinker import Datum

from support.trainers.trained_rows import trajectory
from towline.errors import ConfigError
from towline.schema import Trajectory
from towline.trainers.advantages import group_advantages
from towline.trainers.packing import by_group
from towline.trainers.tinker import datums


def test_a_datum_is_a_trace_shifted_by_one(sessions: list[Trajectory]) -> None:
    made, advantages = datums(by_group(sessions), scale="none")
    assert len(made) == 6
    assert advantages.unscored == advantages.small == advantages.equal == 0
    for one, datum in zip(sessions, made, strict=True):
        (trace,) = one.traces
        assert isinstance(datum, Datum)
        inputs = {name: data.to_numpy() for name, data in datum.loss_fn_inputs.items()}
        assert datum.model_input.to_ints() == trace.token_ids[:-1].tolist()
        assert inputs["target_tokens"].tolist() == trace.token_ids[1:].tolist()
        assert inputs["target_tokens"].dtype == np.int64
        assert np.array_equal(inputs["logprobs"], trace.logprobs[1:])
        trained = trace.loss_mask[1:] == 1
        assert (inputs["advantages"][~trained] == 0).all()
        assert (inputs["advantages"][trained] != 0).all()
        assert inputs["advantages"][trained] == pytest.approx(advantages.sessions[one.session_id])
        assert {data.dtype for data in datum.loss_fn_inputs.values()} == {"int64", "float32"}


def test_the_importance_sampling_loss_of_unmoved_weights_is_the_sum_of_advantages(sessions: list[Trajectory]) -> None:
    """Tinker's loss is -sum(exp(now - recorded) * advantage); where the two agree only the advantages are left."""
    made, advantages = datums(by_group(sessions), scale="none")
    total = sum(float(datum.loss_fn_inputs["advantages"].to_numpy().sum()) for datum in made)
    expected = sum(advantages.sessions[one.session_id] * one.traces[0].trained_tokens for one in sessions)
    assert total == pytest.approx(expected, rel=1e-4, abs=1e-2)


def test_every_trace_of_a_session_is_a_datum_and_the_session_counts_once() -> None:
    groups = by_group([trajectory("a", 1.0, chains=3), trajectory("b", 0.0), trajectory("c", None)])
    made, advantages = datums(groups, scale="none")
    assert len(made) == 4
    assert advantages.unscored == 1
    assert advantages.sessions == group_advantages(groups, scale="none").sessions == {"a": 0.5, "b": -0.5}
    assert made[2].loss_fn_inputs["advantages"].tolist() == [0, 0, 0.5, 0.5, 0.5, 0.5]


def test_groups_without_a_gradient_give_no_datum_and_are_counted() -> None:
    made, advantages = datums(by_group([trajectory("a", 1.0), trajectory("b", 1.0)]))
    assert made == []
    assert advantages.equal == 1


def test_sessions_with_another_temperature_are_refused() -> None:
    hot = trajectory("a", 1.0)
    for temperatures, message in (
        ([0.7] * 7, r"sampled at temperature 0\.7 .* at 1"),
        ([1.0] * 6 + [0.7], r"different temperatures \(0\.7, 1\)"),
    ):
        trace = hot.traces[0].model_copy(update={"temperatures": np.array(temperatures, np.float32)})
        with pytest.raises(ConfigError, match=message):
            datums(by_group([hot.model_copy(update={"traces": [trace]}), trajectory("b", 0.0)]))
