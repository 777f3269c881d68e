"""The ablation of the builders runs, and its figures say what the builders are: rows, tokens, and what is off in them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from towline.benchmarks import builders

pytestmark = pytest.mark.timeout(900)
"""Several processes, each of which imports torch: minutes on a machine that is busy with other things."""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One update of each builder, with an agent that drops the model's reasoning."""
    sides = [side for side in builders.RUNS if side.drops and side.name != "as sent"]
    seen: list[tuple[int, int, str]] = []
    found = builders.run(
        builders.QUICK_PLAN,
        sides,
        lambda done, total, what: seen.append((done, total, what)),
        model=tmp_path_factory.mktemp("models") / "tiny",
    )
    assert seen[-1] == (len(sides), len(sides), sides[-1].title)
    assert json.loads(json.dumps(found)) == found
    return found


def test_the_cost_of_the_same_sessions_depends_on_the_builder(result: dict[str, Any]) -> None:
    by_name = {side["name"]: side for side in result["sides"]}
    assert set(by_name) == {"exact", "merged", "per_turn"}
    sessions = result["sessions"]
    assert {side["sessions"] for side in by_name.values()} == {sessions} == {builders.QUICK_PLAN.samples}
    # A row a conversation, and a row a turn: nobody asked two questions in fewer than two turns.
    assert by_name["exact"]["rows"] == by_name["merged"]["rows"] == sessions
    assert by_name["per_turn"]["rows"] >= 2 * sessions
    for side in by_name.values():
        assert 0 < side["trained_tokens"] < side["row_tokens"] <= side["padded_tokens"] + side["rows"]
        assert 0.0 <= side["success"] <= 1.0
        assert side["trainer_seconds"] <= side["run_seconds"]
    assert by_name["exact"]["token_ratio"] == by_name["exact"]["trainer_ratio"] == 1.0
    assert by_name["per_turn"]["token_ratio"] > 1.0


def test_only_rows_that_were_stitched_afterwards_are_off(result: dict[str, Any]) -> None:
    worst = {side["name"]: side["worst_logprob"] for side in result["sides"]}
    assert max(worst["exact"], worst["per_turn"]) < 1e-3
    assert worst["merged"] > 1e-2
    divergence = {side["name"]: side["mismatch_kl"] for side in result["sides"]}
    assert divergence["merged"] > 100 * abs(divergence["exact"])


def test_the_table_is_printed_and_written_for_the_readme(result: dict[str, Any]) -> None:
    page = io.StringIO()
    builders.render(result, Console(file=page, width=240))
    written = builders.markdown(result)
    for shown in (page.getvalue(), written):
        assert all(side["name"] in shown for side in result["sides"])
        assert f"{result['sides'][1]['padded_tokens']:,}" in shown
        assert str(builders.PAPER_SPEEDUP) in shown
    lines = [line for line in written.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(result["sides"])
    assert len({line.count("|") for line in lines}) == 1


def test_every_run_follows_the_same_plan() -> None:
    plan = replace(builders.QUICK_PLAN, questions=3)
    tasks = [builders._task(side, plan, 0) for side in builders.RUNS]
    assert len({task.environment.model_dump_json() for task in tasks}) == 1
    assert len({json.dumps(task.evaluator) for task in tasks}) == 1
    assert len({json.dumps([task.settings, task.harness_options]) for task in tasks}) == len(tasks)
