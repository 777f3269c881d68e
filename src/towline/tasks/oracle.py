"""The oracle: a task solved by its own reference solution, which proves that the task can be solved.

This is the only place that puts a solution's files into a sandbox, and only the oracle's evaluator tolerates them there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from towline.schema import File, Task
from towline.tasks.fields import TaskError
from towline.tasks.harbor import shell_of
from towline.tasks.harbor_toml import expand_all

ORACLE_HARNESS = "oracle"
SOLUTION_PATH = "/solution"
STEP_SOLUTIONS_PATH = "/solutions"
"""Holds the solutions of a task's steps, one folder per step name."""


def oracle_task(task: Task) -> Task:
    """The task with the harness `oracle`, which runs its solution once; `TaskError` if it has none."""
    if "harbor" in task.metadata:
        files, commands, env = _harbor(task)
    elif task.metadata.get("solution_patch"):
        files = [File(target=f"{SOLUTION_PATH}/solution.patch", text=str(task.metadata["solution_patch"]))]
        reverse = "-R " if task.metadata.get("solution_reversed") else ""
        commands, env = [f"git apply {reverse}{SOLUTION_PATH}/solution.patch"], {}
    else:
        raise TaskError(f"task {task.task_id} has no solution: only Harbor folders and SWE-bench rows have one")
    environment = task.environment.model_copy(
        update={"files": [*task.environment.files, *files], "env": {**task.environment.env, **env}}
    )
    changes: dict[str, Any] = {
        "harness": ORACLE_HARNESS,
        "harness_options": {"command": " && ".join(commands)},
        "environment": environment,
        "evaluator": {**task.evaluator, "oracle": True},
        "num_samples": 1,
        "min_samples": 0,
    }
    return Task.model_validate(task.__dict__ | changes)


def _harbor(task: Task) -> tuple[list[File], list[str], dict[str, str]]:
    about = task.metadata["harbor"]
    folder = Path(about["folder"])
    parts = {f"{STEP_SOLUTIONS_PATH}/{step.name}": folder / "steps" / step.name / "solution" for step in task.steps}
    files, shells = [], set()
    for target, part in (parts or {SOLUTION_PATH: folder / "solution"}).items():
        script = part / "solve.sh"
        if not script.is_file():
            raise TaskError(f"task {task.task_id} has no solution: {script} is missing")
        files.append(File(target=target, source=str(part)))
        shells.add(shell_of(script))
    commands = [f"{max(shells, key=len)} {SOLUTION_PATH}/solve.sh"]
    if parts:
        # Steps run one after the other, each with its own solution at this path.
        commands.insert(0, f'rm -rf {SOLUTION_PATH} && cp -R "{STEP_SOLUTIONS_PATH}/$TOWLINE_STEP" {SOLUTION_PATH}')
    return files, commands, expand_all(about.get("solution_env", {}), os.environ)
