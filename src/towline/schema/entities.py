"""`Task` with its `Environment`, `Session`, and `Reward`.

A task is submitted once and creates a group of sessions; a session moves only along `VALID_TRANSITIONS`.
"""

from __future__ import annotations

import base64
import binascii
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, FiniteFloat, field_validator, model_validator

from towline.errors import TowlineError
from towline.schema.base import Count, Id, Json, Model, Scores, TenantName
from towline.schema.vocabulary import DEFAULT_TENANT, EndReason, FailureReason, RewardStatus, SessionState


class ImageBase(StrEnum):
    """What the name of an image means where no container engine resolves it."""

    REGISTRY = "registry"
    """The image of that name, from its registry."""
    HOST = "host"
    """The host's own root."""


class Network(StrEnum):
    """What can be reached from inside a sandbox."""

    NONE = "none"
    """Nothing."""
    GATEWAY = "gateway"
    """Only the model endpoint of this session."""
    OPEN = "open"
    """The hosts that the operator and the task allow, through a proxy of the node: by default all on the public internet,
    never the host's own loopback or private networks. Never the default."""


class SandboxKind(StrEnum):
    """The sandbox runtimes; an environment that sets none uses the node's default."""

    BUBBLEWRAP = "bubblewrap"
    """User namespaces, without a daemon or root."""
    DOCKER = "docker"
    """Containers of a Docker daemon."""
    APPTAINER = "apptainer"
    """Apptainer instances, for HPC clusters."""
    PROCESS = "process"
    """Plain processes without isolation."""


class Resources(Model):
    """Limits of one sandbox; `None`: the node's default."""

    memory_mb: int | None = Field(default=None, ge=16)
    pids: int | None = Field(default=None, ge=8)
    cpus: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    disk_mb: int | None = Field(default=None, ge=1)
    """Total size of written files."""

    def over(self, defaults: Resources) -> Resources:
        """These limits, with `defaults` where they are not set."""
        given = {name: value for name, value in self.__dict__.items() if value is not None}
        return Resources.model_validate(defaults.__dict__ | given)


InsidePath = Annotated[str, Field(pattern=r"^/[^\x00]*$")]
"""An absolute path inside the sandbox."""


AllowedHost = Annotated[str, Field(pattern=r"^(\*|(\*\.)?[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$")]
"""A host that a sandbox may reach."""


class File(Model):
    """A file or folder that is copied into the sandbox before the harness starts."""

    target: InsidePath
    text: str | None = None
    base64: str | None = None
    source: str | None = None
    """A file or folder on the node's machine."""
    mode: int = Field(default=0o644, ge=0, le=0o777)
    """Mode of an inline file; those of a source are kept."""

    @property
    def data(self) -> bytes | None:
        """The content, unless it is in `source`."""
        if self.text is not None:
            return self.text.encode("utf-8", "surrogateescape")
        return base64.b64decode(self.base64) if self.base64 is not None else None

    @model_validator(mode="after")
    def _one_content(self) -> Self:
        if sum(value is not None for value in (self.text, self.base64, self.source)) != 1:
            raise ValueError("set exactly one of text, base64 and source")
        if self.base64 is not None:
            try:
                base64.b64decode(self.base64, validate=True)
            except binascii.Error as error:
                raise ValueError(f"base64 is not valid: {error}") from error
        return self


class Environment(Model):
    """The environment of a session; its evaluation runs in a fresh one."""

    sandbox: SandboxKind | None = None
    root: str = ""
    """The root file system. Empty: an allow-list of the host's own; else a folder, a tar file or the name of an image."""
    build: str = ""
    """A folder with a Dockerfile that is built before the sessions: from the images that it names, or over `root` if set."""
    base: ImageBase | None = None
    """What the names of images mean in `root` and in the Dockerfile. Default: the node's `images.base`."""
    files: list[File] = Field(default_factory=list)
    setup: list[str] = Field(default_factory=list)
    """Shell commands run in the working folder after the files are copied; if one fails, the session fails."""
    workdir: InsidePath = "/work"
    env: dict[str, str] = Field(default_factory=dict)
    user: str = ""
    """User of the harness. Empty: root, without privileges outside; else a name or number known in the root file system."""
    network: Network = Network.GATEWAY
    allowed_hosts: list[AllowedHost] = Field(default_factory=list)
    """With network `open`, the hosts that can be reached: `name`, `name:port` or `*.name`. Empty: all that the operator
    allows."""
    resources: Resources = Field(default_factory=Resources)
    artifacts: list[InsidePath] = Field(default_factory=list)
    """Files and folders that are saved with the session's logs after the harness ended."""

    @field_validator("env")
    @classmethod
    def _names_are_variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not name or "=" in name or "\x00" in name + value:
                raise ValueError(f"{name!r} cannot be an environment variable")
        return env


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TransitionError(TowlineError):
    """A transition that `VALID_TRANSITIONS` does not have."""


class Suspicion(Model):
    """Something in a session that looks like a cheat (`towline.evaluators.suspicion`)."""

    name: str
    detail: str = ""


class Reward(Model):
    """The result of an evaluator. Only a `scored` reward may reach a trainer; read it through `score`."""

    value: FiniteFloat
    """The outcome. Meaningless unless the status is `scored`."""
    components: Scores = Field(default_factory=dict)
    """The components of the value by name."""
    per_turn: Scores = Field(default_factory=dict)
    """Rewards of single turns, by turn id."""
    evaluator: str = ""
    status: RewardStatus = RewardStatus.SCORED
    error: str | None = None
    """Why there is no score."""
    cause: str | None = None
    """What failed, if the agent itself made its evaluation fail. The value is then the evaluator's lowest score."""
    suspicion: list[Suspicion] = Field(default_factory=list)
    """What looks like a cheat, by name. For information: it does not change the value."""

    @property
    def score(self) -> float | None:
        """The value if it was scored; `None` keeps a failure from being read as 0."""
        return self.value if self.status is RewardStatus.SCORED else None

    @model_validator(mode="after")
    def _failure_has_a_reason(self) -> Self:
        if self.status is RewardStatus.FAILED and not self.error:
            raise ValueError("a failed reward needs an error that says why")
        if self.status is RewardStatus.SCORED and self.error:
            raise ValueError("a scored reward has no error")
        if self.status is not RewardStatus.SCORED and self.cause:
            raise ValueError("only a scored reward has a cause")
        return self


class Timeouts(Model):
    """Budgets of the stages of a session in seconds; `None`: the node's default."""

    init: Seconds | None = None
    run: Seconds | None = None
    """Counts from the start of the harness, not from the queue."""
    build: Seconds | None = None
    evaluate: Seconds | None = None


class Step(Model):
    """One of several instructions of a task, given in the same sandbox after the harness ended on the previous one."""

    name: Id
    instruction: str = Field(min_length=1)
    files: list[File] = Field(default_factory=list)
    """Files that are added for this step."""
    setup: list[str] = Field(default_factory=list)
    """Shell commands run before the harness starts on it."""
    seconds: Seconds | None = None
    """Budget of its run; `None`: that of the task."""


class Task(Model):
    """What to do, where, how it is scored, and how many samples to take."""

    task_id: Id
    """Also the `group_id` of its sessions."""
    instruction: str = Field(min_length=1)
    steps: list[Step] = Field(default_factory=list)
    """If set, the harness gets their instructions one after the other; `instruction` is then all of them as one text."""
    harness: Id
    harness_options: Json = Field(default_factory=dict)
    settings: Json = Field(default_factory=dict)
    """Session settings at the gateway: context policy, builder, sampling, limits."""
    environment: Environment = Field(default_factory=Environment)
    evaluator: Json = Field(default_factory=dict)
    """`kind` and that kind's options. Empty: the sessions are not scored."""
    num_samples: int = Field(default=1, ge=1)
    """Sessions per group."""
    min_samples: int = Field(default=0, ge=0)
    """Usable sessions that complete the group; 0: all of them."""
    grace_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """How long the other samples may continue once `min_samples` sessions are usable; then they are stopped."""
    priority: int = 0
    """Higher runs earlier."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts per sample when the infrastructure fails."""
    timeouts: Timeouts = Field(default_factory=Timeouts)
    max_staleness: Count | None = None
    """Maximum number of policy versions that a delivered result may be behind, unless its consumer is stricter."""
    callback: str | None = None
    """A URL that is called when the group is complete: a hint, never the only delivery."""
    metadata: Json = Field(default_factory=dict)

    @property
    def required_samples(self) -> int:
        return self.min_samples or self.num_samples

    @model_validator(mode="after")
    def _group_can_be_complete(self) -> Self:
        if self.min_samples > self.num_samples:
            raise ValueError(f"min_samples {self.min_samples} exceeds num_samples {self.num_samples}")
        return self


_ADDED_LATER = ("grace_seconds", "environment.base")
"""Fields that tasks in the stores and folders of version 0.1 lack, by path; their defaults are falsy."""


def digest_values(dumped: dict[str, Any]) -> dict[str, Any]:
    """The fields of a dumped task for a digest that stays the same over versions: later fields count where they are set."""
    values = dict(dumped)
    for path in _ADDED_LATER:
        holder, (*parents, name) = values, path.split(".")
        for parent in parents:
            holder[parent] = holder = dict(holder[parent])
        if not holder.get(name):
            holder.pop(name, None)
    return values


class Session(Model):
    """One rollout of a task: one harness in one sandbox."""

    session_id: Id
    task_id: Id
    sample: Count = 0
    """Index of the sample in the group."""
    attempt: int = Field(default=1, ge=1)
    state: SessionState = SessionState.QUEUED
    end_reason: EndReason | None = None
    failure: FailureReason | None = None
    """Why it is FAILED or LOST."""
    stage: SessionState | None = None
    """The last stage before it ended, if known."""
    error: str | None = None
    node: str = ""
    created: float = 0.0
    updated: float = 0.0
    """Unix times."""
    metadata: Json = Field(default_factory=dict)
    tenant: TenantName = DEFAULT_TENANT
    """Whose task it is of."""

    def advance(
        self,
        state: SessionState,
        *,
        at: float,
        end_reason: EndReason | None = None,
        error: str | None = None,
        failure: FailureReason | None = None,
    ) -> Session:
        """The session in its next state; raises `TransitionError` for an invalid transition."""
        if not self.state.can_become(state):
            raise TransitionError(f"session {self.session_id} cannot go from {self.state} to {state}")
        changes = {"state": state, "updated": at}
        changes |= {"end_reason": end_reason or self.end_reason, "error": error or self.error}
        changes |= {"failure": failure or self.failure}
        return Session.model_validate(self.__dict__ | changes)

    @model_validator(mode="after")
    def _end_is_explained(self) -> Self:
        check_end(self.state, self.end_reason, self.error)
        return self


def check_end(state: SessionState, end_reason: EndReason | None, error: str | None) -> None:
    """Raise unless DONE has an `end_reason` and FAILED has an error."""
    if state is SessionState.DONE and end_reason is None:
        raise ValueError("a session that is done needs an end_reason")
    if state is SessionState.FAILED and not error:
        raise ValueError("a failed session needs an error that says why")
