"""Checks of a task before it runs: what is wrong with it. What an untrusted task may name is `schema/untrusted.py`."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from towline.common.mappings import deep_merge
from towline.config import SessionSettings
from towline.errors import ConfigError
from towline.evaluators.registry import make_evaluator
from towline.harnesses.base import Harness, LaunchContext
from towline.harnesses.registry import find_harness
from towline.sandboxes.images.oci.buildah import Buildah
from towline.sandboxes.images.oci.references import names_image, spellings
from towline.sandboxes.images.oci.store import HINT
from towline.schema import POLICY, Environment, ImageBase, SandboxKind, Task


def task_problems(task: Task, defaults: SessionSettings, engines: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Invalid fields, each with the reason. Checks that the paths a task names exist on the node.

    `engines`: the names of the gateway's engines besides the policy.
    """
    try:
        harness = find_harness(task.harness)
    except ConfigError as error:
        yield "harness", str(error)
        return
    yield from _options(harness, task)
    yield from _evaluator(task)
    yield from _settings({**harness.settings, **task.settings}, defaults, engines)
    environment = task.environment
    given = {"environment": environment.files, **{f"steps.{step.name}": step.files for step in task.steps}}
    for place, files in given.items():
        for index, file in enumerate(files):
            if file.source is not None and not Path(file.source).exists():
                yield f"{place}.files[{index}].source", f"{file.source} does not exist"
    if environment.build and not (Path(environment.build) / "Dockerfile").is_file():
        yield "environment.build", f"{environment.build} contains no Dockerfile"


def root_problems(
    environment: Environment,
    sandbox: SandboxKind,
    base: ImageBase = ImageBase.REGISTRY,
    bases: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Problems of an environment's root, for the runtime that it runs in. `base` and `bases` say what images are."""
    root = environment.root
    if sandbox is SandboxKind.PROCESS and root:
        yield "process sandboxes have no root of their own: use bubblewrap, docker or apptainer"
    elif sandbox is SandboxKind.APPTAINER and not root and not environment.build:
        yield "apptainer sandboxes need a root of their own: set a folder or a tar file"
    elif sandbox is SandboxKind.DOCKER and not root and not environment.build:
        yield "docker sandboxes need a root of their own: set an image, a folder or a tar file"
    elif sandbox is not SandboxKind.DOCKER and names_image(root):
        local = any(fnmatch.fnmatchcase(name, pattern) for name in spellings(root) for pattern in bases or {})
        missing = Buildah.missing()
        if missing and not local and (environment.base or base) is ImageBase.REGISTRY:
            yield f"{root!r} is an image, and this machine lacks {' and '.join(missing)} to pull it; install it, or {HINT}"
    elif root and (sandbox is not SandboxKind.DOCKER or root.startswith((".", "/", "~"))) and not Path(root).exists():
        yield f"no root file system at {root!r} on this node; set a folder, a tar file or an image"


def _options(harness: Harness, task: Task) -> Iterator[tuple[str, str]]:
    place = LaunchContext("http://127.0.0.1", "key", "model", task.instruction, "/opt", options=task.harness_options)
    try:
        made = harness.configured(task.harness_options)
        made.launch(made.resolve(place))
    except ConfigError as error:
        yield "harness_options", str(error)
    except Exception as error:
        # Options are arbitrary JSON: a value of the wrong type fails wherever the harness first uses it.
        yield "harness_options", f"harness {harness.name} cannot use these options: {error}"


def _evaluator(task: Task) -> Iterator[tuple[str, str]]:
    try:
        make_evaluator(task.evaluator)
    except ConfigError as error:
        field, colon, reason = str(error).partition(": ")
        known = colon and field.startswith("evaluator")
        yield (field, reason) if known else ("evaluator", str(error))
    except Exception as error:
        yield "evaluator", f"cannot create the evaluator: {error}"


def _settings(
    given: Mapping[str, Any], defaults: SessionSettings, engines: Collection[str]
) -> Iterator[tuple[str, str]]:
    try:
        settings = SessionSettings.model_validate(deep_merge(defaults.model_dump(mode="json"), given))
    except ValidationError as error:
        for problem in error.errors():
            yield ".".join(("settings", *map(str, problem["loc"]))), problem["msg"]
        return
    for pattern, name in settings.models.items():
        if name not in (POLICY, *engines):
            yield (
                f"settings.models.{pattern}",
                f"unknown engine {name!r}; available: {', '.join((POLICY, *engines))}",
            )
