"""SkyRL: a generator whose trajectories are Towline sessions.

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return TowlineGenerator("task.toml", step_wise=cfg.generator.step_wise_trajectories)

The prompts of one `instance_id` are one task, and each gets one of its sessions. SkyRL expects an answer for every prompt,
so an unusable session is replaced by a placeholder: another session's row, fully masked, with the group's mean reward. It
trains nothing and does not change the mean. An incomplete group is fully masked and counted.

SkyRL normalises rewards over rows, except in step-wise training, where it takes the last row of each trajectory and applies
its advantage to the others: with `step_wise` all traces of a session are used, otherwise one (`extra_traces`).

SkyRL tells the step with each batch (`batch_metadata.global_step`), once its weights are in the inference engines: it
is announced before the sessions start.
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
from towline.trainers import packing
from towline.trainers.templates import TaskTemplate, with_sampling
from towline.trainers.versions import TrainerVersions

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_generate_length": "max_tokens",
    "max_tokens": "max_tokens",
}
"""SkyRL's sampling parameters and their names in a task."""


class NothingGenerated(TowlineError):
    """No session of a whole batch is usable for training."""


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt of the batch with the rows of its session."""

    trajectory_id: Any
    rows: list[packing.SplitRow]
    """Empty if the session is not usable."""
    reward: float


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One row of the output: a prompt's own, or a placeholder."""

    place: PromptResult
    row: packing.SplitRow

    @property
    def mask(self) -> list[int]:
        return self.row.response_mask if self.place.rows else [0] * len(self.row.response_mask)

    @property
    def stop_reason(self) -> str:
        if not self.place.rows:
            return "abort"
        return "length" if packing.ended_early(self.row.trajectory) or self.row.trace.truncated else "stop"

    @property
    def last(self) -> bool:
        """Whether this is the last row of its trajectory."""
        return not self.place.rows or self.row is self.place.rows[-1]


@dataclass
class TowlineGenerator:
    """A SkyRL generator over a Towline service."""

    template: TaskTemplate | Path | str
    step_wise: bool = False
    extra_traces: packing.ExtraTraces = "error"
    url: str | None = None
    key: str | None = None
    dropped: packing.Dropped = field(default_factory=packing.Dropped)
    versions: TrainerVersions = field(default_factory=TrainerVersions)

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """A `GeneratorOutput` for a `GeneratorInput`, in the same order."""
        count = len(input_batch["prompts"])
        ids = input_batch.get("trajectory_ids")
        names = [str(n) for n in range(count)] if ids is None else [one.instance_id for one in ids]
        instances: dict[str, list[int]] = {}
        for index, name in enumerate(names):
            instances.setdefault(name, []).append(index)
        async with AsyncClient(self.url, self.key) as client:
            step = getattr(input_batch.get("batch_metadata"), "global_step", None)
            if step is not None:
                await self.versions.announce_async(client, int(step))
            groups = await asyncio.gather(*(self._run(client, input_batch, indices) for indices in instances.values()))
        results: dict[int, PromptResult] = {}
        temperature = (input_batch.get("sampling_params") or {}).get("temperature")
        for indices, group in zip(instances.values(), groups, strict=True):
            of_group = self.prompt_results(group, [ids[n] if ids else None for n in indices], temperature)
            results |= zip(indices, of_group, strict=True)
        return self.output([results[index] for index in range(count)], groups)

    async def _run(
        self, client: AsyncClient, batch: Mapping[str, Any], indices: Sequence[int]
    ) -> packing.TrainingGroup:
        first = indices[0]
        extras = (batch.get("env_extras") or [{}] * (first + 1))[first]
        prompt, template = batch["prompts"][first], TaskTemplate.read(self.template)
        task = template.task({**extras, "prompt": prompt}, prompt=prompt, name="skyrl", samples=len(indices))
        wanted = batch.get("sampling_params") or {}
        sampling = {ours: wanted[theirs] for theirs, ours in _SAMPLING.items() if wanted.get(theirs) is not None}
        if sampling.get("top_k", 0) < 0:
            del sampling["top_k"]
        return await packing.run_group(client, with_sampling(task, sampling))

    def prompt_results(
        self, group: packing.TrainingGroup, trajectory_ids: Sequence[Any], temperature: float | None = None
    ) -> list[PromptResult]:
        """The results of a group's prompts. Those without a usable session have the group's mean reward.

        Rows that were not all sampled at the trainer's `temperature` are refused.
        """
        sessions = group.sessions if group.complete else []
        rewards = [packing.reward_of(session) for session in sessions]
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        results = [
            PromptResult(name, self._rows(one), packing.reward_of(one))
            for name, one in zip(trajectory_ids, sessions, strict=False)
        ]
        for row in (row for result in results for row in result.rows):
            packing.check_temperature(row, temperature)
        return results + [PromptResult(name, [], mean) for name in trajectory_ids[len(results) :]]

    def _rows(self, session: Trajectory) -> list[packing.SplitRow]:
        if self.step_wise:
            return packing.split_rows(session)
        kept = packing.one_row(session, self.extra_traces, self.dropped)
        return [kept] if kept is not None else []

    def output(self, results: Sequence[PromptResult], groups: Sequence[packing.TrainingGroup]) -> dict[str, Any]:
        """The `GeneratorOutput` of the prompts' results."""
        placeholder = next((row for result in results for row in result.rows), None)
        if placeholder is None:
            reason = next((reason for group in groups for reason in group.unusable.values()), "no session was scored")
            raise NothingGenerated(
                f"none of {len(results)} sessions is usable for training; the first reason: {reason}"
            )
        packing.report_batch("SkyRL", [row for result in results for row in result.rows])
        rows = [OutputRow(result, row) for result in results for row in result.rows or [placeholder]]
        return {
            "prompt_token_ids": [one.row.prompt_ids for one in rows],
            "response_ids": [one.row.response_ids for one in rows],
            "rewards": [one.place.reward for one in rows],
            "loss_masks": [one.mask for one in rows],
            "stop_reasons": [one.stop_reason for one in rows],
            "rollout_logprobs": [one.row.response_logprobs for one in rows],
            "trajectory_ids": [one.place.trajectory_id for one in rows],
            "is_last_step": [one.last for one in rows] if self.step_wise else None,
            "rollout_metrics": self._metrics(results, groups),
            "rollout_expert_indices": None,
        }

    def _metrics(self, results: Sequence[PromptResult], groups: Sequence[packing.TrainingGroup]) -> dict[str, float]:
        return {
            "towline/sessions": sum(bool(result.rows) for result in results),
            "towline/left_sessions": sum(len(group.unusable) for group in groups),
            "towline/incomplete_groups": sum(not group.complete for group in groups),
            "towline/dropped_tokens": self.dropped.tokens,
        }


# The stable names of these for users' code.
Line = OutputRow
Place = PromptResult
