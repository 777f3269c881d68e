"""NeMo RL: sessions as the `message_log`s of its rollouts.

NeMo RL takes Towline as an environment of NeMo Gym (`towline.trainers.nemo_gym`) and cuts message logs out of its answers
itself. This is the same shape made directly, for loops that lease Towline's results: a log alternates between `user` (what
was not trained) and `assistant` (what was), and its tokens, joined, are the row, token for token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from towline.schema import Trajectory
from towline.schema.checks import runs
from towline.trainers.groups import cut_short, reward_of, why_not
from towline.trainers.packing import Dropped, ExtraTraces, SplitRow, by_group, common_temperature, grouped_rows


def message_log(row: SplitRow) -> list[dict[str, Any]]:
    """The row as messages with `token_ids`, `token_loss_mask` and `generation_logprobs`, tensors of one length each."""
    import torch

    trace = row.trace

    def message(role: str, start: int, end: int) -> dict[str, Any]:
        trained = int(role == "assistant")
        return {
            "role": role,
            "content": "",
            "token_ids": torch.from_numpy(trace.token_ids[start:end].astype("int64")),
            "token_loss_mask": torch.full((end - start,), trained),
            "generation_logprobs": torch.from_numpy(trace.logprobs[start:end] * trace.loss_mask[start:end]),
        }

    log: list[dict[str, Any]] = []
    context = 0
    for index, start, end in runs(trace.turn_ids):
        if index < 0 or not trace.loss_mask[start:end].all():
            continue
        if context < start:
            log.append(message("user", context, start))
        log.append(message("assistant", start, end))
        context = end
    if context < len(trace.token_ids):
        log.append(message("user", context, len(trace.token_ids)))
    return log


def rollout_batch(
    trajectories: Sequence[Trajectory], extra_traces: ExtraTraces = "error", dropped: Dropped | None = None
) -> dict[str, Any]:
    """The columns of a rollout's final batch. Sessions that nobody may learn from are not in it, nor are lonely ones.

    `prompt_group` names the task of each row: NeMo RL computes advantages over rows, and a session has one.
    """
    import torch

    counted = [trajectory for trajectory in trajectories if why_not(trajectory) is None]
    rows = grouped_rows(by_group(counted), extra_traces, dropped if dropped is not None else Dropped())
    if rows:
        common_temperature(rows)  # NeMo RL divides by its own, for all rows
    return {
        "message_log": [message_log(row) for row in rows],
        "length": torch.tensor([len(row.trace.token_ids) for row in rows]),
        "loss_multiplier": torch.ones(len(rows)),
        "total_reward": torch.tensor([reward_of(row.trajectory) for row in rows]),
        "truncated": torch.tensor([cut_short(row.trajectory) or row.trace.truncated for row in rows], dtype=torch.bool),
        "prompt_group": [row.group_id for row in rows],
    }
