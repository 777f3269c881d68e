"""The harness interface: what Towline has to know of an agent program to run it unchanged.

A harness is data and two small functions: what to install, and which command, environment and files start it against a
base URL with a key. It never sees a token, a turn or a reward, and nothing of the program itself is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from towline.errors import ConfigError

INSTALLS = "/opt/towline"
"""Where installs are shown inside every sandbox, one folder each: `/opt/towline/<name>`."""
HOME = "/home/agent"
"""The home folder of the harness inside a sandbox: its own, empty but for the files of its launch."""
DIALECTS = ("chat", "responses", "messages", "google")


@dataclass(frozen=True, slots=True)
class Npm:
    """An install from npm: exact packages, with a Node of its own in the same folder."""

    packages: tuple[str, ...]
    """`name@version`, exact."""
    node: str = "24"
    """Major version of the Node that comes with it."""
    scripts: bool = False
    """Whether the packages' install scripts must be run for the program to work."""


@dataclass(frozen=True, slots=True)
class PyPI:
    """An install from PyPI: exact packages, with a Python of its own in the same folder."""

    packages: tuple[str, ...]
    """`name==version`, exact."""
    python: str = "3.12"
    """Which Python it needs."""


Install = Npm | PyPI


@dataclass(frozen=True, slots=True)
class Place:
    """What a launch is filled in with."""

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
    """Tokens of the model's context, for programs that ask."""
    max_tokens: int = 8_192
    session: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The harness's own options, checked against `Harness.options`."""
    resume: bool = False
    """A further user turn in the conversation of the launch before, in the same sandbox."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a harness is started."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of `PATH`, `HOME` and the environment's own."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Absolute path inside → text, written before the command."""
    stdin: str = ""
    cwd: str = ""
    """The task's working folder if empty."""


@dataclass(frozen=True, slots=True)
class Harness:
    """One agent program."""

    name: str
    summary: str
    """One line for `towline harness list`."""
    launch: Callable[[Place], Launch]
    """The launch for a place. Pure."""
    install: Install | None = None
    """`None` needs nothing but what the sandbox's root has."""
    version: str = ""
    dialects: tuple[str, ...] = ("chat",)
    """The dialects it can speak, its default first; `options["dialect"]` chooses."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Every option with its default."""
    resumes: bool = False
    """Whether a launch with `Place.resume` goes on with the conversation."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Session settings that this harness needs (`noise`, `vanishing`), under those of the task."""
    success: tuple[int, ...] = (0,)
    """Exit codes that mean it ended by itself and well."""
    calls_model: bool = True
    """A session without a model call is a failure, unless the program is one that makes none."""
    mounts: Mapping[str, Path] = field(default_factory=dict)
    """Folders of the node's machine that it reads: absolute path inside → folder, shown read-only with its sandbox."""
    configure: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """Fields of the harness that depend on its options (an install, mounts), given every option with its value."""

    def configured(self, options: Mapping[str, Any]) -> Harness:
        """The harness as these options make it. A node asks for this first: before it, what to install, what to mount
        and which settings a session has are only the defaults."""
        if self.configure is None:
            return self
        changes = self.configure(self._filled(options))
        return replace(self, **changes)

    def place(self, place: Place) -> Place:
        """The place with this harness's options: defaults filled in, unknown ones refused."""
        options = self._filled(place.options)
        dialect = options.get("dialect", self.dialects[0])
        if dialect not in self.dialects:
            raise ConfigError(f"harness {self.name} speaks {', '.join(self.dialects)}, not {dialect!r}")
        changes: dict[str, Any] = {name: getattr(place, name) for name in Place.__slots__}
        return Place(**changes | {"options": options})

    def _filled(self, options: Mapping[str, Any]) -> dict[str, Any]:
        unknown = set(options) - set(self.options)
        if unknown:
            known = ", ".join(sorted(self.options)) or "none"
            raise ConfigError(f"harness {self.name} has no option {min(unknown)!r}; it has: {known}")
        return {**self.options, **options}


def laid_over(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A program's configuration with changes of the user's, tables merged at every depth."""
    made = dict(config)
    for name, value in changes.items():
        old = made.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            made[name] = laid_over(old, value)
        else:
            made[name] = value
    return made
