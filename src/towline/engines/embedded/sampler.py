"""From logits to a token and the logprob it was drawn with.

A token is drawn as the largest of `probability / noise` with exponential noise, one draw an id from the turn's own
generator. That is an exact sample of the distribution, and unlike a walk along cumulated probabilities it moves only if
two candidates are within rounding of each other: the same seed gives the same tokens whatever else is in the batch.

Invariant: the logprob is that of the very distribution which was drawn from, after temperature and truncation. A greedy
turn takes the likeliest id; its logprobs are those at temperature 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from towline.engines.embedded.turn import Turn


class Sampler:
    """Draws for up to `batch` turns at once."""

    def __init__(self, batch: int, vocabulary: int):
        # Single-precision noise reaches zero too often, which would make an impossible id win.
        self._noise = np.ones((batch, vocabulary), dtype=np.float64)
        self._noise_tensor = torch.from_numpy(self._noise)

    def draw(self, logits: Tensor, turns: Sequence[Turn]) -> tuple[list[int], list[float]]:
        """One id and its logprob for each turn, a row of `logits` each."""
        for row, turn in zip(self._noise, turns, strict=False):
            if turn.random is None:
                row.fill(1.0)
            else:
                turn.random.standard_exponential(out=row)
        logprobs = distribution(logits, turns)
        chosen = logprobs.double().exp_().div_(self._noise_tensor[: len(turns)]).argmax(-1, keepdim=True)
        return chosen[:, 0].tolist(), logprobs.gather(1, chosen)[:, 0].tolist()


def score(logits: Tensor, ids: Tensor, turn: Turn) -> list[float]:
    """The logprob of each of `ids`, a row of `logits` each, as if `turn` had drawn it."""
    logprobs = distribution(logits, [turn] * len(ids))
    scores: list[float] = logprobs.gather(1, ids.unsqueeze(1))[:, 0].tolist()
    return scores


def distribution(logits: Tensor, turns: Sequence[Turn]) -> Tensor:
    """The log-probabilities that each turn draws from."""
    temperatures = [turn.temperature or 1.0 for turn in turns]
    if any(temperature != 1.0 for temperature in temperatures):
        # The likeliest id at 0 keeps small temperatures from overflowing.
        logits = (logits - logits.amax(-1, keepdim=True)) / torch.tensor(temperatures).unsqueeze(1)
    cut = [row for row, turn in enumerate(turns) if turn.top_k > 0 or turn.top_p < 1.0]
    if cut:
        logits = logits.clone()
        logits[cut] = _truncated(logits[cut], [turns[row] for row in cut])
    return logits.log_softmax(-1)


def _truncated(logits: Tensor, turns: Sequence[Turn]) -> Tensor:
    """Keep the `top_k` likeliest ids, and of those the fewest that reach `top_p`."""
    vocabulary = logits.shape[-1]
    limits = torch.tensor([turn.top_k or vocabulary for turn in turns]).unsqueeze(1)
    shares = torch.tensor([turn.top_p for turn in turns]).unsqueeze(1)
    ranked, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    ranked = ranked.masked_fill(torch.arange(vocabulary) >= limits, -math.inf)
    probabilities = ranked.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    outside = before >= shares
    # The likeliest id always stays; and rounding of the sum must not cut anything when the share is 1.
    outside[:, 0] = False
    outside &= shares < 1.0
    return torch.full_like(logits, -math.inf).scatter(1, order, ranked.masked_fill(outside, -math.inf))
