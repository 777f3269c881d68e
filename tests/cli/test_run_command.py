"""`towline run` over the example tasks: each is solved by its own solution, and not by doing nothing."""

from __future__ import annotations

import json
import os
import shutil
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
    output = towline("run", str(EXAMPLES / "tasks"), *how, *model, "--out", str(tmp_path / "out"))
    assert output["states"] == {"done": len(TASKS)}
    assert {name.rpartition("/")[2]: task["rewards"] for name, task in output["tasks"].items()} == {
        name: [reward] for name in TASKS
    }


def test_a_custom_harness_runs_from_one_line(model: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    output = towline("run", str(EXAMPLES / "own_harness" / "task.jsonl"), *model, "--samples", "2", "--out", str(out))
    assert output["sessions"] == output["usable"] == 2
    written = json.loads((out / "summary.json").read_text())
    assert written["calls_as_text"] == written["malformed_calls"] == 0
    for line in output["results"]:
        assert line["end_reason"] == "exited"
        assert line["turns"] == 3
        assert line["chains"] == 1
        trajectory = Trajectory.read(out / "trajectories" / f"{line['session_id']}.arrow")
        assert trajectory.report.trained_tokens == line["trained_tokens"]
        assert (out / "sessions" / line["session_id"] / "harness.log").is_file()
    rows = pq.read_table(out / "traces.parquet")
    assert rows.num_rows == 2
    assert len((out / "results.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("language", ["python", "json"])
def test_the_documented_scripts_solve_the_example(language: str, model: list[str], tmp_path: Path) -> None:
    """The scripts of docs/engines.md with the shell harness, up to the score."""
    text = (EXAMPLES.parent / "docs" / "engines.md").read_text("utf-8").partition("## Scripted replies")[2]
    script = tmp_path / f"replies.{'py' if language == 'python' else 'json'}"
    script.write_text(text.partition(f"```{language}\n")[2].partition("```")[0])
    task = str(EXAMPLES / "own_harness" / "task.jsonl")
    if language == "python":
        output = towline("run", task, *model, "--script", str(script), "--out", str(tmp_path / "out"))
        (line,) = output["results"]
        assert (line["reward"], line["turns"], line["chains"]) == (1.0, 2, 1)
        trajectory = Trajectory.read(tmp_path / "out" / "trajectories" / f"{line['session_id']}.arrow")
        assert trajectory.turns[0].reply["reasoning"] == "One command will do."
        assert trajectory.turns[1].reply["text"] == "The count is in count.txt."
        return
    output = towline(
        "eval", task, "--harness", "shell", *model, "--script", str(script), "--out", str(tmp_path / "out")
    )
    assert output["all"]["pass@1"]["value"] == 1.0
    # Other replies make other samples: a run is not resumed with another script.
    script.write_text('["I give up."]')
    printed = towline(
        "eval", task, "--harness", "shell", *model, "--script", str(script), "--out", str(tmp_path / "out"), code=1
    )
    assert "script" in printed


def test_a_failing_script_is_not_scored(model: list[str], tmp_path: Path) -> None:
    script = tmp_path / "replies.py"
    script.write_text("def script(request):\n    return request.colour\n")
    task = json.loads((EXAMPLES / "own_harness" / "task.jsonl").read_text())
    (tmp_path / "task.jsonl").write_text(json.dumps(task | {"max_attempts": 1}))
    shutil.copy(EXAMPLES / "own_harness" / "agent.py", tmp_path)
    out = tmp_path / "out"
    towline("run", str(tmp_path / "task.jsonl"), *model, "--script", str(script), "--out", str(out), code=1)
    (line,) = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert (line["state"], line["reward"]) == ("failed", None)
    assert "replies.py:2: AttributeError" in line["error"]


def test_errors_are_one_line(model: list[str], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    tasks = str(EXAMPLES / "tasks" / "sort-downloads")
    assert "some tasks name no harness; give --harness" in towline("run", tasks, *model, *out, code=1)
    assert "does not exist" in towline("run", str(tmp_path / "nowhere"), "--harness", "nothing", *model, *out, code=1)
    assert "is not of the form name=value" in towline(
        "run", tasks, "--harness", "nothing", "--option", "x", *model, *out, code=1
    )
