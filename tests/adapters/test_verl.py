"""Our rows in verl's own hands: its `DataProto`, its advantages, its policy loss."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss

from support.trainers.adapter_service import BROKEN, Service, group_task
from support.trainers.trained_rows import trajectory
from towline.errors import ConfigError
from towline.schema import Trajectory
from towline.trainers.advantages import group_advantages
from towline.trainers.grpo.loss import LossSettings, padded_batches, policy_loss, training_rows
from towline.trainers.packing import Dropped, ExtraTracesError, by_group, one_row
from towline.trainers.verl import SessionFailed, TowlineAgentLoop, agent_loop_output, data_proto

PAD = 0


def proto(sessions: list[Trajectory], **options: int) -> DataProto:
    return data_proto(by_group(sessions), pad_token_id=PAD, dropped=Dropped(), **options)


def test_a_batch_holds_the_sessions_token_for_token(sessions: list[Trajectory]) -> None:
    data = proto(sessions)
    batch = data.batch
    assert isinstance(batch, TensorDict)
    assert len(data) == 6
    width = batch["prompts"].shape[1]
    for place, one in enumerate(sessions):
        (trace,) = one.traces
        seen = batch["attention_mask"][place].bool()
        assert batch["input_ids"][place][seen].tolist() == trace.token_ids.tolist()
        assert batch["position_ids"][place][seen].tolist() == list(range(len(trace.token_ids)))
        answered = seen[width:]
        start = len(trace.token_ids) - int(answered.sum())
        assert batch["response_mask"][place][answered].tolist() == trace.loss_mask[start:].tolist()
        assert batch["rollout_log_probs"][place][answered].tolist() == trace.logprobs[start:].tolist()
        # Nothing is trained in front of the response, and nothing in the padding behind it.
        assert not trace.loss_mask[:start].any()
        assert not batch["response_mask"][place][~answered].any()
        assert batch["token_level_scores"][place].sum().item() == pytest.approx(trace.reward)
        assert batch["token_level_scores"][place][answered][-1].item() == pytest.approx(trace.reward)
    assert data.non_tensor_batch["uid"].tolist() == [one.group_id for one in sessions]
    assert data.non_tensor_batch["session_id"].tolist() == [one.session_id for one in sessions]
    assert data.meta_info["temperature"] == 1.0


def test_a_batch_works_with_verls_own_operations(sessions: list[Trajectory]) -> None:
    data = proto(sessions)
    again = DataProto.concat(data.chunk(2))
    assert torch.equal(again.batch["input_ids"], data.batch["input_ids"])
    assert data.union(DataProto.from_dict(tensors={"old_log_probs": data.batch["rollout_log_probs"]})) is data
    assert len(data.select_idxs([0, 3])) == 2


def test_verls_advantages_match_ours(sessions: list[Trajectory]) -> None:
    data = proto(sessions)
    given = (data.batch["token_level_scores"], data.batch["response_mask"], data.non_tensor_batch["uid"])
    mask = data.batch["response_mask"]

    centred, _ = compute_grpo_outcome_advantage(*given, norm_adv_by_std_in_grpo=False)
    own = group_advantages(by_group(sessions), scale="none").sessions
    expected = torch.tensor([own[one.session_id] for one in sessions])[:, None] * mask
    # Rewards are some hundreds, in float32 there and in float64 here.
    assert torch.allclose(centred, expected, atol=1e-3)
    assert centred.abs().max() > 0

    # verl divides by the standard deviation of a sample, Towline by that of the group itself.
    scaled, _ = compute_grpo_outcome_advantage(*given, epsilon=0.0, norm_adv_by_std_in_grpo=True)
    own = group_advantages(by_group(sessions), scale="std").sessions
    expected = torch.tensor([own[one.session_id] for one in sessions])[:, None] * mask * np.sqrt(2 / 3)
    assert torch.allclose(scaled, expected, atol=5e-3)


def test_verls_policy_loss_matches_ours_and_respects_the_mask(sessions: list[Trajectory]) -> None:
    data = proto(sessions)
    mask, recorded = data.batch["response_mask"], data.batch["rollout_log_probs"]
    given = (data.batch["token_level_scores"], mask, data.non_tensor_batch["uid"])
    advantages, _ = compute_grpo_outcome_advantage(*given, norm_adv_by_std_in_grpo=False)
    # The policy has moved, some of it past the clip.
    moved = torch.randn(recorded.shape, generator=torch.Generator().manual_seed(0)) * 0.2
    now = (recorded + moved).requires_grad_()
    loss, *_ = compute_policy_loss(
        recorded, now, advantages, mask, cliprange=0.2, cliprange_low=0.2, cliprange_high=0.28
    )
    loss.backward()
    assert now.grad is not None
    assert (now.grad[mask == 0] == 0).all()
    assert (now.grad[mask == 1] != 0).any()

    rows = training_rows(sessions, group_advantages(by_group(sessions), scale="none"))
    place = {one.session_id: number for number, one in enumerate(sessions)}
    ours = torch.tensor(0.0)
    for row in rows:
        (batch,) = padded_batches([row], 10**9)
        (number,) = (place[row.session],)
        new = now.detach()[number][mask[number] == 1]
        before = recorded[number][mask[number] == 1]
        settings = LossSettings(clip_low=0.2, clip_high=0.28)
        found = policy_loss(new, torch.zeros_like(new), before, batch, settings).loss
        # A batch of one row averages over its own tokens; verl over those of all rows.
        ours += found * batch.trained / int(mask.sum())
    assert loss.item() == pytest.approx(ours.item(), rel=1e-4, abs=1e-3)


def test_rows_that_verl_would_misread_are_excluded_and_counted() -> None:
    sessions = [
        trajectory("a", 1.0, group="one"),
        trajectory("b", 0.0, group="one"),
        trajectory("c", None, group="one"),
        # verl takes the only row of a group for better than nothing.
        trajectory("d", 1.0, group="two"),
        trajectory("e", None, group="two"),
    ]
    dropped = Dropped()
    data = data_proto(by_group(sessions), pad_token_id=PAD, dropped=dropped)
    assert data.non_tensor_batch["session_id"].tolist() == ["a", "b"]
    assert (dropped.unscored, dropped.small_groups) == (2, 1)
    with pytest.raises(ConfigError, match="no group has two scored sessions"):
        proto(sessions[3:])


def test_a_session_with_several_traces_is_one_row_or_an_error() -> None:
    groups = by_group([trajectory("a", 1.0, chains=3), trajectory("b", 0.0)])
    with pytest.raises(ExtraTracesError, match="session a has 3 traces"):
        data_proto(groups, pad_token_id=PAD, dropped=Dropped())
    dropped = Dropped()
    data = data_proto(groups, pad_token_id=PAD, extra_traces="main_only", dropped=dropped)
    assert len(data) == 2
    assert (dropped.traces, dropped.tokens) == (2, 8)


def test_rows_are_padded_and_never_truncated() -> None:
    sessions = [trajectory("a", 1.0), trajectory("b", 0.0)]
    data = proto(sessions, prompt_length=5, response_length=6)
    assert data.batch["prompts"].shape == (2, 5)
    assert data.batch["attention_mask"][0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0]
    with pytest.raises(ConfigError, match="a response has 4 tokens, but response_length is 3"):
        proto(sessions, response_length=3)


def test_one_session_is_an_agent_loops_output(sessions: list[Trajectory]) -> None:
    row = one_row(sessions[0], "error", Dropped())
    assert row is not None
    output = agent_loop_output(row)
    assert isinstance(output, AgentLoopOutput)
    fields = output.as_dict()
    trace = row.trace
    assert fields["prompts"].tolist() + fields["responses"].tolist() == trace.token_ids.tolist()
    assert fields["rollout_log_probs"].tolist() == trace.logprobs[row.start :].tolist()
    assert fields["rm_scores"].sum().item() == pytest.approx(trace.reward)
    assert output.num_turns == row.num_turns >= 1
    assert output.extra_fields["min_global_steps"] == trace.lowest_version


@pytest.mark.parametrize("broken", [False, True])
async def test_the_agent_loop_runs_a_session_or_says_why_not(service: Service, tmp_path: Path, broken: bool) -> None:
    task = group_task(7, "any", samples=1, **({"evaluator": BROKEN} if broken else {}))
    fields = json.loads(task.model_dump_json(exclude={"task_id", "instruction"}))
    template = tmp_path / "task.json"
    template.write_text(json.dumps(fields))
    loop = TowlineAgentLoop(template=str(template), url=service.client.url, within=300, tokenizer=None)
    prompt = [{"role": "user", "content": task.instruction}]
    if broken:
        with pytest.raises(SessionFailed, match="the judge fell ill"):
            await loop.run({"temperature": 1.0}, raw_prompt=prompt)
    else:
        output = await loop.run({"temperature": 1.0}, raw_prompt=prompt)
        assert output.reward_score is not None
        assert sum(output.response_mask) > 0
        with pytest.raises(ConfigError, match="sampled at temperature 1"):
            await loop.run({"temperature": 0.7}, raw_prompt=prompt)
