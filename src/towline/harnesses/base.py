"""The harness interface: what Towline has to know of an agent program to run it unchanged.

A harness is data and two small functions: what to install, and which command, environment and files start it against a
base URL with a key. It never sees a token, a turn or a reward, and nothing of the program itself is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from towline.errors import ConfigError, TowlineError

INSTALL_ROOT = "/opt/towline"
"""Where installs are mounted inside every sandbox, one folder each: `/opt/towline/<name>`."""
HOME = "/home/agent"
"""The home folder of the harness inside a sandbox: its own, empty except for the files of its launch."""
DIALECTS = ("chat", "responses", "messages", "google")


class InstallError(TowlineError):
    """A harness cannot be installed, or its install cannot run; the message says what to do."""

    failure = "harness"


@dataclass(frozen=True, slots=True)
class Npm:
    """An install from npm: exact packages, with a Node of its own in the same folder."""

    packages: tuple[str, ...]
    """`name@version`, exact."""
    node: str = "24"
    """Major version of the bundled Node."""
    scripts: bool = False
    """Whether the packages' install scripts must run for the program to work. They run in a sandbox without a network."""
    lock: str = ""
    """Name of its lock in `locks/data`: every package by version and hash. Empty: only `packages` are pinned."""


@dataclass(frozen=True, slots=True)
class PyPI:
    """An install from PyPI: exact packages, with a Python of its own in the same folder."""

    packages: tuple[str, ...]
    """`name==version`, exact."""
    python: str = "3.12"
    """The Python version it needs."""
    lock: str = ""
    """As with npm."""
    sources: tuple[str, ...] = ()
    """Locked packages that PyPI has only as source. They are built in a sandbox; all others are wheels."""


Install = Npm | PyPI


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """Everything a launch depends on: gateway, key, model, instruction, paths, options."""

    base_url: str
    """The gateway's root without a trailing slash: `http://127.0.0.1:8500`. OpenAI-style clients add `/v1`."""
    key: str
    model: str
    instruction: str
    install: str
    """Where the install is inside the sandbox; empty for a harness without one."""
    workdir: str = "/work"
    home: str = HOME
    context: int = 131_072
    """The model's context in tokens, for programs that need it."""
    max_tokens: int = 8_192
    session: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The harness's own options, checked against `Harness.options`."""
    resume: bool = False
    """Whether this is a further user turn in the conversation of the previous launch, in the same sandbox."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a harness is started."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of `PATH`, `HOME` and the environment's own variables."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Absolute path inside the sandbox → text, written before the command runs."""
    stdin: str = ""
    cwd: str = ""
    """Default: the task's working folder."""


@dataclass(frozen=True, slots=True)
class Harness:
    """One agent program."""

    name: str
    summary: str
    """One line for `towline harness list`."""
    launch: Callable[[LaunchContext], Launch]
    """The launch for a context. Pure."""
    install: Install | None = None
    """`None` if the program needs nothing beyond the sandbox's root."""
    version: str = ""
    dialects: tuple[str, ...] = ("chat",)
    """The dialects it can speak, its default first; `options["dialect"]` selects one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Every option with its default."""
    resumes: bool = False
    """Whether a launch with `LaunchContext.resume` continues the conversation."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Session settings that this harness needs (`noise`, `vanishing`); those of the task take precedence."""
    success: tuple[int, ...] = (0,)
    """Exit codes that mean that it ended normally."""
    calls_model: bool = True
    """Whether it calls the model: if so, a session without a model call is a failure."""
    mounts: Mapping[str, Path] = field(default_factory=dict)
    """Folders of the node's machine that it reads: absolute path inside → folder, mounted read-only."""
    configure: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """Fields of the harness that depend on its options (an install, mounts), given all options with their values."""

    def configured(self, options: Mapping[str, Any]) -> Harness:
        """The harness with these options applied. A node calls this first: before it, what to install, what to mount and
        which settings a session has are only the defaults."""
        if self.configure is None:
            return self
        changes = self.configure(self._with_defaults(options))
        return replace(self, **changes)

    def resolve(self, ctx: LaunchContext) -> LaunchContext:
        """The context with this harness's options: defaults filled in, unknown ones refused."""
        options = self._with_defaults(ctx.options)
        dialect = options.get("dialect", self.dialects[0])
        if dialect not in self.dialects:
            raise ConfigError(f"harness {self.name} speaks {', '.join(self.dialects)}, not {dialect!r}")
        return replace(ctx, options=options)

    def _with_defaults(self, options: Mapping[str, Any]) -> dict[str, Any]:
        unknown = set(options) - set(self.options)
        if unknown:
            known = ", ".join(sorted(self.options)) or "none"
            raise ConfigError(f"harness {self.name} has no option {min(unknown)!r}; it has: {known}")
        return {**self.options, **options}
