"""Finished sessions as Tinker `Datum`s, and one update from them if an API key is set."""

import argparse
import os

from towline.client import Client
from towline.trainers.packing import by_group
from towline.trainers.tinker import datums

parser = argparse.ArgumentParser()
parser.add_argument("--url", default=None, help="URL of a running service (default: TOWLINE_URL)")
parser.add_argument("--groups", type=int, default=4)
parser.add_argument("--model", default="Qwen/Qwen3-8B", help="Tinker's name of the service's model")
options = parser.parse_args()

with Client(options.url) as client:
    results = client.results("tinker-example", "group", limit=options.groups, idle=30, auto_ack=True)
    sessions = [trajectory for result in results for trajectory in result.trajectories]

data, advantages = datums(by_group(sessions))
tokens = sum(datum.model_input.length for datum in data)
print(f"{len(data)} datums of {len(advantages.sessions)} sessions, {tokens} tokens")
print(f"excluded: {advantages.unscored} sessions without a score, {advantages.equal} groups of equal rewards")

if os.environ.get("TINKER_API_KEY") and data:
    import tinker

    training = tinker.ServiceClient().create_lora_training_client(base_model=options.model)
    training.forward_backward(data, "importance_sampling").result()
    training.optim_step(tinker.AdamParams(learning_rate=1e-5)).result()
    print("one optimiser step done")
