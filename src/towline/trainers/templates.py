"""Task templates: how a row of a trainer's dataset becomes a task.

A template is a `Task` without an id whose strings may reference fields of the row: `{row.question}`, `{row.choices.0}`. A
string that is exactly one reference becomes the field's value, of any type; within a longer string the value is inserted as
text, or as JSON if it is a list or an object. Other braces are left alone: harnesses have placeholders of their own.

Without an `instruction` in the template, the row's prompt is the instruction. A row may carry `towline_task`, an object of
`Task` fields that override the template's.
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

TASK_FIELD = "towline_task"
"""The field in which a row carries task fields of its own."""
_REFERENCE = re.compile(r"\{row((?:\.[^{}.\s]+)+)\}")
_TEXT_PARTS = ("text", "input_text")
_ROLES = ("system", "developer", "user")


class RowError(TowlineError):
    """A row that cannot be turned into a task."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        """Path of the invalid field, in the row or in the task made from it."""


@dataclass(frozen=True, slots=True)
class TaskTemplate:
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, source: TaskTemplate | Path | str) -> TaskTemplate:
        """Read a template from a `.toml` or `.json` file; a template is returned as it is."""
        if isinstance(source, TaskTemplate):
            return source
        path = Path(source)
        try:
            text = path.read_text("utf-8")
            fields = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is not a task template in TOML or JSON: {error}") from error
        unknown = fields.keys() - Task.model_fields.keys() if isinstance(fields, dict) else {"its type"}
        if unknown:
            raise ConfigError(f"{path} is not a task template: unknown task fields {', '.join(sorted(unknown))}")
        return cls(fields)

    def task(self, row: Mapping[str, Any], *, prompt: Any, name: str, samples: int | None = None) -> Task:
        """Make a task from a row. Its id starts with `name` and is unique: the same row again makes another task."""
        own = row.get(TASK_FIELD) or {}
        if not isinstance(own, dict):
            raise RowError("must be an object of the fields of a task", TASK_FIELD)
        made = {key: _fill(value, row) for key, value in self.fields.items() if key not in own} | own
        if not made.get("instruction"):
            made["instruction"] = instruction_from_prompt(prompt)
        made["task_id"] = f"{name}/{uuid4().hex}"
        if samples is not None:
            made["num_samples"] = samples
        try:
            return Task.model_validate(made)
        except ValidationError as error:
            first = error.errors()[0]
            location = ".".join(map(str, first["loc"])) or "task"
            missing = first["type"] == "missing"
            advice = f"; set it in the task template or in the row's `{TASK_FIELD}`" if missing else ""
            raise RowError(f"{first['msg']}{advice}", location) from error


def with_sampling(task: Task, sampling: Mapping[str, Any], **changes: Any) -> Task:
    """The task with the trainer's sampling parameters, which override the template's; `None` leaves one as it is."""
    chosen = {name: value for name, value in sampling.items() if value is not None}
    settings = task.settings | {"sampling": task.settings.get("sampling", {}) | chosen}
    return task.model_copy(update={"settings": settings, **changes})


def with_system_prompt(prompt: Any, system: str | None) -> Any:
    """The prompt with a system message in front, where there is one."""
    if not system:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    return [{"role": "system", "content": system}, *messages]


def instruction_from_prompt(prompt: Any) -> str:
    """The prompt as one instruction text: a string, or system, developer and user messages joined."""
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, list) and prompt:
        text = "\n\n".join(_message_text(message, index) for index, message in enumerate(prompt))
    else:
        raise RowError("must be text or a list of messages, unless the task template has an `instruction`", "prompt")
    if not text.strip():
        raise RowError("is empty", "prompt")
    return text


def _message_text(message: Any, index: int) -> str:
    location = f"prompt.{index}"
    role = message.get("role", "user") if isinstance(message, dict) else None
    if role not in _ROLES or message.get("type", "message") != "message":
        raise RowError(f"a harness takes one instruction; a message of role {role!r} cannot be part of it", location)
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("must be text or a list of parts", f"{location}.content")
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise RowError("only text can be part of an instruction", f"{location}.content.{number}")
    return "".join(part["text"] for part in content)


def _fill(value: Any, row: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _fill(one, row) for key, one in value.items()}
    if isinstance(value, list):
        return [_fill(one, row) for one in value]
    if not isinstance(value, str):
        return value
    if whole := _REFERENCE.fullmatch(value):
        return _lookup(row, whole[1])
    return _REFERENCE.sub(lambda match: _as_text(_lookup(row, match[1])), value)


def _lookup(row: Any, path: str) -> Any:
    """The value at `.a.b.0` of a row."""
    for name in path[1:].split("."):
        if isinstance(row, Mapping) and name in row:
            row = row[name]
        elif isinstance(row, list) and name.isdecimal() and int(name) < len(row):
            row = row[int(name)]
        else:
            raise RowError("the task template references this field, but the row does not have it", path[1:])
    return row


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
