"""`UntrustedTask`: a task that cannot name anything of the host, and the one function that makes a `Task` of it.

Every field of a task, its evaluator, its settings and its harness's options has a decision here: its type. A field that is
missing here is refused, and a test fails until it has one. The types and what widens them are in `trust.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from towline.common.image_references import DIGEST, parse_image
from towline.common.untrusted.data_files import UnsafePath
from towline.schema.entities import SandboxKind, Task
from towline.schema.trust import (
    UPLOAD,
    Admission,
    Build,
    Callback,
    ClosedNetwork,
    Glob,
    Grant,
    HarnessName,
    HostPath,
    InsideOnly,
    Isolated,
    Metadata,
    Packages,
    Pattern,
    Plain,
    PythonVersion,
    RootName,
    TaskRefused,
    UserName,
    Variables,
    is_granted,
    require,
)

Resolve = Callable[[str], str]
"""The path on this machine of a path that a task names; raises `UnsafePath` or `OSError`."""


class _Narrow(BaseModel):
    """A part of an untrusted task. Unknown fields are refused, and only fields that were given are written."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class UntrustedFile(_Narrow):
    target: InsideOnly
    text: Plain = None
    base64: Plain = None
    source: HostPath | None = None
    mode: Plain = None


class UntrustedEnvironment(_Narrow):
    sandbox: Isolated = None
    root: RootName = ""
    """What a name means is decided with the registry, in `admit_task`."""
    build: Build = ""
    base: Plain = None
    """`host` is the allow-list of the host's root that an empty `root` is, too."""
    files: list[UntrustedFile] = []
    setup: Plain = None
    workdir: InsideOnly = "/work"
    env: Variables = {}
    user: UserName = ""
    network: ClosedNetwork = None  # type: ignore[assignment]
    allowed_hosts: Plain = None
    resources: Plain = None
    artifacts: list[InsideOnly] = []


class UntrustedStep(_Narrow):
    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9 ._-]{0,127}$")
    """Also the name of a folder of logs."""
    instruction: Plain
    files: list[UntrustedFile] = []
    setup: Plain = None
    seconds: Plain = None


class UntrustedRole(_Narrow):
    role: Plain
    model: Glob | None = None
    system: Pattern | None = None
    tools: Glob | None = None


class UntrustedSettings(_Narrow):
    policy: Plain = None
    builder: Plain = None
    capture: Plain = None
    vanishing: Plain = None
    noise: list[Pattern] = Field([], max_length=32)
    trained_roles: Plain = None
    roles: list[UntrustedRole] = Field([], max_length=32)
    models: dict[Glob, str] = Field({}, max_length=32)
    """Names of the operator's engines; they are checked against `engines`."""
    template_args: Plain = None
    sampling: Plain = None
    limits: Plain = None


# Evaluators by kind


class _Evaluator(_Narrow):
    kind: str
    oracle: Plain = False
    lowest: Plain = 0.0


class UntrustedAnswer(_Evaluator):
    answer: Plain
    file: InsideOnly | None = None
    tolerance: Plain = None
    strict: Plain = None
    symbolic: Plain = None
    seconds: Plain = None


class UntrustedCommand(_Evaluator):
    command: Plain
    files: list[UntrustedFile] = []
    carry: list[InsideOnly] | None = None
    hidden: list[InsideOnly] = []
    reward: Plain = None
    pattern: Pattern = ""
    trajectory: Plain = None
    env: Variables = {}
    cwd: InsideOnly | None = None
    user: UserName = ""
    seconds: Plain = None
    on_timeout: Plain = None


class UntrustedCompleted(_Evaluator):
    codes: Plain = None


class UntrustedHarborStep(_Evaluator):
    kind: str = "step"
    name: str
    tests: HostPath = ""
    min_reward: Plain = None
    seconds: Plain = None
    env: Variables = {}
    artifacts: list[InsideOnly] = []


class UntrustedHarbor(_Evaluator):
    tests: HostPath = ""
    environment_mode: Plain = None
    env: Variables = {}
    user: UserName = ""
    seconds: Plain = None
    artifacts: list[InsideOnly] = []
    secret: list[HostPath] = []
    steps: list[UntrustedHarborStep] = []
    strategy: Plain = None


class UntrustedSwebench(_Narrow):
    """Names of rows and parsers of the `swebench` package, which are looked up and never imported."""

    instance_id: Plain
    log_parser: Plain
    eval_type: Plain = None
    repo: Plain = None
    version: Plain = None


class UntrustedPatch(_Evaluator):
    command: Plain
    repository: InsideOnly | None = None
    base: Plain = None
    test_patch: Plain = None
    files: list[UntrustedFile] = []
    test_files: list[Glob] = Field([], max_length=256)
    fail_to_pass: Plain = None
    pass_to_pass: Plain = None
    expected: Plain = None
    command_applies_tests: Plain = None
    swebench: UntrustedSwebench | None = None
    conceal: Plain = None
    withheld: list[InsideOnly] = []
    log_format: Plain = None
    env: Variables = {}
    user: UserName = ""
    seconds: Plain = None
    on_timeout: Plain = None


class UntrustedPython(_Evaluator):
    """Code in Towline's own process."""

    kind: Literal["python"]
    function: str
    arguments: Plain = None
    carry: Plain = None
    seconds: Plain = None

    @field_validator("function")
    @classmethod
    def _is_trusted(cls, function: str, info: ValidationInfo) -> str:
        require(Grant.MODULES, f"{function!r} is Python code that would run in Towline's own process", info)
        return function


EVALUATORS: dict[str, type[_Evaluator]] = {
    "answer": UntrustedAnswer,
    "command": UntrustedCommand,
    "completed": UntrustedCompleted,
    "harbor": UntrustedHarbor,
    "patch": UntrustedPatch,
    "python": UntrustedPython,
}


# Options by harness


class UntrustedShell(_Narrow):
    """`shell`, and `oracle`, which has its options."""

    command: Plain = None
    env: Plain = None
    files: Plain = None
    folder: HostPath = ""
    packages: Packages = []
    python: PythonVersion = "3.12"
    stdin: Plain = None
    resumes: Plain = None


INSIDE_OPTIONS: dict[str, frozenset[str]] = {
    "claude_code": frozenset({"compact_at", "env", "args"}),
    "codex": frozenset({"effort", "compact_at", "config", "args"}),
    "gemini_cli": frozenset({"settings", "args"}),
    "hermes": frozenset({"max_turns", "toolsets", "config"}),
    "mini_swe_agent": frozenset({"config", "settings", "step_limit"}),
    "nothing": frozenset(),
    "openclaw": frozenset({"thinking", "seconds", "config"}),
    "opencode": frozenset({"dialect", "config", "args"}),
    "openhands_sdk": frozenset({"dialect", "max_turns", "llm"}),
    "pi": frozenset({"dialect", "thinking", "args"}),
    "qwen_code": frozenset({"settings", "args"}),
}
"""Options of presets that become arguments, variables and files inside the sandbox, and nothing else."""
SHELLS = ("shell", "oracle")
_ROOT = "environment.root"


class UntrustedTask(_Narrow):
    """A task that describes work and cannot name anything of the host."""

    task_id: Plain
    instruction: Plain
    steps: list[UntrustedStep] = []
    harness: HarnessName
    harness_options: Any = {}
    """`UntrustedShell`, or options of `INSIDE_OPTIONS`."""
    settings: UntrustedSettings = UntrustedSettings()
    environment: UntrustedEnvironment = UntrustedEnvironment()
    evaluator: Any = {}
    """One of `EVALUATORS`, or empty."""
    num_samples: Plain = None
    min_samples: Plain = None
    grace_seconds: Plain = None
    priority: Plain = None
    max_attempts: Plain = None
    timeouts: Plain = None
    max_staleness: Plain = None
    callback: Callback = None
    metadata: Metadata = {}

    @classmethod
    def read(cls, task: Task, admission: Admission) -> UntrustedTask:
        """The task in the narrow type. Raises `TaskRefused` for the first field that names something of the host."""
        found = _read(cls, task.model_dump(exclude_unset=True), admission)
        changes: dict[str, Any] = {}
        if found.evaluator:
            kind = found.evaluator.get("kind")
            if not isinstance(kind, str) or kind not in EVALUATORS:
                raise TaskRefused("evaluator.kind", f"unknown kind {kind!r}; known kinds: {', '.join(EVALUATORS)}")
            changes["evaluator"] = _read(EVALUATORS[kind], found.evaluator, admission, "evaluator")
        if found.harness_options and ":" not in found.harness:
            changes["harness_options"] = _read_options(
                found.harness.replace("-", "_"), found.harness_options, admission
            )
        return found.model_copy(update=changes)


M = TypeVar("M", bound=_Narrow)


def _read(model: type[M], values: dict[str, Any], admission: Admission, place: str = "") -> M:
    try:
        return model.model_validate(values, context=admission)
    except ValidationError as error:
        first = next((one for one in error.errors() if one["type"] == "needs_trust"), error.errors()[0])
        field = ".".join(map(str, (*filter(None, (place,)), *first["loc"])))
        if first["type"] != "needs_trust":
            raise TaskRefused(field, first["msg"].removeprefix("Value error, ")) from error
        grant = Grant(first["ctx"]["grant"])
        raise TaskRefused(field, _allowing(first["msg"], grant, admission), grant) from error


def _read_options(harness: str, options: dict[str, Any], admission: Admission) -> Any:
    if harness in SHELLS:
        return _read(UntrustedShell, options, admission, "harness_options")
    if ":" in harness:
        if is_granted(Grant.MODULES, admission):
            return options
        reason = f"only {harness!r} itself knows what its options name"
        raise TaskRefused("harness_options", _allowing(reason, Grant.MODULES, admission), Grant.MODULES)
    for name in options:
        if name not in INSIDE_OPTIONS.get(harness, ()):
            reason = f"harness {harness!r} has no option of that name that an untrusted task may set"
            raise TaskRefused(f"harness_options.{name}", reason)
    return options


def complete_image(name: str) -> str:
    """The image with its registry and its tag or digest; such a name is never taken for a path of a node."""
    return str(parse_image(name))


def _allowing(reason: str, grant: Grant, admission: Admission) -> str:
    return f"{reason}; to allow it: {admission.hint.format(grant=grant)}"


def admit_task(task: Task, admission: Admission, resolve: Resolve | None = None) -> Task:
    """The trusted task of an untrusted one: the only way from one to the other.

    Paths become those of this machine by `resolve` (None: a task has no folder), names of roots and images what the
    registry says. Raises `TaskRefused`.
    """
    return _Admitting(admission, resolve).task(UntrustedTask.read(task, admission))


class _Admitting:
    """Replaces each reference of a task by what it means on this machine."""

    def __init__(self, admission: Admission, resolve: Resolve | None):
        self._admission = admission
        self._resolve = resolve

    def task(self, untrusted: UntrustedTask) -> Task:
        environment = untrusted.environment
        if environment.sandbox is None and self._admission.sandbox is SandboxKind.PROCESS:
            self._require(
                Grant.PROCESS, "environment.sandbox", "the default sandbox here is `process`, without isolation"
            )
        values = untrusted.model_dump(exclude_unset=True)
        inside = values.get("environment", {})
        if environment.root:
            inside["root"] = self._root(environment.root)
        if environment.build:
            inside["build"] = self._path("environment.build", environment.build)
            if self._resolve is not None and not UPLOAD.fullmatch(environment.build):
                self._path("environment.build", f"{environment.build}/Dockerfile")
        self._files("environment", inside.get("files", []))
        for index, step in enumerate(values.get("steps", [])):
            self._files(f"steps.{index}", step.get("files", []))
        options = values.get("harness_options", {})
        if isinstance(untrusted.harness_options, UntrustedShell) and options.get("folder"):
            options["folder"] = self._path("harness_options.folder", options["folder"])
        self._evaluator(values.get("evaluator", {}))
        return Task.model_validate(values)

    def _evaluator(self, evaluator: dict[str, Any]) -> None:
        self._files("evaluator", evaluator.get("files", []))
        if evaluator.get("kind") != "harbor":
            return
        for index, step in enumerate([evaluator, *evaluator.get("steps", [])]):
            if step.get("tests"):
                place = f"evaluator.steps.{index - 1}.tests" if index else "evaluator.tests"
                step["tests"] = self._path(place, step["tests"])
        if "secret" in evaluator:
            evaluator["secret"] = [self._path("evaluator.secret", one) for one in evaluator["secret"]]

    def _files(self, place: str, files: list[dict[str, Any]]) -> None:
        for index, file in enumerate(files):
            if file.get("source"):
                file["source"] = self._path(f"{place}.files.{index}.source", file["source"])

    def _path(self, place: str, path: str) -> str:
        if UPLOAD.fullmatch(path) and self._admission.uploads:
            return path
        if self._resolve is None:
            self._require(Grant.PATHS, place, "a path of the service's machine; upload the file or folder instead")
            return path
        try:
            return self._resolve(path)
        except UnsafePath as error:
            raise TaskRefused(place, _allowing(str(error), Grant.PATHS, self._admission), Grant.PATHS) from error
        except (OSError, ValueError) as error:
            raise TaskRefused(place, f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error

    def _root(self, root: str) -> str:
        """The path or the complete image reference that a root means."""
        admission = self._admission
        if (known := admission.registry.find(root)) is not None:
            return known
        if DIGEST.fullmatch(root):
            raise TaskRefused(_ROOT, "the operator's registry has no image of this digest; write it as NAME@DIGEST")
        if UPLOAD.fullmatch(root):
            return self._path(_ROOT, root)
        try:
            image = complete_image(root)
        except ValueError:
            return self._path(_ROOT, root)
        if self._resolve is not None:
            with suppress(OSError, UnsafePath):
                return self._resolve(root)
        if not admission.registry.allows(root):
            self._require(Grant.IMAGES, _ROOT, f"{root!r} is not a root or an image of the operator's registry")
        return image

    def _require(self, grant: Grant, place: str, reason: str) -> None:
        if not is_granted(grant, self._admission):
            raise TaskRefused(place, _allowing(reason, grant, self._admission), grant)
