"""Tasks for a command: loaded, checked before anything starts, and their harnesses installed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from towline.cli import common
from towline.config import Settings
from towline.errors import ConfigError
from towline.schema import Task

UNNAMED = "unnamed"
"""Stands for the harness of tasks that name none, where no `--harness` does."""


def options(given: Sequence[str], harness: str = "") -> dict[str, Any]:
    """The options of a harness from `name=value` texts. What is text by default stays text; else the value may be JSON."""
    from towline.harnesses.registry import find_harness

    defaults: Mapping[str, Any] = find_harness(harness).options if harness else {}
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--option {text!r} is not name=value")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
        if isinstance(defaults.get(name), str) and not isinstance(found[name], list | dict):
            found[name] = value
    return found


def load_tasks(
    paths: Sequence[str], harness: str, samples: int | None, given: Sequence[str], console: Console
) -> list[Task]:
    """The tasks at the paths. `harness` and its options are for those that name none of their own."""
    from towline.harnesses.registry import find_harness
    from towline.tasks.loading import load

    if harness:
        find_harness(harness)
    loaded = load(paths, harness=harness or UNNAMED, samples=samples, harness_options=options(given, harness))
    others = sorted({task.harness for task in loaded} - {harness, UNNAMED})
    if harness and others:
        console.print(f"[yellow]note:[/] some tasks name a harness of their own: {', '.join(others)}", highlight=False)
    return loaded


def make_ready(tasks: Sequence[Task], settings: Settings, console: Console) -> None:
    """Refuse what cannot run, naming the task and the field, and install what is missing, before anything starts."""
    from towline.harnesses.install import Installs
    from towline.harnesses.registry import find_harness
    from towline.node.checking import problems

    if any(task.harness == UNNAMED for task in tasks):
        raise ConfigError("say which --harness to run (see `towline harness list`)")
    for task in tasks:
        for field, reason in problems(task, settings.session, settings.engines):
            raise ConfigError(f"task {task.task_id}: {field}: {reason}")
    cache = settings.node.cache
    installs = Installs(cache / "harnesses" if cache is not None else None)
    for harness in {
        task.harness: find_harness(task.harness).configured(task.harness_options) for task in tasks
    }.values():
        if not installs.ready(harness):
            console.print(f"installing {harness.name} {harness.version}, once for this machine", highlight=False)
            with console.status(f"installing {harness.name}"):
                common.run(installs.ensure(harness))
