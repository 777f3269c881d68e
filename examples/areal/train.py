"""AReaL's trainer over Towline sessions."""

import sys

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.utils.hf_utils import load_hf_tokenizer

config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
tokenizer = load_hf_tokenizer(config.tokenizer_path)
rows = get_custom_dataset(split="train", dataset_config=config.train_dataset, tokenizer=tokenizer)
with PPOTrainer(config, train_dataset=rows) as trainer:
    trainer.train(
        workflow="towline.trainers.areal.TowlineWorkflow",
        workflow_kwargs={"template": "examples/areal/task.toml", "samples": 8, "extra_traces": "main_only"},
    )
