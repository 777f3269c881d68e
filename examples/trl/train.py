"""GRPO with TRL: every prompt is a task, every completion a session of the agent in ../first_agent, run by Towline."""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from towline.client import Client
from towline.demo import tiny_model
from towline.demo.registry import training_task
from towline.trainers.service import own_service
from towline.trainers.trl import TowlineRollouts, session_reward

AGENT = Path(__file__).resolve().parents[1] / "first_agent" / "agent.py"

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--out", type=Path, default=Path("runs/trl"))
options = parser.parse_args()

model = tiny_model.create(tiny_model.default_folder())
with own_service(model, options.out, ["--concurrency", "16"]) as url, Client(url) as client:
    rollouts = TowlineRollouts(
        client,
        # The prompt only identifies the task; the harness decides what the model sees.
        lambda prompt: training_task(int(prompt), AGENT, samples=1),
        weights=options.out / "weights",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=session_reward,
        rollout_func=rollouts,
        train_dataset=Dataset.from_list([{"prompt": str(number)} for number in range(1000)]),
        args=GRPOConfig(
            output_dir=str(options.out),
            max_steps=options.steps,
            per_device_train_batch_size=64,
            num_generations=16,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            bf16=False,
        ),
    )
    trainer.train()
    print(f"masked sessions: {sum(rollouts.failed.values())}, dropped trained tokens: {rollouts.dropped.tokens}")
