"""`towline train`: a real agent in real sandboxes, a service of its own, an update from its sessions, and going on later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from towline.demo import tiny_model
from towline.demo.registry import EXAMPLE_AGENT, training_task
from towline.trainers.grpo import metrics

pytestmark = pytest.mark.timeout(900)
"""Several processes, each of which imports torch: minutes on a machine that is busy with other things."""


def train(model: Path, out: Path, steps: int) -> Any:
    command = ["train", "--registry", "--model", str(model), "--out", str(out), "--steps", str(steps)]
    command += ["--groups", "2", "--samples", "4", "--synchronous", "--held-out", "4", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "towline", *command], capture_output=True, text=True, timeout=500, env=os.environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.create(tmp_path_factory.mktemp("models") / "tiny", steps=20)


def test_it_learns_checkpoints_and_resumes(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = train(model, out, 1)
    assert first["last"]["version"] == 1
    assert (first["pacing"]["groups_per_update"], first["pacing"]["max_staleness"]) == (2, 4)
    assert [one["step"] for one in first["success"]] == [0, 1]
    assert all(0.0 <= one["success"] <= 1.0 for one in first["success"])
    again = train(model, out, 2)
    assert again["last"]["version"] == 2
    # The first run's sessions were used once, and no others were made for them.
    assert again["last"]["sessions_used"] == 16
    steps = [line for line in metrics.read_metrics(out) if "mean_reward" in line]
    assert [line["step"] for line in steps] == [1, 2]
    written = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written if "success" in line] == [0, 1, 2]  # once each, though it resumed at 1
    for line in steps:
        assert line["sessions"] == 8
        assert line["staleness"] == 0.0
        assert line["worst_logprob"] < 1e-3
    assert (out / "curves.png").stat().st_size > 1000
    assert (out / "weights" / "v2" / "model.safetensors").is_file()


def test_a_run_whose_sessions_all_fail_says_why_and_can_resume(model: Path, tmp_path: Path) -> None:
    out, tasks = tmp_path / "run", tmp_path / "tasks.jsonl"
    made = training_task(0, EXAMPLE_AGENT, samples=2)
    broken = made.model_copy(update={"environment": made.environment.model_copy(update={"setup": ["exit 3"]})})
    tasks.write_text(broken.model_dump_json() + "\n")
    command = ["train", str(tasks), "--model", str(model), "--out", str(out), "--steps", "1"]
    command += ["--groups", "1", "--samples", "2", "--json"]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "towline", *command, *options],
            capture_output=True,
            text=True,
            timeout=400,
            env=os.environ,
        )

    failed = run()
    assert failed.returncode == 1
    assert "groups in a row had too few usable sessions" in failed.stderr
    assert "set-up command" in failed.stderr
    # Mended, the run goes on; it waits for none of those that failed.
    tasks.write_text(made.model_dump_json() + "\n")
    done = run("--measure", str(tasks))
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert [(one["step"], one["tasks"]) for one in told["success"]] == [(0, 1), (1, 1)]
    last = told["last"]
    assert (last["version"], last["sessions_used"]) == (1, 2)
    assert last["incomplete_groups"] >= 4
