"""`towline eval` end to end: metrics by task and harness, failures apart, compared with an earlier run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from towline.cli.eval import evaluate
from towline.demo import tokenizer
from towline.errors import ConfigError
from towline.runs.eval_report import EvalReport, EvalReportError, TaskTally, compare, k_values, tally_samples
from towline.runs.ledger import SampleRecord
from towline.schema import SessionState

AGENT = Path(__file__).parents[2] / "examples/first_agent"


def run(*words: str) -> tuple[int, dict[str, Any], str]:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(evaluate)
    done = CliRunner().invoke(app, [*words, "--json"])
    assert not isinstance(done.exception, Exception), done.exception
    return done.exit_code, json.loads(done.stdout), done.stderr


def test_eval_and_comparison(tmp_path: Path) -> None:
    model, tasks = tmp_path / "model", tmp_path / "tasks.jsonl"
    model.mkdir()
    tokenizer.write(model)
    command = "{python} {program}/agent.py --questions 1; exit %d"
    lines = [
        {
            "task_id": f"t{n}",
            "instruction": "Answer.",
            "harness_options": {"command": command % (n == 1), "folder": str(AGENT)},
            "evaluator": {"kind": "completed"},
        }
        for n in range(2)
    ]
    tasks.write_text("\n".join(map(json.dumps, lines)))
    fixed = [str(tasks), "--engine", "scripted", "--model", str(model), "--sandbox", "process", "--samples", "2"]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    code, output, _ = run(*fixed, "--harness", "shell", "--out", first)
    assert code == 0
    assert output["all"]["pass@1"]["value"] == output["all"]["pass@2"]["value"] == 0.5
    own = output["harnesses"]["shell"]["tasks"]
    assert (own["t0"]["passed"], own["t1"]["passed"], own["t0"]["n"]) == (2, 0, 2)
    assert own["t0"]["pass@1"]["low"] < 1 == own["t0"]["pass@1"]["high"]
    recipe = EvalReport.read(tmp_path / "first").recipe
    assert recipe["session"]["policy"] == "retain"

    # The same folder again runs nothing, and another rule for passing judges anew.
    code, again, _ = run(*fixed, "--harness", "shell", "--out", first, "--pass", "turns >= 1", "--compare", first)
    assert (code, again["all"]["pass@1"]["value"]) == (0, 1.0)
    lines_now = (tmp_path / "first/progress.jsonl").read_text().count("session_id")
    assert lines_now == 4
    found = again["compared"]["differences"]["shell"]["pass@1"]
    assert (found["value"], found["better"], found["worse"], found["tasks"]) == (0.5, 1, 0, 2)
    assert any("passing" in line for line in again["compared"]["settings"])

    # A setup that fails is an infrastructure failure: it says nothing about the model.
    tasks.write_text("\n".join(json.dumps({**line, "environment": {"setup": ["echo wet; exit 9"]}}) for line in lines))
    code, broken, _ = run(*fixed, "--harness", "shell", "--out", second)
    figures = broken["harnesses"]["shell"]
    assert (code, figures["failed"], figures["samples"], figures["pass@1"]) == (1, 4, 0, None)
    assert "wet" in (tmp_path / "second/progress.jsonl").read_text()

    # Mistakes that show beforehand are reported before anything runs.
    with pytest.raises(ConfigError, match="harness nothing has no option 'command'"):
        evaluate_with(*fixed, "--harness", "nothing", "--out", str(tmp_path / "third"))
    assert not (tmp_path / "third").exists()


def evaluate_with(*words: str) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(evaluate)
    done = CliRunner().invoke(app, [*words, "--json"])
    if done.exception is not None:
        raise done.exception


def sample(n: int, state: SessionState, reward: float | None) -> SampleRecord:
    fields = {"task_id": "t", "digest": "d", "harness": "h", "sample": n, "session_id": f"s{n}", "state": state}
    error = "broke" if state is SessionState.FAILED else None
    return SampleRecord.model_validate({**fields, "reward": reward, "usable": reward is not None, "error": error})


def test_only_scored_samples_count() -> None:
    done, failed = SessionState.DONE, SessionState.FAILED
    samples = [sample(0, done, 1.0), sample(1, done, 0.0), sample(2, done, None), sample(3, failed, None)]
    found = tally_samples(samples, lambda one: (one.reward or 0) >= 1)["h"]["t"]
    assert found == TaskTally(n=2, passed=1, unscored=1, failed=1, rewards=[1.0, 0.0])
    assert k_values(1) == [1]
    assert k_values(10) == [1, 2, 4, 8, 10]
    assert k_values(8) == [1, 2, 4, 8]


def test_incomparable_reports_are_rejected(tmp_path: Path) -> None:
    one = EvalReport(samples=1, passing="reward >= 1", harnesses={"a": {"t": TaskTally(n=1, passed=1)}})
    two = one.model_copy(update={"harnesses": {"b": {"t": TaskTally(n=1, passed=1)}}})
    with pytest.raises(EvalReportError, match="no task with the same harness"):
        compare(one, two)
    assert EvalReport.read(one.write(tmp_path)) == one
    with pytest.raises(EvalReportError, match="cannot read"):
        EvalReport.read(tmp_path / "nowhere")
    (tmp_path / "eval.json").write_text("[]")
    with pytest.raises(EvalReportError, match="not an evaluation"):
        EvalReport.read(tmp_path)
