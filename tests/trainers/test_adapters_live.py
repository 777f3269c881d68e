"""Adapters over a real service: real agents in sandboxes, and what slime, AReaL, SkyRL and NeMo RL would get of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from support.trainers.adapter_service import BROKEN, MEAN
from support.trainers.adapter_views import Sample
from towline.client import Client
from towline.demo import tiny_model
from towline.demo.registry import EXAMPLE_AGENT, RegistryInstance, draw_instance
from towline.errors import ConfigError
from towline.trainers import nemo_rl, slime
from towline.trainers.areal import GroupEpisodes
from towline.trainers.service import own_service
from towline.trainers.skyrl import NothingGenerated, TowlineGenerator
from towline.trainers.templates import TaskTemplate


def template(evaluator: str = MEAN) -> TaskTemplate:
    return TaskTemplate(
        {
            "harness": "shell",
            "harness_options": {
                "command": [
                    "python3",
                    "-S",
                    "-E",
                    f"{{program}}/{EXAMPLE_AGENT.name}",
                    "--registry",
                    "/work/registry.json",
                ],
                "folder": str(EXAMPLE_AGENT.parent.resolve()),
            },
            "environment": {"files": [{"target": "/work/registry.json", "text": "{row.registry}"}]},
            "evaluator": {"kind": "python", "function": evaluator},
            "settings": {"limits": {"turns": 4}, "sampling": {"max_tokens": 32}},
            "max_attempts": 1,
        }
    )


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = tiny_model.create(tmp_path_factory.mktemp("model") / "tiny", steps=20)
    with own_service(model, tmp_path_factory.mktemp("service"), ["--concurrency", "4"]) as url, Client(url) as client:
        yield client


def instance(number: int) -> RegistryInstance:
    return draw_instance(Random(number))


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": instance(number).questions[0].text}]


class DataSource:
    """Gives prompts as slime's does: groups of samples that are alike but for their index."""

    def __init__(self, samples: int):
        self.samples = samples
        self.given = 0

    def get_samples(self, count: int) -> list[list[Sample]]:
        groups = []
        for _ in range(count):
            number, self.given = self.given, self.given + 1
            row: dict[str, Any] = {"prompt": question(number), "metadata": {"registry": instance(number).to_json()}}
            groups.append([Sample(number, number * self.samples + n, **row) for n in range(self.samples)])
        return groups


@dataclass
class RolloutFnTrainOutput:
    samples: list[Any]
    metrics: dict[str, Any]


@pytest.fixture
def args(service: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    types = SimpleNamespace(RolloutFnTrainOutput=RolloutFnTrainOutput)
    monkeypatch.setitem(sys.modules, f"{Sample.__module__.split('.')[0]}.rollout.base_types", types)
    (tmp_path / "task.json").write_text(json.dumps(template().fields))
    return SimpleNamespace(
        rollout_batch_size=2,
        n_samples_per_prompt=3,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_max_response_len=24,
        towline_url=service.url,
        towline_template=str(tmp_path / "task.json"),
    )


def test_slime_gets_a_batch_of_whole_groups(service: Client, args: SimpleNamespace) -> None:
    output = slime.generate_rollout(args, 0, DataSource(3))
    assert [len(group) for group in output.samples] == [3, 3]
    assert output.metrics["towline/sessions"] == 6
    for number, group in enumerate(output.samples):
        assert [sample.rollout_id for sample in group] == [sample.index for sample in group]
        found = {one.session_id: one for one in service.trajectories([one.metadata["session_id"] for one in group])}
        for sample in group:
            (trace,) = found[sample.metadata["session_id"]].traces
            assert sample.group_index == number
            assert sample.tokens == trace.token_ids.tolist()
            assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
            assert sample.loss_mask[0] == 1
            assert sample.reward == pytest.approx(trace.reward)
            assert sample.weight_versions == ["0"]
            assert found[sample.metadata["session_id"]].turns[0].messages[-1]["text"] == question(number)[0]["content"]


def test_slime_gets_the_reason_if_no_group_can_be_completed(args: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "task.json").write_text(json.dumps(template(BROKEN).fields))
    args.rollout_batch_size = 1
    with pytest.raises(ConfigError, match=r"dropped in one batch; a recent reason: .*the judge fell ill"):
        slime.generate_rollout(args, 0, DataSource(2))


async def test_an_areal_episode_is_a_group(service: Client) -> None:
    episodes = GroupEpisodes(template(), samples=3, url=service.url)
    data = {"messages": question(1), "registry": instance(1).to_json()}
    batch = await episodes.arun_episode(None, data)
    assert batch is not None
    assert set(batch) == {
        "input_ids", "loss_mask", "logprobs", "versions", "turn_ids", "rewards", "attention_mask",
    }  # fmt: skip
    assert batch["rewards"].shape == (3,)
    assert len({batch[name].shape for name in batch if name != "rewards"}) == 1
    trained = batch["loss_mask"].bool()
    assert (batch["versions"][trained] == 0).all()
    assert (batch["versions"][~trained] == -1).all()
    assert (batch["turn_ids"][trained] >= 0).all()
    assert (batch["logprobs"][trained] < 0).all()
    failing = GroupEpisodes(template(BROKEN), samples=2, url=service.url)
    assert await failing.arun_episode(None, data) is None
    assert failing.rejected == 1


@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int


async def test_every_skyrl_prompt_gets_a_session_of_its_instance(service: Client) -> None:
    generator = TowlineGenerator(template(), url=service.url)
    order = [(0, 0), (1, 0), (0, 1), (1, 1)]
    batch = {
        "prompts": [question(number) for number, _ in order],
        "env_classes": ["towline"] * 4,
        "env_extras": [{"registry": instance(number).to_json()} for number, _ in order],
        "sampling_params": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_generate_length": 24},
        "trajectory_ids": [TrajectoryID(str(number), repetition) for number, repetition in order],
    }
    output = await generator.generate(batch)
    assert output["trajectory_ids"] == batch["trajectory_ids"]
    columns = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs", "stop_reasons")
    assert {len(output[name]) for name in columns} == {4}
    # The same instance, the same first prompt: nothing of it is trained.
    firsts = output["prompt_token_ids"]
    assert firsts[0] == firsts[2] != firsts[1] == firsts[3]
    for place in range(4):
        response = output["response_ids"][place]
        assert len(response) == len(output["loss_masks"][place]) == len(output["rollout_logprobs"][place])
        assert output["loss_masks"][place][0] == 1
    assert output["rollout_metrics"]["towline/sessions"] == 4
    with pytest.raises(NothingGenerated, match="the judge fell ill"):
        await TowlineGenerator(template(BROKEN), url=service.url).generate(batch)


def test_a_nemo_rl_message_log_is_the_row(service: Client) -> None:
    row = {"registry": instance(2).to_json()}
    task = template().task(row, prompt=question(2), name="nemo-rl", samples=2)
    service.submit(task)
    sessions = service.trajectories([one.session_id for one in service.wait(task.task_id, 120).sessions])
    batch = nemo_rl.rollout_batch(sessions)
    assert batch["prompt_group"] == [task.task_id] * 2
    for log, session in zip(batch["message_log"], sessions, strict=True):
        (trace,) = session.traces
        assert [message["role"] for message in log] == ["user", "assistant"] * len(session.turns)
        assert [token for message in log for token in message["token_ids"].tolist()] == trace.token_ids.tolist()
        assert [value for message in log for value in message["token_loss_mask"].tolist()] == trace.loss_mask.tolist()
