"""Settings: one `towline.toml`, one object, environment overrides; layered by pydantic-settings.

Order of precedence: command line, environment (`TOWLINE_GATEWAY__PORT=8001`), `towline.toml`, defaults. An unknown key or a
wrong value is an error on one line that names its source (file, variable or option) and the key. A file that was found in
the working folder, and not named, sets less (`found_file.py`).
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from towline.common.untrusted.patterns import compile_pattern
from towline.config.budgets import SessionBudgets
from towline.config.cluster import ClusterSettings
from towline.config.egress import EgressSettings
from towline.config.found_file import VARIABLE, check_found_file
from towline.config.http import HttpLimits
from towline.config.images import ImageSettings
from towline.config.section import MAX_BODY_BYTES, MAX_BYTES, MAX_COUNT, MAX_SECONDS, MAX_TOKENS, Section
from towline.config.sources import PREFIX, EnvironmentSource, describe, without_none
from towline.config.tenants import Tenancy
from towline.errors import ConfigError
from towline.schema import BuilderName, ContextPolicy, Resources, SandboxKind, TurnRole
from towline.schema.trust import ROOT_NAME, Grant, RootRegistry
from towline.schema.vocabulary import POLICY, TRAINED_ROLES

FILE = "towline.toml"
STALL_SECONDS = 120.0


class Limits(Section):
    """Limits of one session. `None`: no limit."""

    turns: int | None = Field(None, ge=1, le=MAX_COUNT)
    sampled_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    """Checked when a turn starts; the turn may use what is left, so concurrent turns can exceed the limit together."""
    context: int | None = Field(None, ge=1, le=MAX_TOKENS)
    """Longest prompt plus reply in tokens; never more than the engine's own."""
    seconds: float | None = Field(None, gt=0, le=MAX_SECONDS)
    """Wall clock since the session was created, not counting time in which its engine was paused or down."""


class SamplingSettings(Section):
    """How turns are sampled.

    `fixed` (for training): these temperature, top-p and top-k values replace what the harness asks for, and nothing else
    biases the distribution; overrides are recorded. `harness`: the harness's own values where it sends them.
    """

    mode: Literal["fixed", "harness"] = "fixed"
    temperature: float = Field(1.0, ge=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=MAX_COUNT)
    max_tokens: int = Field(4096, ge=1, le=MAX_TOKENS)
    """Longest turn; a harness may request less."""


class RoleRule(Section):
    """Assigns a role to matching calls. Every pattern that is set must match."""

    role: TurnRole
    model: str | None = None
    """Glob of the model name."""
    system: str | None = None
    """Regular expression (RE2) searched in the system prompt."""
    tools: str | None = None
    """Glob that matches the name of a declared tool; empty: the call declares no tools."""

    @model_validator(mode="after")
    def _is_a_rule(self) -> Self:
        if self.role is TurnRole.DISCARDED:
            raise ValueError("discarded turns were never delivered to the harness; a rule cannot assign this role")
        if self.model is None and self.system is None and self.tools is None:
            raise ValueError("set at least one of model, system and tools")
        return self

    @field_validator("system")
    @classmethod
    def _pattern_compiles(cls, pattern: str | None) -> str | None:
        compile_pattern(pattern or "")
        return pattern


class SessionSettings(Section):
    """Defaults of a session; every field can be set per session."""

    policy: ContextPolicy = ContextPolicy.RETAIN
    builder: BuilderName = BuilderName.EXACT
    capture: Literal["exact", "plain"] = "exact"
    vanishing: Literal["fork", "keep"] = "fork"
    noise: tuple[str, ...] = ()
    """Regular expressions (RE2) for text that changes on every call and carries no meaning."""
    trained_roles: tuple[TurnRole, ...] = tuple(TRAINED_ROLES)
    roles: tuple[RoleRule, ...] = ()
    """Roles by model name, system prompt or tools; the first matching rule wins. `docs/roles.md` has the rules for all
    other calls."""
    models: dict[str, str] = Field(default_factory=dict)
    """Which engine serves which model name of the harness: `{"*haiku*": "small"}`. An exact name wins over patterns, then
    the first matching pattern; `policy` is the main engine, which serves every other name and is the only one trained."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    sampling: SamplingSettings = SamplingSettings()
    limits: Limits = Limits()

    @field_validator("trained_roles")
    @classmethod
    def _roles_are_trainable(cls, roles: tuple[TurnRole, ...]) -> tuple[TurnRole, ...]:
        if len(set(roles)) != len(roles) or TurnRole.DISCARDED in roles:
            raise ValueError("name each role once, and never `discarded`: those turns were not delivered")
        return roles

    @field_validator("template_args")
    @classmethod
    def _arguments_are_free(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        taken = {"messages", "tools", "add_generation_prompt"}.intersection(arguments)
        if taken:
            raise ValueError(f"{min(taken)!r} is set by the gateway")
        return arguments

    @field_validator("noise")
    @classmethod
    def _patterns_compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            compile_pattern(pattern)
        return patterns


class GatewaySettings(Section):
    """The model endpoint of harnesses."""

    host: str = "127.0.0.1"
    port: int = Field(8500, ge=0, le=65535)
    """Provider routes, for harnesses. 0 picks a free port."""
    control_host: str = "127.0.0.1"
    control_port: int = Field(8501, ge=0, le=65535)
    public_url: str | None = None
    """URL under which harnesses reach the provider routes. Default: host and port."""
    data: Path = Path("towline-data")
    journal: Literal["group", "os", "none"] = "group"
    body_bytes: int = Field(64 * 1024 * 1024, ge=1024, le=MAX_BODY_BYTES)
    ping_seconds: float = Field(5.0, gt=0, le=MAX_SECONDS)
    """Interval of keep-alive pings on a stream that waits for its turn."""
    orphan_seconds: float = Field(30.0, ge=0, le=MAX_SECONDS)
    """How long a turn continues after its client disconnected, so that a retry can pick it up."""
    drain_seconds: float = Field(3.0, ge=0, le=MAX_SECONDS)
    """How long turns in flight may continue when the gateway shuts down."""
    sessions: int = Field(10_000, ge=1, le=1_000_000)
    """Maximum number of open sessions at once."""
    connections: int = Field(4096, ge=1)
    """Most open connections of each listener that sessions share."""
    budgets: SessionBudgets = SessionBudgets()
    image_hosts: tuple[str, ...] = ()
    """Hosts (`name` or `name:port`; `*.name` for all below it) whose images the gateway fetches for a harness that sends a
    URL. Default: none, only images in the request itself (`data:`). Private and loopback addresses are never fetched."""
    image_bytes: int = Field(20 * 1024 * 1024, ge=1024)
    """Largest image that is fetched."""
    image_seconds: float = Field(20.0, gt=0)
    """Time limit of fetching one image."""


class ModelSettings(Section):
    """The model: its tokenizer and chat template."""

    folder: Path | None = None
    template: Path | None = None
    renderer: str = "auto"
    """`auto`, `sentinel`, or a family of the `renderers` package."""
    format: str | None = None
    """Tool-call format. Default: detected from the template."""
    special_text: Literal["engine", "plain"] = "engine"
    name: str = ""
    """Name in `/v1/models`. Default: the name of the folder."""


EngineKind = Literal["embedded", "smollm2", "llamacpp", "vllm", "sglang", "openai", "scripted"]


class EngineSettings(Section):
    """The engine that samples."""

    kind: EngineKind = "embedded"
    """`embedded`, `smollm2` and `llamacpp` run in this process; `vllm`, `sglang` and `openai` (any OpenAI-compatible chat
    server) are remote servers at `urls`; `scripted` is for tests. `docs/engines.md` compares them."""
    urls: tuple[str, ...] = ()
    """Base URLs of the servers; several vLLM or SGLang servers are replicas of one model and form a pool, and a router
    (sglang-router, vLLM's router) stands for the workers that it lists. The URL of a chat server ends before
    `/chat/completions`."""
    model: str = ""
    """Model name at those servers."""
    key_variable: str = "TOWLINE_UPSTREAM_KEY"
    """Environment variable that holds the API key of the servers; the key itself is never a setting."""
    stall_seconds: float = Field(STALL_SECONDS, gt=0, le=MAX_SECONDS)
    """A turn fails if the engine produces no token for this long. Pauses and waiting for a free replica do not count; time
    in the engine's own queue does."""
    start_seconds: float | None = Field(None, ge=0, le=MAX_SECONDS)
    """How long to wait for a vLLM or SGLang server that is not up yet. Default: 600 with `towline serve`, whose trainer may
    start the server later; other commands need it to be up."""
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    threads: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Threads of an in-process engine. Default: 1 with llama.cpp, torch's own default with `embedded`."""
    max_batch: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Concurrent turns in an in-process engine. Default: 4 with llama.cpp, 16 with `embedded`."""
    context: int | None = Field(None, ge=16, le=MAX_TOKENS)
    """Context length of an in-process engine. Default: the model's; with llama.cpp at most 8192."""

    @field_validator("urls", mode="before")
    @classmethod
    def _one_url_is_a_list(cls, urls: Any) -> Any:
        return [urls] if isinstance(urls, str) else urls


class NamedEngine(Section):
    """An additional engine with a frozen model: `session.models` says which model names it serves."""

    engine: EngineSettings = EngineSettings()
    model: ModelSettings = ModelSettings()


class StageSeconds(Section):
    """Default budget of each stage of a session."""

    prepare: float = Field(3600.0, gt=0, le=MAX_SECONDS)
    """Installs, images and root file systems: once per environment."""
    start: float = Field(300.0, gt=0, le=MAX_SECONDS)
    """Creating one sandbox, counted from when `node.start_limit` admits it. Waiting for that is charged to no stage."""
    init: float = Field(300.0, gt=0, le=MAX_SECONDS)
    run: float = Field(1800.0, gt=0, le=MAX_SECONDS)
    build: float = Field(300.0, gt=0, le=MAX_SECONDS)
    evaluate: float = Field(600.0, gt=0, le=MAX_SECONDS)


class NodeSettings(Section):
    """How sessions run on one machine."""

    sandbox: SandboxKind = SandboxKind.BUBBLEWRAP
    """Default sandbox for environments that set none."""
    init_workers: int = Field(4, ge=1, le=100_000)
    run_workers: int = Field(16, ge=1, le=100_000)
    build_workers: int = Field(2, ge=1, le=100_000)
    evaluate_workers: int = Field(4, ge=1, le=100_000)
    """Worker slots per stage."""
    start_limit: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Most sandboxes that are being created at once, for sessions, the warm pool and evaluations together. Default: twice
    the CPUs, at least 2. The worker slots and `ahead` limit how many run."""
    ahead: int = Field(4, ge=0, le=MAX_COUNT)
    """Sessions that are prepared before a run slot is free."""
    warm: int = Field(2, ge=0, le=MAX_COUNT)
    """Warm sandboxes per environment."""
    seconds: StageSeconds = StageSeconds()
    hold_seconds: float = Field(600.0, gt=0, le=MAX_SECONDS)
    """How long sessions wait for an engine or sandbox runtime that is down; then they fail with its reason."""
    looping: int = Field(10, ge=0, le=MAX_COUNT)
    """A session that repeats the same call with the same result this often in a row ends as `looping`; 0: never."""
    resources: Resources = Resources()
    """Default limits of a sandbox."""
    log_bytes: int = Field(16 * 1024 * 1024, ge=1024, le=MAX_BYTES)
    """Maximum number of bytes of a harness log that are kept."""
    artifact_bytes: int = Field(64 * 1024 * 1024, ge=1024, le=MAX_BYTES)
    """Maximum number of bytes that are kept per artifact."""
    bases: dict[str, str] = Field(default_factory=dict)
    """Local root file system to use for an image name: `{"python:3.*": "roots/python.tar"}`. `images.base` says what all
    other images are."""
    cache: Path | None = None
    """Folder of installs and root file systems, shared by all sessions. Default: the user's cache folder."""
    cache_bytes: int = Field(20 * 1024**3, ge=1024**2, le=MAX_BYTES)
    """Maximum number of bytes of root file systems in the cache."""
    egress: EgressSettings = EgressSettings()
    total_memory_mb: int | None = Field(None, ge=0)
    """Memory of all sandboxes of this node together. Default: 80% of the machine's; 0: no limit. Needs control groups."""
    total_pids: int | None = Field(None, ge=0)
    """Processes of all sandboxes of this node together. Default: half of the machine's; 0: no limit."""


class ServerSettings(Tenancy):
    """The rollout service."""

    host: str = "127.0.0.1"
    """Bind address. Any but loopback needs `auth`, and should have TLS."""
    auth: bool = True
    """Whether requests need an API key. The first start writes one to `admin.key` in `data`. Only a service on a loopback
    address may do without: then every program and user of the machine has full access."""
    allowed_hosts: tuple[str, ...] = ()
    """Names under which clients may address the service, besides loopback, `host`, the address that they connect to and
    the machine's own name: `name`, `*.name`, or `*` for any."""
    tls_cert: Path | None = None
    """Certificate chain (PEM). With `tls_key`: the service speaks HTTPS only."""
    tls_key: Path | None = None
    """Private key (PEM) of the certificate; not encrypted."""
    http: HttpLimits = HttpLimits()
    port: int = Field(8600, ge=0, le=65535)
    data: Path = Path("towline-data")
    database: str | None = None
    """`postgresql://user@host/name`. Default: an SQLite file in `data`. Put a URL with a password into the variable
    `TOWLINE_SERVER__DATABASE`."""
    segments: str | None = None
    """Where trajectories are stored: a folder or an fsspec URL. Default: a folder in `data`."""
    nodes: int = Field(1, ge=1, le=256)
    """Node hosts that the server starts as child processes on this machine; the limits of `node` are per host."""
    lost_seconds: float = Field(60.0, gt=0, le=MAX_SECONDS)
    """How long a node may be unreachable; then its sessions are given up and run on other nodes."""
    queue: int = Field(100_000, ge=1, le=10_000_000)
    """Maximum number of waiting sessions of a tenant; further tasks are rejected until there is room."""
    lease_seconds: float = Field(300.0, gt=0, le=7 * 86_400)
    """Default duration of a lease."""
    wait_seconds: float = Field(60.0, ge=0, le=86_400)
    """Longest time that a call for results waits for the first one."""
    keep_seconds: float = Field(7 * 86_400.0, ge=0, le=MAX_SECONDS)
    """How long results are kept at least after their task ended; longer while a live consumer has not acknowledged them."""
    silent_seconds: float = Field(3 * 86_400.0, gt=0, le=MAX_SECONDS)
    """A consumer that was silent for this long no longer keeps results from being removed."""
    pacing_seconds: float = Field(900.0, gt=0, le=MAX_SECONDS)
    """A consumer that was silent for this long and holds no lease no longer paces sessions."""
    events: int = Field(100_000, ge=100, le=MAX_COUNT)
    """How many events are kept for clients that reconnect."""
    body_bytes: int = Field(64 * 1024 * 1024, ge=1024, le=MAX_BODY_BYTES)
    stop_seconds: float = Field(10.0, ge=0, le=MAX_SECONDS)
    """How long sessions may continue on shutdown; then their turns are saved, and they are retried after a restart."""
    callback_hosts: tuple[str, ...] = ()
    """Where a task's callback may go: `name:port`, `name` (port 80 or 443, by scheme) or `name:*` (any port)."""
    callback_tries: int = Field(8, ge=1, le=1000)
    quarantine_deaths: int = Field(3, ge=0, le=MAX_COUNT)
    """Node deaths after which a sample that was running at each of them is a suspect; 0: never. Suspects run without other
    sessions, and one that kills its node while running alone is quarantined: FAILED, with no retry."""
    trust_submitters: bool = False
    """Whether keys with role `submit` may use the server's machine in their tasks: its files, the process sandbox, an open
    network, modules to import. Admin keys always may."""
    submitters_may: tuple[Grant, ...] = ()
    """What untrusted tasks may use of the nodes' machines (`["network", "images"]`). `trust_submitters`: everything."""
    trust_tasks: bool = False
    """Whether a service without keys trusts the tasks of every local user. Only on loopback."""

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: set both, or neither")
        return self


LogOutput = Literal["text", "json"]


class LogSettings(Section):
    """The log of `towline serve` and `towline gateway`."""

    format: LogOutput = "text"
    """`json`: one object per line, with a failed session's id, task, reason and stage as fields."""


class Settings(Section):
    """All settings of Towline."""

    gateway: GatewaySettings = GatewaySettings()
    session: SessionSettings = SessionSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    engines: dict[str, NamedEngine] = Field(default_factory=dict)
    """Additional engines by name."""
    node: NodeSettings = NodeSettings()
    images: ImageSettings = ImageSettings()
    server: ServerSettings = ServerSettings()
    log: LogSettings = LogSettings()
    cluster: ClusterSettings = ClusterSettings()
    roots: dict[str, str] = Field(default_factory=dict)
    """Root file systems (folders or tar files on the nodes) by the name that tasks use for them."""

    @property
    def registry(self) -> RootRegistry:
        """The roots and images that tasks may name."""
        return RootRegistry(self.roots, self.images.names, self.images.allowed)

    @field_validator("roots")
    @classmethod
    def _roots_have_names(cls, roots: dict[str, str]) -> dict[str, str]:
        for name in roots:
            if not ROOT_NAME.fullmatch(name):
                raise ValueError(f"{name!r}: a name has lower-case letters and digits, joined by '.', '_' or '-'")
        return roots

    @model_validator(mode="after")
    def _engines_are_known(self) -> Self:
        for name in self.engines:
            if name == POLICY or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
                raise ValueError(f"engines.{name}: a name has letters, digits, '.', '_' and '-', and is not {POLICY!r}")
        for pattern, name in self.session.models.items():
            if name != POLICY and name not in self.engines:
                raise ValueError(f"session.models.{pattern}: there is no engine {name!r} under `engines`")
        return self

    @classmethod
    def load(cls, file: Path | None = None, **overrides: dict[str, Any]) -> Self:
        """From `overrides` over the environment over `file` (default: `TOWLINE_CONFIG`, else `towline.toml` here)."""
        file = file or named_file()
        if file is not None and not file.is_file():
            raise ConfigError(f"{file} does not exist")
        path, given = file or Path(FILE), without_none(overrides)

        class Layers(_SettingsLayers, toml_file=path):
            """The layers with this file as the lowest."""

        try:
            loaded = cls.model_validate(dict(Layers(**given)))
            if file is None and os.path.lexists(path):
                check_found_file(path)
            return loaded
        except ValidationError as error:
            raise ConfigError("; ".join(describe(one, path, given) for one in error.errors())) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise ConfigError(f"{path}: {error}") from error


def named_file() -> Path | None:
    """The settings file that the environment names."""
    return Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


class _SettingsLayers(BaseSettings, Settings):
    """The settings as `Settings.load` layers them; `Settings(...)` itself reads neither file nor environment."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__")

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = TomlConfigSettingsSource(settings_cls)
        return init_settings, EnvironmentSource(settings_cls), file
