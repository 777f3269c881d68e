"""A row of a trainer's dataset as a task.

A template is a `Task` without its id whose texts may name fields of the row: `{row.question}`, `{row.choices.0}`. A text
that is one such name and nothing else becomes the field's value, whatever its type; within a longer text the value is
written as text, and as JSON if it is a list or an object. No other brace is touched: harnesses have names of their own.

Without an `instruction` in the template the row's prompt is the instruction. A row may bring `towline_task`, an object of
`Task` fields that replace the template's.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import ValidationError

from towline.errors import ConfigError, TowlineError
from towline.schema import Task

OWN = "towline_task"
"""The field by which a row brings a task of its own."""
_NAME = re.compile(r"\{row((?:\.[^{}.\s]+)+)\}")
_TEXT_PARTS = ("text", "input_text")
_ROLES = ("system", "developer", "user")


class RowError(TowlineError):
    """A row that makes no task."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        """Path of the field at fault: of the row, or of the task that it would make."""


@dataclass(frozen=True, slots=True)
class TaskTemplate:
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | str) -> TaskTemplate:
        """The template in a `.toml` or `.json` file."""
        path = Path(path)
        try:
            text = path.read_text("utf-8")
            fields = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is no task template in TOML or JSON: {error}") from error
        unknown = fields.keys() - Task.model_fields.keys() if isinstance(fields, dict) else {"its type"}
        if unknown:
            raise ConfigError(f"{path} is no task template: a task has no {', '.join(sorted(unknown))}")
        return cls(fields)

    def task(self, row: Mapping[str, Any], *, prompt: Any, name: str, samples: int | None = None) -> Task:
        """The task that a row makes, under an id of its own that starts with `name`: the same row again is another task."""
        own = row.get(OWN) or {}
        if not isinstance(own, dict):
            raise RowError("must be an object of the fields of a task", OWN)
        made = {key: _filled(value, row) for key, value in self.fields.items() if key not in own} | own
        if not made.get("instruction"):
            made["instruction"] = instruction_of(prompt)
        made["task_id"] = f"{name}/{uuid4().hex}"
        if samples is not None:
            made["num_samples"] = samples
        try:
            return Task.model_validate(made)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "task"
            advice = f"; say it in the task template or in `{OWN}` of the row" if first["type"] == "missing" else ""
            raise RowError(f"{first['msg']}{advice}", place) from error


def instruction_of(prompt: Any) -> str:
    """A prompt as the one text that a harness starts from: plain, or system, developer and user messages, joined."""
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, list) and prompt:
        text = "\n\n".join(_message_text(message, index) for index, message in enumerate(prompt))
    else:
        raise RowError("must be text or a list of messages, or the task template needs an `instruction`", "prompt")
    if not text.strip():
        raise RowError("is empty", "prompt")
    return text


def _message_text(message: Any, index: int) -> str:
    place = f"prompt.{index}"
    role = message.get("role", "user") if isinstance(message, dict) else None
    if role not in _ROLES or message.get("type", "message") != "message":
        raise RowError(f"a harness starts from one instruction, and cannot be given a message of role {role!r}", place)
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("must be text or a list of parts", f"{place}.content")
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise RowError("only text can be part of an instruction", f"{place}.content.{number}")
    return "".join(part["text"] for part in content)


def _filled(value: Any, row: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(one, row) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, row) for one in value]
    if not isinstance(value, str):
        return value
    if whole := _NAME.fullmatch(value):
        return _found(row, whole[1])
    return _NAME.sub(lambda match: _as_text(_found(row, match[1])), value)


def _found(row: Any, path: str) -> Any:
    """The value at `.a.b.0` of a row."""
    for name in path[1:].split("."):
        if isinstance(row, Mapping) and name in row:
            row = row[name]
        elif isinstance(row, list) and name.isdecimal() and int(name) < len(row):
            row = row[int(name)]
        else:
            raise RowError("the task template names this field, and the row has none", path[1:])
    return row


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
