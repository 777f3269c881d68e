"""verl: trajectories as a `DataProto`, a session as an `AgentLoopOutput`, and an agent loop that runs one.

verl compares rows: its GRPO estimator counts every row of a `uid` as one sample, and trains on the only row of a `uid` with
its raw reward. So a session is one row here; sessions without a score and groups left with fewer than two are excluded and
counted. Prompts are padded on the left and responses on the right; rows are never truncated: one that does not fit is an
error.

The agent loop is for verl's trainer as it is by default (`trainer.use_v1`, verl 0.9.1), which runs the loops of a
prompt side by
side and takes as many outputs as they return: a session that is not usable, or longer than `rollout.prompt_length` and
`rollout.response_length`, returns none and so leaves its group. A group that is left with fewer than two fails as a
whole, which verl evicts. The older trainer needs an output of every loop: there such a session is an error.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from towline.client import AsyncClient
from towline.errors import ConfigError
from towline.schema import Trajectory
from towline.trainers import packing
from towline.trainers.packing import SessionFailed
from towline.trainers.templates import TaskTemplate, with_sampling
from towline.trainers.versions import TrainerVersions

if TYPE_CHECKING:
    from torch import Tensor
    from verl import DataProto
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

log = logging.getLogger("towline.trainers")


def data_proto(
    groups: Mapping[str, Sequence[Trajectory]],
    *,
    pad_token_id: int,
    extra_traces: packing.ExtraTraces = "error",
    dropped: packing.Dropped,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> DataProto:
    """One row per session, with the group as `uid`; lengths default to the longest of the batch.

    `token_level_scores` holds the reward at the last token of the response, as verl expects.
    """
    import torch
    from verl import DataProto

    rows = packing.grouped_rows(groups, extra_traces, dropped)
    if not rows:
        raise ConfigError("no group has two scored sessions, so verl has nothing to compare")
    packing.report_batch("verl", rows)
    temperature = packing.batch_temperature(rows)
    prompt_width = _width([row.start for row in rows], prompt_length, "prompt")
    response_width = _width([len(row.trace.token_ids) - row.start for row in rows], response_length, "response")

    def left(lists: Sequence[Sequence[int]], fill: int) -> Tensor:
        return torch.tensor([[fill] * (prompt_width - len(one)) + list(one) for one in lists])

    def right(lists: Sequence[Sequence[float]], fill: float, kind: torch.dtype) -> Tensor:
        return torch.tensor([list(one) + [fill] * (response_width - len(one)) for one in lists], dtype=kind)

    prompts = left([row.prompt_ids for row in rows], pad_token_id)
    responses = right([row.response_ids for row in rows], pad_token_id, torch.int64)
    attention = torch.cat(
        [
            left([[1] * row.start for row in rows], 0),
            right([[1] * len(row.response_ids) for row in rows], 0, torch.int64),
        ],
        dim=1,
    )
    scores = [[0.0] * (len(row.response_ids) - 1) + [row.reward or 0.0] for row in rows]
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": right([row.response_mask for row in rows], 0, torch.int64),
            "rollout_log_probs": right([row.response_logprobs for row in rows], 0.0, torch.float32),
            "token_level_scores": right(scores, 0.0, torch.float32),
        },
        non_tensors={
            "uid": np.array([row.group_id for row in rows], dtype=object),
            "session_id": np.array([row.session_id for row in rows], dtype=object),
            "__num_turns__": np.array([row.num_turns for row in rows], dtype=np.int32),
        },
        meta_info={"temperature": temperature},
    )


def agent_loop_output(row: packing.SplitRow, versions: TrainerVersions | None = None) -> AgentLoopOutput:
    """One session in the shape that verl's agent loops return; `versions` turns policy versions into verl's steps."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    steps = row.trace.policy_versions[row.trace.loss_mask == 1] - (versions.offset if versions is not None else 0)
    return AgentLoopOutput(
        prompt_ids=row.prompt_ids,
        response_ids=row.response_ids,
        response_mask=row.response_mask,
        response_logprobs=row.response_logprobs,
        reward_score=row.reward,
        num_turns=row.num_turns,
        metrics=AgentLoopMetrics(generate_sequences=sum(turn.seconds for turn in row.trajectory.turns)),
        extra_fields={
            "session_id": row.session_id,
            "reward_extra_info": {},
            "min_global_steps": int(steps.min()),
            "max_global_steps": int(steps.max()),
        },
    )


@dataclass(slots=True)
class _Siblings:
    """The loops of one prompt, which verl runs in one process."""

    running: int = 0
    usable: int = 0
    started: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)


class TowlineAgentLoop:
    """An agent loop: one row of verl's dataset is one session of a harness.

    Name it in the file of `actor_rollout_ref.rollout.agent.agent_loop_config_path`, with the service's `url` and the path of
    a task `template` (see `TaskTemplate`). The service's engine must be the one whose weights verl updates: verl's own
    servers
    report the step of their weights, which is announced before a session starts. Sessions are sampled as verl asks, at
    temperature 0 in its validation.
    """

    _siblings: ClassVar[dict[str, _Siblings]] = {}
    versions: ClassVar[TrainerVersions] = TrainerVersions()
    """What this worker process has announced."""

    def __init__(
        self,
        *,
        template: str,
        url: str | None = None,
        extra_traces: packing.ExtraTraces = "error",
        within: float | None = None,
        trainer_config: Any = None,
        server_manager: Any = None,
        **_: Any,
    ):
        self.template = TaskTemplate.read(template)
        self.url = url
        self.extra_traces: packing.ExtraTraces = extra_traces
        self.within = within
        self.server_manager = server_manager
        self.dropped = packing.Dropped()
        rollout = trainer_config.config.actor_rollout_ref.rollout if trainer_config is not None else None
        self.prompt_length = int(rollout.prompt_length) if rollout is not None else None
        self.response_length = int(rollout.response_length) if rollout is not None else None

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        # Only the newer trainer numbers the loops of a prompt, and takes a list.
        if "session_id" not in row or "uid" not in row:
            kept, reason = await self._session(sampling_params, row)
            if kept is None:
                raise SessionFailed(f"{reason} (with trainer.use_v1=True it would leave its group)")
            return agent_loop_output(kept, self.versions)
        siblings = self._siblings.setdefault(str(row["uid"]), _Siblings())
        siblings.started += 1
        siblings.running += 1
        kept = None
        try:
            kept, reason = await self._session(sampling_params, row)
            siblings.usable += kept is not None
        finally:
            siblings.running -= 1
            if not siblings.running:
                self._siblings.pop(str(row["uid"]), None)
                siblings.done.set()
        await siblings.done.wait()
        if siblings.started > 1 and siblings.usable < 2:
            raise SessionFailed(
                f"{siblings.usable} of {siblings.started} sessions of prompt {row['uid']} are usable, so there "
                f"is nothing to "
                f"compare{f': {reason}' if reason else ''}"
            )
        if kept is None:
            log.warning("verl: a session leaves the group of prompt %s: %s", row["uid"], reason)
            return []
        return [agent_loop_output(kept, self.versions)]

    async def _session(
        self, sampling_params: Mapping[str, Any], row: Mapping[str, Any]
    ) -> tuple[packing.SplitRow | None, str]:
        """Run one session: its row, or why it has none."""
        task = self.template.task(row, prompt=row.get("raw_prompt"), name="verl", samples=1)
        sampling = {name: sampling_params.get(name) for name in ("temperature", "top_p")}
        if (sampling_params.get("top_k") or 0) > 0:
            sampling["top_k"] = sampling_params["top_k"]
        async with AsyncClient(self.url) as client:
            step = await self._step()
            if step is not None:
                await self.versions.announce_async(client, step)
            group = await packing.run_group(client, with_sampling(task, sampling), within=self.within)
        for trajectory in group.sessions:
            kept = packing.one_row(trajectory, self.extra_traces, self.dropped)
            if kept is not None:
                packing.check_temperature(kept, sampling_params.get("temperature"))
                return self._fitting(kept)
        reasons = "; ".join(group.unusable.values()) or "none of its turns is of the main conversation"
        return None, f"task {task.task_id} has no usable session: {reasons}"

    def _fitting(self, row: packing.SplitRow) -> tuple[packing.SplitRow | None, str]:
        """The row, if it has the lengths that verl is configured for."""
        sizes = (
            ("prompt", row.start, self.prompt_length),
            ("response", len(row.trace.token_ids) - row.start, self.response_length),
        )
        for name, size, most in sizes:
            if most is not None and size > most:
                self.dropped.too_long += 1
                return None, (
                    f"the {name} of session {row.session_id} has {size} tokens and rollout.{name}_length is "
                    f"{most}: rows are "
                    "never truncated; increase it, or limit the session (max_context_tokens)"
                )
        return row, ""

    async def _step(self) -> int | None:
        """The step of the weights in verl's servers, which they report with every output; `None` if they report none."""
        if self.server_manager is None:
            return None
        output = await self.server_manager.generate(
            request_id=uuid.uuid4().hex, prompt_ids=[0], sampling_params={"max_tokens": 1, "temperature": 0.0}
        )
        step = (getattr(output, "extra_fields", None) or {}).get("global_steps")
        return None if step is None else int(step)


def _width(lengths: Sequence[int], wanted: int | None, what: str) -> int:
    longest = max(lengths)
    if wanted is not None and longest > wanted:
        raise ConfigError(
            f"a {what} has {longest} tokens, but {what}_length is {wanted}: rows are never truncated; increase it"
        )
    return wanted or longest
