"""Where a task is done: the sandbox that a task asks for, its files, its limits and its network.

Everything here is a wish of the task's; which sandboxes there are, and what they can enforce, is the node's to say.
"""

from __future__ import annotations

import base64
import binascii
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from towline.schema.base import Model


class Network(StrEnum):
    """What can be reached from inside a sandbox."""

    NONE = "none"
    GATEWAY = "gateway"
    """The model endpoint of this one session, and nothing else."""
    OPEN = "open"
    """Whatever the host can reach, by choice and never by default."""


class SandboxKind(StrEnum):
    """The runtimes; an environment that names none takes the node's default."""

    BUBBLEWRAP = "bubblewrap"
    DOCKER = "docker"
    APPTAINER = "apptainer"
    PROCESS = "process"
    """No isolation at all."""


class Resources(Model):
    """Limits of one sandbox; `None` leaves one to the node."""

    memory_mb: int | None = Field(default=None, ge=16)
    pids: int | None = Field(default=None, ge=8)
    cpus: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    disk_mb: int | None = Field(default=None, ge=1)
    """What may be written, all files together."""

    def over(self, defaults: Resources) -> Resources:
        """These limits, and the defaults where they say nothing."""
        given = {name: value for name, value in self.__dict__.items() if value is not None}
        return Resources.model_validate(defaults.__dict__ | given)


InsidePath = Annotated[str, Field(pattern=r"^/[^\x00]*$")]
"""An absolute path inside the sandbox."""


class File(Model):
    """A file or folder that is put into the sandbox before the harness starts."""

    target: InsidePath
    text: str | None = None
    base64: str | None = None
    source: str | None = None
    """A file or folder on the node's machine."""
    mode: int = Field(default=0o644, ge=0, le=0o777)
    """Of a file given here; those of a source are kept."""

    @property
    def data(self) -> bytes | None:
        """The content, unless it is in `source`."""
        if self.text is not None:
            return self.text.encode("utf-8", "surrogateescape")
        return base64.b64decode(self.base64) if self.base64 is not None else None

    @model_validator(mode="after")
    def _one_content(self) -> Self:
        if sum(value is not None for value in (self.text, self.base64, self.source)) != 1:
            raise ValueError("a file has one of text, base64 and source")
        if self.base64 is not None:
            try:
                base64.b64decode(self.base64, validate=True)
            except binascii.Error as error:
                raise ValueError(f"base64 is not base64: {error}") from error
        return self


class Environment(Model):
    """The place a session of the task runs in, and again, untouched, its evaluation."""

    sandbox: SandboxKind | None = None
    root: str = ""
    """The root file system: empty for an allow-list of the host's own, else a folder, a tar file, or, for docker and
    apptainer, an image's name."""
    build: str = ""
    """A folder with a Dockerfile, built over `root` ahead of the sessions."""
    files: list[File] = Field(default_factory=list)
    setup: list[str] = Field(default_factory=list)
    """Shell commands that are run in the working folder once the files are there; one that fails, fails the session."""
    workdir: InsidePath = "/work"
    env: dict[str, str] = Field(default_factory=dict)
    user: str = ""
    """Who runs there: empty for root (without its powers outside), else a name or number of the root's users."""
    network: Network = Network.GATEWAY
    resources: Resources = Field(default_factory=Resources)
    artifacts: list[InsidePath] = Field(default_factory=list)
    """Files and folders that are kept with the session's logs when the harness has ended."""

    @field_validator("env")
    @classmethod
    def _names_are_variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not name or "=" in name or "\x00" in name + value:
                raise ValueError(f"{name!r} cannot be an environment variable")
        return env
