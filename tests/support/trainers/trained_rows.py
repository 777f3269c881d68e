"""Trajectories for tests of trainers: two turns, or several chains, with a reward."""

from __future__ import annotations

from typing import Any

import numpy as np

from towline.schema import FidelityReport, Reward, RewardStatus, SessionState, Trace, Trajectory, Turn


def trajectory(
    session: str,
    reward: float | None,
    *,
    chains: int = 1,
    group: str = "g",
    vocabulary: int = 32,
    seed: int = 0,
    version: int = 0,
    per_turn: dict[str, float] | None = None,
    logprob: float = -1.0,
) -> Trajectory:
    """`chains` conversations of one turn each: a prompt of three tokens, four sampled ones."""
    chance = np.random.default_rng([seed, *session.encode()])
    turns, traces = [], []
    for index in range(chains):
        prompt = chance.integers(1, vocabulary, 3).astype(np.int32)
        sampled = chance.integers(1, vocabulary, 4).astype(np.int32)
        logprobs = np.full(4, logprob, np.float32)
        turns.append(
            Turn(
                id=f"{session}-{index}",
                index=index,
                reason="unmatched" if index else None,
                prompt_length=3,
                suffix=prompt,
                sampled=sampled,
                logprobs=logprobs,
                versions=np.full(4, version, np.int32),
                finish="stop",
            )
        )
        sampled_only = np.array([0, 0, 0, 1, 1, 1, 1])
        traces.append(
            Trace(
                trace_id=f"{session}/{index}",
                rollout_id=session,
                group_id=group,
                token_ids=np.concatenate([prompt, sampled]),
                loss_mask=sampled_only.astype(np.uint8),
                logprobs=np.concatenate([np.zeros(3, np.float32), logprobs]),
                policy_versions=np.where(sampled_only, version, -1).astype(np.int32),
                turn_ids=np.where(sampled_only, index, -1).astype(np.int32),
                fork_reason="unmatched" if index else None,
            )
        )
    made = Trajectory(
        session_id=session,
        group_id=group,
        turns=turns,
        traces=traces,
        report=FidelityReport(trained_tokens=sum(trace.trained_tokens for trace in traces)),
        state=SessionState.DONE,
        end_reason="exited",
    )
    fields: dict[str, Any] = {"value": reward or 0.0, "per_turn": per_turn or {}}
    if reward is None:
        fields |= {"status": RewardStatus.FAILED, "error": "the judge fell ill"}
    return made.with_reward(Reward(**fields))
