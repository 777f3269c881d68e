"""slime and Miles: a rollout function that fills their `Sample`s.

    --rollout-function-path            towline.trainers.slime.generate_rollout
    --custom-reward-post-process-path  towline.trainers.slime.session_rewards
    --custom-config-path               towline.yaml, with towline_template: task.toml (and towline_url, towline_key)

Each prompt of the data source makes one task with `n_samples_per_prompt` sessions. A session gives one `Sample` per trace;
all of them share a `rollout_id`, by which the loss counts a session once, and `session_rewards` does so for advantages. An
incomplete group is dropped whole and the next prompt replaces it: a batch has `rollout_batch_size` groups.

slime labels the weights that it puts into its SGLang engines with a growing `weight_version`, which the engines report
with every
turn; before each batch the service is told to take that version over (`announce`), so that each token has its own.

The only module of slime or Miles that is imported is a sibling of the one their `Sample` comes from. Checked against
the source of slime at 624b824 and of Miles at 31f1ca9.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from towline.client import AsyncClient
from towline.errors import ConfigError
from towline.schema import Trajectory
from towline.trainers import packing
from towline.trainers.advantages import Scale, centred
from towline.trainers.templates import TaskTemplate, with_sampling
from towline.trainers.versions import announce_reported

_DROPPED = 8
"""Batches' worth of groups that may be dropped for one batch before the run stops."""


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """One batch of groups, with metrics. The signature is slime's."""
    if evaluation:
        raise ConfigError(
            "this rollout function does not evaluate: use `towline eval`, or set another --eval-function-path"
        )
    batch = asyncio.run(_collect(args, data_source))
    package = type(batch.groups[0][0][0]).__module__.split(".")[0]
    types = importlib.import_module(f"{package}.rollout.base_types")
    return types.RolloutFnTrainOutput(samples=shaped(batch.groups), metrics=batch.metrics())


@dataclass(slots=True)
class CollectedGroups:
    """The groups of one batch."""

    groups: list[list[list[Any]]] = field(default_factory=list)
    """Samples, by group and session."""
    sessions: int = 0
    traces: int = 0
    left: int = 0
    """Sessions that are not usable for training."""
    dropped: int = 0
    """Incomplete groups."""

    def metrics(self) -> dict[str, float]:
        return {
            "towline/sessions": self.sessions,
            "towline/traces": self.traces,
            "towline/left_sessions": self.left,
            "towline/dropped_groups": self.dropped,
        }


async def _collect(args: Any, data_source: Any) -> CollectedGroups:
    template = TaskTemplate.read(_setting(args, "towline_template"))
    batch = CollectedGroups()
    rows: list[packing.SplitRow] = []
    async with AsyncClient(getattr(args, "towline_url", None), getattr(args, "towline_key", None)) as client:
        await announce_reported(client)
        while missing := args.rollout_batch_size - len(batch.groups):
            prompts = data_source.get_samples(missing)
            groups = await asyncio.gather(*(_run(client, template, args, samples) for samples in prompts))
            for samples, group in zip(prompts, groups, strict=True):
                batch.left += len(group.unusable)
                if not group.complete:
                    batch.dropped += 1
                    continue
                batch.groups.append(sample_group(samples, group.sessions, args.rollout_temperature))
                batch.sessions += len(group.sessions)
                rows += (row for session in group.sessions for row in packing.split_rows(session))
            if batch.dropped > _DROPPED * args.rollout_batch_size:
                reason = next(
                    (reason for group in groups for reason in group.unusable.values()), "no session was scored"
                )
                raise ConfigError(f"{batch.dropped} groups were dropped in one batch; a recent reason: {reason}")
    batch.traces = len(rows)
    packing.report_batch("slime", rows)
    return batch


async def _run(client: AsyncClient, template: TaskTemplate, args: Any, samples: Sequence[Any]) -> packing.TrainingGroup:
    first = samples[0]
    row = {**(first.metadata or {}), "prompt": first.prompt, "label": first.label}
    task = template.task(row, prompt=first.prompt, name="slime", samples=len(samples))
    sampling = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "max_tokens": args.rollout_max_response_len,
    }
    return await packing.run_group(client, with_sampling(task, sampling))


def sample_group(
    samples: Sequence[Any], sessions: Sequence[Trajectory], temperature: float | None = None
) -> list[list[Any]]:
    """The samples of each session of a group, copied from those of the data source.

    `temperature` is that of slime's logprobs; rows sampled at another one are refused.
    """
    rows = [packing.split_rows(session) for session in sessions]
    for row in (row for own in rows for row in own):
        packing.check_temperature(row, temperature)
    # A group that is complete by `min_samples` may have fewer sessions than samples.
    return [[_filled(sample, row) for row in own] for sample, own in zip(samples, rows, strict=False)]


def shaped(groups: list[list[list[Any]]]) -> list[list[Any]]:
    """The groups as slime takes them: lists of samples, or lists of lists if any session has several samples."""
    if any(len(session) > 1 for group in groups for session in group):
        return [list(group) for group in groups]
    return [[sample for (sample,) in group] for group in groups]


def _filled(given: Any, row: packing.SplitRow) -> Any:
    sample = copy.copy(given)
    status = type(given).Status
    sample.rollout_id = given.index
    sample.tokens = row.token_ids
    sample.response_length = len(row.response_ids)
    sample.loss_mask = row.response_mask
    sample.rollout_log_probs = row.response_logprobs
    sample.weight_versions = _versions(row)
    sample.reward = packing.reward_of(row.trajectory)
    truncated = packing.ended_early(row.trajectory) or row.trace.truncated
    sample.status = status.TRUNCATED if truncated else status.COMPLETED
    sample.response = str(row.trajectory.turns[-1].reply.get("text") or "")
    sample.metadata = {
        **(given.metadata or {}),
        "session_id": row.session_id,
        "trace_id": row.trace.trace_id,
        "role": row.trace.role.value,
        "end_reason": row.trajectory.end_reason,
    }
    return sample


def _versions(row: packing.SplitRow) -> list[str]:
    """The policy versions of the trained tokens in order, one entry per run of equal versions."""
    trained = row.trace.policy_versions[row.trace.loss_mask == 1].tolist()
    return [str(trained[0]), *(str(after) for before, after in pairwise(trained) if after != before)]


def session_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Raw and normalised rewards per sample; every session of a group counts once. The signature is slime's."""
    groups: dict[Any, dict[Any, float]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, {})[sample.rollout_id] = float(sample.reward)
    scale: Scale = "std" if getattr(args, "grpo_std_normalization", True) else "none"
    normalised = {
        name: dict(zip(group, centred(list(group.values()), scale).tolist(), strict=True))
        for name, group in groups.items()
    }
    return [float(sample.reward) for sample in samples], [
        normalised[sample.group_index][sample.rollout_id] for sample in samples
    ]


def _setting(args: Any, name: str) -> str:
    value = getattr(args, name, None)
    if not value:
        raise ConfigError(f"{name} is missing: set it in the file given by --custom-config-path")
    return str(value)


# The stable names of these for users' code.
Batch = CollectedGroups
