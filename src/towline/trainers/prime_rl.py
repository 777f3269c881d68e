"""prime-rl: sessions as `TrainingSample`s, one per trace.

prime-rl takes flat rows with an advantage per token, so all traces of a session are used and a session still counts once in
its group. `mask` marks trained tokens; logprobs, temperatures and advantages have one entry per token.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from towline.schema import Trajectory
from towline.trainers.advantages import Advantages, Scale, group_advantages, token_advantages
from towline.trainers.packing import by_group, split_rows, unusable_because


def training_samples(
    trajectories: Sequence[Trajectory], env_name: str, *, scale: Scale = "std", turn_weight: float = 1.0
) -> list[dict[str, Any]]:
    """The fields of a `TrainingSample` for every trace of every session that has an advantage."""
    usable = [trajectory for trajectory in trajectories if unusable_because(trajectory) is None]
    advantages = group_advantages(by_group(usable), scale=scale, turn_weight=turn_weight)
    return [sample for trajectory in usable for sample in _samples(trajectory, advantages, env_name)]


def _samples(trajectory: Trajectory, advantages: Advantages, env_name: str) -> list[dict[str, Any]]:
    samples = []
    for index, row in enumerate(split_rows(trajectory)):
        values = token_advantages(row.trajectory, row.trace, advantages)
        if values is None:
            continue
        trace = row.trace
        samples.append(
            {
                "token_ids": trace.token_ids.tolist(),
                "mask": trace.loss_mask.astype(bool).tolist(),
                "logprobs": trace.logprobs.tolist(),
                "temperatures": trace.logit_divisors.tolist(),
                "env_name": env_name,
                "advantages": values.tolist(),
                "trace_id": trajectory.session_id,
                "branch_index": index,
            }
        )
    return samples


def structs(samples: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The samples as prime-rl's own type, without fields that the installed version lacks."""
    kind = importlib.import_module("prime_rl.transport").TrainingSample
    known = set(kind.__struct_fields__)
    return [kind(**{name: value for name, value in one.items() if name in known}) for one in samples]
