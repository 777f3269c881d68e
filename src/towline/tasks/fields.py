"""Reading the fields of a task file: prompts as one text, and errors that name the file, the line and the field.

What a file says is untrusted: `TaskDefaults.admit` makes a task of it, with paths inside the file's own folder and nothing
else of this machine, unless the user trusts more. What the user says on the command line is added afterwards, unchecked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from towline.common.untrusted.data_files import DataFolder, UnsafePath
from towline.errors import ConfigError
from towline.schema import Task
from towline.schema.trust import DATA_FILES, NOTHING, Admission, Grant, RootRegistry, TaskRefused
from towline.schema.untrusted import admit_task

UNNAMED = "unnamed"
"""Placeholder harness of tasks that name none, while the user names none either. Such a task does not run."""
HARBOR_KEY = "harbor"
"""Key of a task's metadata that only the loader of Harbor folders sets: the oracle reads files from the folder it names."""


class TaskError(ConfigError):
    """A task that cannot be loaded. Names the file, the line and the field, and says what to do."""


@dataclass(frozen=True, slots=True)
class TaskDefaults:
    """Values for tasks that do not set their own."""

    harness: str
    harness_options: dict[str, Any] = field(default_factory=dict)
    samples: int | None = None
    """Overrides `num_samples` of every task."""
    trust: frozenset[Grant] = NOTHING
    """What the files may name besides their own folder: `--trust`."""
    registry: RootRegistry = field(default_factory=RootRegistry)
    uploads: bool = False
    """Whether the tasks go to a service, where `upload:…` means something."""

    def folder(self, path: Path) -> DataFolder:
        """A folder of data, whose links are followed only if its paths are trusted."""
        return DataFolder(path, links=Grant.PATHS in self.trust)

    def admit(self, values: dict[str, Any], folder: Path, location: SourceLocation) -> Task:
        """The task that these values of a file describe, with the user's harness options where it is the user's harness.

        Raises `TaskError` for values that are not a task, and for a value that names something of this machine.
        """
        values = dict(values)
        own = values.pop("harness_options", None) or {}
        values["harness"] = values.get("harness") or self.harness
        # A task without a harness does not run: its options are checked when it has one.
        late = own if values["harness"] == UNNAMED and isinstance(own, dict) else None
        try:
            task = Task.model_validate(values | ({"harness_options": own} if own and late is None else {}))
            task = admit_task(task, self._admission(), lambda path: self._resolve(folder, path))
        except ValidationError as error:
            raise location.invalid(error) from error
        except TaskRefused as error:
            raise location.error(error.field, error.reason) from error
        options = {**self.harness_options, **(late or task.harness_options)} if task.harness == self.harness else None
        return task if options is None else task.model_copy(update={"harness_options": options})

    def _admission(self) -> Admission:
        reserved = frozenset({HARBOR_KEY})
        return Admission(
            self.trust | DATA_FILES, self.registry, reserved=reserved, harness=self.harness, uploads=self.uploads
        )

    def _resolve(self, folder: Path, path: str) -> str:
        """A relative path starts at the file's folder; with trusted paths, one that is not there starts where we are."""
        if Grant.PATHS not in self.trust:
            return str(self.folder(folder).find(path))
        given = Path(path).expanduser()
        return str(folder.absolute() / given if (folder / given).exists() else given.absolute())


class SourceLocation:
    """A file and line that a task comes from; builds errors that name them."""

    def __init__(self, path: Path, line: int = 0):
        self.path = path
        self.line = line

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else str(self.path)

    def unsafe(self, error: UnsafePath) -> TaskError:
        return self.error("", f"{error}; to allow it: --trust {Grant.PATHS}")

    def error(self, field: str, reason: str) -> TaskError:
        return TaskError(f"{self}: {field}: {reason}" if field else f"{self}: {reason}")

    def invalid(self, error: ValidationError, prefix: Iterable[str] = ()) -> TaskError:
        """Pydantic's first three findings, each with its field."""
        found = [f"{_dotted((*prefix, *problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        return TaskError(f"{self}: {'; '.join(found[:3])}{more}")


def _dotted(parts: Iterable[Any]) -> str:
    return ".".join(map(str, parts)) or "the row"


_TEXT_PARTS = ("text", "input_text")


def instruction_text(value: Any, location: SourceLocation, field: str) -> str:
    """A prompt as one text. A harness starts from one instruction, so a list of messages may contain only system, developer
    and user messages, which are joined; anything else is refused rather than dropped."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, list) and value:
        text = "\n\n".join(_message(item, location, f"{field}.{index}") for index, item in enumerate(value))
    else:
        raise location.error(field, "must be text or a list of messages")
    if not text.strip():
        raise location.error(field, "is empty")
    return text


def _message(message: Any, location: SourceLocation, field: str) -> str:
    if not isinstance(message, dict):
        raise location.error(field, "a message is an object with `role` and `content`")
    role = message.get("role", "user")
    if role not in ("system", "developer", "user") or message.get("type", "message") != "message":
        raise location.error(
            f"{field}.role", f"a harness starts from one instruction; messages of role {role!r} are not supported"
        )
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise location.error(f"{field}.content", "must be text or a list of parts")
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise location.error(f"{field}.content.{index}", f"only text can be part of an instruction, not {kind!r}")
        parts.append(part["text"])
    return "".join(parts)
