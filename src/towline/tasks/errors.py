"""What is wrong with a task file, and where: the file, the line, the field."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from towline.errors import ConfigError


class TaskError(ConfigError):
    """A task that cannot be loaded. Says which file, which line, which field, and what to do."""


class Place:
    """Where in which file; makes errors that say so."""

    def __init__(self, path: Path, line: int = 0):
        self.path = path
        self.line = line

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else str(self.path)

    def error(self, field: str, reason: str) -> TaskError:
        return TaskError(f"{self}: {field}: {reason}" if field else f"{self}: {reason}")

    def invalid(self, error: ValidationError, prefix: Iterable[str] = ()) -> TaskError:
        """The first few of pydantic's findings, each with its field."""
        found = [f"{_dotted((*prefix, *problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        return TaskError(f"{self}: {'; '.join(found[:3])}{more}")


def _dotted(parts: Iterable[Any]) -> str:
    return ".".join(map(str, parts)) or "the whole"
