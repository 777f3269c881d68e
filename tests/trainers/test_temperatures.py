"""Turns of one row at different temperatures: recomputed logprobs match, and trainers with one temperature refuse them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from support.trainers.adapter_views import VIEWS, Sample, group_of, session
from towline.config import GatewaySettings, SamplingSettings, SessionSettings
from towline.demo import tiny_model
from towline.demo.session import recompute
from towline.engines.embedded import EmbeddedEngine
from towline.errors import ConfigError
from towline.gateway.gateway import Gateway
from towline.gateway.server import serve_gateway
from towline.schema import BuilderName, Reward, Trajectory, Turn
from towline.tokens.loading import load_codec
from towline.trainers import nemo_gym, prime_rl, slime, verifiers
from towline.trainers.grpo.learner import Learner, LearnerSettings
from towline.trainers.packing import batch_temperature, check_temperature, split_rows

KEY = "control-key-of-the-tests"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model.create(tmp_path_factory.mktemp("models") / "tiny", steps=20)


async def sampled(model: Path, data: Path, temperatures: list[float], **settings: Any) -> Trajectory:
    """A conversation whose turns ask for these temperatures, sampled as the harness asks."""
    codec = load_codec(model, renderer="sentinel")
    engine = EmbeddedEngine(model, decode=codec.tokenizer.decode, seed=3, threads=1)
    defaults = SessionSettings(sampling=SamplingSettings(mode="harness", max_tokens=24), **settings)
    gateway = Gateway(
        engine, codec, GatewaySettings(port=0, control_port=0, data=data), defaults=defaults, model="tiny"
    )
    async with serve_gateway(gateway, KEY) as running, aiohttp.ClientSession() as web:
        control = {"authorization": f"Bearer {KEY}"}
        async with web.post(f"{running.control_url}/v1/sessions", json={}, headers=control) as response:
            opened = await response.json()
        path = f"{running.control_url}/v1/sessions/{opened['id']}"
        messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the colour of the lamp?"}]
        for temperature in temperatures:
            url = opened["base_urls"]["openai"] + "/chat/completions"
            body = {"model": "tiny", "messages": messages, "temperature": temperature}
            async with web.post(url, json=body, headers={"authorization": f"Bearer {opened['key']}"}) as response:
                assert response.status == 200, await response.text()
                reply = (await response.json())["choices"][0]["message"]
            messages += [reply, {"role": "user", "content": "And of the door?"}]
        async with web.delete(path, headers=control) as response:
            assert response.status == 200
        async with web.get(f"{path}/trajectory", headers=control) as response:
            return Trajectory.from_json(await response.read())


@pytest.mark.parametrize("builder", BuilderName)
async def test_recomputed_logprobs_match_turns_at_different_temperatures(
    model: Path, tmp_path: Path, builder: BuilderName
) -> None:
    asked = [0.3, 0.3, 1.0, 0.0]
    made = await sampled(model, tmp_path / "data", asked, builder=builder)
    assert [turn.temperature for turn in made.turns] == asked
    trained = np.concatenate([trace.temperatures[trace.loss_mask == 1] for trace in made.traces])
    expected = [np.full(len(turn.sampled), turn.temperature, np.float32) for turn in made.turns]
    assert np.array_equal(trained, np.concatenate(expected))
    for trace in made.traces:
        assert (trace.temperatures[trace.turn_ids < 0] == 1).all()
    assert recompute(model, [made]) < 1e-4
    # The reference trainer sees what was recorded; with the last turn's temperature for all it would be nats away.
    learner = Learner(model, LearnerSettings())
    other = made.with_reward(Reward(value=0)).model_copy(update={"session_id": "other"})
    report = learner.update({"g": [made.with_reward(Reward(value=1)), other]})
    assert report.own_tokens == report.trained_tokens == 2 * len(trained)
    assert report.worst_logprob < 1e-4
    assert np.isfinite([report.loss, report.entropy, report.gradient]).all()
    one_for_all = made.model_copy(
        update={"traces": [t.model_copy(update={"temperatures": np.ones_like(t.temperatures)}) for t in made.traces]}
    )
    assert recompute(model, [one_for_all]) > 0.1


def at(made: Trajectory, *temperatures: float) -> Trajectory:
    """The session as if its turns had been sampled at these temperatures."""
    turns = [
        Turn(**turn.__dict__ | {"temperature": value}) for turn, value in zip(made.turns, temperatures, strict=True)
    ]
    traces = []
    for trace in made.traces:
        data = {"temperature": temperatures[int(trace.turn_ids[-1])], "temperatures": [], "sampling": []}
        traces.append(type(trace)(**trace.__dict__ | data))
    return Trajectory.model_validate(made.__dict__ | {"turns": turns, "traces": traces})


@pytest.mark.parametrize("name", VIEWS)
def test_a_row_with_several_temperatures_is_refused_by_trainers_that_take_one(name: str) -> None:
    mixed = group_of(at(session("a", 1.0), 0.3, 1.0), at(session("b", 0.0), 1.0, 1.0))
    if name == "prime_rl":
        assert len(VIEWS[name](mixed)) == 2
        return
    with pytest.raises(ConfigError, match=r"session a has a row \(trace a/0\) .* different temperatures \(0\.3, 1\)"):
        VIEWS[name](mixed)
    uniform = group_of(at(session("a", 1.0), 0.3, 0.3), at(session("b", 0.0), 0.3, 0.3))
    assert len(VIEWS[name](uniform)) == 2


def test_prime_rl_gets_a_nonzero_temperature_per_token() -> None:
    a, b = prime_rl.training_samples([at(session("a", 1.0), 0.3, 0.0), session("b", 0.0)], "towline")
    trace = at(session("a", 1.0), 0.3, 0.0).traces[0]
    by_turn = {-1: 1.0, 0: np.float32(0.3), 1: 1.0}  # a greedy turn tells logprobs at temperature 1
    assert a["temperatures"] == [by_turn[int(turn)] for turn in trace.turn_ids]
    assert set(b["temperatures"]) == {1.0}


def test_a_trainers_own_temperature_is_compared_with_every_trained_token() -> None:
    (row,) = split_rows(at(session("a", 1.0), 0.7, 0.7))
    check_temperature(row, 0.7)
    check_temperature(row, None)
    assert batch_temperature([row]) == 0.7
    for wrong in (1.0, 0.0, 0.70001):
        with pytest.raises(ConfigError, match=r"was sampled at temperature 0\.7 and the trainer computes"):
            check_temperature(row, wrong)
    # Turns that another row trains are context here, whatever they were sampled at.
    (row,) = split_rows(at(session("a", 1.0), 0.3, 1.0))
    masked = row.trace.model_copy(update={"loss_mask": row.trace.loss_mask * (row.trace.turn_ids == 1)})
    check_temperature(type(row)(row.trajectory, masked, row.start), 1.0)
    (greedy,) = split_rows(at(session("a", 1.0), 0.0, 0.0))
    with pytest.raises(ConfigError, match=r"temperature 0 \(greedy\)"):
        batch_temperature([greedy])
    sample = Sample(group_index=0, index=0)
    with pytest.raises(ConfigError, match=r"sampled at temperature 0 and the trainer computes logprobs at 1"):
        slime.sample_group([sample], [greedy.trajectory], 1.0)
    with pytest.raises(ConfigError, match="sampled at temperature 0 and"):
        verifiers.trace_fields(greedy.trajectory, 1.0)
    assert nemo_gym.response_of(greedy, {})["temperature"] == 0.0
