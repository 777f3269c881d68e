"""Finished sessions as verl's `DataProto`, with its own GRPO advantages and policy loss at the first step."""

import argparse

from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss

from towline.client import Client
from towline.trainers.packing import Dropped, by_group
from towline.trainers.verl import data_proto

parser = argparse.ArgumentParser()
parser.add_argument("--url", default=None, help="URL of a running service (default: TOWLINE_URL)")
parser.add_argument("--groups", type=int, default=4)
parser.add_argument("--pad-token-id", type=int, default=0)
options = parser.parse_args()

with Client(options.url) as client:
    results = client.results("verl-example", "group", limit=options.groups, idle=30, auto_ack=True)
    sessions = [trajectory for result in results for trajectory in result.trajectories]

dropped = Dropped()
data = data_proto(by_group(sessions), pad_token_id=options.pad_token_id, extra_traces="main_only", dropped=dropped)
batch, groups = data.batch, data.non_tensor_batch["uid"]
mask = batch["response_mask"]
advantages, _ = compute_grpo_outcome_advantage(batch["token_level_scores"], mask, groups)
# The weights are still those that sampled, so the ratio is 1 everywhere.
recorded = batch["rollout_log_probs"]
loss, *_ = compute_policy_loss(recorded, recorded, advantages, mask, cliprange=0.2)
print(f"{len(data)} rows of {len(set(groups))} groups, {int(mask.sum())} trained tokens, loss {loss.item():.4f}")
print(f"dropped: {dropped}")
