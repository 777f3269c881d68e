"""Tinker, and servers with its API: trajectories as `Datum`s for `forward_backward(…, "importance_sampling")`.

A datum is one trace: position j of its inputs predicts token j + 1, so inputs are the tokens without the last; targets,
logprobs and advantages are those without the first. Untrained tokens have an advantage of 0, hence no gradient. The loss is
a sum over tokens, so a session's weight is its number of trained tokens.

The training loop is yours: after `save_weights_for_sampler`, announce the step with
`TrainerVersions().announce(client, step)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from towline.schema import Trajectory
from towline.trainers.advantages import Advantages, Scale, group_advantages, token_advantages
from towline.trainers.packing import SplitRow, check_temperature, report_batch, split_rows

if TYPE_CHECKING:
    from tinker import Datum

TEMPERATURE = 1.0
"""The temperature at which Tinker computes logprobs."""


def datums(
    groups: Mapping[str, Sequence[Trajectory]], *, scale: Scale = "std", turn_weight: float = 1.0
) -> tuple[list[Datum], Advantages]:
    """The datums of every session that has an advantage, and the advantages, which also count the sessions without."""
    advantages = group_advantages(groups, scale=scale, turn_weight=turn_weight)
    report_batch("Tinker", [row for group in groups.values() for one in group for row in split_rows(one)])
    data = []
    for group in groups.values():
        for trajectory in group:
            for row in split_rows(trajectory):
                values = token_advantages(trajectory, row.trace, advantages)
                if values is not None:
                    data.append(datum(row, values))
    return data, advantages


def datum(row: SplitRow, advantages: npt.NDArray[np.float32]) -> Datum:
    """One trace with its per-token advantages."""
    from tinker import Datum, ModelInput

    check_temperature(row, TEMPERATURE)
    tokens = row.token_ids
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], np.int64),
            "logprobs": row.trace.logprobs[1:].astype(np.float32),
            "advantages": advantages[1:].astype(np.float32),
        },
    )
