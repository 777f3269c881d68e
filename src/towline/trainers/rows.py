"""Trajectories as tensors: rows of whole traces, padded on the right, with everything the loss needs at each token.

`targets[i, j]` is the token that position j predicts, so every array is one shorter than its trace: entry j belongs to
token j + 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from towline.schema import Trace, Trajectory
from towline.trainers.advantages import Advantages, token_advantages


@dataclass(slots=True)
class Row:
    """A trace with an advantage for each of its tokens."""

    trace: Trace
    session: str
    advantages: np.ndarray
    """One entry a token; 0 where nothing is trained."""

    @property
    def tokens(self) -> int:
        return len(self.trace.token_ids)


@dataclass(slots=True)
class Batch:
    inputs: Tensor
    targets: Tensor
    mask: Tensor
    """1 where the target is trained."""
    logprobs: Tensor
    """As recorded when the token was sampled."""
    advantages: Tensor
    versions: Tensor
    temperatures: Tensor
    """What logits are divided by for the recorded logprob of each target."""
    weights: Tensor
    """What each trained token counts in the loss."""

    @property
    def trained(self) -> int:
        return int(self.mask.sum().item())


def rows_of(trajectories: Sequence[Trajectory], advantages: Advantages) -> list[Row]:
    """Every trace of every session that has an advantage."""
    rows = []
    for trajectory in trajectories:
        for trace in trajectory.traces:
            values = token_advantages(trajectory, trace, advantages)
            if values is not None and trace.trained_tokens:
                rows.append(Row(trace, trajectory.session_id, values))
    return rows


def batches(rows: Sequence[Row], most_tokens: int, *, per: str = "token") -> Iterator[Batch]:
    """Padded batches of at most `most_tokens` entries, rows of similar length together.

    The weights over all batches sum to 1: with `per="token"` each trained token counts alike, with `per="session"` each
    session does, however many traces it has.
    """
    total = sum(row.trace.trained_tokens for row in rows)
    by_session: dict[str, int] = {}
    for row in rows:
        by_session[row.session] = by_session.get(row.session, 0) + row.trace.trained_tokens
    chosen: list[Row] = []
    for row in sorted(rows, key=lambda row: row.tokens):
        if chosen and row.tokens * (len(chosen) + 1) > most_tokens:
            yield _batch(chosen, total, by_session, per)
            chosen = []
        chosen.append(row)
    if chosen:
        yield _batch(chosen, total, by_session, per)


def _batch(rows: Sequence[Row], total: int, by_session: dict[str, int], per: str) -> Batch:
    length = max(row.tokens for row in rows) - 1

    def padded(arrays: Sequence[np.ndarray], kind: type, fill: float = 0) -> Tensor:
        out: np.ndarray = np.full((len(arrays), length), fill, kind)
        for place, array in enumerate(arrays):
            out[place, : len(array)] = array
        return torch.from_numpy(out)

    mask = padded([row.trace.loss_mask[1:] for row in rows], np.float32)
    counts = [1 / total if per == "token" else 1 / (len(by_session) * by_session[row.session]) for row in rows]
    return Batch(
        inputs=padded([row.trace.token_ids[:-1] for row in rows], np.int64),
        targets=padded([row.trace.token_ids[1:] for row in rows], np.int64),
        mask=mask,
        logprobs=padded([row.trace.logprobs[1:] for row in rows], np.float32),
        advantages=padded([row.advantages[1:] for row in rows], np.float32),
        versions=padded([row.trace.policy_versions[1:] for row in rows], np.int64),
        temperatures=padded([row.trace.logit_divisors[1:] for row in rows], np.float32, fill=1),
        weights=mask * torch.tensor(counts)[:, None],
    )
