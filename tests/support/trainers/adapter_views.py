"""Sessions for the tests of adapters, and what each adapter makes of a group, in one shape.

A session is a conversation of two turns, a tool's result between them, and optionally a sub-agent's turn beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from towline.schema import EndReason, FidelityReport, Reward, SessionState, Task, Trace, Trajectory, Turn, TurnRole
from towline.trainers import areal, nemo_gym, nemo_rl, prime_rl, skyrl, slime
from towline.trainers.packing import Dropped, TrainingGroup, one_row, reward_of, split_rows
from towline.trainers.templates import TaskTemplate


def session(
    name: str,
    reward: float | None,
    *,
    subagent: bool = False,
    end: EndReason = EndReason.EXITED,
    broken: bool = False,
    group: str = "g",
) -> Trajectory:
    """`reward` `None` is a judge that failed; `broken` a session whose machinery did."""
    chance = np.random.default_rng([*name.encode()])

    def some(count: int) -> np.ndarray:
        return chance.integers(1, 30, count).astype(np.int32)

    def turn(index: int, parent: Turn | None, role: TurnRole, messages: list[Any], reply: dict[str, Any]) -> Turn:
        suffix, sampled = some(5 if parent is None else 3), some(4)
        before = parent.prompt_length + len(parent.sampled) if parent else 0
        return Turn(
            id=f"{name}-{index}",
            index=index,
            parent=parent.id if parent else None,
            reason="unmatched" if parent is None and index else None,
            role=role,
            prompt_length=before + len(suffix),
            suffix=suffix,
            sampled=sampled,
            logprobs=-chance.random(4).astype(np.float32),
            versions=np.array([3, 3, 4, 4], np.int32),
            finish="stop",
            messages=messages,
            reply=reply,
        )

    asked = [{"role": "user", "text": "what colour is it?"}]
    call = {"id": "c1", "name": "colour", "arguments": {"item": "lamp"}, "custom": False}
    first = turn(0, None, TurnRole.MAIN, asked, {"role": "assistant", "text": "", "tool_calls": [call]})
    result = [{"role": "tool", "text": "blue", "tool_call_id": "c1"}]
    second = turn(1, first, TurnRole.MAIN, result, {"role": "assistant", "text": "blue"})
    turns, paths = [first, second], [[first, second]]
    if subagent:
        turns.append(turn(2, None, TurnRole.SUBAGENT, asked, {"role": "assistant", "text": "perhaps"}))
        paths.append([turns[2]])
    ended: dict[str, Any] = {"state": SessionState.DONE, "end_reason": end}
    if broken:
        ended = {"state": SessionState.FAILED, "error": "the sandbox burned down"}
    traces = [_trace(f"{name}/{n}", name, group, path) for n, path in enumerate(paths)]
    report = FidelityReport(trained_tokens=sum(trace.trained_tokens for trace in traces))
    made = Trajectory(session_id=name, group_id=group, turns=turns, traces=traces, report=report, **ended)
    if reward is None:
        return made.with_reward(Reward(value=0.0, status="failed", error="the judge fell ill"))
    return made.with_reward(Reward(value=reward))


def _trace(name: str, session: str, group: str, path: Sequence[Turn]) -> Trace:
    def joined(context: Callable[[Turn], Any], sampled: Callable[[Turn], Any]) -> np.ndarray:
        return np.concatenate([part for turn in path for part in (context(turn), sampled(turn))])

    return Trace(
        trace_id=name,
        rollout_id=session,
        group_id=group,
        role=path[0].role,
        token_ids=joined(lambda t: t.suffix, lambda t: t.sampled),
        loss_mask=joined(lambda t: np.zeros(len(t.suffix), np.uint8), lambda t: np.ones(4, np.uint8)),
        logprobs=joined(lambda t: np.zeros(len(t.suffix), np.float32), lambda t: t.logprobs),
        policy_versions=joined(lambda t: np.full(len(t.suffix), -1, np.int32), lambda t: t.versions),
        turn_ids=joined(lambda t: np.full(len(t.suffix), -1, np.int32), lambda t: np.full(4, t.index, np.int32)),
        fork_reason="unmatched" if path[0].index else None,
    )


def group_of(*sessions: Trajectory, min_samples: int = 1) -> TrainingGroup:
    task = Task(task_id="g", instruction="do it", harness="shell", num_samples=len(sessions), min_samples=min_samples)
    return TrainingGroup.of(task, sessions)


@dataclass(frozen=True)
class Seen:
    """One row as a trainer gets it."""

    tokens: list[int]
    mask: list[int]
    logprobs: list[float]
    """As given where the mask is 1."""
    advantage: float
    """What the adapter gives, or what the trainer's own rule makes of the rewards that it gives."""
    short: bool | None = None
    """Whether the trainer is told that the session was cut short; `None` where it has no word for it."""


View = Callable[[TrainingGroup], list[Seen]]


def centred(rewards: Sequence[float]) -> list[float]:
    """What trainers that take rewards do with the rows of one group."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def in_nemo_gym(group: TrainingGroup) -> list[Seen]:
    rewards, seen = [], []
    for session in group.sessions if group.complete else []:
        row = one_row(session, "main_only", Dropped())
        assert row is not None
        response = nemo_gym.response_of(row, {"input": "do it"})
        calls = [item for item in response["output"] if "generation_token_ids" in item]
        for before, after in pairwise(calls):
            known = before["prompt_token_ids"] + before["generation_token_ids"]
            assert after["prompt_token_ids"][: len(known)] == known
        tokens = calls[-1]["prompt_token_ids"] + calls[-1]["generation_token_ids"]
        mask, logprobs = [0] * len(tokens), [0.0] * len(tokens)
        for call in calls:
            start, count = len(call["prompt_token_ids"]), len(call["generation_token_ids"])
            mask[start : start + count] = [1] * count
            logprobs[start : start + count] = call["generation_log_probs"]
        rewards.append(reward_of(session))
        seen.append((tokens, mask, logprobs, response["status"] == "incomplete"))
    values = centred(rewards) if rewards else []
    return [Seen(t, m, p, value, short) for (t, m, p, short), value in zip(seen, values, strict=True)]


def in_nemo_rl(group: TrainingGroup) -> list[Seen]:
    if not group.complete:
        return []
    batch = nemo_rl.rollout_batch(group.sessions, "main_only")
    values = centred(batch["total_reward"].tolist()) if batch["message_log"] else []
    seen = []
    for log, value, short in zip(batch["message_log"], values, batch["truncated"].tolist(), strict=True):
        assert {len(message["token_ids"]) for message in log} != {0}
        columns = [
            [value for message in log for value in message[name].tolist()]
            for name in ("token_ids", "token_loss_mask", "generation_logprobs")
        ]
        seen.append(Seen(*columns, value, short))
    return seen


@dataclass
class Sample:
    """The fields of slime's and Miles's `Sample` that matter here, with their documented names."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)


def in_slime(group: TrainingGroup) -> list[Seen]:
    if not group.complete:
        return []
    given = [Sample(group_index=7, index=70 + n, prompt="do it") for n in range(group.task.num_samples)]
    made = slime.sample_group(given, group.sessions)
    samples = [sample for of_session in made for sample in of_session]
    _, values = slime.session_rewards(SimpleNamespace(grpo_std_normalization=False), samples)
    seen = []
    for sample, value in zip(samples, values, strict=True):
        prompt = len(sample.tokens) - sample.response_length
        seen.append(
            Seen(
                sample.tokens,
                [0] * prompt + sample.loss_mask,
                [0.0] * prompt + sample.rollout_log_probs,
                value,
                sample.status is Sample.Status.TRUNCATED,
            )
        )
    return seen


def in_prime_rl(group: TrainingGroup) -> list[Seen]:
    if not group.complete:
        return []
    seen = []
    for sample in prime_rl.training_samples(group.sessions, "towline", scale="none"):
        mask = [int(value) for value in sample["mask"]]
        (value,) = {round(one, 5) for one, trained in zip(sample["advantages"], mask, strict=True) if trained}
        assert not any(one for one, trained in zip(sample["advantages"], mask, strict=True) if not trained)
        seen.append(Seen(sample["token_ids"], mask, sample["logprobs"], value))
    return seen


def in_areal(group: TrainingGroup) -> list[Seen]:
    return _areal(group, areal.GroupEpisodes(TaskTemplate(), extra_traces="main_only"))


def in_areal_by_advantage(group: TrainingGroup) -> list[Seen]:
    return _areal(group, areal.GroupEpisodes(TaskTemplate(), rewards="advantage", scale="none"))


def _areal(group: TrainingGroup, episodes: areal.GroupEpisodes) -> list[Seen]:
    batch = episodes.batch(group)
    if batch is None:
        return []
    rewards = batch["rewards"].tolist()
    values = centred(rewards) if episodes.rewards == "score" else rewards
    seen = []
    for place, value in enumerate(values):
        length = int(batch["attention_mask"][place].sum())
        assert not batch["loss_mask"][place, length:].any()
        columns = [batch[name][place, :length].tolist() for name in ("input_ids", "loss_mask", "logprobs")]
        if any(columns[1]):
            seen.append(Seen(*columns, value))
    return seen


def in_skyrl(group: TrainingGroup) -> list[Seen]:
    return _skyrl(group, skyrl.TowlineGenerator(TaskTemplate(), extra_traces="main_only"))


def in_skyrl_step_wise(group: TrainingGroup) -> list[Seen]:
    return _skyrl(group, skyrl.TowlineGenerator(TaskTemplate(), step_wise=True))


def _skyrl(group: TrainingGroup, generator: skyrl.TowlineGenerator) -> list[Seen]:
    results = generator.prompt_results(group, [f"g_{n}" for n in range(group.task.num_samples)])
    try:
        output = generator.output(results, [group])
    except skyrl.NothingGenerated:
        return []
    last = output["is_last_step"] or [True] * len(output["rewards"])
    # In step-wise training the trainer takes last rows alone, and gives the others what their trajectory got.
    counted = [reward for reward, it_is in zip(output["rewards"], last, strict=True) if it_is]
    by_trajectory = dict(
        zip(
            [name for name, it_is in zip(output["trajectory_ids"], last, strict=True) if it_is],
            centred(counted),
            strict=True,
        )
    )
    seen = []
    for place, name in enumerate(output["trajectory_ids"]):
        prompt, response = output["prompt_token_ids"][place], output["response_ids"][place]
        mask = [0] * len(prompt) + output["loss_masks"][place]
        if any(mask):
            short = output["stop_reasons"][place] == "length"
            logprobs = [0.0] * len(prompt) + output["rollout_logprobs"][place]
            seen.append(Seen(prompt + response, mask, logprobs, by_trajectory[name], short))
    return seen


ONE_ROW: dict[str, View] = {
    "nemo_gym": in_nemo_gym,
    "nemo_rl": in_nemo_rl,
    "areal": in_areal,
    "skyrl": in_skyrl,
}
"""Trainers that take one row a session."""
ALL_ROWS: dict[str, View] = {
    "slime": in_slime,
    "prime_rl": in_prime_rl,
    "areal by advantage": in_areal_by_advantage,
    "skyrl step by step": in_skyrl_step_wise,
}
"""Trainers that take all of them."""
VIEWS = ONE_ROW | ALL_ROWS


def rows_in(sessions: Sequence[Trajectory], every: bool) -> list[Trace]:
    """What the sessions come to, token for token."""
    rows = [split_rows(one) for one in sessions]
    return [row.trace for own in rows for row in (own if every else own[:1])]
