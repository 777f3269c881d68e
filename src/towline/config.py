"""Settings: one `towline.toml`, one object, environment overrides.

Order of precedence: command line, environment (`TOWLINE_GATEWAY__PORT=8001`), `towline.toml`, defaults. Unknown keys are
errors that name the key.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from towline.errors import ConfigError
from towline.schema import BuilderName, ContextPolicy, Resources, SandboxKind, TurnRole
from towline.schema.vocabulary import POLICY, TRAINED_ROLES

FILE = "towline.toml"
STALL_SECONDS = 120.0
PREFIX = "TOWLINE_"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Limits(_Section):
    """What one session may use. `None` is no limit of its own."""

    turns: int | None = Field(None, ge=1)
    sampled_tokens: int | None = Field(None, ge=1)
    """Looked at when a turn starts, which may then use what is left: turns at the same time may together use more."""
    context: int | None = Field(None, ge=1)
    """Longest prompt plus reply in tokens; never more than the engine's own."""
    seconds: float | None = Field(None, gt=0)
    """Wall clock since the session was created, without the time that its engine was paused or unusable."""


class SamplingSettings(_Section):
    """How turns are sampled.

    `fixed` (for training): temperature, top-p and top-k are these, whatever the harness asks, and nothing else biases the
    distribution; what was overridden is recorded. `harness`: the harness's own values where it gives them.
    """

    mode: Literal["fixed", "harness"] = "fixed"
    temperature: float = Field(1.0, ge=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_tokens: int = Field(4096, ge=1)
    """Longest turn; a harness may ask for less."""


class RoleRule(_Section):
    """Which role a call has, whatever its shape. Every pattern that is given must match."""

    role: TurnRole
    model: str | None = None
    """Glob of the model name."""
    system: str | None = None
    """Regular expression found in the system prompt."""
    tools: str | None = None
    """Glob that the name of a declared tool matches; empty: the call declares no tools."""

    @model_validator(mode="after")
    def _is_a_rule(self) -> Self:
        if self.role is TurnRole.DISCARDED:
            raise ValueError("discarded turns are those that were never delivered; no rule can name them")
        if self.model is None and self.system is None and self.tools is None:
            raise ValueError("give at least one of model, system and tools")
        return self

    @field_validator("system")
    @classmethod
    def _pattern_compiles(cls, pattern: str | None) -> str | None:
        _compiled(pattern or "")
        return pattern


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error


class SessionSettings(_Section):
    """What a session is run under; every field may be set when the session is created."""

    policy: ContextPolicy = ContextPolicy.RETAIN
    builder: BuilderName = BuilderName.EXACT
    capture: Literal["exact", "plain"] = "exact"
    vanishing: Literal["fork", "keep"] = "fork"
    noise: tuple[str, ...] = ()
    """Patterns (regular expressions) of text that changes on every call and means nothing."""
    trained_roles: tuple[TurnRole, ...] = tuple(TRAINED_ROLES)
    roles: tuple[RoleRule, ...] = ()
    """Roles by model name, system prompt or tools; the first rule that matches a call decides. `docs/roles.md` has the
    rules for all other calls."""
    models: dict[str, str] = Field(default_factory=dict)
    """Which engine answers to which model name of the harness: `{"*haiku*": "small"}`. A name stands before a pattern, a
    pattern before those after it; `policy` is the main engine, which answers to every other name and alone is trained."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    sampling: SamplingSettings = SamplingSettings()
    limits: Limits = Limits()

    @field_validator("trained_roles")
    @classmethod
    def _roles_are_trainable(cls, roles: tuple[TurnRole, ...]) -> tuple[TurnRole, ...]:
        if len(set(roles)) != len(roles) or TurnRole.DISCARDED in roles:
            raise ValueError("each role once, and never discarded, which was never delivered")
        return roles

    @field_validator("template_args")
    @classmethod
    def _arguments_are_free(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        taken = {"messages", "tools", "add_generation_prompt"}.intersection(arguments)
        if taken:
            raise ValueError(f"{min(taken)!r} is given by the gateway")
        return arguments

    @field_validator("noise")
    @classmethod
    def _patterns_compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            _compiled(pattern)
        return patterns


class GatewaySettings(_Section):
    host: str = "127.0.0.1"
    port: int = Field(8500, ge=0, le=65535)
    """Provider routes, for harnesses. 0 takes a free port."""
    control_host: str = "127.0.0.1"
    control_port: int = Field(8501, ge=0, le=65535)
    public_url: str | None = None
    """How harnesses reach the provider routes, if not by host and port."""
    data: Path = Path("towline-data")
    journal: Literal["group", "os", "none"] = "group"
    body_bytes: int = Field(64 * 1024 * 1024, ge=1024)
    ping_seconds: float = Field(5.0, gt=0)
    """How often a stream that waits for its turn is kept alive."""
    orphan_seconds: float = Field(30.0, ge=0)
    """How long a turn goes on after its client left, for a retry to pick it up."""
    drain_seconds: float = Field(3.0, ge=0)
    """How long turns in flight may go on when the gateway is told to stop."""
    sessions: int = Field(10_000, ge=1)
    """Most open sessions at a time."""


class ModelSettings(_Section):
    folder: Path | None = None
    template: Path | None = None
    renderer: str = "auto"
    """`auto`, `sentinel`, or a family of the `renderers` package."""
    format: str | None = None
    """Tool-call format, if it is not to be found from the template."""
    special_text: Literal["engine", "plain"] = "engine"
    name: str = ""
    """The name under which `/v1/models` lists it; the folder's name by default."""


EngineKind = Literal["embedded", "smollm2", "llamacpp", "vllm", "sglang", "openai", "scripted"]


class EngineSettings(_Section):
    kind: EngineKind = "embedded"
    """`embedded`, `smollm2` and `llamacpp` run in this process; `vllm`, `sglang` and `openai` (any OpenAI-compatible chat
    server) are servers at `urls`; `scripted` is for tests. `docs/engines.md` compares them."""
    urls: tuple[str, ...] = ()
    """Where the servers are; several of vLLM or SGLang are replicas of one model and make a pool. A chat server's ends
    before `/chat/completions`."""
    model: str = ""
    """The model's name at those servers."""
    key_variable: str = "TOWLINE_UPSTREAM_KEY"
    """Environment variable that holds the servers' key; the key itself is never a setting."""
    stall_seconds: float = Field(STALL_SECONDS, gt=0)
    """A turn for which the engine has produced no token for so long is failed. Pauses and waits for a free replica do not
    count; the engine's own queue does."""
    seed: int | None = None
    threads: int | None = Field(None, ge=1)
    """Of an engine in this process. Default: one with llama.cpp, as many as torch likes with `embedded`."""
    max_batch: int | None = Field(None, ge=1)
    """Turns at the same time in an engine in this process. Default: 4 with llama.cpp, 16 with `embedded`."""
    context: int | None = Field(None, ge=16)
    """Longest prompt plus sample of an engine in this process. Default: the model's, with llama.cpp at most 8192."""

    @field_validator("urls", mode="before")
    @classmethod
    def _one_is_a_list_too(cls, urls: Any) -> Any:
        return [urls] if isinstance(urls, str) else urls


class NamedEngine(_Section):
    """A further engine with its model, frozen: `session.models` says what it answers to."""

    engine: EngineSettings = EngineSettings()
    model: ModelSettings = ModelSettings()


class StageSeconds(_Section):
    """How long a stage of a session may take where its task says nothing."""

    prepare: float = Field(3600.0, gt=0)
    """Installs, images and root file systems: once for all sessions of an environment."""
    init: float = Field(300.0, gt=0)
    run: float = Field(1800.0, gt=0)
    build: float = Field(300.0, gt=0)
    evaluate: float = Field(600.0, gt=0)


class NodeSettings(_Section):
    """How sessions run on one machine."""

    sandbox: SandboxKind = SandboxKind.BUBBLEWRAP
    """For environments that name none."""
    init_workers: int = Field(4, ge=1)
    run_workers: int = Field(16, ge=1)
    build_workers: int = Field(2, ge=1)
    evaluate_workers: int = Field(4, ge=1)
    """How many sessions may be in a stage at the same time."""
    ahead: int = Field(4, ge=0)
    """Sessions that are made ready before there is room for them to run."""
    warm: int = Field(2, ge=0)
    """Sandboxes kept ready for each environment."""
    seconds: StageSeconds = StageSeconds()
    hold_seconds: float = Field(600.0, gt=0)
    """How long sessions wait for an engine or a sandbox runtime that cannot be used; then they fail with its reason."""
    looping: int = Field(10, ge=0)
    """A session that makes the same call and gets the same result so many times in a row ends as `looping`; 0: never."""
    resources: Resources = Resources()
    """Limits of a sandbox where its task says nothing."""
    log_bytes: int = Field(16 * 1024 * 1024, ge=1024)
    """Most that is kept of what a harness prints."""
    artifact_bytes: int = Field(64 * 1024 * 1024, ge=1024)
    """Most that is kept of each artifact."""
    bases: dict[str, str] = Field(default_factory=dict)
    """Which root file system stands for which image of a Dockerfile: `{"python:3.*": "roots/python.tar"}`. An image that
    no pattern matches is the environment's own root, which is the host's unless it names another."""
    cache: Path | None = None
    """Installs and root file systems, shared by all sessions. Default: the user's cache folder."""
    cache_bytes: int = Field(20 * 1024**3, ge=1024**2)
    """Most that root file systems take there."""


class ServerSettings(_Section):
    """The rollout service."""

    host: str = "127.0.0.1"
    """Anything but loopback needs a key first."""
    port: int = Field(8600, ge=0, le=65535)
    data: Path = Path("towline-data")
    database: str | None = None
    """`postgresql://user@host/name`; a file in `data` by default. A password belongs into the environment's
    `TOWLINE_SERVER__DATABASE`."""
    segments: str | None = None
    """Where trajectories are kept: a folder, or any URL of fsspec. Default: a folder in `data`."""
    queue: int = Field(100_000, ge=1, le=10_000_000)
    """Most sessions that wait; further tasks are refused until there is room."""
    lease_seconds: float = Field(300.0, gt=0)
    """How long a consumer has for a result, if it does not say."""
    wait_seconds: float = Field(60.0, ge=0)
    """Longest that a call for results waits for the first."""
    keep_seconds: float = Field(7 * 86_400.0, ge=0)
    """How long a task's results are kept at least. A consumer that still needs them keeps them longer."""
    silent_seconds: float = Field(3 * 86_400.0, gt=0)
    """A consumer that was not seen for so long keeps nothing."""
    pacing_seconds: float = Field(900.0, gt=0)
    """A consumer that was not seen for so long, and holds no lease, paces nothing."""
    events: int = Field(100_000, ge=100)
    """How many events are kept for those who come back."""
    body_bytes: int = Field(64 * 1024 * 1024, ge=1024)
    stop_seconds: float = Field(10.0, ge=0)
    """How long sessions may go on when the server is told to stop; then they are kept as they are and run again later."""
    callback_hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "::1")
    """Hosts (`name` or `name:port`) that a task's callback may name."""
    callback_tries: int = Field(8, ge=1)
    quarantine_deaths: int = Field(3, ge=0)
    """Node deaths after which a session that was running at each of them is suspected of causing them; 0: never. Suspects
    run without other sessions, and one that keeps killing its node alone is quarantined: FAILED, and not tried again."""
    trust_submitters: bool = False
    """Whether keys of role `submit` may use the server's own machine in their tasks: its files, the process sandbox, an
    open network, modules to import. Admins may."""


LogFormat = Literal["text", "json"]


class LogSettings(_Section):
    """The log of `towline serve` and `towline gateway`."""

    format: LogFormat = "text"
    """`json`: one object per line, with a failed session's id, task, reason and stage as fields."""


class Settings(_Section):
    gateway: GatewaySettings = GatewaySettings()
    session: SessionSettings = SessionSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    engines: dict[str, NamedEngine] = Field(default_factory=dict)
    """Further engines by name."""
    node: NodeSettings = NodeSettings()
    server: ServerSettings = ServerSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _engines_are_known(self) -> Self:
        for name in self.engines:
            if name == POLICY or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
                raise ValueError(f"engines.{name}: a name is letters, digits, '.', '_' and '-', and not {POLICY!r}")
        for pattern, name in self.session.models.items():
            if name != POLICY and name not in self.engines:
                raise ValueError(f"session.models.{pattern}: there is no engine {name!r} under `engines`")
        return self

    @classmethod
    def load(cls, file: Path | None = None, **overrides: dict[str, Any]) -> Self:
        """From the file (`towline.toml` here, if there is one), the environment and `overrides`, in rising precedence."""
        path = file or Path(FILE)
        values: dict[str, Any] = {}
        if path.is_file():
            try:
                values = tomllib.loads(path.read_text("utf-8"))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
                raise ConfigError(f"{path}: {error}") from error
        elif file is not None:
            raise ConfigError(f"{file} does not exist")
        _merge(values, _from_environment(os.environ, cls))
        _merge(values, {section: _given(fields) for section, fields in overrides.items()})
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ConfigError(f"settings: {problems}") from error


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """Without what is `None`, at any depth."""
    return {name: _given(v) if isinstance(v, dict) else v for name, v in fields.items() if v is not None}


def _merge(base: dict[str, Any], over: dict[str, Any]) -> None:
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            _merge(base[name], value)
        else:
            base[name] = value


def _from_environment(environment: Mapping[str, str], settings: type[Settings]) -> dict[str, Any]:
    """`TOWLINE_SECTION__FIELD[__FIELD]`; a section that does not exist is somebody else's variable.

    Lists and objects are JSON.
    """
    values: dict[str, Any] = {}
    for name, value in sorted(environment.items()):
        if not name.startswith(PREFIX) or "__" not in name:
            continue
        section, *path, field = name[len(PREFIX) :].lower().split("__")
        if section in settings.model_fields:
            place = values.setdefault(section, {})
            for part in path:
                place = place.setdefault(part, {})
                if not isinstance(place, dict):
                    raise ConfigError(f"{name}: {part} is given a value of its own by another variable")
            place[field] = _list_or_object(value)
    return values


def _list_or_object(text: str) -> Any:
    """The JSON list or object that the text is, else the text."""
    try:
        return json.loads(text) if text.lstrip()[:1] in ("[", "{") else text
    except ValueError:
        return text
