"""SkyRL: a generator whose trajectories are Towline's sessions.

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return TowlineGenerator("task.toml", step_wise=cfg.generator.step_wise_trajectories)

The prompts of one `instance_id` are one task, and each gets one of its sessions. SkyRL wants an answer for every prompt, so
a session that left its group is stood in for: by another's row that is masked whole and has the mean reward of the group.
It trains nothing and moves no mean. A group that is not complete is masked whole, and counted.

SkyRL centres rewards over rows, except in step-wise training, where it takes the last row of each trajectory and spreads its
advantage over the others: with `step_wise` all traces of a session go, otherwise one (`extra_traces`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from towline.client import AsyncClient
from towline.errors import TowlineError
from towline.schema import Trajectory
from towline.trainers.groups import Group, cut_short, reward_of, run_group
from towline.trainers.packing import Dropped, ExtraTraces, SplitRow, check_temperature, one_row, split_rows
from towline.trainers.templates import TaskTemplate

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_generate_length": "max_tokens",
    "max_tokens": "max_tokens",
}
"""What SkyRL says of sampling, and what a task calls it."""


class NothingGenerated(TowlineError):
    """No session of a whole batch gave anything to learn from."""


@dataclass(frozen=True, slots=True)
class Place:
    """One prompt of the batch, and what it got."""

    trajectory_id: Any
    rows: list[SplitRow]
    """Empty if its session left the group."""
    reward: float


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the output: a place's own, or a stand-in."""

    place: Place
    row: SplitRow

    @property
    def mask(self) -> list[int]:
        return self.row.response_mask if self.place.rows else [0] * len(self.row.response_mask)

    @property
    def stop_reason(self) -> str:
        if not self.place.rows:
            return "abort"
        return "length" if cut_short(self.row.trajectory) or self.row.trace.truncated else "stop"

    @property
    def last(self) -> bool:
        """Whether it is its trajectory's last."""
        return not self.place.rows or self.row is self.place.rows[-1]


@dataclass
class TowlineGenerator:
    template: TaskTemplate | Path | str
    step_wise: bool = False
    extra_traces: ExtraTraces = "error"
    url: str | None = None
    key: str | None = None
    dropped: Dropped = field(default_factory=Dropped)

    def __post_init__(self) -> None:
        if not isinstance(self.template, TaskTemplate):
            self.template = TaskTemplate.read(self.template)

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """A `GeneratorOutput` for a `GeneratorInput`, in the same order."""
        count = len(input_batch["prompts"])
        ids = input_batch.get("trajectory_ids")
        names = [str(n) for n in range(count)] if ids is None else [one.instance_id for one in ids]
        instances: dict[str, list[int]] = {}
        for place, name in enumerate(names):
            instances.setdefault(name, []).append(place)
        async with AsyncClient(self.url, self.key) as client:
            groups = await asyncio.gather(*(self._run(client, input_batch, places) for places in instances.values()))
        found: list[Place | None] = [None] * count
        temperature = (input_batch.get("sampling_params") or {}).get("temperature")
        for places, group in zip(instances.values(), groups, strict=True):
            made = self.places(group, [ids[n] if ids else None for n in places], temperature)
            for place, one in zip(places, made, strict=True):
                found[place] = one
        return self.output([place for place in found if place is not None], groups)

    async def _run(self, client: AsyncClient, batch: Mapping[str, Any], places: Sequence[int]) -> Group:
        assert isinstance(self.template, TaskTemplate)
        first = places[0]
        extras = (batch.get("env_extras") or [{}] * (first + 1))[first]
        prompt = batch["prompts"][first]
        task = self.template.task({**extras, "prompt": prompt}, prompt=prompt, name="skyrl", samples=len(places))
        wanted = batch.get("sampling_params") or {}
        sampling = {ours: wanted[theirs] for theirs, ours in _SAMPLING.items() if wanted.get(theirs) is not None}
        if sampling.get("top_k", 0) < 0:
            del sampling["top_k"]
        # What the trainer computes logprobs of goes over what the template says.
        settings = task.settings | {"sampling": task.settings.get("sampling", {}) | sampling}
        return await run_group(client, task.model_copy(update={"settings": settings}))

    def places(self, group: Group, trajectory_ids: Sequence[Any], temperature: float | None = None) -> list[Place]:
        """What each of a group's prompts got. Those without a session have the group's mean reward.

        Rows that were not sampled at the trainer's `temperature`, or at several, are refused.
        """
        sessions = group.sessions if group.complete else []
        rewards = [reward_of(session) for session in sessions]
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        made = [
            Place(name, self._rows(one), reward_of(one)) for name, one in zip(trajectory_ids, sessions, strict=False)
        ]
        for row in (row for place in made for row in place.rows):
            check_temperature(row, temperature)
        return made + [Place(name, [], mean) for name in trajectory_ids[len(made) :]]

    def _rows(self, session: Trajectory) -> list[SplitRow]:
        if self.step_wise:
            return split_rows(session)
        kept = one_row(session, self.extra_traces, self.dropped)
        return [kept] if kept is not None else []

    def output(self, places: Sequence[Place], groups: Sequence[Group]) -> dict[str, Any]:
        spare = next((row for place in places for row in place.rows), None)
        if spare is None:
            why = next((reason for group in groups for reason in group.left.values()), "no session was scored")
            raise NothingGenerated(f"no session of {len(places)} gave anything to learn from; the first because: {why}")
        lines = [Line(place, row) for place in places for row in place.rows or [spare]]
        return {
            "prompt_token_ids": [line.row.prompt_ids for line in lines],
            "response_ids": [line.row.response_ids for line in lines],
            "rewards": [line.place.reward for line in lines],
            "loss_masks": [line.mask for line in lines],
            "stop_reasons": [line.stop_reason for line in lines],
            "rollout_logprobs": [line.row.response_logprobs for line in lines],
            "trajectory_ids": [line.place.trajectory_id for line in lines],
            "is_last_step": [line.last for line in lines] if self.step_wise else None,
            "rollout_metrics": self._metrics(places, groups),
            "rollout_expert_indices": None,
        }

    def _metrics(self, places: Sequence[Place], groups: Sequence[Group]) -> dict[str, float]:
        return {
            "towline/sessions": sum(bool(place.rows) for place in places),
            "towline/left_sessions": sum(len(group.left) for group in groups),
            "towline/incomplete_groups": sum(not group.complete for group in groups),
            "towline/dropped_tokens": self.dropped.tokens,
        }
