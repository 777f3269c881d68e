"""`towline train`: a real agent in real sandboxes, a service of its own, an update from its sessions, and going on later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from towline import tiny
from towline.trainers import metrics


def train(model: Path, out: Path, steps: int) -> Any:
    command = ["train", "--registry", "--model", str(model), "--out", str(out), "--steps", str(steps)]
    command += ["--groups", "2", "--samples", "4", "--synchronous", "--held-out", "4", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "towline", *command], capture_output=True, text=True, timeout=500, env=os.environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_it_learns_checkpoints_and_goes_on(tmp_path: Path) -> None:
    model = tiny.create(tmp_path / "model", steps=20)
    out = tmp_path / "run"
    first = train(model, out, 1)
    assert first["last"]["version"] == 1
    assert [one["step"] for one in first["success"]] == [0, 1]
    assert all(0.0 <= one["success"] <= 1.0 for one in first["success"])
    again = train(model, out, 2)
    assert again["last"]["version"] == 2
    # The first run's sessions were used once, and no others were made for them.
    assert again["last"]["sessions_used"] == 16
    steps = [line for line in metrics.read(out) if "mean_reward" in line]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["sessions"] == 8
        assert line["staleness"] == 0.0
        assert line["worst_logprob"] < 1e-3
    assert (out / "curves.png").stat().st_size > 1000
    assert (out / "weights" / "v2" / "model.safetensors").is_file()
