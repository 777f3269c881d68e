"""What each framework asks for, by its documented field names and shapes."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

from support.trainers.adapter_views import Sample, group_of, session
from towline.client import AsyncClient
from towline.schema import EndReason
from towline.trainers import areal, nemo_gym, prime_rl, skyrl, slime, verifiers
from towline.trainers.packing import Dropped, ExtraTracesError, one_row
from towline.trainers.templates import TaskTemplate


def test_adapters_import_without_their_framework_and_torch() -> None:
    code = (
        "import importlib, sys\n"
        "for absent in ('torch', 'areal', 'slime', 'miles', 'prime_rl', 'verifiers', 'skyrl', 'nemo_gym', 'nemo_rl'):\n"
        "    sys.modules[absent] = None\n"
        "for name in ('areal', 'nemo_gym', 'nemo_rl', 'prime_rl', 'skyrl', 'slime', 'verifiers'):\n"
        "    importlib.import_module('towline.trainers.' + name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# NeMo Gym


def test_response_items_are_the_conversation_with_the_tokens_of_each_turn() -> None:
    row = one_row(session("a", 1.0), "error", Dropped())
    assert row is not None
    response = nemo_gym.response_of(row, {"input": "do it", "model": "mine"})
    assert (response["id"], response["model"], response["status"]) == ("resp_a", "mine", "completed")
    first, result, second = response["output"]
    assert (first["type"], first["name"], first["arguments"]) == ("function_call", "colour", '{"item": "lamp"}')
    assert result == {"type": "function_call_output", "call_id": first["call_id"], "output": "blue"}
    assert (second["type"], second["content"][0]["text"]) == ("message", "blue")
    assert second["prompt_token_ids"][:9] == first["prompt_token_ids"] + first["generation_token_ids"]
    assert len(second["prompt_token_ids"]) == 12
    assert len(second["generation_token_ids"]) == len(second["generation_log_probs"]) == 4
    assert response["usage"]["output_tokens"] == 8
    assert response["usage"]["input_tokens"] == 5 + 12


async def test_a_rows_sampling_overrides_the_template_and_repeated_rows_are_separate_tasks() -> None:
    template = TaskTemplate({"harness": "pi", "num_samples": 8, "settings": {"sampling": {"top_k": 5}}})
    async with AsyncClient("http://127.0.0.1:1") as client:
        agent = nemo_gym.Agent(client, template)
        params = {"input": "Why?", "instructions": "Be brief.", "temperature": 0.7, "max_output_tokens": 99}
        task = agent.task({"responses_create_params": params})
    assert task.instruction == "Be brief.\n\nWhy?"
    assert task.num_samples == 1
    assert task.settings == {"sampling": {"top_k": 5, "temperature": 0.7, "max_tokens": 99}}


async def test_an_unreachable_service_is_never_a_reward() -> None:
    app = nemo_gym.make_app(TaskTemplate({"harness": "pi"}))
    async with AsyncClient("http://127.0.0.1:1", patience=0.1) as client:
        app.state.agent = nemo_gym.Agent(client, TaskTemplate({"harness": "pi"}))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://agent") as http:
            assert (await http.get("/")).status_code == 200
            answer = await http.post("/run", json={"responses_create_params": {"input": "Why?"}})
    assert answer.status_code == 503
    assert "no response from http://127.0.0.1:1" in answer.json()["error"]


def test_metrics_exclude_failed_sessions() -> None:
    answers = [
        {"_ng_task_index": 0, "reward": 1.0},
        {"_ng_task_index": 0, "reward": 0.5},
        {"_ng_task_index": 1, "reward": 0.0},
        {"_ng_task_index": 1, "reward": 0.0, "_ng_failure_class": "infrastructure"},
    ]
    found = nemo_gym.means(answers)
    assert found["agent_metrics"] == found["key_metrics"] == {"mean/reward": 0.5}
    assert [one["mean/reward"] for one in found["group_level_metrics"]] == [0.75, 0.0]
    assert nemo_gym.means([])["key_metrics"] == {}


# slime and Miles


def samples(count: int) -> list[Sample]:
    return [Sample(group_index=2, index=20 + n, prompt="do it", metadata={"source": "mine"}) for n in range(count)]


def test_samples_of_one_session_share_its_rollout_id_and_all_groups_have_one_shape() -> None:
    many = slime.sample_group(samples(2), [session("a", 1.0, subagent=True), session("b", 0.0)])
    one = slime.sample_group(samples(2), [session("c", 1.0), session("d", 0.0, end=EndReason.TIMEOUT)])
    assert [[sample.rollout_id for sample in of_session] for of_session in many] == [[20, 20], [21]]
    assert slime.shaped([many, one]) == [many, one]
    assert slime.shaped([one]) == [[one[0][0], one[1][0]]]
    first = many[0][0]
    assert first.weight_versions == ["3", "4", "3", "4"]
    assert first.response_length == len(first.loss_mask) == len(first.rollout_log_probs) == 11
    assert first.metadata == {
        "source": "mine", "session_id": "a", "trace_id": "a/0", "role": "main", "end_reason": "exited",
    }  # fmt: skip
    assert first.status is Sample.Status.COMPLETED
    assert one[1][0].status is Sample.Status.TRUNCATED


def test_slime_rewards_are_scaled_over_sessions() -> None:
    made = slime.sample_group(samples(2), [session("a", 1.0, subagent=True), session("b", 0.0)])
    flat = [sample for of_session in made for sample in of_session]
    raw, scaled = slime.session_rewards(SimpleNamespace(grpo_std_normalization=True), flat)
    assert raw == [1.0, 1.0, 0.0]
    assert scaled == pytest.approx([1.0, 1.0, -1.0])
    for sample in flat:
        sample.reward = 1.0
    assert slime.session_rewards(SimpleNamespace(), flat)[1] == [0.0, 0.0, 0.0]


# prime-rl and verifiers


def test_a_training_sample_has_one_entry_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    found = prime_rl.training_samples([session("a", 1.0, subagent=True), session("b", 0.0)], "towline")
    assert [(one["trace_id"], one["branch_index"]) for one in found] == [("a", 0), ("a", 1), ("b", 0)]
    for one in found:
        lengths = {len(one[name]) for name in ("token_ids", "mask", "logprobs", "temperatures", "advantages")}
        assert lengths == {len(one["token_ids"])}
        assert one["env_name"] == "towline"

    class TrainingSample(SimpleNamespace):
        __struct_fields__ = ("token_ids", "mask", "logprobs", "temperatures", "env_name", "advantages")

    transport = ModuleType("prime_rl.transport")
    monkeypatch.setattr(transport, "TrainingSample", TrainingSample, raising=False)
    monkeypatch.setitem(sys.modules, "prime_rl.transport", transport)
    made = prime_rl.structs(found)
    assert [set(vars(one)) for one in made] == [set(TrainingSample.__struct_fields__)] * 3
    assert made[0].token_ids == found[0]["token_ids"]


def test_the_branches_of_a_trace_are_the_rows_and_share_no_node() -> None:
    made = session("a", 1.0, subagent=True, end=EndReason.TIMEOUT)
    fields = verifiers.trace_fields(made)
    nodes: list[dict[str, Any]] = fields["nodes"]
    parents = [node["parent"] for node in nodes]
    assert parents == [None, 0, 1, 2, None, 4]
    assert [node["message"]["role"] for node in nodes[:4]] == ["user", "assistant", "tool", "assistant"]
    for trace, branch in zip(made.traces, (nodes[:4], nodes[4:]), strict=True):
        assert [token for node in branch for token in node.get("token_ids", [])] == trace.token_ids.tolist()
        assert [one for node in branch for one in node.get("mask", [])] == trace.loss_mask.astype(bool).tolist()
        spoken = [value for node in branch for value in node.get("logprobs", [])]
        assert spoken == pytest.approx(trace.logprobs[trace.loss_mask == 1].tolist())
    assert (fields["ok"], fields["is_timeout"], fields["stop_condition"]) == (True, True, "agent_timeout")
    assert fields["rewards"] == {"towline": {"score": 1.0}}


# AReaL


def test_the_areal_workflow_is_created_on_first_access(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ModuleType("areal.api.workflow_api")
    monkeypatch.setattr(api, "RolloutWorkflow", type("RolloutWorkflow", (), {}), raising=False)
    monkeypatch.setitem(sys.modules, "areal.api.workflow_api", api)
    made = areal.TowlineWorkflow(TaskTemplate({"harness": "pi"}), samples=4)
    del areal.TowlineWorkflow
    assert isinstance(made, api.RolloutWorkflow)
    assert made.samples == 4
    with pytest.raises(AttributeError, match="no attribute Workflow"):
        areal.Workflow  # noqa: B018


def test_areal_rows_are_padded() -> None:
    group = group_of(session("a", 1.0, subagent=True), session("b", 0.0))
    batch = areal.GroupEpisodes(TaskTemplate(), rewards="advantage", scale="none").batch(group)
    assert batch is not None
    assert batch["input_ids"].shape == (3, 16)
    assert batch["attention_mask"].sum(1).tolist() == [16, 9, 16]
    assert batch["versions"][1, 9:].tolist() == batch["turn_ids"][1, 9:].tolist() == [-1] * 7
    assert batch["versions"][0, :5].tolist() == [-1] * 5
    assert batch["rewards"].tolist() == [0.5, 0.5, -0.5]
    with pytest.raises(ExtraTracesError, match="session a has 2 traces"):
        areal.GroupEpisodes(TaskTemplate()).batch(group)


def test_equal_rewards_are_rejected_where_the_adapter_compares() -> None:
    episodes = areal.GroupEpisodes(TaskTemplate(), rewards="advantage")
    assert episodes.batch(group_of(session("a", 1.0), session("b", 1.0))) is None
    assert episodes.rejected == 1


# SkyRL


def test_a_prompt_without_a_session_is_masked_and_does_not_change_the_mean() -> None:
    generator = skyrl.TowlineGenerator(TaskTemplate(), step_wise=True)
    group = group_of(session("a", 1.0, subagent=True), session("b", None), session("c", 0.0))
    output = generator.output(generator.prompt_results(group, ["g_0", "g_1", "g_2"]), [group])
    assert output["trajectory_ids"] == ["g_0", "g_0", "g_1", "g_2"]
    assert output["is_last_step"] == [False, True, True, True]
    assert output["rewards"] == [1.0, 1.0, 0.0, 0.5]
    assert [sum(mask) for mask in output["loss_masks"]] == [8, 4, 8, 0]
    assert output["stop_reasons"][-1] == "abort"
    assert output["rollout_metrics"]["towline/left_sessions"] == 1
