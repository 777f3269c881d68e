"""What `towline cluster` does with any scheduler, and the record of what it submitted.

The record is one small file in the data folder. It says what was submitted, never how it is now: that is asked of the
scheduler each time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from towline.common.files import write_atomically
from towline.errors import ConfigError

_FILE = "launched.json"


class LaunchRecord(BaseModel):
    """What `towline cluster up` submitted."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["slurm", "kubernetes"]
    name: str
    job_id: str = ""
    """Slurm job."""
    namespace: str = ""
    """Kubernetes namespace."""


class LaunchStatus(BaseModel):
    """How the submitted job or deployment is now."""

    kind: Literal["slurm", "kubernetes"]
    name: str
    job_id: str = ""
    namespace: str = ""
    state: str
    """As the scheduler says it: `PENDING`, `RUNNING`, …; Kubernetes: `AVAILABLE`, `PROGRESSING`, `ABSENT`."""
    active: bool
    """Whether it runs or is going to."""
    detail: str = ""
    """Why it waits, or which nodes it has."""
    url: str = ""
    """Where the service is; empty until it listens."""
    key: str = ""
    """Where its API key is."""
    log: str = ""
    """Where its log is."""


class Launcher(Protocol):
    """Starts and stops Towline with one scheduler."""

    def render(self) -> str:
        """What `up` submits, without the values of secrets."""
        ...

    def up(self) -> LaunchRecord:
        """Submit it."""
        ...

    def status(self, record: LaunchRecord) -> LaunchStatus:
        """Ask the scheduler."""
        ...

    def down(self, record: LaunchRecord) -> None:
        """Stop it, and return when it has stopped."""
        ...


def read_record(state: Path) -> LaunchRecord | None:
    """The record in a state folder, if something was submitted from it."""
    try:
        return LaunchRecord.model_validate_json((state / _FILE).read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ConfigError(f"{state / _FILE} is damaged; end the job by hand and remove this file") from error


def write_record(state: Path, record: LaunchRecord) -> None:
    state.mkdir(parents=True, exist_ok=True)
    write_atomically(state / _FILE, record.model_dump_json(exclude_defaults=True).encode())


def remove_record(state: Path) -> None:
    (state / _FILE).unlink(missing_ok=True)
