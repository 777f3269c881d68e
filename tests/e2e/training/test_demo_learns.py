"""The demo's second part, shortened: with its rewards the tiny model learns, with the same rewards shuffled it does not.

Everything is real: the service, sandboxes, the example agent, the embedded engine, the learner. Only the number of updates
is smaller than in `make demo`.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from towline.demo import tiny_model
from towline.demo.training import Training, train
from towline.trainers.grpo.metrics import read_metrics


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.create(tmp_path_factory.mktemp("models") / "tiny")


def learn(model: Path, folder: Path, training: Training) -> dict[str, Any]:
    console = Console(file=io.StringIO(), width=160)
    found = train(console, model, folder, training, seed=1)
    shown = console.file.getvalue()
    assert found["problems"] == [], shown
    assert "held-out questions right" in shown
    assert (folder / "curves.png").is_file()
    return found


@pytest.mark.timeout(1500)
def test_success_on_held_out_questions_rises(model: Path, tmp_path: Path) -> None:
    training = Training(steps=12, measurements=1)
    found = learn(model, tmp_path / "run", training)
    before, after = found["success"]
    assert before["success"] <= 0.40
    assert after["success"] >= 0.75
    assert after["sessions_used"] == training.steps * training.groups * training.samples
    # Rollouts went on while the learner learned, and each token's record is the learner's own logprob.
    assert max(line.get("staleness", 0.0) for line in read_metrics(tmp_path / "run")) > 0
    assert found["worst_own_logprob"] < 1e-3
    assert found["max_abs_dlogp"] < 1e-4


@pytest.mark.timeout(1500)
def test_with_shuffled_rewards_it_does_not(model: Path, tmp_path: Path) -> None:
    found = learn(model, tmp_path / "control", Training(steps=8, measurements=1, permute=True))
    assert found["success"][-1]["success"] < 0.40
