"""The oracle: the same task, done by its own solution, to show that it can be done.

Only here are the solution's files put into a sandbox, and only the oracle's evaluator lets them be there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from towline.schema import File, Task
from towline.tasks.errors import TaskError
from towline.tasks.harbor import shell_of
from towline.tasks.variables import expand_all

HARNESS = "oracle"
PLACE = "/solution"
STEPS = "/solutions"
"""Where the solutions of a task's steps wait for their turn, each in a folder of the step's name."""


def oracle(task: Task) -> Task:
    """The task with harness `oracle` running its solution once; `TaskError` if it has none."""
    if "harbor" in task.metadata:
        files, commands, env = _harbor(task)
    elif task.metadata.get("solution_patch"):
        files = [File(target=f"{PLACE}/solution.patch", text=str(task.metadata["solution_patch"]))]
        commands, env = [f"git apply {PLACE}/solution.patch"], {}
    else:
        raise TaskError(f"task {task.task_id} has no solution: only Harbor folders and SWE-bench rows have one")
    environment = task.environment.model_copy(
        update={"files": [*task.environment.files, *files], "env": {**task.environment.env, **env}}
    )
    changes: dict[str, Any] = {
        "harness": HARNESS,
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
    parts = {f"{STEPS}/{step.name}": folder / "steps" / step.name / "solution" for step in task.steps}
    files, shells = [], set()
    for target, part in (parts or {PLACE: folder / "solution"}).items():
        script = part / "solve.sh"
        if not script.is_file():
            raise TaskError(f"task {task.task_id} has no solution: {script} is missing")
        files.append(File(target=target, source=str(part)))
        shells.add(shell_of(script))
    commands = [f"{max(shells, key=len)} {PLACE}/solve.sh"]
    if parts:
        # A step's solution has the place to itself, one after the other.
        commands.insert(0, f'rm -rf {PLACE} && cp -R "{STEPS}/$TOWLINE_STEP" {PLACE}')
    return files, commands, expand_all(about.get("solution_env", {}), os.environ)
