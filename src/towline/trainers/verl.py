"""verl: trajectories as a `DataProto`, a session as an `AgentLoopOutput`, and an agent loop that runs one.

verl compares rows: its GRPO estimator counts every row of a `uid` as one sample, and trains on the only row of a `uid` with
its raw reward. So a session is one row here; sessions without a score and groups left with fewer than two are excluded and
counted. Prompts are padded on the left and responses on the right; rows are never truncated: one that does not fit is an
error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from towline.client import AsyncClient
from towline.errors import ConfigError
from towline.schema import Trajectory
from towline.trainers import packing
from towline.trainers.packing import SessionFailed
from towline.trainers.templates import TaskTemplate

if TYPE_CHECKING:
    from torch import Tensor
    from verl import DataProto
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput


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


def agent_loop_output(row: packing.SplitRow) -> AgentLoopOutput:
    """One session in the shape that verl's agent loops return."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    versions = row.trace.policy_versions[row.trace.loss_mask == 1]
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
            "min_global_steps": int(versions.min()),
            "max_global_steps": int(versions.max()),
        },
    )


class TowlineAgentLoop:
    """An agent loop: one row of verl's dataset is one session of a harness.

    Name it in the file of `actor_rollout_ref.rollout.agent.agent_loop_config_path`, with the service's `url` and the path of
    a task `template` (see `TaskTemplate`). The service's engine must be the one whose weights verl updates. An unusable
    session is an error, since verl cannot mask a whole row.
    """

    def __init__(
        self,
        *,
        template: str,
        url: str | None = None,
        extra_traces: packing.ExtraTraces = "error",
        within: float | None = None,
        **_: Any,
    ):
        self.template = TaskTemplate.read(template)
        self.url = url
        self.extra_traces: packing.ExtraTraces = extra_traces
        self.within = within
        self.dropped = packing.Dropped()

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> AgentLoopOutput:
        task = self.template.task(row, prompt=row.get("raw_prompt"), name="verl", samples=1)
        async with AsyncClient(self.url) as client:
            group = await packing.run_group(client, task, within=self.within)
        for trajectory in group.sessions:
            kept = packing.one_row(trajectory, self.extra_traces, self.dropped)
            if kept is not None:
                packing.check_temperature(kept, sampling_params.get("temperature"))
                return agent_loop_output(kept)
        reasons = "; ".join(group.unusable.values()) or "none of its turns is of the main conversation"
        raise SessionFailed(f"task {task.task_id} has no usable session: {reasons}")


def _width(lengths: Sequence[int], wanted: int | None, what: str) -> int:
    longest = max(lengths)
    if wanted is not None and longest > wanted:
        raise ConfigError(
            f"a {what} has {longest} tokens, but {what}_length is {wanted}: rows are never truncated; increase it"
        )
    return wanted or longest
