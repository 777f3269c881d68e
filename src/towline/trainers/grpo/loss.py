"""Padded batches of traces, and the policy loss on them.

A row is a whole trace, right-padded. `targets[i, j]` is the token that position j predicts, so every array is one shorter
than its trace: entry j belongs to token j + 1.

The loss is a clipped policy gradient on recorded logprobs with truncated importance sampling, entropy and KL. It keeps two
ratios apart. The *proximal* ratio is current policy over the policy at the start of this update; it is clipped, wider above
than below. The *behaviour* ratio is the policy at the start of the update over the one that sampled (an older version,
another engine); it corrects the gradient and is truncated, so that no single token dominates the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from towline.schema import Trace, Trajectory
from towline.trainers.advantages import Advantages, token_advantages


@dataclass(slots=True)
class TrainingRow:
    """A trace with an advantage per token."""

    trace: Trace
    session: str
    advantages: np.ndarray
    """One entry per token; 0 for tokens that are not trained."""

    @property
    def tokens(self) -> int:
        return len(self.trace.token_ids)


@dataclass(slots=True)
class TrainingBatch:
    inputs: Tensor
    targets: Tensor
    mask: Tensor
    """1 where the target is trained."""
    logprobs: Tensor
    """As recorded at sampling time."""
    advantages: Tensor
    versions: Tensor
    temperatures: Tensor
    """Divisor of the logits behind each target's recorded logprob."""
    weights: Tensor
    """Weight of each trained token in the loss."""

    @property
    def trained(self) -> int:
        return int(self.mask.sum().item())


def training_rows(trajectories: Sequence[Trajectory], advantages: Advantages) -> list[TrainingRow]:
    """Every trace of every session that has an advantage."""
    rows = []
    for trajectory in trajectories:
        for trace in trajectory.traces:
            values = token_advantages(trajectory, trace, advantages)
            if values is not None and trace.trained_tokens:
                rows.append(TrainingRow(trace, trajectory.session_id, values))
    return rows


def padded_batches(rows: Sequence[TrainingRow], max_tokens: int, *, per: str = "token") -> Iterator[TrainingBatch]:
    """Padded batches of at most `max_tokens` entries, with rows of similar length together.

    The weights over all batches sum to 1: with `per="token"` each trained token has the same weight, with
    `per="session"` each session has, however many traces it has.
    """
    total = sum(row.trace.trained_tokens for row in rows)
    by_session: dict[str, int] = {}
    for row in rows:
        by_session[row.session] = by_session.get(row.session, 0) + row.trace.trained_tokens
    chosen: list[TrainingRow] = []
    for row in sorted(rows, key=lambda row: row.tokens):
        if chosen and row.tokens * (len(chosen) + 1) > max_tokens:
            yield _batch(chosen, total, by_session, per)
            chosen = []
        chosen.append(row)
    if chosen:
        yield _batch(chosen, total, by_session, per)


def _batch(rows: Sequence[TrainingRow], total: int, by_session: dict[str, int], per: str) -> TrainingBatch:
    length = max(row.tokens for row in rows) - 1

    def padded(arrays: Sequence[np.ndarray], kind: type, fill: float = 0) -> Tensor:
        out: np.ndarray = np.full((len(arrays), length), fill, kind)
        for index, array in enumerate(arrays):
            out[index, : len(array)] = array
        return torch.from_numpy(out)

    mask = padded([row.trace.loss_mask[1:] for row in rows], np.float32)
    row_weights = [1 / total if per == "token" else 1 / (len(by_session) * by_session[row.session]) for row in rows]
    return TrainingBatch(
        inputs=padded([row.trace.token_ids[:-1] for row in rows], np.int64),
        targets=padded([row.trace.token_ids[1:] for row in rows], np.int64),
        mask=mask,
        logprobs=padded([row.trace.logprobs[1:] for row in rows], np.float32),
        advantages=padded([row.advantages[1:] for row in rows], np.float32),
        versions=padded([row.trace.policy_versions[1:] for row in rows], np.int64),
        temperatures=padded([row.trace.logit_divisors[1:] for row in rows], np.float32, fill=1),
        weights=mask * torch.tensor(row_weights)[:, None],
    )


@dataclass(frozen=True, slots=True)
class LossSettings:
    clip_low: float = 0.2
    clip_high: float = 0.28
    """Larger than `clip_low`, so that rare tokens can become likely (clip-higher)."""
    behaviour_bound: float = 2.0
    """Truncation bound of importance weights."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    kl: float = 0.0
    """Weight of the KL divergence from the reference policy."""


@dataclass(slots=True)
class LossTerms:
    """One batch's share of the loss and of the reported figures: sums over tokens with the batch's weights."""

    loss: Tensor
    entropy: float
    clipped: float
    behaviour: float
    """Mean of the importance weights before truncation."""
    kl: float


def token_logprobs(model: nn.Module, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """Logprobs of the trained targets at the temperature they were sampled with, and the entropy at each.

    Only trained positions are projected to the vocabulary.
    """
    chosen = batch.mask.bool()
    hidden = model.hidden(batch.inputs)[chosen]  # type: ignore[operator]
    logits = functional.linear(hidden, model.head)  # type: ignore[arg-type]
    logits = logits / batch.temperatures[chosen][:, None]
    full = functional.log_softmax(logits, -1)
    picked = full.gather(1, batch.targets[chosen][:, None])[:, 0]
    entropy = -(full.exp() * full).sum(-1)
    return picked, entropy


def policy_loss(
    new: Tensor,
    entropy: Tensor,
    before: Tensor,
    batch: TrainingBatch,
    settings: LossSettings,
    reference: Tensor | None = None,
) -> LossTerms:
    """`new`: current logprobs, with gradient. `before`: logprobs at the start of the update. Both of trained tokens."""
    chosen = batch.mask.bool()
    recorded, advantages, weights = (a[chosen] for a in (batch.logprobs, batch.advantages, batch.weights))
    ratio = (new - before).exp()
    raw = (before - recorded).exp()
    behaviour = raw.clamp(max=settings.behaviour_bound)
    plain = ratio * advantages
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages
    gain = torch.minimum(plain, clipped) * behaviour + settings.entropy * entropy
    kl = torch.zeros_like(new)
    if reference is not None:
        # Unbiased and never negative: r - 1 - log r with r = reference / policy.
        log_ratio = reference - new
        kl = log_ratio.exp() - 1 - log_ratio
        gain = gain - settings.kl * kl
    loss = -(gain * weights).sum()
    with torch.no_grad():
        return LossTerms(
            loss,
            float((entropy * weights).sum()),
            float(((clipped < plain).float() * weights).sum()),
            float((raw * weights).sum()),
            float((kl * weights).sum()),
        )
