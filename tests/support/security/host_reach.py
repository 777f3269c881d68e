"""What a task that was accepted would reach on the node's machine, found by doing what a node does with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from towline.evaluators.registry import make_evaluator
from towline.harnesses.registry import find_harness
from towline.sandboxes.files import archives
from towline.sandboxes.images.oci.references import names_image, parse_reference
from towline.schema import Network, SandboxKind, Task
from towline.schema.trust import pattern_problem

SECRET = "the operator's secret"
MARKER = "HOST_REACHED"
"""The variable that code of a task sets if it runs in this process."""


def host_reach(task: Task, default: SandboxKind = SandboxKind.BUBBLEWRAP) -> list[str]:
    """Everything of the host that the task would reach: secrets that were read, code that ran, places it may talk to."""
    os.environ.pop(MARKER, None)
    environment, found = task.environment, []
    if (environment.sandbox or default) is SandboxKind.PROCESS:
        found.append("programs without isolation")
    if environment.network is Network.OPEN:
        found.append("other machines")
    if environment.root and not names_image(environment.root):
        found += [f"root {environment.root}"] * _holds_secret(Path(environment.root).expanduser())
    elif environment.root:
        registry = parse_reference(environment.root).registry
        found += [f"registry {registry}"] if registry != "docker.io" else []
    if environment.build:
        found += [f"build {environment.build}"] * _holds_secret(Path(environment.build))
    sources = [file for part in (environment, *task.steps) for file in part.files]
    named = [file.source for file in sources if file.source]
    named += [file["source"] for file in task.evaluator.get("files", []) if file.get("source")]
    steps = task.evaluator.get("steps", [])
    named += [one.get("tests", "") for one in (task.evaluator, *steps)] + task.evaluator.get("secret", [])
    found += [f"file {name}" for name in named if name and _holds_secret(Path(name).expanduser())]
    found += _code(task)
    found += [f"pattern {one[:40]}" for one in _patterns(task) if pattern_problem(one)]
    if MARKER in os.environ:
        found.append("code in this process")
    return found


def _code(task: Task) -> list[str]:
    found = []
    harness = find_harness(task.harness)
    if task.harness_options and ":" not in task.harness:
        made = harness.configured(task.harness_options)
        found += [f"mount {path}" for path in made.mounts.values() if _holds_secret(path)]
        found += [f"install {made.install}"] if made.install != harness.install else []
    if task.evaluator.get("kind") == "python":
        make_evaluator(task.evaluator)
    return found


def _patterns(task: Task) -> list[str]:
    roles = [role["system"] for role in task.settings.get("roles", []) if role.get("system")]
    pattern = task.evaluator.get("pattern")
    return [*task.settings.get("noise", []), *roles, *([pattern] if pattern else [])]


def _holds_secret(path: Path) -> bool:
    """Whether what a node packs or mounts of this path has the secret in it."""
    try:
        if path.is_dir():
            return SECRET.encode() in archives.pack_folder(path)
        return SECRET.encode() in path.read_bytes()
    except (OSError, archives.ArchiveError):
        return False


def evil_module(folder: Path, name: str) -> Path:
    """A Python module that shows that it was imported, with a harness and a reward function."""
    path = folder / f"{name}.py"
    path.write_text(
        f"import os\nos.environ[{MARKER!r}] = '1'\n"
        "from towline.harnesses.nothing import HARNESS\n"
        "def reward(answer):\n    return 1.0\n"
    )
    return path


def merged(task: dict[str, Any], changes: dict[str, Any]) -> Task:
    return Task.model_validate({"task_id": "t", "instruction": "x", "harness": "nothing", **task, **changes})
