"""What untrusted tasks may name: the grants, and the types of single values that stay inside without one.

An untrusted task comes from a submit key, a data file or a Harbor folder. Its values have the types below, which cannot
express a path, variable, module or network of the host. A user or operator widens them by name: each `Grant` lets one kind
of thing through, and a value that needs one is refused with the grant it needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from towline.common.image_references import DEFAULT_REGISTRY, DIGEST, parse_image
from towline.common.untrusted.data_files import UnsafePath, plain_parts
from towline.errors import ConfigError
from towline.schema.entities import Network, SandboxKind


class Grant(StrEnum):
    """One kind of thing of the host that a task may name although it is untrusted."""

    PATHS = "paths"
    """Files and folders of this machine outside the data file's own folder, and links inside it."""
    PROCESS = "process"
    """The sandbox `process`, which isolates nothing."""
    ENV = "env"
    """Values of environment variables: `${VAR}` in Harbor folders."""
    MODULES = "modules"
    """Python code that runs in Towline's own process: evaluators `python`, harnesses `module:NAME`."""
    NETWORK = "network"
    """The network `open`."""
    PACKAGES = "packages"
    """Packages that are installed on this machine for a harness."""
    IMAGES = "images"
    """Images of any registry, by any name."""
    BUILDS = "builds"
    """Building Dockerfiles."""
    PATTERNS = "patterns"
    """Regular expressions that RE2 cannot run: with back-references or look-around, or very long ones."""


NOTHING: frozenset[Grant] = frozenset()
EVERYTHING: frozenset[Grant] = frozenset(Grant)
DATA_FILES: frozenset[Grant] = frozenset({Grant.IMAGES, Grant.BUILDS})
"""What data files of the user may do without `--trust`: both happen in sandboxes."""

UPLOAD = re.compile(r"upload:[0-9a-f]{64}")
"""A file or folder that was uploaded to the service, by the SHA-256 of its content."""
ROOT_NAME = re.compile(r"(?=.{1,128}$)[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*")
"""A name in the operator's registry: as an image's, without a registry, a folder and a tag."""
MAX_PATTERN = 1000
"""Longest regular expression of an untrusted task, in characters."""
_MAX_REPEAT = 1000
_MAX_GLOB = 256
_MAX_STARS = 8


@dataclass(frozen=True, slots=True)
class RootRegistry:
    """The operator's roots and images: the only ones that an untrusted task can name at a service."""

    roots: Mapping[str, str] = field(default_factory=dict)
    """Folder or tar file on the nodes, by name."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Image reference, by name."""
    allowed: tuple[str, ...] = ()
    """Patterns of image references that may be named directly (`docker.io/swebench/*`)."""

    def find(self, name: str) -> str | None:
        """The path or image that a name or a digest means; None if the registry does not have it.

        A name completed as an image's (`docker.io/library/NAME:latest`) is still that name.
        """
        if DIGEST.fullmatch(name):
            return next((str(parse_image(one)) for one in self.images.values() if one.endswith(f"@{name}")), None)
        try:
            names = (name, *parse_image(name).spellings())
        except ValueError:
            return None
        for one in names:
            if one in self.roots:
                return self.roots[one]
            if one in self.images:
                return str(parse_image(self.images[one]))
        return None

    def allows(self, name: str) -> bool:
        """Whether an image may be named directly: by an allowed pattern, or on Docker Hub by digest."""
        reference = parse_image(name)
        if reference.digest and reference.registry == DEFAULT_REGISTRY:
            return True
        return any(fnmatchcase(one, pattern) for one in reference.spellings() for pattern in self.allowed)


@dataclass(frozen=True, slots=True)
class Admission:
    """What one source of untrusted tasks may name. The context of every narrow type."""

    grants: frozenset[Grant] = NOTHING
    registry: RootRegistry = field(default_factory=RootRegistry)
    sandbox: SandboxKind | None = None
    """The sandbox of tasks that set none, if its choice is not the word of whoever trusts the task."""
    hint: str = "--trust {grant}"
    """How to allow what was refused."""
    reserved: frozenset[str] = frozenset()
    """Keys of `metadata` that only a loader may set."""
    harness: str = ""
    """The harness that the user named himself, on the command line."""
    uploads: bool = True
    """Whether `upload:…` means something where the task runs."""


class TaskRefused(ConfigError):
    """An untrusted task names something of the host. Says which field, and which grant would allow it."""

    def __init__(self, field: str, reason: str, grant: Grant | None = None):
        super().__init__(f"{field}: {reason}" if field else reason)
        self.field, self.reason, self.grant = field, reason, grant


def parse_grants(words: Iterable[str]) -> frozenset[Grant]:
    """Grants from words such as `paths,env`; `all` is every grant. Raises `ConfigError` for an unknown one."""
    found: set[Grant] = set()
    for word in (part.strip() for text in words for part in text.split(",")):
        if word == "all":
            found |= EVERYTHING
        elif word in list(Grant):
            found.add(Grant(word))
        elif word:
            raise ConfigError(f"--trust {word}: unknown; known: {', '.join(Grant)}, all")
    return frozenset(found)


def admission_of(info: ValidationInfo) -> Admission:
    """The admission that a value is read under; without one nothing is granted."""
    return info.context if isinstance(info.context, Admission) else Admission()


def require(grant: Grant, reason: str, info: ValidationInfo) -> None:
    """Raise unless this admission has the grant. This is the guard behind every narrow type."""
    if not is_granted(grant, admission_of(info)):
        raise PydanticCustomError("needs_trust", "{reason}", {"reason": reason, "grant": grant.value})


def is_granted(grant: Grant, admission: Admission) -> bool:
    return grant in admission.grants


def _host_path(value: str, info: ValidationInfo) -> str:
    if not value or (UPLOAD.fullmatch(value) and admission_of(info).uploads):
        return value
    try:
        plain_parts(value)
    except UnsafePath as error:
        require(Grant.PATHS, f"{error}; only paths inside the task's own folder may be named", info)
    return value


def _root(value: str, info: ValidationInfo) -> str:
    try:
        parse_image(value)
    except ValueError:
        return _host_path(value, info)
    return value


def _inside_path(value: str) -> str:
    if not value.startswith("/") or len(value) > 4096 or any(ord(one) < 32 or ord(one) == 127 for one in value):
        raise ValueError("must be an absolute path inside the sandbox, without control characters")
    if ".." in value.split("/"):
        raise ValueError("must not have `..`")
    return value


def _sandbox(value: SandboxKind | None, info: ValidationInfo) -> SandboxKind | None:
    if value is SandboxKind.PROCESS:
        require(Grant.PROCESS, "`process` runs the task's programs on this machine without isolation", info)
    return value


def _network(value: Network, info: ValidationInfo) -> Network:
    if value is Network.OPEN:
        require(Grant.NETWORK, "`open` lets the task's programs reach other machines", info)
    return value


def _harness(value: str, info: ValidationInfo) -> str:
    if value == admission_of(info).harness:
        return value
    if ":" in value:
        require(Grant.MODULES, f"{value!r} is a Python module that would run in Towline's own process", info)
    elif not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", value):
        raise ValueError("must be the name of a harness; see `towline harness list`")
    return value


def _packages(value: Any, info: ValidationInfo) -> Any:
    if value:
        require(Grant.PACKAGES, "packages are installed on this machine, outside a sandbox", info)
    return value


def _build(value: str, info: ValidationInfo) -> str:
    if value:
        require(Grant.BUILDS, "a Dockerfile is built on this machine", info)
    return _host_path(value, info)


def _callback(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"https?://[^\s@\x00-\x20\x7f]{1,2000}", value):
        raise ValueError("must be an http or https URL without a user name")
    return value


def _variables(value: dict[str, str]) -> dict[str, str]:
    for name in value:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,255}", name):
            raise ValueError(f"{name!r} is not the name of a variable")
    return value


def _metadata(value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    for name in admission_of(info).reserved & value.keys():
        require(Grant.PATHS, f"`metadata.{name}` names folders of this machine; only a Harbor folder has it", info)
    return value


def _pattern(value: str, info: ValidationInfo) -> str:
    problem = pattern_problem(value)
    if problem:
        require(Grant.PATTERNS, problem, info)
    return value


def pattern_problem(pattern: str) -> str:
    """Why RE2 could not run a regular expression in linear time; empty if it can."""
    if len(pattern) > MAX_PATTERN:
        return f"a regular expression has at most {MAX_PATTERN} characters"
    try:
        parsed = re._parser.parse(pattern)  # type: ignore[attr-defined]
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return _problem_in(parsed, 1)


_REFUSED = {
    "GROUPREF": "back-references",
    "GROUPREF_EXISTS": "conditional groups",
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "ATOMIC_GROUP": "atomic groups",
    "POSSESSIVE_REPEAT": "possessive repeats",
}


def _problem_in(parsed: Any, times: int) -> str:
    """The first thing in a parsed expression that RE2 lacks; `times`: how often the repeats around it multiply it."""
    if not isinstance(parsed, re._parser.SubPattern):  # type: ignore[attr-defined]
        if not isinstance(parsed, tuple | list):
            return ""
        return next(filter(None, (_problem_in(one, times) for one in parsed)), "")
    for operator, arguments in parsed:
        if str(operator) in _REFUSED:
            return f"{_REFUSED[str(operator)]} are not in RE2, which runs the regular expressions of untrusted tasks"
        inner = times
        if str(operator) in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, _ = arguments
            inner *= max(1, int(least), int(most) if int(most) != int(re._constants.MAXREPEAT) else 1)  # type: ignore[attr-defined]
            if inner > _MAX_REPEAT:
                return f"repeats multiply to more than {_MAX_REPEAT}"
        if problem := _problem_in(arguments, inner):
            return problem
    return ""


def _glob(value: str) -> str:
    if len(value) > _MAX_GLOB or value.count("*") > _MAX_STARS:
        raise ValueError(f"a pattern has at most {_MAX_GLOB} characters and {_MAX_STARS} `*`")
    return value


Plain = Any
"""Stays inside the sandbox, or is a number or a choice among the operator's own things: no restriction."""
HostPath = Annotated[str, AfterValidator(_host_path)]
"""A path relative to the task's own folder, or an upload."""
RootName = Annotated[str, Field(max_length=4096), AfterValidator(_root)]
"""A name of the registry, a digest, an image, an upload, or a path relative to the task's own folder."""
UserName = Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9._:-]{0,63})?$")]
InsideOnly = Annotated[str, AfterValidator(_inside_path)]
"""An absolute path inside the sandbox, without `..`."""
Isolated = Annotated[SandboxKind | None, AfterValidator(_sandbox)]
ClosedNetwork = Annotated[Network, AfterValidator(_network)]
HarnessName = Annotated[str, AfterValidator(_harness)]
Packages = Annotated[Any, AfterValidator(_packages)]
PythonVersion = Annotated[str, Field(pattern=r"^3\.[0-9]{1,2}$")]
"""A version, never a path: interpreters are searched by it."""
Build = Annotated[str, AfterValidator(_build)]
Callback = Annotated[str | None, AfterValidator(_callback)]
"""A URL; the service also checks its host (`server.callback_hosts`)."""
Variables = Annotated[dict[str, str], AfterValidator(_variables)]
Metadata = Annotated[dict[str, Any], AfterValidator(_metadata)]
Pattern = Annotated[str, AfterValidator(_pattern)]
"""A regular expression that RE2 can run."""
Glob = Annotated[str, AfterValidator(_glob)]
