"""NeMo RL: sessions as `message_log`s.

NeMo RL can use Towline through NeMo Gym (`towline.trainers.nemo_gym`) and builds message logs from its answers. This module
makes the same shape directly, for loops that lease Towline's results: a log alternates between `user` (untrained tokens) and
`assistant` (trained tokens), and its concatenated tokens are the row, token for token.

NeMo RL forms groups of rows with the same prompt tokens (`length` of them), so the sessions of a task must begin alike: a
harness that writes a time or a path into its prompt makes each row a group of its own, which is reported. After
`refit_policy_generation`, announce the step: `TrainerVersions().announce(client, step)`. NeMo RL's own generation server has
chat routes only, so that under it `--engine openai` is what there is. Checked against its source at 7ea279a.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from towline.schema import Trajectory
from towline.schema.checks import runs
from towline.trainers import packing

log = logging.getLogger("towline.trainers")


def message_log(row: packing.SplitRow) -> list[dict[str, Any]]:
    """The row as messages with `token_ids`, `token_loss_mask` and `generation_logprobs`, tensors of equal length."""
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
    trajectories: Sequence[Trajectory],
    extra_traces: packing.ExtraTraces = "error",
    dropped: packing.Dropped | None = None,
) -> dict[str, Any]:
    """The columns of a rollout's final batch, without unusable sessions and groups of one.

    `length` is that of the prompt, by which NeMo RL forms groups; `prompt_group` is the task of each row. NeMo RL computes
    advantages over rows, and a session has one.
    """
    import torch

    usable = [trajectory for trajectory in trajectories if packing.unusable_because(trajectory) is None]
    rows = packing.grouped_rows(
        packing.by_group(usable), extra_traces, dropped if dropped is not None else packing.Dropped()
    )
    packing.report_batch("NeMo RL", rows)
    if rows:
        packing.batch_temperature(rows)  # NeMo RL uses one temperature for all rows
    for name, prompts in _different_prompts(rows).items():
        log.warning(
            "NeMo RL: the %d sessions of task %s have %d different prompts; NeMo RL groups rows by prompt, so they are not "
            "compared with each other: use a harness without times and paths in its prompt, or group by prompt_group",
            *(sum(row.group_id == name for row in rows), name, prompts),
        )
    return {
        "message_log": [message_log(row) for row in rows],
        "length": torch.tensor([row.start for row in rows], dtype=torch.int64),
        "loss_multiplier": torch.ones(len(rows)),
        "total_reward": torch.tensor([packing.reward_of(row.trajectory) for row in rows]),
        "truncated": torch.tensor(
            [packing.ended_early(row.trajectory) or row.trace.truncated for row in rows], dtype=torch.bool
        ),
        "prompt_group": [row.group_id for row in rows],
    }


def _different_prompts(rows: Sequence[packing.SplitRow]) -> dict[str, int]:
    """Groups whose rows have several prompts, and how many."""
    prompts: dict[str, set[bytes]] = {}
    for row in rows:
        prompts.setdefault(row.group_id, set()).add(row.trace.token_ids[: row.start].tobytes())
    return {name: len(found) for name, found in prompts.items() if len(found) > 1}
