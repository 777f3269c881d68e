"""Harbor task folders as tasks: `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`, `steps/`.

A task's requests are honored, or the folder is refused with the reason. The network is narrower than in Harbor: without an
explicit `network_mode = "public"` or a list of allowed hosts, a task reaches only the gateway.

A folder is data. Its files are opened without following links, it names its own files relative to itself, and variables of
this machine (`${VAR}`) are read only if the user trusts it with them.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from towline.common.untrusted.data_files import MAX_TEXT, DataFolder, UnsafePath
from towline.schema import Task
from towline.schema.trust import Grant
from towline.tasks.fields import HARBOR_KEY, SourceLocation, TaskDefaults
from towline.tasks.harbor_toml import (
    Artifacts,
    EnvironmentTable,
    HarborToml,
    Healthcheck,
    MissingVariable,
    StepTable,
    expand_all,
    references,
)

FILE = "task.toml"
DOCKERFILE = "environment/Dockerfile"
WORKDIR = "/app"
"""Default working folder of a task that sets neither `environment.workdir` nor WORKDIR in its Dockerfile."""
LOGS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(\S+)\s*$", re.IGNORECASE | re.MULTILINE)
_MARGIN = 60.0
"""Seconds of the evaluation besides those of the tests, for collecting and uploading files."""


def load_folder(folder: Path, defaults: TaskDefaults) -> Task:
    """The task of a Harbor folder."""
    data = defaults.folder(folder.resolve())
    location = SourceLocation(data.path / FILE)
    try:
        return _load(data, location, defaults)
    except MissingVariable as error:
        raise location.error("env", str(error)) from error
    except UnsafePath as error:
        raise location.unsafe(error) from error


def _load(folder: DataFolder, location: SourceLocation, defaults: TaskDefaults) -> Task:
    config = _config(folder, location)
    _refuse(config, folder, location)
    ignored = config.unknown()
    notes = [f"ignored in {FILE}: {', '.join(ignored)}"] if ignored else []
    variables = FolderVariables(location, os.environ if Grant.ENV in defaults.trust else None)
    network = _network(config, notes, trusted=Grant.NETWORK in defaults.trust)
    values: dict[str, Any] = {
        "task_id": config.task.name if config.task else folder.path.name,
        "instruction": _instruction(folder, config),
        "steps": _steps(folder, config, location),
        "num_samples": defaults.samples or 1,
        "environment": _environment(folder, config, location, variables) | network,
        "evaluator": _evaluator(folder, config, variables),
        "timeouts": _timeouts(config),
        "metadata": {name: value for name, value in config.metadata.items() if name != HARBOR_KEY},
    }
    task = defaults.admit(values, folder.path, location)
    return task.model_copy(update={"metadata": {**task.metadata, HARBOR_KEY: _about(folder.path, config, notes)}})


class FolderVariables:
    """Expands `${VAR}` from this machine's variables, if the user trusts the folder with them; else refuses."""

    def __init__(self, location: SourceLocation, known: Mapping[str, str] | None):
        self._location = location
        self._known = known

    def expand(self, place: str, texts: Mapping[str, str]) -> dict[str, str]:
        if self._known is None:
            for name, text in texts.items():
                if wanted := references(text):
                    raise self._location.error(
                        f"{place}.{name}",
                        f"reads the variable {wanted[0]} of this machine; to allow it: --trust {Grant.ENV}",
                    )
        return expand_all(texts, self._known or {})


def _config(folder: DataFolder, location: SourceLocation) -> HarborToml:
    try:
        return HarborToml.model_validate(tomllib.loads(folder.read_text(FILE)))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise location.error("", str(error)) from error
    except ValidationError as error:
        raise location.invalid(error) from error


def _refuse(config: HarborToml, folder: DataFolder, location: SourceLocation) -> None:
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
    compose = next((name for name in _COMPOSE if os.path.lexists(folder.path / "environment" / name)), None)
    if compose:
        raise SourceLocation(folder.path / "environment" / compose).error(
            "", "not supported; a task runs in one sandbox"
        )
    if not environment.docker_image and not folder.is_file(DOCKERFILE):
        raise location.error("environment", "needs environment/Dockerfile or docker_image")


def _instruction(folder: DataFolder, config: HarborToml) -> str:
    """The task's instruction, or the instructions of its steps in order."""
    if not config.steps:
        return _text(folder, "instruction.md")
    parts = []
    for number, step in enumerate(config.steps, 1):
        text = _text(folder, f"steps/{step.name}/instruction.md").strip()
        parts.append(f"# Step {number} of {len(config.steps)}\n\n{text}\n")
    return "\n".join(parts)


def _steps(folder: DataFolder, config: HarborToml, location: SourceLocation) -> list[dict[str, Any]]:
    """Each step with its files, its set-up and its time limit."""
    workdir = _workdir(config.environment, folder, location)
    made = []
    for step in config.steps:
        brought = f"steps/{step.name}/workdir"
        setup = []
        if folder.is_file(f"{brought}/setup.sh"):
            setup.append(f"{shell_of(folder, f'{brought}/setup.sh')} ./setup.sh")
        if step.healthcheck:
            setup.append(_healthy(step.healthcheck))
        made.append(
            {
                "name": step.name,
                "instruction": _text(folder, f"steps/{step.name}/instruction.md"),
                "files": [{"target": workdir, "source": brought}] if folder.is_folder(brought) else [],
                "setup": setup,
                "seconds": step.agent.timeout_sec,
            }
        )
    return made


def shell_of(folder: DataFolder, script: str) -> str:
    """The shell in a script's shebang. Scripts are run by name of their shell because the executable bit is easily lost."""
    first = folder.read_bytes(script, MAX_TEXT).partition(b"\n")[0][:200]
    return "bash" if first.startswith(b"#!") and b"bash" in first else "sh"


def _environment(
    folder: DataFolder, config: HarborToml, location: SourceLocation, variables: FolderVariables
) -> dict[str, Any]:
    table = config.environment
    made: dict[str, Any] = {
        "env": variables.expand("environment.env", table.env),
        "workdir": _workdir(table, folder, location),
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
        made["build"] = "environment"
    if table.healthcheck:
        made["setup"].append(_healthy(table.healthcheck))
    return made


def _workdir(table: EnvironmentTable, folder: DataFolder, location: SourceLocation) -> str:
    if table.workdir:
        if not table.workdir.startswith("/"):
            raise location.error("environment.workdir", "must be an absolute path")
        return table.workdir
    if not table.docker_image:
        # A later WORKDIR may be relative to the previous one.
        at = ""
        for given in _WORKDIR.findall(_text(folder, DOCKERFILE)):
            at = os.path.normpath(os.path.join(at or "/", given.strip("\"'")))
        if at and "$" not in at and at != "/":
            return at
    return WORKDIR


def _network(config: HarborToml, notes: list[str], *, trusted: bool) -> dict[str, Any]:
    """What the agent may reach. The sandbox's proxy enforces an allow-list, of a folder that is trusted with a network."""
    mode = config.agent.network_mode or config.environment.network_mode
    hosts = config.agent.allowed_hosts or config.environment.allowed_hosts
    if mode == "public":
        return {"network": "open"}
    if hosts and mode != "no-network" and trusted:
        return {"network": "open", "allowed_hosts": list(hosts)}
    if hosts and mode != "no-network":
        notes.append(f"only the gateway is reachable, not {', '.join(hosts)}; to allow them: --trust {Grant.NETWORK}")
    return {"network": "gateway"}


def _healthy(check: Healthcheck) -> str:
    """A shell loop that succeeds when the check does, and fails after too many failed checks."""
    command = f"timeout {check.timeout_sec:g} sh -c {shlex.quote(check.command)}"
    grace = int(check.start_period_sec // check.start_interval_sec)
    return (
        f"n=0; until {command}; do n=$((n+1)); "
        f"if [ $n -ge {grace + check.retries} ]; then echo 'the health check failed' >&2; exit 1; fi; "
        f"if [ $n -lt {grace} ]; then sleep {check.start_interval_sec:g}; else sleep {check.interval_sec:g}; fi; done"
    )


def _evaluator(folder: DataFolder, config: HarborToml, variables: FolderVariables) -> dict[str, Any]:
    verifier = config.verifier
    made: dict[str, Any] = {
        "kind": "harbor",
        "tests": "tests",
        "environment_mode": verifier.environment_mode or "separate",
        "env": variables.expand("verifier.env", verifier.env),
        "user": verifier.user or "",
        "seconds": verifier.timeout_sec,
        "artifacts": _sources(config.artifacts),
        "secret": [part for part in ("tests", "solution", "steps") if folder.is_folder(part)],
    }
    if config.steps:
        made["steps"] = [_step(folder, step, config, variables) for step in config.steps]
        made["strategy"] = config.multi_step_reward_strategy
        if not folder.is_folder("tests"):
            made["tests"] = ""
    elif not folder.is_file("tests/test.sh"):
        raise SourceLocation(folder.path / "tests" / "test.sh").error("", "missing; it scores the task")
    return made


def _step(folder: DataFolder, step: StepTable, config: HarborToml, variables: FolderVariables) -> dict[str, Any]:
    tests = f"steps/{step.name}/tests"
    if not folder.is_file(f"{tests}/test.sh") and not folder.is_file("tests/test.sh"):
        raise SourceLocation(folder.path / tests / "test.sh").error(
            "", "missing; add one for this step, or one for the whole task"
        )
    own = "timeout_sec" in step.verifier.model_fields_set
    return {
        "name": step.name,
        "tests": tests if folder.is_folder(tests) else "",
        "min_reward": step.min_reward,
        "seconds": step.verifier.timeout_sec if own else config.verifier.timeout_sec,
        "env": variables.expand(f"steps.{step.name}.verifier.env", step.verifier.env),
        "artifacts": _sources(step.artifacts),
    }


def _timeouts(config: HarborToml) -> dict[str, Any]:
    steps = [s.verifier if "timeout_sec" in s.verifier.model_fields_set else config.verifier for s in config.steps]
    return {
        "init": config.environment.build_timeout_sec,
        "run": config.agent.timeout_sec,
        "evaluate": sum(table.timeout_sec for table in steps or [config.verifier]) + _MARGIN,
    }


def _about(folder: Path, config: HarborToml, notes: list[str]) -> dict[str, Any]:
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
    return about


def _sources(*lists: Artifacts) -> list[str]:
    return list(dict.fromkeys(artifact.source for artifacts in lists for artifact in artifacts))


def _text(folder: DataFolder, name: str) -> str:
    place = SourceLocation(folder.path / name)
    try:
        text = folder.read_text(name)
    except FileNotFoundError as error:
        raise place.error("", "missing") from error
    except UnsafePath as error:
        raise place.unsafe(error) from error
    except (OSError, UnicodeDecodeError) as error:
        raise place.error("", f"cannot be read: {error}") from error
    if not text.strip():
        raise place.error("", "is empty")
    return text
