"""Reading the fields of a task file: prompts as one text, and errors that name the file, the line and the field."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from towline.errors import ConfigError


class TaskError(ConfigError):
    """A task that cannot be loaded. Names the file, the line and the field, and says what to do."""


@dataclass(frozen=True, slots=True)
class TaskDefaults:
    """Values for tasks that do not set their own."""

    harness: str
    harness_options: dict[str, Any] = field(default_factory=dict)
    samples: int | None = None
    """Overrides `num_samples` of every task."""


class SourceLocation:
    """A file and line that a task comes from; builds errors that name them."""

    def __init__(self, path: Path, line: int = 0):
        self.path = path
        self.line = line

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else str(self.path)

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
