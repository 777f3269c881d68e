"""AReaL: a workflow whose episode is a group of Towline's sessions.

    workflow="towline.trainers.areal.TowlineWorkflow"
    workflow_kwargs={"template": "task.toml", "samples": 8}

One episode is one task with `samples` sessions, and answers with a padded batch of rows: `input_ids, logprobs, loss_mask,
versions, turn_ids, rewards, attention_mask`; versions and turn ids are -1 for what nobody sampled. A group that is not
complete is rejected (`None`), as AReaL knows it.

AReaL centres rewards over rows. With `rewards="score"` a session therefore gives one row (`extra_traces`), and AReaL's own
normalisation does the rest. With `rewards="advantage"` all traces of a session are rows, their reward is the session's
advantage in its group, and AReaL's normalisation is to be off; a group of equal rewards is rejected.
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
from towline.trainers.advantages import Scale, group_advantages
from towline.trainers.groups import Group, reward_of, run_group
from towline.trainers.packing import Dropped, ExtraTraces, SplitRow, common_temperature, one_row_each, split_rows
from towline.trainers.templates import TaskTemplate

if TYPE_CHECKING:
    from torch import Tensor

Rewards = Literal["score", "advantage"]


@dataclass
class Episodes:
    """What the workflow does, without AReaL."""

    template: TaskTemplate | Path | str
    samples: int = 1
    prompt: str = "messages"
    """The field of a data row that is the instruction, if the template has none."""
    extra_traces: ExtraTraces = "error"
    rewards: Rewards = "score"
    scale: Scale = "std"
    """How `rewards="advantage"` scales them."""
    url: str | None = None
    key: str | None = None
    dropped: Dropped = field(default_factory=Dropped)
    rejected: int = 0
    """Groups that were not complete, or taught nothing."""

    def __post_init__(self) -> None:
        if not isinstance(self.template, TaskTemplate):
            self.template = TaskTemplate.read(self.template)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """One group; the engine is Towline's own to call. The signature is AReaL's."""
        assert isinstance(self.template, TaskTemplate)
        task = self.template.task(data, prompt=data.get(self.prompt), name="areal", samples=self.samples)
        # A client belongs to the loop that it is used in, and AReaL may run episodes in several.
        async with AsyncClient(self.url, self.key) as client:
            return self.batch(await run_group(client, task))

    def batch(self, group: Group) -> dict[str, Tensor] | None:
        """The group's rows; `None` if it is to be rejected."""
        rows, rewards = self._rows(group) if group.complete else ([], {})
        if not rows:
            self.rejected += 1
            return None
        common_temperature(rows)  # AReaL divides by its own, for all rows
        return padded(rows, rewards)

    def _rows(self, group: Group) -> tuple[list[SplitRow], Mapping[str, float]]:
        if self.rewards == "score":
            rewards = {session.session_id: reward_of(session) for session in group.sessions}
            return one_row_each(group.sessions, self.extra_traces, self.dropped), rewards
        advantages = group_advantages({group.task.task_id: group.sessions}, scale=self.scale).sessions
        return [row for one in group.sessions if one.session_id in advantages for row in split_rows(one)], advantages


def padded(rows: Sequence[SplitRow], rewards: Mapping[str, float]) -> dict[str, Tensor]:
    """Rows side by side, filled up on the right."""
    import torch

    length = max(len(row.trace.token_ids) for row in rows)

    def column(name: str, fill: int, kind: type[np.generic]) -> Tensor:
        out: npt.NDArray[Any] = np.full((len(rows), length), fill, kind)
        for place, row in enumerate(rows):
            values = getattr(row.trace, name)
            out[place, : len(values)] = values
        return torch.from_numpy(out)

    lengths = torch.tensor([len(row.trace.token_ids) for row in rows])
    return {
        "input_ids": column("token_ids", 0, np.int32),
        "loss_mask": column("loss_mask", 0, np.int32),
        "logprobs": column("logprobs", 0, np.float32),
        "versions": column("policy_versions", -1, np.int32),
        "turn_ids": column("turn_ids", -1, np.int32),
        "rewards": torch.tensor([rewards[row.session_id] for row in rows], dtype=torch.float32),
        "attention_mask": torch.arange(length)[None, :] < lengths[:, None],
    }


def __getattr__(name: str) -> Any:
    """`TowlineWorkflow` is made when it is asked for, since its base is AReaL's."""
    if name != "TowlineWorkflow":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    base = importlib.import_module("areal.api.workflow_api").RolloutWorkflow
    made = type(name, (Episodes, base), {"__doc__": Episodes.__doc__, "__module__": __name__})
    globals()[name] = made
    return made
