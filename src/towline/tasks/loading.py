"""From paths to tasks: which loader a path is for is seen from what is there, never guessed from its name alone.

A folder with `task.toml` is a Harbor task; any other folder holds Harbor tasks and JSONL files, one level down. A file is
read line by line, and each line is recognised by its fields (`towline.tasks.rows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from towline.schema import Task
from towline.tasks import harbor, rows
from towline.tasks.errors import TaskError

LINES = (".jsonl", ".ndjson")
"""How the names of files with one task a line end."""


def load(
    paths: Sequence[str | Path],
    *,
    harness: str,
    samples: int | None = None,
    harness_options: Mapping[str, Any] | None = None,
) -> list[Task]:
    """Every task at the paths, in order. `harness` and its options are for tasks that name none of their own;
    `samples` replaces what a task says."""
    defaults = rows.Defaults(harness, dict(harness_options or {}), samples)
    tasks: list[Task] = []
    origin: dict[str, str] = {}
    for path in map(Path, paths):
        for place, task in _at(path, defaults):
            if task.task_id in origin:
                raise TaskError(f"{place}: the task id {task.task_id!r} is already taken by {origin[task.task_id]}")
            origin[task.task_id] = place
            tasks.append(task)
    return tasks


def _at(path: Path, defaults: rows.Defaults) -> list[tuple[str, Task]]:
    if path.is_dir():
        if (path / harbor.FILE).is_file():
            return [(str(path), harbor.load_folder(path, defaults))]
        inside = [entry for entry in sorted(path.iterdir()) if not entry.name.startswith(".")]
        found = [entry for entry in inside if (entry / harbor.FILE).is_file() or entry.suffix in LINES]
        if not found:
            raise TaskError(
                f"{path}: no task here; a Harbor task is a folder with {harbor.FILE}, other tasks are lines of *.jsonl files"
            )
        return [task for entry in found for task in _at(entry, defaults)]
    if path.is_file():
        if path.name == harbor.FILE:
            return [(str(path), harbor.load_folder(path.parent, defaults))]
        return rows.load_file(path, defaults)
    raise TaskError(f"{path} does not exist")
