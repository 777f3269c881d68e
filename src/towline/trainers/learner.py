"""The learner: a model, its optimiser, and one update from a batch of groups. It knows no service and no engine.

Every update reports what its data was worth besides the loss: the largest difference between a recorded logprob and the
learner's own, and the divergence between the policies that sampled and that trains. With an engine that computes the same
function and no staleness the former is rounding, and anything else is a bug somewhere.
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

from towline.crashpoints import crash_point
from towline.engines.embedded import Decoder, load, save
from towline.schema import Trajectory
from towline.trainers.advantages import Scale, group_advantages
from towline.trainers.loss import LossSettings, policy_loss, token_logprobs
from towline.trainers.rows import Batch, Row, batches, rows_of

_STATE = "learner.pt"
OWN_BOUND = 1e-3
"""Largest |learner - recorded| logprob of a token that the learner's own weights sampled, in float32."""


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_norm: float = 1.0
    updates: int = 4
    """Optimiser steps that a batch of groups is split into. Where groups teach nothing there are fewer steps, not smaller
    ones: a step from a session or two is as long as any other, and mostly noise."""
    keep_equal: bool = False
    """Whether groups whose sessions all got the same go through the trainer: they teach nothing, but cost what others do."""
    epochs: int = 1
    """How often each session is learned from; the clipped ratio is what keeps the later ones in bounds."""
    batch_tokens: int = 8192
    """Entries of a padded batch, which is what memory is for."""
    per: str = "token"
    """What counts alike in the loss: each trained `token`, or each `session`."""
    scale: Scale = "std"
    turn_weight: float = 1.0
    """What rewards of turns count, where an evaluator gives any."""
    outcome_weight: float = 1.0
    """What the outcome counts beside them."""
    loss: LossSettings = field(default_factory=LossSettings)


@dataclass(slots=True)
class Update:
    """What one update did, in figures."""

    version: int
    sessions: int = 0
    rows: int = 0
    row_tokens: int = 0
    trained_tokens: int = 0
    padded_tokens: int = 0
    """Entries of the padded batches: what goes through the model, once to compare and once to learn."""
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
    """Trained tokens that were sampled under the learner's own version, before the update."""
    worst_logprob: float = 0.0
    """Largest |learner - recorded| over those."""
    mismatch_kl: float = 0.0
    """Estimated divergence of the sampling policy from the learner's, before the update, a token."""
    staleness: float = 0.0
    """Mean age of the trained tokens in versions."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Learner:
    def __init__(self, folder: Path, settings: LearnerSettings, *, reference: bool = False, seed: int = 0):
        self.settings = settings
        self.model: Decoder = load(folder)
        self.reference: Decoder | None = load(folder).requires_grad_(False) if reference else None
        self.version = 0
        self._shuffle = torch.Generator().manual_seed(seed)
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=settings.rate, betas=settings.betas, weight_decay=settings.weight_decay
        )

    def update(self, groups: Mapping[str, Sequence[Trajectory]]) -> Update:
        """Learn from whole groups; the version goes up by one, whether there was anything to learn or not."""
        settings = self.settings
        advantages = group_advantages(
            groups,
            scale=settings.scale,
            turn_weight=settings.turn_weight,
            outcome_weight=settings.outcome_weight,
            keep_equal=settings.keep_equal,
        )
        rows = rows_of([trajectory for group in groups.values() for trajectory in group], advantages)
        report = Update(
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

    def _learn(self, rows: Sequence[Row], report: Update) -> None:
        parts = self._parts(rows, report.sessions)
        before = [
            self._measured(list(batches(part, self.settings.batch_tokens, per=self.settings.per))) for part in parts
        ]
        report.padded_tokens = sum(batch.inputs.numel() for part in before for batch, _, _ in part)
        _compare([pair for part in before for pair in part], self.version, report)
        passes = before * self.settings.epochs
        for part in passes:
            self.optimiser.zero_grad(set_to_none=True)
            for batch, was, reference in part:
                new, entropy = token_logprobs(self.model, batch)
                found = policy_loss(new, entropy, was, batch, self.settings.loss, reference)
                found.loss.backward()  # type: ignore[no-untyped-call]
                share = 1 / len(passes)
                report.loss += float(found.loss.detach()) * share
                report.entropy += found.entropy * share
                report.clipped += found.clipped * share
                report.behaviour += (found.behaviour - 1 * float(batch.weights.sum())) * share
                report.kl += found.kl * share
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_norm)
            report.gradient = max(report.gradient, float(norm))
            self.optimiser.step()
            crash_point("trainer.learning")

    def _parts(self, rows: Sequence[Row], scored: int) -> list[list[Row]]:
        """The rows in as many parts as there are optimiser steps; a session's rows stay together."""
        sessions = list(dict.fromkeys(row.session for row in rows))
        order = torch.randperm(len(sessions), generator=self._shuffle).tolist()
        count = max(1, round(self.settings.updates * len(sessions) / max(scored, len(sessions))))
        count = min(count, len(sessions))
        place = {sessions[index]: number % count for number, index in enumerate(order)}
        parts: list[list[Row]] = [[] for _ in range(count)]
        for row in rows:
            parts[place[row.session]].append(row)
        return parts

    @torch.no_grad()
    def _measured(self, made: Sequence[Batch]) -> list[tuple[Batch, Tensor, Tensor | None]]:
        """Each batch with its logprobs under the policy as it is now, and under the reference."""
        found = []
        for batch in made:
            now, _ = token_logprobs(self.model, batch)
            reference = token_logprobs(self.reference, batch)[0] if self.reference is not None else None
            found.append((batch, now, reference))
        return found

    # Weights and checkpoints

    def save_weights(self, folder: Path) -> None:
        """The weights as an engine reads them."""
        save(self.model, folder)

    def checkpoint(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Everything that is needed to go on, whole or not at all; `extra` is the caller's own JSON."""
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
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def resume(self, folder: Path) -> dict[str, Any] | None:
        """Go on from a checkpoint; its `extra`, or `None` if there is none."""
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


def _compare(measured: Sequence[tuple[Batch, Tensor, Tensor | None]], version: int, report: Update) -> None:
    """How far recorded logprobs are from the learner's own, before anything was learned from them."""
    differences, ages = [], []
    for batch, now, _ in measured:
        chosen = batch.mask.bool()
        differences.append(batch.logprobs[chosen] - now)
        ages.append(version - batch.versions[chosen])
    difference, age = torch.cat(differences), torch.cat(ages)
    own = difference[age == 0]
    report.own_tokens = own.numel()
    report.worst_logprob = float(own.abs().max()) if own.numel() else 0.0
    # exp(-d) - 1 + d estimates KL(sampling || learner) from samples of the sampling policy, without bias.
    report.mismatch_kl = float((torch.exp(-difference) - 1 + difference).mean())
    report.staleness = float(age.float().mean())
