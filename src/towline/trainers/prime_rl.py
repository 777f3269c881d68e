"""prime-rl: sessions as `TrainingSample`s, one per trace.

prime-rl takes flat rows with an advantage per token, so all traces of a session are used and a session still counts once in
its group. `mask` marks trained tokens; logprobs, temperatures and advantages have one entry per token.

prime-rl replaces the weights of its vLLM servers under running turns (`/pause?mode=keep`) and tells its observers:
`PolicyWatcher(observers=[…, VersionObserver()])` announces each version. Checked against its source at 559b447.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from towline.client import AsyncClient
from towline.schema import Trajectory
from towline.trainers.advantages import Advantages, Scale, group_advantages, token_advantages
from towline.trainers.packing import by_group, report_batch, split_rows, unusable_because
from towline.trainers.versions import TrainerVersions

_MODULES = ("prime_rl.transports.rollouts.types", "prime_rl.transport")
"""Where prime-rl has `TrainingSample`: now, and in older versions."""


def training_samples(
    trajectories: Sequence[Trajectory], env_name: str, *, scale: Scale = "std", turn_weight: float = 1.0
) -> list[dict[str, Any]]:
    """The fields of a `TrainingSample` for every trace of every session that has an advantage."""
    usable = [trajectory for trajectory in trajectories if unusable_because(trajectory) is None]
    advantages = group_advantages(by_group(usable), scale=scale, turn_weight=turn_weight)
    report_batch("prime-rl", [row for trajectory in usable for row in split_rows(trajectory)])
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
    kind = _training_sample()
    known = set(kind.__struct_fields__)
    return [kind(**{name: value for name, value in one.items() if name in known}) for one in samples]


def _training_sample() -> Any:
    for name in _MODULES:
        try:
            return importlib.import_module(name).TrainingSample
        except ModuleNotFoundError as error:
            missing = error
    raise missing


class VersionObserver:
    """An observer of prime-rl's policy watcher: announces the version of weights once all its servers have them."""

    def __init__(self, url: str | None = None, key: str | None = None):
        self.url, self.key = url, key
        self.versions = TrainerVersions()

    async def on_version_pending(self, step: int) -> None:
        """No-op: turns in flight keep the version that samples them."""

    async def on_new_version(self, step: int) -> None:
        async with AsyncClient(self.url, self.key) as client:
            await self.versions.announce_async(client, step)
