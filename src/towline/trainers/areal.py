"""AReaL: a workflow whose episode is one group of Towline sessions.

    workflow="towline.trainers.areal.TowlineWorkflow"
    workflow_kwargs={"template": "task.toml", "samples": 8}    # and gconfig.n_samples: 1
    actor.reward_norm.group_size: 8                            # as many as `samples`

An episode is one task with `samples` sessions. It returns a padded batch of rows: `input_ids, logprobs, loss_mask, versions,
turn_ids, rewards, attention_mask`; versions and turn ids are -1 for tokens that were not sampled. An incomplete group is
rejected (`None`), which AReaL supports.

AReaL normalises rewards over rows. With `rewards="score"` a session therefore gives one row (`extra_traces`), and AReaL
normalises. With `rewards="advantage"` every trace of a session is a row, its reward is the session's advantage in its
group, and AReaL's normalisation must be off; a group of equal rewards is rejected.

AReaL normalises over `group_size` consecutive rows: with another number than `samples` it compares sessions of different
tasks, and with 1 every advantage is 0. So with `rewards="score"` a group always has `samples` rows: an unusable session is
replaced by a row without trained tokens and with the group's mean reward, which does not change the mean.

Before a group starts, the version of AReaL's inference engine (`engine.get_version()`) is announced; `versions` are in
AReaL's numbering, which its staleness limit uses.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from towline.client import AsyncClient
from towline.trainers import packing
from towline.trainers.advantages import Scale, group_advantages
from towline.trainers.templates import TaskTemplate
from towline.trainers.versions import TrainerVersions

if TYPE_CHECKING:
    from torch import Tensor

Rewards = Literal["score", "advantage"]


@dataclass
class GroupEpisodes:
    """The workflow without AReaL's base class."""

    template: TaskTemplate | Path | str
    samples: int = 1
    """Sessions per group."""
    prompt: str = "messages"
    """The field of a data row that holds the instruction, if the template has none."""
    extra_traces: packing.ExtraTraces = "error"
    rewards: Rewards = "score"
    scale: Scale = "std"
    """How advantages are scaled with `rewards="advantage"`."""
    url: str | None = None
    key: str | None = None
    dropped: packing.Dropped = field(default_factory=packing.Dropped)
    versions: TrainerVersions = field(default_factory=TrainerVersions)
    rejected: int = 0
    """Groups that were incomplete or carried no gradient."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Run one group; `engine` only tells its version, since Towline calls its own. The signature is AReaL's."""
        template = TaskTemplate.read(self.template)
        task = template.task(data, prompt=data.get(self.prompt), name="areal", samples=self.samples)
        # A client belongs to one event loop, and AReaL may run episodes in several.
        async with AsyncClient(self.url, self.key) as client:
            if hasattr(engine, "get_version"):
                await self.versions.announce_async(client, int(engine.get_version()))
            return self.batch(await packing.run_group(client, task))

    def batch(self, group: packing.TrainingGroup) -> dict[str, Tensor] | None:
        """The group's rows; `None` if the group is rejected."""
        rows, rewards = self._rows(group) if group.complete else ([], {})
        if not rows:
            self.rejected += 1
            return None
        packing.report_batch("AReaL", rows)
        packing.batch_temperature(rows)  # AReaL uses one temperature for all rows
        missing = group.task.num_samples - len(rows) if self.rewards == "score" else 0
        return padded(rows, rewards, self.versions, fillers=max(0, missing))

    def _rows(self, group: packing.TrainingGroup) -> tuple[list[packing.SplitRow], Mapping[str, float]]:
        if self.rewards == "score":
            rewards = {session.session_id: packing.reward_of(session) for session in group.sessions}
            return packing.one_row_per_session(group.sessions, self.extra_traces, self.dropped), rewards
        advantages = group_advantages({group.task.task_id: group.sessions}, scale=self.scale).sessions
        return [
            row for one in group.sessions if one.session_id in advantages for row in packing.split_rows(one)
        ], advantages


def padded(
    rows: Sequence[packing.SplitRow],
    rewards: Mapping[str, float],
    versions: TrainerVersions | None = None,
    fillers: int = 0,
) -> dict[str, Tensor]:
    """The rows as right-padded tensors; `versions` turns policy versions into AReaL's.

    `fillers` rows follow that train nothing and have the mean reward.
    """
    import torch

    own_rewards = [rewards[row.session_id] for row in rows]
    own_rewards += [sum(own_rewards) / len(rows)] * fillers
    trained = len(rows)
    rows = [*rows, *[rows[0]] * fillers]
    length = max(len(row.trace.token_ids) for row in rows)

    def column(name: str, fill: int, kind: type[np.generic]) -> Tensor:
        out: npt.NDArray[Any] = np.full((len(rows), length), fill, kind)
        for index, row in enumerate(rows):
            values = getattr(row.trace, name)
            out[index, : len(values)] = values
        return torch.from_numpy(out)

    lengths = torch.tensor([len(row.trace.token_ids) for row in rows])
    own = column("policy_versions", -1, np.int32)
    own[own >= 0] -= versions.offset if versions is not None else 0
    loss_mask = column("loss_mask", 0, np.int32)
    loss_mask[trained:] = 0
    return {
        "input_ids": column("token_ids", 0, np.int32),
        "loss_mask": loss_mask,
        "logprobs": column("logprobs", 0, np.float32),
        "versions": own,
        "turn_ids": column("turn_ids", -1, np.int32),
        "rewards": torch.tensor(own_rewards, dtype=torch.float32),
        "attention_mask": torch.arange(length)[None, :] < lengths[:, None],
    }


def __getattr__(name: str) -> Any:
    """Create `TowlineWorkflow` on first access, since its base class is AReaL's."""
    if name != "TowlineWorkflow":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    base = importlib.import_module("areal.api.workflow_api").RolloutWorkflow
    workflow = type(name, (GroupEpisodes, base), {"__doc__": GroupEpisodes.__doc__, "__module__": __name__})
    globals()[name] = workflow
    return workflow


# The stable names of these for users' code.
Episodes = GroupEpisodes
