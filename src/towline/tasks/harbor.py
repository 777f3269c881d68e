"""Harbor task folders as tasks: `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`, `steps/`.

A task's requests are honored, or the folder is refused with the reason. The network is narrower than in Harbor: without an
explicit `network_mode = "public"` a task reaches only the gateway, even if it lists allowed hosts, because an allow-list
cannot be enforced here.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from towline.schema import Task
from towline.tasks.fields import SourceLocation, TaskDefaults
from towline.tasks.harbor_toml import (
    Artifacts,
    EnvironmentTable,
    HarborToml,
    Healthcheck,
    MissingVariable,
    StepTable,
    expand_all,
)

FILE = "task.toml"
WORKDIR = "/app"
"""Default working folder of a task that sets neither `environment.workdir` nor WORKDIR in its Dockerfile."""
LOGS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(\S+)\s*$", re.IGNORECASE | re.MULTILINE)
_MARGIN = 60.0
"""Seconds of the evaluation besides those of the tests, for collecting and uploading files."""


def load_folder(folder: Path, defaults: TaskDefaults) -> Task:
    """The task of a Harbor folder."""
    folder = folder.resolve()
    location = SourceLocation(folder / FILE)
    config = _config(location)
    _refuse(config, folder, location)
    name = config.task.name if config.task else folder.name
    ignored = config.unknown()
    notes = [f"ignored in {FILE}: {', '.join(ignored)}"] if ignored else []
    network = _network(config, notes)
    try:
        values: dict[str, Any] = {
            "task_id": name,
            "instruction": _instruction(folder, config),
            "steps": _steps(folder, config, location),
            "harness": defaults.harness,
            "harness_options": dict(defaults.harness_options),
            "num_samples": defaults.samples or 1,
            "environment": _environment(folder, config, location) | {"network": network},
            "evaluator": _evaluator(folder, config),
            "timeouts": _timeouts(config),
            "metadata": _metadata(folder, config, notes),
        }
    except MissingVariable as error:
        raise location.error("env", str(error)) from error
    try:
        return Task.model_validate(values)
    except ValidationError as error:
        raise location.invalid(error) from error


def _config(location: SourceLocation) -> HarborToml:
    try:
        return HarborToml.model_validate(tomllib.loads(location.path.read_text("utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise location.error("", str(error)) from error
    except ValidationError as error:
        raise location.invalid(error) from error


def _refuse(config: HarborToml, folder: Path, location: SourceLocation) -> None:
    environment = config.environment
    if environment.gpus or environment.tpu:
        raise location.error("environment.gpus", "sandboxes have no GPU or TPU; remove the requirement")
    for name, verifier in [
        ("verifier", config.verifier),
        *((f"steps.{s.name}.verifier", s.verifier) for s in config.steps),
    ]:
        if verifier.environment is not None:
            raise location.error(f"{name}.environment", "not supported; tests run in the task's own environment")
        if verifier.collect:
            raise location.error(f"{name}.collect", "not supported; move these commands into test.sh")
    if environment.os != "linux":
        raise location.error("environment.os", f"sandboxes run Linux, not {environment.os}")
    if environment.mcp_servers:
        raise location.error("environment.mcp_servers", "MCP servers beside the sandbox are not supported; remove them")
    compose = next((name for name in _COMPOSE if (folder / "environment" / name).exists()), None)
    if compose:
        raise SourceLocation(folder / "environment" / compose).error("", "not supported; a task runs in one sandbox")
    if not environment.docker_image and not (folder / "environment" / "Dockerfile").is_file():
        raise location.error("environment", "needs environment/Dockerfile or docker_image")


def _instruction(folder: Path, config: HarborToml) -> str:
    """The task's instruction, or the instructions of its steps in order."""
    if not config.steps:
        return _text(folder / "instruction.md")
    parts = []
    for number, step in enumerate(config.steps, 1):
        text = _text(folder / "steps" / step.name / "instruction.md").strip()
        parts.append(f"# Step {number} of {len(config.steps)}\n\n{text}\n")
    return "\n".join(parts)


def _steps(folder: Path, config: HarborToml, location: SourceLocation) -> list[dict[str, Any]]:
    """Each step with its files, its set-up and its time limit."""
    workdir = _workdir(config.environment, folder / "environment" / "Dockerfile", location)
    made = []
    for step in config.steps:
        brought = folder / "steps" / step.name / "workdir"
        setup = []
        if (brought / "setup.sh").is_file():
            setup.append(f"{shell_of(brought / 'setup.sh')} ./setup.sh")
        if step.healthcheck:
            setup.append(_healthy(step.healthcheck))
        made.append(
            {
                "name": step.name,
                "instruction": _text(folder / "steps" / step.name / "instruction.md"),
                "files": [{"target": workdir, "source": str(brought)}] if brought.is_dir() else [],
                "setup": setup,
                "seconds": step.agent.timeout_sec,
            }
        )
    return made


def shell_of(script: Path) -> str:
    """The shell in a script's shebang. Scripts are run by name of their shell because the executable bit is easily lost."""
    with open(script, "rb") as file:
        first = file.readline(200)
    return "bash" if first.startswith(b"#!") and b"bash" in first else "sh"


def _environment(folder: Path, config: HarborToml, location: SourceLocation) -> dict[str, Any]:
    table = config.environment
    dockerfile = folder / "environment" / "Dockerfile"
    made: dict[str, Any] = {
        "env": expand_all(table.env, os.environ),
        "workdir": _workdir(table, dockerfile, location),
        "setup": [f"mkdir -p {' '.join(LOGS)}"],
        "user": config.agent.user or "",
        "resources": {"cpus": table.cpus, "memory_mb": table.memory_mb, "disk_mb": table.storage_mb},
        "artifacts": _sources(config.artifacts, *(step.artifacts for step in config.steps)),
    }
    if "image_base" in config.metadata:
        made["base"] = config.metadata["image_base"]
    if table.docker_image:
        made["root"] = table.docker_image
    else:
        made["build"] = str(dockerfile.parent)
    if table.healthcheck:
        made["setup"].append(_healthy(table.healthcheck))
    return made


def _workdir(table: EnvironmentTable, dockerfile: Path, location: SourceLocation) -> str:
    if table.workdir:
        if not table.workdir.startswith("/"):
            raise location.error("environment.workdir", "must be an absolute path")
        return table.workdir
    if not table.docker_image:
        # A later WORKDIR may be relative to the previous one.
        at = ""
        for given in _WORKDIR.findall(_text(dockerfile)):
            at = os.path.normpath(os.path.join(at or "/", given.strip("\"'")))
        if at and "$" not in at and at != "/":
            return at
    return WORKDIR


def _network(config: HarborToml, notes: list[str]) -> str:
    mode = config.agent.network_mode or config.environment.network_mode
    hosts = config.agent.allowed_hosts or config.environment.allowed_hosts
    if mode == "allowlist" or (mode is None and hosts):
        notes.append(
            f"an allow-list of hosts cannot be enforced: only the gateway is reachable, not {', '.join(hosts)}"
        )
    return "open" if mode == "public" else "gateway"


def _healthy(check: Healthcheck) -> str:
    """A shell loop that succeeds when the check does, and fails after too many failed checks."""
    command = f"timeout {check.timeout_sec:g} sh -c {shlex.quote(check.command)}"
    grace = int(check.start_period_sec // check.start_interval_sec)
    return (
        f"n=0; until {command}; do n=$((n+1)); "
        f"if [ $n -ge {grace + check.retries} ]; then echo 'the health check failed' >&2; exit 1; fi; "
        f"if [ $n -lt {grace} ]; then sleep {check.start_interval_sec:g}; else sleep {check.interval_sec:g}; fi; done"
    )


def _evaluator(folder: Path, config: HarborToml) -> dict[str, Any]:
    verifier = config.verifier
    made: dict[str, Any] = {
        "kind": "harbor",
        "tests": str(folder / "tests"),
        "environment_mode": verifier.environment_mode or "separate",
        "env": expand_all(verifier.env, os.environ),
        "user": verifier.user or "",
        "seconds": verifier.timeout_sec,
        "artifacts": _sources(config.artifacts),
        "secret": [str(folder / part) for part in ("tests", "solution", "steps") if (folder / part).is_dir()],
    }
    if config.steps:
        made["steps"] = [_step(folder, step, config) for step in config.steps]
        made["strategy"] = config.multi_step_reward_strategy
        if not (folder / "tests").is_dir():
            made["tests"] = ""
    elif not (folder / "tests" / "test.sh").is_file():
        raise SourceLocation(folder / "tests" / "test.sh").error("", "missing; it scores the task")
    return made


def _step(folder: Path, step: StepTable, config: HarborToml) -> dict[str, Any]:
    tests = folder / "steps" / step.name / "tests"
    if not (tests / "test.sh").is_file() and not (folder / "tests" / "test.sh").is_file():
        raise SourceLocation(tests / "test.sh").error("", "missing; add one for this step, or one for the whole task")
    own = "timeout_sec" in step.verifier.model_fields_set
    return {
        "name": step.name,
        "tests": str(tests) if tests.is_dir() else "",
        "min_reward": step.min_reward,
        "seconds": step.verifier.timeout_sec if own else config.verifier.timeout_sec,
        "env": expand_all(step.verifier.env, os.environ),
        "artifacts": _sources(step.artifacts),
    }


def _timeouts(config: HarborToml) -> dict[str, Any]:
    steps = [s.verifier if "timeout_sec" in s.verifier.model_fields_set else config.verifier for s in config.steps]
    return {
        "init": config.environment.build_timeout_sec,
        "run": config.agent.timeout_sec,
        "evaluate": sum(table.timeout_sec for table in steps or [config.verifier]) + _MARGIN,
    }


def _metadata(folder: Path, config: HarborToml, notes: list[str]) -> dict[str, Any]:
    about: dict[str, Any] = {"folder": str(folder), "schema_version": config.schema_version}
    if config.task:
        about |= {"version": config.task.version, "description": config.task.description}
        about["keywords"] = config.task.keywords
    if config.solution.env:
        about["solution_env"] = config.solution.env
    if config.steps:
        about["steps"] = [step.name for step in config.steps]
    if notes:
        about["notes"] = notes
    return {**config.metadata, "harbor": about}


def _sources(*lists: Artifacts) -> list[str]:
    return list(dict.fromkeys(artifact.source for artifacts in lists for artifact in artifacts))


def _text(path: Path) -> str:
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError as error:
        raise SourceLocation(path).error("", "missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SourceLocation(path).error("", f"cannot be read: {error}") from error
    if not text.strip():
        raise SourceLocation(path).error("", "is empty")
    return text
