"""The oracle: the same task, done by its own solution, to show that it can be done.

Only here are the solution's files put into a sandbox, and only the oracle's evaluator lets them be there.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from towline.schema import File, Task
from towline.tasks.errors import TaskError
from towline.tasks.variables import expand_all

HARNESS = "oracle"
PLACE = "/solution"
STEPS = "/solutions"
"""Where the solutions of a task's steps wait for their turn."""


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
    parts = [(Path("steps") / name / "solution", f"{STEPS}/{name}") for name in about.get("steps", [])]
    files, commands = [], []
    for part, target in parts or [(Path("solution"), PLACE)]:
        script = folder / part / "solve.sh"
        if not script.is_file():
            raise TaskError(f"task {task.task_id} has no solution: {script} is missing")
        files.append(File(target=target, source=str(folder / part)))
        if target != PLACE:
            # A step's solution has the place to itself, one after the other.
            commands.append(f"rm -rf {PLACE} && cp -R {shlex.quote(target)} {PLACE}")
        commands.append(f"{_shell(script)} {PLACE}/solve.sh")
    return files, commands, expand_all(about.get("solution_env", {}), os.environ)


def _shell(script: Path) -> str:
    """The shell that the script asks for. It is named since a file's right to be run is easily lost on its way."""
    with open(script, "rb") as file:
        first = file.readline(200)
    return "bash" if first.startswith(b"#!") and b"bash" in first else "sh"
