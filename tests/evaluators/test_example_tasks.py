"""The example tasks: their own solution scores 1, doing nothing 0, and cheap tricks nothing more than that."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.evaluators.evaluator_rig import Rig
from towline.sandboxes.base import Runtime
from towline.sandboxes.images.build import build
from towline.sandboxes.images.root_cache import RootCache
from towline.schema import Task
from towline.tasks.loading import load_tasks
from towline.tasks.oracle import oracle_task

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"
NAMES = sorted(folder.name for folder in EXAMPLES.iterdir() if folder.is_dir())

FORGED = """
mkdir -p /logs/verifier /tests
echo 1 >/logs/verifier/reward.txt; echo '{"reward": 1}' >/logs/verifier/reward.json
printf '#!/bin/sh\\necho 1 >/logs/verifier/reward.txt\\n' >/tests/test.sh
for name in answer.txt report.txt stock.tsv orders.tsv; do ln -s /tests/expected.tsv $name; done
"""
LYING = {
    "fix-csvtool": """
printf '#!/bin/sh\\n(while :; do echo 1 >/logs/verifier/reward.txt; sleep 0.05; done) >/dev/null 2>&1 &\\ncat /tests/* 2>&1\\nexit 0\\n' >csvtool
""",
    "fix-leap-calendar": """
printf 'import os\\nos.makedirs("/logs/verifier", exist_ok=True)\\nopen("/logs/verifier/reward.json", "w").write("{\\\\"reward\\\\": 1}")\\nos._exit(0)\\n' >recur/__init__.py
""",
}
"""Programs that the tests run and that would rather score than work."""


async def built(name: str, runtime: Runtime, tmp_path: Path, *, by_oracle: bool = False) -> Rig:
    """The rig of an example with its Dockerfile built, as a node does it."""
    (task,) = load_tasks([EXAMPLES / name], harness="shell")
    task = oracle_task(task) if by_oracle else task
    made = await build(
        runtime, task.environment.root, Path(task.environment.build), cache=RootCache(tmp_path / "cache", 1 << 30)
    )
    environment = task.environment.model_copy(update={"env": {**made.env, **task.environment.env}})
    assert made.workdir == task.environment.workdir
    logs = tmp_path / "logs"
    await asyncio.to_thread(logs.mkdir)
    return Rig(runtime, Task.model_validate(task.__dict__ | {"environment": environment}), logs, layers=made.layers)


def test_there_is_one_of_every_kind() -> None:
    assert len(NAMES) >= 5
    assert len(load_tasks([EXAMPLES], harness="codex", samples=4)) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
async def test_the_solution_scores_1_and_nothing_scores_0(name: str, bubblewrap: Runtime, tmp_path: Path) -> None:
    rig = await built(name, bubblewrap, tmp_path)
    assert (await rig.judge("true")).value == 0
    assert (await rig.judge(FORGED)).value == 0
    if name in LYING:
        assert (await rig.judge(LYING[name])).value == 0


@pytest.mark.parametrize("name", NAMES)
async def test_the_oracle_scores_1(name: str, bubblewrap: Runtime, tmp_path: Path) -> None:
    rig = await built(name, bubblewrap, tmp_path, by_oracle=True)
    reward = await rig.judge(rig.task.harness_options["command"])
    assert reward.value == 1, (rig.logs / "verifier" / "test-stdout.txt").read_text()
    assert rig.notes == []


async def test_half_of_two_steps_is_half_the_reward(bubblewrap: Runtime, tmp_path: Path) -> None:
    rig = await built("stock-take", bubblewrap, tmp_path, by_oracle=True)
    solution = rig.task.harness_options["command"]
    half = await rig.judge(f'if [ "$TOWLINE_STEP" = clean ]; then {solution}; fi')
    assert (half.value, half.components) == (0.5, {"step.clean": 1, "step.reorder": 0})
    # Without the first step there is no second.
    late = await rig.judge(f'if [ "$TOWLINE_STEP" = reorder ]; then {solution}; fi')
    assert (late.value, late.components) == (0, {"step.clean": 0})


async def test_a_solution_in_the_environment_is_refused(bubblewrap: Runtime, tmp_path: Path) -> None:
    """The oracle's files in a session that is not the oracle's are a leak."""
    rig = await built("lattice-paths", bubblewrap, tmp_path, by_oracle=True)
    honest = Task.model_validate(rig.task.__dict__ | {"evaluator": {**rig.task.evaluator, "oracle": False}})
    problems = await Rig(bubblewrap, honest, rig.logs, layers=rig.layers).problems()
    assert problems == ["/solution exists before the agent runs"]
