"""`towline run` over the example tasks: each is solved by its own solution, and not by doing nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from towline.harnesses import oracle
from towline.schema import Trajectory

EXAMPLES = Path(__file__).parents[2] / "examples"
TASKS = sorted(folder.name for folder in (EXAMPLES / "tasks").iterdir() if (folder / "task.toml").is_file())


def towline(*arguments: str, code: int = 0) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "towline", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ,
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout) if code == 0 else done.stderr


@pytest.fixture(scope="module")
def model(assets: Path) -> list[str]:
    return ["--engine", "scripted", "--model", str(assets / "tokenizers" / "qwen3")]


def test_there_are_examples_of_every_kind() -> None:
    assert len(TASKS) >= 5
    assert oracle.HARNESS.calls_model is False


@pytest.mark.parametrize(("how", "reward"), [(["--oracle"], 1.0), (["--harness", "nothing"], 0.0)])
def test_examples_are_solvable_and_not_free(how: list[str], reward: float, model: list[str], tmp_path: Path) -> None:
    told = towline("run", str(EXAMPLES / "tasks"), *how, *model, "--out", str(tmp_path / "out"))
    assert told["states"] == {"done": len(TASKS)}
    assert {name.rpartition("/")[2]: task["rewards"] for name, task in told["tasks"].items()} == {
        name: [reward] for name in TASKS
    }


def test_an_agent_of_ones_own_is_run_from_one_line(model: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    told = towline("run", str(EXAMPLES / "own_harness" / "task.jsonl"), *model, "--samples", "2", "--out", str(out))
    assert told["sessions"] == told["usable"] == 2
    for line in told["results"]:
        assert line["end_reason"] == "exited"
        assert line["turns"] == 3
        assert line["chains"] == 1
        trajectory = Trajectory.read(out / "trajectories" / f"{line['session_id']}.arrow")
        assert trajectory.report.trained_tokens == line["trained_tokens"]
        assert (out / "sessions" / line["session_id"] / "harness.log").is_file()
    rows = pq.read_table(out / "traces.parquet")
    assert rows.num_rows == 2
    assert len((out / "results.jsonl").read_text().splitlines()) == 2


def test_what_is_wrong_is_said_in_one_line(model: list[str], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    tasks = str(EXAMPLES / "tasks" / "sort-downloads")
    assert "say which --harness" in towline("run", tasks, *model, *out, code=1)
    assert "does not exist" in towline("run", str(tmp_path / "nowhere"), "--harness", "nothing", *model, *out, code=1)
    assert "is not name=value" in towline("run", tasks, "--harness", "nothing", "--option", "x", *model, *out, code=1)
