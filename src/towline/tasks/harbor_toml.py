"""`task.toml` of a Harbor task folder (schema 1.4), with Harbor's own names.

Keys that Towline does not use are listed in the task's metadata; keys that change what the task means and cannot be
honored are refused. Older spellings (`version`, `memory`, `storage`, `allow_internet`) are accepted. `${VAR}` and
`${VAR:-default}` in environment tables are expanded from the loader's environment, for folders that the user trusts with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator

from towline.errors import ConfigError

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)]
"""A user by name or number."""
NetworkMode = Literal["public", "no-network", "allowlist"]
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT])I?B?\s*$", re.IGNORECASE)
_MEGABYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}


class _Table(BaseModel):
    """Like Harbor, ignores unknown keys, so that files of a later schema can be read."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def unknown(self) -> list[str]:
        """Keys that are set and not used."""
        found = list(self.model_extra or ())
        for name, value in self.__dict__.items():
            for table in value if isinstance(value, list) else [value]:
                if isinstance(table, _Table):
                    found += [f"{name}.{key}" for key in table.unknown()]
        return sorted(found)


class Healthcheck(_Table):
    command: str
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: float = Field(0.0, ge=0)
    start_interval_sec: Seconds = 5.0
    retries: int = Field(3, ge=1)


class AgentTable(_Table):
    timeout_sec: Seconds | None = None
    user: Name | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] = Field(default_factory=list)


class VerifierTable(_Table):
    timeout_sec: Seconds = 600.0
    env: dict[str, str] = Field(default_factory=dict)
    user: Name | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: dict[str, Any] | None = None
    collect: list[Any] = Field(default_factory=list)


class EnvironmentTable(_Table):
    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    cpus: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    memory_mb: int | None = Field(None, ge=1)
    storage_mb: int | None = Field(None, ge=1)
    gpus: int = 0
    tpu: dict[str, Any] | None = None
    os: str = "linux"
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] = Field(default_factory=list)
    allow_internet: bool | None = None
    healthcheck: Healthcheck | None = None
    mcp_servers: list[Any] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _older_sizes(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        if isinstance(data.get("os"), str):
            data["os"] = data["os"].lower()
        for old in ("memory", "storage"):
            if old in data:
                size = _SIZE.match(str(data[old]))
                if size is None:
                    raise ValueError(f"{old} must be a size such as 2G or 512M")
                data.setdefault(f"{old}_mb", max(1, round(float(size[1]) * _MEGABYTES[size[2].upper()])))
                del data[old]
        return data


class SolutionTable(_Table):
    env: dict[str, str] = Field(default_factory=dict)


class Package(_Table):
    name: str = Field(min_length=1)
    version: str = ""
    description: str = ""
    authors: list[Any] = Field(default_factory=list)
    keywords: list[str] = Field(default_factory=list)


class Artifact(_Table):
    source: str


def _artifact(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


Artifacts = list[Annotated[Artifact, BeforeValidator(_artifact)]]


class StepTable(_Table):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    min_reward: FiniteFloat | dict[str, FiniteFloat] | None = None
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    healthcheck: Healthcheck | None = None
    artifacts: Artifacts = Field(default_factory=list)


class HarborToml(_Table):
    schema_version: str = "1.0"
    task: Package | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    steps: list[StepTable] = Field(default_factory=list)
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"
    artifacts: Artifacts = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _older_version(cls, data: Any) -> Any:
        if isinstance(data, dict) and "version" in data:
            data = {"schema_version": str(data["version"]), **data}
            del data["version"]
        return data

    @model_validator(mode="after")
    def _step_names_are_unique(self) -> HarborToml:
        names = [step.name for step in self.steps]
        if len(set(names)) != len(names):
            raise ValueError("two steps have the same name")
        return self


_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


class MissingVariable(ConfigError):
    """A reference without a default to a variable that is not set."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """The text with every reference expanded. An empty variable counts as missing, as in a shell's `:-`."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if variables.get(name):
            return variables[name]
        if default is None:
            if name in variables:
                return ""
            raise MissingVariable(f"the variable {name} is not set; set it, or write ${{{name}:-default}}")
        return default

    return _REFERENCE.sub(value, text)


def references(text: str) -> list[str]:
    """The variables that a text refers to."""
    return [match[1] for match in _REFERENCE.finditer(text)]


def expand_all(texts: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    return {name: expand(text, variables) for name, text in texts.items()}
