"""The learner: a model, its optimiser, and one update from a batch of groups. It knows no service and no engine.

Besides the loss, every update reports the quality of its data: the largest difference between a recorded logprob and the
learner's own, and the divergence between the sampling policy and the trained one. With an engine that computes the same
function and no staleness the difference is rounding error; anything larger is a bug.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from towline.common.crashpoints import crash_point
from towline.common.files import sync_folder
from towline.engines.embedded import Decoder, load_decoder, save_decoder
from towline.schema import Trajectory
from towline.trainers.advantages import Scale, group_advantages
from towline.trainers.grpo.loss import (
    LossSettings,
    TrainingBatch,
    TrainingRow,
    padded_batches,
    policy_loss,
    token_logprobs,
    training_rows,
)

_STATE = "learner.pt"
ON_POLICY_BOUND = 1e-3
"""Bound on |learner - recorded| logprob, in float32, for tokens sampled with the learner's current weights."""


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    rate: float = 1e-3
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_norm: float = 1.0
    """Gradient clipping norm."""
    updates: int = 4
    """Optimiser steps per batch of groups. If some groups carry no gradient there are fewer steps, not smaller ones:
    Adam's step length does not shrink with the batch, so a step from one or two sessions is mostly noise."""
    keep_equal: bool = False
    """Whether groups with equal rewards go through the model: they carry no gradient, but cost as much as others."""
    epochs: int = 1
    """Passes over each session; ratio clipping bounds the later ones."""
    batch_tokens: int = 8192
    """Entries per padded batch; bounds memory."""
    per: str = "token"
    """What has equal weight in the loss: each trained `token`, or each `session`."""
    scale: Scale = "std"
    """How advantages are scaled."""
    turn_weight: float = 1.0
    """Weight of per-turn rewards, where an evaluator gives any."""
    outcome_weight: float = 1.0
    """Weight of the outcome reward beside them."""
    loss: LossSettings = field(default_factory=LossSettings)


@dataclass(slots=True)
class UpdateReport:
    """Figures of one update."""

    version: int
    sessions: int = 0
    rows: int = 0
    row_tokens: int = 0
    trained_tokens: int = 0
    padded_tokens: int = 0
    """Entries of the padded batches: they pass through the model once for comparison and once for learning."""
    mean_reward: float = 0.0
    unscored: int = 0
    small_groups: int = 0
    equal_groups: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    behaviour: float = 1.0
    kl: float = 0.0
    gradient: float = 0.0
    own_tokens: int = 0
    """Trained tokens sampled under the learner's version before the update."""
    worst_logprob: float = 0.0
    """Largest |learner - recorded| logprob over those."""
    mismatch_kl: float = 0.0
    """Estimated KL divergence per token of the sampling policy from the learner's, before the update."""
    staleness: float = 0.0
    """Mean age of the trained tokens, in versions."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Learner:
    def __init__(self, folder: Path, settings: LearnerSettings, *, reference: bool = False, seed: int = 0):
        self.settings = settings
        self.model: Decoder = load_decoder(folder)
        self.reference: Decoder | None = load_decoder(folder).requires_grad_(False) if reference else None
        self.version = 0
        self._shuffle = torch.Generator().manual_seed(seed)
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=settings.rate, betas=settings.betas, weight_decay=settings.weight_decay
        )

    def update(self, groups: Mapping[str, Sequence[Trajectory]]) -> UpdateReport:
        """Learn from whole groups. The version increases by one even if no group carries a gradient."""
        settings = self.settings
        advantages = group_advantages(
            groups,
            scale=settings.scale,
            turn_weight=settings.turn_weight,
            outcome_weight=settings.outcome_weight,
            keep_equal=settings.keep_equal,
        )
        rows = training_rows([trajectory for group in groups.values() for trajectory in group], advantages)
        report = UpdateReport(
            version=self.version + 1,
            sessions=len(advantages.rewards),
            mean_reward=sum(advantages.rewards.values()) / max(1, len(advantages.rewards)),
            unscored=advantages.unscored,
            small_groups=advantages.small,
            equal_groups=advantages.equal,
            rows=len(rows),
            row_tokens=sum(row.tokens for row in rows),
            trained_tokens=sum(row.trace.trained_tokens for row in rows),
        )
        if rows:
            self._learn(rows, report)
        self.version += 1
        return report

    def _learn(self, rows: Sequence[TrainingRow], report: UpdateReport) -> None:
        parts = self._parts(rows, report.sessions)
        before = [
            self._with_logprobs(list(padded_batches(part, self.settings.batch_tokens, per=self.settings.per)))
            for part in parts
        ]
        report.padded_tokens = sum(batch.inputs.numel() for part in before for batch, _, _ in part)
        _compare([pair for part in before for pair in part], self.version, report)
        passes = before * self.settings.epochs
        for part in passes:
            self.optimiser.zero_grad(set_to_none=True)
            for batch, old, reference in part:
                new, entropy = token_logprobs(self.model, batch)
                terms = policy_loss(new, entropy, old, batch, self.settings.loss, reference)
                terms.loss.backward()  # type: ignore[no-untyped-call]
                share = 1 / len(passes)
                report.loss += float(terms.loss.detach()) * share
                report.entropy += terms.entropy * share
                report.clipped += terms.clipped * share
                report.behaviour += (terms.behaviour - 1 * float(batch.weights.sum())) * share
                report.kl += terms.kl * share
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_norm)
            report.gradient = max(report.gradient, float(norm))
            self.optimiser.step()
            crash_point("trainer.learning")

    def _parts(self, rows: Sequence[TrainingRow], scored: int) -> list[list[TrainingRow]]:
        """Split the rows into one part per optimiser step; a session's rows stay together."""
        sessions = list(dict.fromkeys(row.session for row in rows))
        order = torch.randperm(len(sessions), generator=self._shuffle).tolist()
        count = max(1, round(self.settings.updates * len(sessions) / max(scored, len(sessions))))
        count = min(count, len(sessions))
        part_of = {sessions[index]: number % count for number, index in enumerate(order)}
        parts: list[list[TrainingRow]] = [[] for _ in range(count)]
        for row in rows:
            parts[part_of[row.session]].append(row)
        return parts

    @torch.no_grad()
    def _with_logprobs(self, batches: Sequence[TrainingBatch]) -> list[tuple[TrainingBatch, Tensor, Tensor | None]]:
        """Each batch with its logprobs under the current policy, and under the reference."""
        scored = []
        for batch in batches:
            now, _ = token_logprobs(self.model, batch)
            reference = token_logprobs(self.reference, batch)[0] if self.reference is not None else None
            scored.append((batch, now, reference))
        return scored

    # Weights and checkpoints

    def save_weights(self, folder: Path) -> None:
        """Write the weights in the format that engines load."""
        save_decoder(self.model, folder)

    def checkpoint(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Write everything needed to resume, atomically; `extra` is JSON of the caller's."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "version": self.version,
            "shuffle": self._shuffle.get_state(),
            "extra": json.dumps(dict(extra)),
        }
        draft = folder / f".{_STATE}.tmp"
        with open(draft, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        crash_point("trainer.in_checkpoint")
        draft.replace(folder / _STATE)
        sync_folder(folder)

    def resume(self, folder: Path) -> dict[str, Any] | None:
        """Load a checkpoint and return its `extra`; `None` if there is no checkpoint."""
        path = folder / _STATE
        if not path.is_file():
            return None
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.version = state["version"]
        self._shuffle.set_state(state["shuffle"])
        extra: dict[str, Any] = json.loads(state["extra"])
        return extra


def _compare(scored: Sequence[tuple[TrainingBatch, Tensor, Tensor | None]], version: int, report: UpdateReport) -> None:
    """Report how far recorded logprobs are from the learner's own, before the update."""
    differences, ages = [], []
    for batch, now, _ in scored:
        chosen = batch.mask.bool()
        differences.append(batch.logprobs[chosen] - now)
        ages.append(version - batch.versions[chosen])
    difference, age = torch.cat(differences), torch.cat(ages)
    own = difference[age == 0]
    report.own_tokens = own.numel()
    report.worst_logprob = float(own.abs().max()) if own.numel() else 0.0
    # exp(-d) - 1 + d is an unbiased estimate of KL(sampling || learner) from samples of the sampling policy.
    report.mismatch_kl = float((torch.exp(-difference) - 1 + difference).mean())
    report.staleness = float(age.float().mean())
