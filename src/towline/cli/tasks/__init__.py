"""Load the tasks of a command, validate them before anything starts, and install their harnesses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from towline.cli import terminal
from towline.config import Settings
from towline.errors import ConfigError
from towline.schema import Task
from towline.schema.trust import parse_grants
from towline.tasks.fields import UNNAMED

__all__ = ["UNNAMED", "load_tasks", "parse_options", "prepare_tasks"]


def parse_options(given: Sequence[str], harness: str = "") -> dict[str, Any]:
    """Harness options from `name=value` strings. Values are JSON or text; options whose default is text stay text."""
    from towline.harnesses.registry import find_harness

    defaults: Mapping[str, Any] = find_harness(harness).options if harness else {}
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--option {text!r} is not of the form name=value")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
        if isinstance(defaults.get(name), str) and not isinstance(found[name], list | dict):
            found[name] = value
    return found


def parse_band(text: str) -> tuple[float, float]:
    """A band of pass rates, `LOW:HIGH`."""
    low, colon, high = text.partition(":")
    try:
        found = float(low), float(high)
    except ValueError:
        found = 1.0, 0.0
    if not colon or not 0 <= found[0] <= found[1] <= 1:
        raise ConfigError(f"--band {text!r} is not of the form LOW:HIGH with 0 <= LOW <= HIGH <= 1")
    return found


def load_tasks(
    paths: Sequence[str],
    harness: str,
    samples: int | None,
    given: Sequence[str],
    console: Console,
    *,
    trust: Sequence[str] | None = None,
    settings: Settings | None = None,
) -> list[Task]:
    """The tasks at the paths. `harness` and its options apply to tasks that name none.

    `trust` is what the files may name besides their own folders. `settings` name the roots; without them the tasks go to a
    service, which has its own.
    """
    from towline.harnesses.registry import find_harness
    from towline.tasks.loading import load_tasks

    if harness:
        find_harness(harness)
    loaded = load_tasks(
        paths,
        harness=harness or UNNAMED,
        samples=samples,
        harness_options=parse_options(given, harness),
        trust=parse_grants(trust or ()),
        registry=settings.registry if settings else None,
        uploads=settings is None,
    )
    others = sorted({task.harness for task in loaded} - {harness, UNNAMED})
    if harness and others:
        console.print(f"[yellow]note:[/] some tasks name their own harness: {', '.join(others)}", highlight=False)
    return loaded


def prepare_tasks(tasks: Sequence[Task], settings: Settings, console: Console) -> None:
    """Reject tasks that cannot run, naming the task and the field, and install missing harnesses."""
    from towline.harnesses.registry import find_harness
    from towline.node.task_check import task_problems
    from towline.runs.run import harness_installs

    if any(task.harness == UNNAMED for task in tasks):
        raise ConfigError("some tasks name no harness; give --harness (see `towline harness list`)")
    for task in tasks:
        for field, reason in task_problems(task, settings.session, settings.engines):
            raise ConfigError(f"task {task.task_id}: {field}: {reason}")
    installs = harness_installs(settings)
    for harness in {
        task.harness: find_harness(task.harness).configured(task.harness_options) for task in tasks
    }.values():
        if not installs.ready(harness):
            console.print(f"installing {harness.name} {harness.version} (once per machine)", highlight=False)
            with console.status(f"installing {harness.name}"):
                terminal.run_async(installs.ensure(harness))
