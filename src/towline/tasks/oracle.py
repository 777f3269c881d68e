"""The oracle: a task solved by its own reference solution, which proves that the task can be solved.

This is the only place that puts a solution's files into a sandbox, and only the oracle's evaluator tolerates them there.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from towline.common.untrusted.data_files import DataFolder, UnsafePath
from towline.schema import File, Task
from towline.schema.trust import Grant
from towline.tasks.fields import HARBOR_KEY, SourceLocation, TaskError
from towline.tasks.harbor import FILE, FolderVariables, shell_of

ORACLE_HARNESS = "oracle"
SOLUTION_PATH = "/solution"
STEP_SOLUTIONS_PATH = "/solutions"
"""Holds the solutions of a task's steps, one folder per step name."""


def oracle_task(task: Task, trust: Collection[Grant] = ()) -> Task:
    """The task with the harness `oracle`, which runs its solution once; `TaskError` if it has none.

    `trust` is what the task's files may name, as for loading them.
    """
    if HARBOR_KEY in task.metadata:
        files, commands, env = _harbor(task, frozenset(trust))
    elif task.metadata.get("solution_patch"):
        files = [File(target=f"{SOLUTION_PATH}/solution.patch", text=str(task.metadata["solution_patch"]))]
        reverse = "-R " if task.metadata.get("solution_reversed") else ""
        commands, env = [f"git apply {reverse}{SOLUTION_PATH}/solution.patch"], {}
    elif isinstance(task.metadata.get("solution_script"), str):
        files = [File(target=f"{SOLUTION_PATH}/solve.sh", text=task.metadata["solution_script"])]
        commands, env = [f"sh {SOLUTION_PATH}/solve.sh"], {}
    else:
        raise TaskError(
            f"task {task.task_id} has no solution: Harbor folders and SWE rows have one, other tasks may have "
            "`solution_script` in their metadata"
        )
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


def _harbor(task: Task, trust: frozenset[Grant]) -> tuple[list[File], list[str], dict[str, str]]:
    about = task.metadata[HARBOR_KEY]
    folder = DataFolder(Path(about["folder"]), links=Grant.PATHS in trust)
    location = SourceLocation(folder.path / FILE)
    parts = {f"{STEP_SOLUTIONS_PATH}/{step.name}": f"steps/{step.name}/solution" for step in task.steps}
    files, shells = [], set()
    for target, part in (parts or {SOLUTION_PATH: "solution"}).items():
        script = f"{part}/solve.sh"
        try:
            if not folder.is_file(script):
                raise TaskError(f"task {task.task_id} has no solution: {folder.path / script} is missing")
            files.append(File(target=target, source=str(folder.find(part))))
            shells.add(shell_of(folder, script))
        except UnsafePath as error:
            raise location.unsafe(error) from error
    commands = [f"{max(shells, key=len)} {SOLUTION_PATH}/solve.sh"]
    if parts:
        # Steps run one after the other, each with its own solution at this path.
        commands.insert(0, f'rm -rf {SOLUTION_PATH} && cp -R "{STEP_SOLUTIONS_PATH}/$TOWLINE_STEP" {SOLUTION_PATH}')
    variables = FolderVariables(location, os.environ if Grant.ENV in trust else None)
    return files, commands, variables.expand("solution.env", about.get("solution_env", {}))
