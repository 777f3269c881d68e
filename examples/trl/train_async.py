"""Asynchronous GRPO with TRL, on a GPU: sessions continue during learning, and rows carry the age of their tokens."""

import argparse
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from towline.client import Client
from towline.demo import tiny_model
from towline.demo.registry import training_task
from towline.trainers.service import own_service
from towline.trainers.trl import TowlineWorker

AGENT = Path(__file__).resolve().parents[1] / "first_agent" / "agent.py"

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", type=Path, default=Path("runs/trl-async"))
options = parser.parse_args()

model = tiny_model.create(tiny_model.default_folder())
with own_service(model, options.out, ["--concurrency", "16"]) as url, Client(url) as client:
    worker = TowlineWorker(
        client,
        lambda number: training_task(number, AGENT, samples=16),
        model=model,
        weights=options.out / "weights",
    )
    trainer = AsyncGRPOTrainer(
        model=str(model),
        processing_class=AutoTokenizer.from_pretrained(model),
        # Required by TRL; the worker provides the tasks.
        train_dataset=Dataset.from_list([{"prompt": ""}]),
        args=AsyncGRPOConfig(
            output_dir=str(options.out),
            max_steps=options.steps,
            per_device_train_batch_size=64,
            num_generations=16,
            learning_rate=1e-3,
            token_budget=0,
            max_staleness=4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        ),
        rollout_worker=worker,
        weight_transfer=worker.weights,
    )
    trainer.train()
