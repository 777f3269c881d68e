"""The learner: what was rewarded becomes likelier, what it recorded about its data is true, and it goes on where it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support.trainers.trained_rows import trajectory
from towline.engines.embedded import DecoderConfig, create_decoder, save_decoder
from towline.schema import Trajectory
from towline.trainers.advantages import group_advantages
from towline.trainers.grpo.learner import Learner, LearnerSettings
from towline.trainers.grpo.loss import (
    LossSettings,
    TrainingBatch,
    padded_batches,
    policy_loss,
    token_logprobs,
    training_rows,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("model")
    config = DecoderConfig("qwen3", 32, 32, 64, 2, 2, 1, 16, max_position_embeddings=64, tie_word_embeddings=True)
    save_decoder(create_decoder(config, 0), place)
    return place


def scored_by(learner: Learner, made: Trajectory) -> Trajectory:
    """The trajectory as the learner's own weights would have recorded it."""
    changed = []
    for trace in made.traces:
        ids = torch.from_numpy(trace.token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(learner.model(ids[None])[0, :-1], -1).gather(1, ids[1:, None])[:, 0].numpy()
        full = np.concatenate([[0.0], logprobs]).astype(np.float32) * trace.loss_mask
        changed.append(trace.model_copy(update={"logprobs": full.astype(np.float32)}))
    turns = [
        turn.model_copy(update={"logprobs": trace.logprobs[3:]})
        for turn, trace in zip(made.turns, changed, strict=True)
    ]
    return Trajectory.model_validate(made.__dict__ | {"traces": changed, "turns": turns})


def likelihood(learner: Learner, made: Trajectory) -> float:
    return float(np.mean([trace.logprobs.sum() for trace in scored_by(learner, made).traces]))


def group(learner: Learner, rewards: list[float]) -> dict[str, list[Trajectory]]:
    return {"g": [scored_by(learner, trajectory(f"s{n}", reward)) for n, reward in enumerate(rewards)]}


def test_rewarded_tokens_become_more_likely(folder: Path) -> None:
    learner = Learner(folder, LearnerSettings(rate=1e-3, updates=1))
    data = group(learner, [1.0, 0.0, 0.0, 1.0])
    before = [likelihood(learner, made) for made in data["g"]]
    report = learner.update(data)
    after = [likelihood(learner, made) for made in data["g"]]
    assert after[0] > before[0]
    assert after[3] > before[3]
    assert after[1] < before[1]
    assert after[2] < before[2]
    assert learner.version == report.version == 1
    assert (report.sessions, report.rows, report.trained_tokens) == (4, 4, 16)
    assert report.mean_reward == 0.5


def test_recorded_logprobs_are_compared_before_anything_is_learned(folder: Path) -> None:
    learner = Learner(folder, LearnerSettings(updates=2))
    report = learner.update(group(learner, [1.0, 0.0]))
    assert report.worst_logprob < 1e-5
    assert abs(report.mismatch_kl) < 1e-6
    assert report.staleness == 0
    # A record that is wrong, and one of an older version, show.
    wrong = {"g": [trajectory("a", 1.0, logprob=-0.25, version=1), trajectory("b", 0.0, logprob=-0.25, version=1)]}
    report = learner.update(wrong)
    assert report.worst_logprob > 1.0
    assert report.mismatch_kl > 0.1
    stale = {"g": [trajectory("a", 1.0, version=0), trajectory("b", 0.0, version=0)]}
    assert learner.update(stale).staleness == 2


def test_a_group_without_a_gradient_changes_nothing_but_the_version(folder: Path) -> None:
    learner = Learner(folder, LearnerSettings())
    weights = {name: value.clone() for name, value in learner.model.state_dict().items()}
    report = learner.update(group(learner, [1.0, 1.0, 1.0]))
    assert (report.equal_groups, report.rows, report.version) == (1, 0, 1)
    assert all(torch.equal(value, weights[name]) for name, value in learner.model.state_dict().items())


def test_groups_without_a_gradient_mean_fewer_steps_not_smaller_ones(folder: Path) -> None:
    for equal, steps in ((0, 4), (6, 1)):
        learner = Learner(folder, LearnerSettings(updates=4))
        groups = group(learner, [1.0, 0.0] * (4 if not equal else 1))
        groups |= {"equal": [trajectory(f"e{n}", 1.0, group="equal") for n in range(equal)]}
        learner.update(groups)
        (taken,) = {int(state["step"]) for state in learner.optimiser.state.values()}
        assert taken == steps


def test_resuming_from_a_checkpoint_gives_the_same_result(folder: Path, tmp_path: Path) -> None:
    def data(n: int) -> dict[str, list[Trajectory]]:
        return {"g": [trajectory(f"s{n}{k}", float(k % 2), version=n) for k in range(6)]}

    whole = Learner(folder, LearnerSettings(updates=3), seed=5)
    for step in range(4):
        whole.update(data(step))
    first = Learner(folder, LearnerSettings(updates=3), seed=5)
    for step in range(2):
        first.update(data(step))
    first.checkpoint(tmp_path, {"used": ["r1", "r2"]})
    second = Learner(folder, LearnerSettings(updates=3), seed=99)
    assert second.resume(tmp_path) == {"used": ["r1", "r2"]}
    for step in range(2, 4):
        second.update(data(step))
    assert second.version == whole.version == 4
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name])
    assert Learner(folder, LearnerSettings()).resume(tmp_path / "nowhere") is None


def one_batch(folder: Path) -> tuple[Learner, TrainingBatch]:
    learner = Learner(folder, LearnerSettings())
    data = [trajectory("a", 1.0), trajectory("b", 0.0)]
    (made,) = padded_batches(training_rows(data, group_advantages({"g": data})), 10_000)
    return learner, made


def test_the_loss_matches_its_formula(folder: Path) -> None:
    learner, batch = one_batch(folder)
    new, entropy = token_logprobs(learner.model, batch)
    settings = LossSettings(clip_low=0.2, clip_high=0.28, behaviour_bound=2.0, entropy=0.1, kl=0.5)
    before, reference = new.detach() - 0.5, new.detach() - 0.3
    found = policy_loss(new, entropy, before, batch, settings, reference)
    expected = 0.0
    chosen = batch.mask.bool()
    for n, was, recorded, advantage, weight, spread in zip(
        new.tolist(),
        before.tolist(),
        batch.logprobs[chosen].tolist(),
        batch.advantages[chosen].tolist(),
        batch.weights[chosen].tolist(),
        entropy.tolist(),
        strict=True,
    ):
        ratio, behaviour = np.exp(n - was), min(2.0, np.exp(was - recorded))
        clipped = min(max(ratio, 0.8), 1.28)
        kl = np.exp(-0.3) - 1 + 0.3
        expected -= weight * (min(ratio * advantage, clipped * advantage) * behaviour + 0.1 * spread - 0.5 * kl)
    assert found.loss.item() == pytest.approx(expected, rel=1e-4)
    assert found.clipped == pytest.approx(0.5, abs=1e-5)


def test_logprobs_use_the_sampling_temperature(folder: Path) -> None:
    learner, batch = one_batch(folder)
    batch.temperatures = torch.linspace(0.5, 2.0, batch.targets.numel()).reshape(batch.targets.shape)
    found, _ = token_logprobs(learner.model, batch)
    logits = learner.model(batch.inputs) / batch.temperatures[:, :, None]
    full = torch.log_softmax(logits, -1).gather(2, batch.targets[:, :, None])[:, :, 0]
    assert torch.allclose(found, full[batch.mask.bool()], atol=1e-5)


def test_saved_weights_load_in_an_engine(folder: Path, tmp_path: Path) -> None:
    learner = Learner(folder, replace(LearnerSettings(), rate=1e-2))
    learner.update(group(learner, [1.0, 0.0]))
    learner.save_weights(tmp_path)
    again = Learner(tmp_path, LearnerSettings())
    ids = torch.arange(1, 9)[None]
    assert torch.equal(again.model(ids), learner.model(ids))
