"""TRL's own `GRPOTrainer` over a real service: steps, weights that arrive, masks that hold, failures that are no zeros."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from support.trainers.adapter_service import BROKEN, MEAN, Service, group_task
from towline.client import WaitTimeout
from towline.errors import ConfigError
from towline.schema import Task, TaskState
from towline.trainers.trl import TowlineRollouts, session_reward


def trainer_of(service: Service, rollouts: TowlineRollouts, out: Path, **options: Any) -> GRPOTrainer:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 6,
        "num_generations": 3,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "seed": 0,
    }
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(service.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(service.model),
        reward_funcs=session_reward,
        rollout_func=rollouts,
        args=GRPOConfig(output_dir=str(out), **(settings | options)),
        train_dataset=Dataset.from_list([{"prompt": str(number)} for number in range(8)]),
    )


def task_of(evaluator: str = MEAN) -> Callable[[str], Task]:
    return lambda prompt: group_task(int(prompt), "named by the adapter", samples=1, evaluator=evaluator)


@pytest.fixture
def rollouts(service: Service, tmp_path: Path) -> TowlineRollouts:
    return TowlineRollouts(service.client, task_of(), weights=tmp_path / "weights", within=300)


def test_two_steps_change_the_weights_and_the_engine_gets_them(
    service: Service, rollouts: TowlineRollouts, tmp_path: Path
) -> None:
    trainer = trainer_of(service, rollouts, tmp_path / "out")
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    version = service.client.policy().version
    trainer.train()
    after = trainer.model.state_dict()
    assert trainer.state.global_step == 2
    assert any(not torch.equal(before[name], after[name]) for name in before)
    steps = [line for line in trainer.state.log_history if "reward" in line]
    assert len(steps) == 2
    for line in steps:
        # No group was without a gradient, and no session was lost.
        assert line["frac_reward_zero_std"] == 0.0
        assert line["rewards/session_reward/mean"] > 0.0
    assert not rollouts.failed
    assert rollouts.dropped.tokens == 0
    # Once before each step, and the second time with what the first had changed.
    assert service.client.policy().version == version + 2
    first, second = (load_file(tmp_path / "weights" / f"v{version + n}" / "model.safetensors") for n in (1, 2))
    assert torch.equal(first["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert not torch.equal(first["model.embed_tokens.weight"], second["model.embed_tokens.weight"])


def test_one_row_per_prompt_in_order_and_one_task_per_group(
    service: Service, rollouts: TowlineRollouts, tmp_path: Path
) -> None:
    trainer = trainer_of(service, rollouts, tmp_path / "out")
    # TRL keeps equal prompts together; nothing depends on it.
    rows = rollouts(["3", "5", "3", "5", "3"], trainer)
    assert {len(values) for values in rows.values()} == {5}
    found = {one.session_id: one for one in service.client.trajectories(rows["session_id"])}
    assert len(found) == 5
    tasks = [found[session].group_id for session in rows["session_id"]]
    assert tasks[0] == tasks[2] == tasks[4] != tasks[1] == tasks[3]
    for place, session in enumerate(rows["session_id"]):
        (trace,) = found[session].traces
        prompt, completion, mask = rows["prompt_ids"][place], rows["completion_ids"][place], rows["env_mask"][place]
        assert prompt + completion == trace.token_ids.tolist()
        assert [0] * len(prompt) + mask == trace.loss_mask.tolist()
        assert mask[0] == 1
        assert rows["session_reward"][place] == pytest.approx(trace.reward)
        # Sampled by the weights that were pushed for this call.
        assert trace.lowest_version == service.client.policy().version


def test_a_token_outside_the_mask_is_not_in_the_loss(
    service: Service, rollouts: TowlineRollouts, tmp_path: Path
) -> None:
    trainer = trainer_of(service, rollouts, tmp_path / "out")
    seen: list[tuple[dict[str, Any], torch.Tensor]] = []
    forward = trainer._get_per_token_logps_and_entropies
    compute = trainer._compute_loss

    def leaf(*args: Any, **kwargs: Any) -> Any:
        logprobs, *rest = forward(*args, **kwargs)
        if not logprobs.requires_grad:
            return (logprobs, *rest)
        seen[-1][1].data = logprobs.detach().clone()
        return (seen[-1][1], *rest)

    def losing(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        seen.append((inputs, torch.zeros((), requires_grad=True)))
        return compute(model, inputs)

    trainer._get_per_token_logps_and_entropies = leaf
    trainer._compute_loss = losing
    trainer.args.max_steps = 1
    trainer.train()
    ((inputs, logprobs),) = seen
    trained = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    # A question, or what a tool returned, stands between two turns.
    assert (inputs["completion_mask"].bool() & ~trained).any()
    assert logprobs.grad is not None
    assert (logprobs.grad[~trained] == 0).all()
    assert (logprobs.grad[trained] != 0).all()


def test_the_recorded_logprobs_are_the_trainers_own(
    service: Service, rollouts: TowlineRollouts, tmp_path: Path
) -> None:
    trainer = trainer_of(service, rollouts, tmp_path / "out")
    rows = rollouts(["1", "1"], trainer)
    for prompt, completion, mask, recorded in zip(
        rows["prompt_ids"], rows["completion_ids"], rows["env_mask"], rows["logprobs"], strict=True
    ):
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        trained = torch.tensor(mask).bool()
        assert (own - torch.tensor(recorded))[trained].abs().max() < 1e-3


def test_an_unscored_session_is_masked_and_counted_and_not_a_zero(service: Service, tmp_path: Path) -> None:
    rollouts = TowlineRollouts(service.client, task_of(BROKEN), weights=None, within=300)
    trainer = trainer_of(service, rollouts, tmp_path / "out", max_steps=1)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    (reason,) = rollouts.failed
    assert "the judge fell ill" in reason
    assert rollouts.failed[reason] == 6
    # Neither a mean reward of 0 nor a step away from what these sessions did.
    (line,) = (line for line in trainer.state.log_history if "reward" in line)
    assert line["reward"] is None
    after = trainer.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_caller_that_stops_waiting_cancels_the_sessions(
    service: Service, rollouts: TowlineRollouts, tmp_path: Path
) -> None:
    trainer = trainer_of(service, rollouts, tmp_path / "out")
    rollouts.within = 0.0
    with pytest.raises(WaitTimeout):
        rollouts(["1", "2"], trainer)
    own = [task.state for task in service.client.tasks() if task.task_id.startswith(rollouts.run)]
    assert own == [TaskState.CANCELLED] * 2


def test_sessions_with_another_temperature_are_refused(
    service: Service, rollouts: TowlineRollouts, tmp_path: Path
) -> None:
    trainer = trainer_of(service, rollouts, tmp_path / "out", temperature=0.7)
    with pytest.raises(ConfigError, match=r"sampled at temperature 1 .* at 0\.7"):
        rollouts(["1"], trainer)
