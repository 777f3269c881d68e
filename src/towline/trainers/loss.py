"""The policy loss: a clipped policy gradient on recorded logprobs, with truncated importance sampling, entropy and KL.

Two ratios, kept apart. The *proximal* ratio is that of the policy now to the policy when this update began: it is clipped,
wider above than below. The *behaviour* ratio is that of the policy when the update began to the one that sampled (an older
version, another engine): it corrects the gradient and is cut off at a bound, so that no single token rules the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from towline.trainers.rows import Batch


@dataclass(frozen=True, slots=True)
class LossSettings:
    clip_low: float = 0.2
    clip_high: float = 0.28
    """Larger than `clip_low`, so that rare tokens can become likely (clip-higher)."""
    behaviour_bound: float = 2.0
    """Where importance weights are cut off."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    kl: float = 0.0
    """Weight of the divergence from the reference policy."""


@dataclass(slots=True)
class Parts:
    """One batch's share of the loss and of what is reported; sums over tokens, weighted as the batch says."""

    loss: Tensor
    entropy: float
    clipped: float
    behaviour: float
    """Mean of the importance weights before the cut."""
    kl: float


def token_logprobs(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logprobs of the trained targets under the model at the temperature they were sampled with, and the entropy there.

    Only trained places are projected to the vocabulary.
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
    new: Tensor, entropy: Tensor, before: Tensor, batch: Batch, settings: LossSettings, reference: Tensor | None = None
) -> Parts:
    """`new`: logprobs now, with gradient. `before`: under the policy when this update began. Both of trained tokens."""
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
        away = reference - new
        kl = away.exp() - 1 - away
        gain = gain - settings.kl * kl
    loss = -(gain * weights).sum()
    with torch.no_grad():
        return Parts(
            loss,
            float((entropy * weights).sum()),
            float(((clipped < plain).float() * weights).sum()),
            float((raw * weights).sum()),
            float((kl * weights).sum()),
        )
