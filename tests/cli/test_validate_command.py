"""`towline tasks validate`: good tasks pass, and every kind of bad task is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from towline.cli import app
from towline.runs.validation import PassBand, ProbeResult, RefusalName, TaskVerdict, judge_pass_rate, judge_probes
from towline.schema import Task
from towline.tasks.loading import load_tasks
from towline.tasks.probes import CHEATS, ProbeKind, probes_of

GREP = {"kind": "command", "command": "grep -qx hello out.txt"}


def task(name: str, evaluator: dict[str, Any] | None = None, solution: str = "echo hello >out.txt", **more: Any) -> Any:
    row = {"task_id": name, "instruction": f"Write hello to out.txt ({name}).", "evaluator": evaluator or GREP, **more}
    return row | ({"metadata": {"solution_script": solution}} if solution else {})


IMPORTS = "python3 -c 'import solution; assert solution.one() == 1'"
ROWS = [
    task("good"),
    {"id": "sum", "problem": "What is 40 + 2?", "answer": "42"},
    task("unsolvable", solution="echo hullo >out.txt"),
    task("free", {"kind": "command", "command": "true"}),
    task("random", {"kind": "command", "command": 'echo "0.$(od -An -N6 -tu4 /dev/urandom | tr -d " \\n")"', "reward": "number"}),
    task("cheatable", {"kind": "command", "command": IMPORTS, "env": {"PYTHONPATH": "/work"}}, "echo 'one = lambda: 1' >solution.py"),
    task("leaking", {**GREP, "hidden": ["/work/expected"]}, environment={"files": [{"target": "/work/expected", "text": "hello"}]}),
    task("no verifier", {"kind": "command", "command": "no-such-verifier"}),
    task("no environment", environment={"setup": ["exit 3"]}),
    task("slow", solution="sleep 600", timeouts={"run": 1}),
    task("no solution", solution=""),
    {**task("not scored"), "evaluator": {}},
    task("wrong", {"kind": "magic"}),
    "{",
    {**task("good"), "instruction": "Another text."},
    {**task("copy"), "instruction": "Write  HELLO to out.txt (good)."},
]  # fmt: skip
EXPECTED = {
    "good": [],
    "sum": [],
    "unsolvable": ["unsolvable"],
    "free": ["free_reward"],
    "random": ["flaky", "flaky", "unsolvable", "free_reward"],
    "cheatable": ["cheatable"],
    "leaking": ["leaked_answer"],
    "no verifier": ["broken_verifier"],
    "no environment": ["broken_environment"],
    "slow": ["too_slow"],
    "no solution": ["no_oracle"],
    "not scored": ["not_scored"],
    "wrong": ["unreadable"],
    "rows.jsonl:14": ["unreadable"],
    "rows.jsonl:15": ["duplicate"],
    "copy": ["duplicate"],
}


@pytest.mark.timeout(900)
def test_each_kind_of_bad_task_is_refused_by_name(tmp_path: Path) -> None:
    file, good = tmp_path / "rows.jsonl", tmp_path / "good.jsonl"
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in ROWS))
    command = ["tasks", "validate", str(file), "--json", "--out", str(tmp_path / "out"), "--accepted", str(good)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1, done.output
    report = json.loads(done.stdout)
    found: dict[str, list[str]] = {}
    for verdict in report["verdicts"]:
        place = verdict["place"].rpartition("/")[2]
        name = verdict["task_id"] if verdict["task_id"] not in found and "/" not in verdict["task_id"] else place
        found[name] = [one["name"] for one in verdict["refusals"]]
    assert found == EXPECTED
    assert (report["tasks"], report["accepted"]) == (len(ROWS), 2)
    assert len(set(report["refused"])) >= 11
    by_id = {
        verdict["task_id"]: verdict for verdict in report["verdicts"] if verdict["place"].endswith(("1", "2", "6"))
    }
    assert "the cheat startup_hooks scores 1" in by_id["cheatable"]["refusals"][0]["detail"]
    probes = [(one["probe"], one["score"]) for one in by_id["good"]["probes"]]
    assert sorted(probes)[-4:] == [("nothing", 0), ("oracle", 1), ("oracle", 1), ("startup_hooks", 0)]
    # What was accepted is a data set of its own, which is accepted as a whole.
    accepted = load_tasks([good], harness="pi")
    assert [one.task_id for one in accepted] == ["good", "sum"]
    again = CliRunner().invoke(app, ["tasks", "validate", str(good), "--runs", "1", "--out", str(tmp_path / "again")])
    assert again.exit_code == 0, again.output
    assert "2 of 2 tasks accepted" in again.output


def test_pass_rates_and_their_band(tmp_path: Path) -> None:
    band = PassBand(0.1, 0.9)
    for rewards, name in (
        ([1.0] * 8, "too_easy"),
        ([0.0] * 8, "too_hard"),
        ([0.5] * 8, "too_hard"),
        ([], "unknown_pass_rate"),
        ([1.0, 0.0], None),
    ):
        verdict = TaskVerdict("t", "here")
        judge_pass_rate(verdict, band, rewards)
        assert [one.name.value for one in verdict.refusals] == ([name] if name else [])
    tally = {"n": 8, "passed": 8, "unscored": 0, "failed": 0, "rewards": [1.0] * 8}
    report = {"recipe": {}, "samples": 8, "passing": "reward >= 1", "harnesses": {"pi": {"easy": tally}}}
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.json").write_text(json.dumps(report))
    row = tmp_path / "row.jsonl"
    row.write_text(json.dumps({**task("easy", solution=""), "evaluator": GREP}))
    given = ["--band", "0.1:0.9", "--pass-rates", str(tmp_path / "report" / "report.json")]
    done = CliRunner().invoke(app, ["tasks", "validate", str(row), "--json", "--out", str(tmp_path / "out"), *given])
    (verdict,) = json.loads(done.stdout)["verdicts"]
    assert ([one["name"] for one in verdict["refusals"]], verdict["pass_rate"]) == (["no_oracle", "too_easy"], 1)
    for wrong in ("0.5", "0.9:0.1", "a:b", "0:2"):
        assert CliRunner().invoke(app, ["tasks", "validate", str(row), "--band", wrong]).exit_code == 1
    needs = CliRunner().invoke(app, ["tasks", "validate", str(row), "--band", "0:1"])
    assert needs.exit_code == 1


def test_an_infrastructure_failure_is_no_score() -> None:
    verdict = TaskVerdict("t", "here", [ProbeResult("oracle", 1.0), ProbeResult("oracle", None, error="gone")])
    judge_probes(verdict)
    assert {one.name for one in verdict.refusals} == {RefusalName.BROKEN_ENVIRONMENT, RefusalName.FLAKY}
    graded = TaskVerdict(
        "t", "here", [ProbeResult("oracle", 1.0), ProbeResult("nothing", 0.0), ProbeResult("history", 0.2)]
    )
    judge_probes(graded)
    assert [one.name for one in graded.refusals] == [RefusalName.CHEATABLE]


def test_the_probes_of_each_kind_of_task() -> None:
    swe = next(iter(load_tasks(["miniature-swe"], harness="pi")))
    names = [probe.name for probe in probes_of(swe)]
    assert names == ["oracle", "nothing", "edited_tests", "startup_hooks", "history", "deleted_files"]
    answer = Task.model_validate(
        {"task_id": "a", "instruction": "?", "harness": "pi", "evaluator": {"kind": "answer", "answer": [4, "four"]}}
    )
    made = {probe.name: probe for probe in probes_of(answer, runs=3)}
    assert list(made) == ["oracle", "nothing", "repeated_question", "every_guess"]
    assert made["oracle"].task.num_samples == 3
    assert r"\boxed{4}" in made["oracle"].task.harness_options["command"]
    assert made["nothing"].kind is ProbeKind.NOTHING
    assert set(names[2:]) | set(list(made)[2:]) <= set(CHEATS)
