"""TRL's own `AsyncGRPOTrainer` over a real service, with two of its parts replaced that only exist for GPUs."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from support.trainers.adapter_service import BROKEN, Service, group_task
from towline.schema import TaskState
from towline.trainers.advantages import group_advantages
from towline.trainers.packing import by_group
from towline.trainers.trl import TowlineWorker
from towline.trainers.trl.worker import WorkerError


def varlen_attention(q: Any, k: Any, v: Any, q_ends: Any, k_ends: Any, *_: int, **options: Any) -> torch.Tensor:
    """What the flash attention kernel computes for packed sequences, in plain torch: each sees its own keys alone."""
    out = torch.empty_like(q)
    for (q_start, q_end), (k_start, k_end) in zip(
        zip(q_ends[:-1].tolist(), q_ends[1:].tolist(), strict=True),
        zip(k_ends[:-1].tolist(), k_ends[1:].tolist(), strict=True),
        strict=True,
    ):
        # The queries are the last tokens of their path.
        rows, columns = q_end - q_start, k_end - k_start
        seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        parts = (x.transpose(0, 1) for x in (q[q_start:q_end], k[k_start:k_end], v[k_start:k_end]))
        found = scaled_dot_product_attention(*parts, attn_mask=seen, scale=options["softmax_scale"], enable_gqa=True)
        out[q_start:q_end] = found.transpose(0, 1)
    return out


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flop counter asks CUDA for the device's name, and flash attention is a CUDA kernel."""
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention))


def worker_of(service: Service, folder: Path, **options: Any) -> TowlineWorker:
    settings: dict[str, Any] = {
        "tasks": lambda number: group_task(number, "named by the worker", samples=3),
        "model": service.model,
        "weights": folder / "weights",
        "ahead": 2,
    }
    return TowlineWorker(service.client, **(settings | options))


def trainer_of(service: Service, worker: TowlineWorker, out: Path) -> AsyncGRPOTrainer:
    return AsyncGRPOTrainer(
        model=str(service.model),
        processing_class=AutoTokenizer.from_pretrained(service.model),
        train_dataset=Dataset.from_list([{"prompt": "not looked at: the worker has tasks of its own"}]),
        args=AsyncGRPOConfig(
            output_dir=str(out),
            per_device_train_batch_size=6,
            gradient_accumulation_steps=1,
            num_generations=3,
            max_steps=2,
            learning_rate=1e-2,
            dtype="float32",
            token_budget=0,
            max_staleness=2,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
        ),
        rollout_worker=worker,
        weight_transfer=worker.weights,
    )


@pytest.mark.parametrize("pace", [{}, {"groups_per_update": 2, "max_staleness": 2}], ids=["ahead", "paced"])
def test_two_steps_change_the_weights_and_the_engine_gets_them(
    service: Service, tmp_path: Path, pace: dict[str, int]
) -> None:
    worker = worker_of(service, tmp_path, **pace)
    trainer = trainer_of(service, worker, tmp_path / "out")
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    version = service.client.policy().version
    trainer.train()
    assert trainer.state.global_step == 2
    after = trainer.model.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    # Before the first step, and after each.
    assert service.client.policy().version == version + 3
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "weights" / f"v{version + 3}", dtype=torch.float32)
    assert torch.equal(served.get_input_embeddings().weight, after["model.embed_tokens.weight"])
    steps = [line for line in trainer.state.log_history if "reward" in line]
    assert len(steps) == 2
    assert all(line["reward"] > 0 and 0 <= line["sample/staleness_max"] <= 2 for line in steps)
    # The first rows are all of the weights that learn from them: what TRL computes is what was recorded.
    assert steps[0]["sample/staleness_max"] == 0
    assert steps[0]["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    # Nothing is left under way.
    own = [task for task in service.client.tasks() if task.task_id.startswith(worker.run)]
    assert len(own) >= 4
    assert {task.state for task in own} <= {TaskState.DONE, TaskState.CANCELLED}


def collected(worker: TowlineWorker, count: int) -> list[RolloutSample]:
    """So many rows, as the trainer takes them."""
    found = []
    while len(found) < count:
        try:
            found.append(worker.rollout_buffer.get(timeout=1.0))
        except queue.Empty:
            worker.check_health(300)
    return found


def test_rows_are_the_sessions_traces_with_their_advantage_and_their_age(service: Service, tmp_path: Path) -> None:
    worker = worker_of(service, tmp_path)
    # As if the trainer had counted 5 more versions than the service.
    now = service.client.policy().version
    worker.update_model_version(now + 5)
    worker.start()
    try:
        samples = collected(worker, 6)
    finally:
        worker.stop()
    for number in {sample.group_id for sample in samples}:
        own = [sample for sample in samples if sample.group_id == number]
        status = service.client.task(f"{worker.run}/{number:06d}")
        found = service.client.trajectories([one.session_id for one in status.sessions])
        traces = {tuple(trace.token_ids.tolist()): trace for one in found for trace in one.traces}
        advantages = group_advantages(by_group(found)).sessions
        for sample in own:
            trace = traces[tuple(sample.input_ids.tolist())]
            assert sample.completion_mask.tolist() == trace.loss_mask.tolist()
            assert sample.old_log_probs.tolist() == trace.logprobs.tolist()
            assert sample.advantage == pytest.approx(advantages[trace.rollout_id])
            assert sample.model_version == now + 5
            assert sample.metrics["reward"] == pytest.approx(trace.reward)


def test_only_masked_in_tokens_are_loss_terms(service: Service, tmp_path: Path) -> None:
    """TRL's own packing of our rows: every loss term is a trained token, and every trained token is one."""
    worker = worker_of(service, tmp_path)
    worker.start()
    try:
        samples = collected(worker, 3)
    finally:
        worker.stop()
    row = packing.TreeRow()
    for sample in samples:
        row.add({name: getattr(sample, name) for name in RolloutSample.__slots__})
    packed = row.pack()
    trained = [int(sample.completion_mask.sum()) for sample in samples]
    assert packed["token_index"].numel() == sum(trained)
    assert sum(trained) < sum(len(sample.input_ids) - int(sample.completion_mask.argmax()) for sample in samples)
    recorded = torch.cat([torch.from_numpy(s.old_log_probs[s.completion_mask == 1]) for s in samples])
    assert torch.equal(packed["old_log_probs"], recorded)
    assert (packed["old_log_probs"] <= 0).all()


def test_unscored_groups_are_counted_and_give_no_rows(service: Service, tmp_path: Path) -> None:
    tasks = [BROKEN, BROKEN]
    worker = worker_of(
        service,
        tmp_path,
        tasks=lambda n: group_task(n, "named", samples=3, **({"evaluator": tasks[n]} if n < len(tasks) else {})),
    )
    worker.start()
    try:
        samples = collected(worker, 3)
    finally:
        worker.stop()
    assert min(sample.group_id for sample in samples) >= 2
    counted = [worker.metrics_queue.get_nowait() for _ in range(worker.metrics_queue.qsize())]
    assert sum(line["towline/small_groups_total"] for line in counted) == 2


def test_sessions_with_another_temperature_are_refused(service: Service, tmp_path: Path) -> None:
    worker = worker_of(service, tmp_path, temperature=0.7)
    worker.start()
    try:
        with pytest.raises(WorkerError, match=r"sampled at temperature 1 .* at 0\.7"):
            collected(worker, 1)
    finally:
        worker.stop()


def test_a_failed_worker_reports_its_error_on_a_health_check(service: Service, tmp_path: Path) -> None:
    def none_left(number: int) -> Any:
        raise LookupError("there are no more tasks")

    worker = worker_of(service, tmp_path, tasks=none_left)
    worker.start()
    assert worker._thread is not None
    worker._thread.join()
    with pytest.raises(WorkerError, match="there are no more tasks"):
        worker.check_health(300)
    worker.stop()
