"""Tasks in lines of JSON. A line is recognised by its fields, and every error names the file, the line and the field.

| fields | kind | scored by |
|---|---|---|
| `task_id`, `instruction` | Towline's own `Task` | as it says |
| `instance_id`, `base_commit`, `problem_statement` | SWE-bench, SWE-Gym | `patch` |
| `responses_create_params` | NeMo Gym | `answer` if there is an `expected_answer` |
| `prompt`, `tests` | coding | the tests, in a clean sandbox |
| `prompt`, `problem` or `question`, with `answer` | math and STEM | `answer` |

A row of any kind may also have `environment`, `evaluator`, `timeouts`, `harness`, `harness_options`, `num_samples` and
`metadata` as a `Task` has them; they go over what the kind itself gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from towline.schema import Task
from towline.tasks import coding, nemo_gym, swebench
from towline.tasks.errors import Place
from towline.tasks.text import instruction_text

Row = dict[str, Any]

QUESTION = ("prompt", "problem", "question")
ANSWER = ("answer", "expected_answer", "ground_truth")
OVER = ("environment", "evaluator", "timeouts", "settings", "metadata")
"""Fields of a `Task` that a row may have, laid over what its kind gives."""
_SHORT = 200
"""Characters of a row's other fields that are kept."""
BOXED = "\n\nEnd your last message with the final answer in \\boxed{}."


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a task gets that says nothing of it."""

    harness: str
    harness_options: Row = field(default_factory=dict)
    samples: int | None = None
    """Replaces what a task says."""


def load_file(path: Path, defaults: Defaults) -> list[tuple[str, Task]]:
    """The tasks of a file with where each stands; empty lines are nothing."""
    found = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    place = Place(path, number)
                    found.append((str(place), task_of(_object(line, place), place, defaults)))
    except UnicodeDecodeError as error:
        raise Place(path).error("", f"not UTF-8 text: {error}") from error
    except OSError as error:
        raise Place(path).error("", f"cannot be read: {error}") from error
    if not found:
        raise Place(path).error("", "there is no task in this file")
    return found


def task_of(row: Row, place: Place, defaults: Defaults) -> Task:
    """The task that one row describes."""
    if "instruction" in row:
        return _task(dict(row), place, defaults)
    read = _reader(row, place)
    made = read(row, place)
    made.setdefault("task_id", _identity(row, place))
    made["metadata"] = _about(row) | made.get("metadata", {})
    for name in OVER:
        if name in row:
            if not isinstance(row[name], dict):
                raise place.error(name, "must be an object")
            # A different kind of evaluator shares no options with the row's own.
            replaces = name == "evaluator" and row[name].get("kind", made.get(name, {}).get("kind")) != made.get(
                name, {}
            ).get("kind")
            made[name] = dict(row[name]) if replaces else made.get(name, {}) | row[name]
    for name in ("harness", "harness_options", "num_samples", "min_samples", "priority"):
        if name in row:
            made[name] = row[name]
    return _task(made, place, defaults)


def _task(values: Row, place: Place, defaults: Defaults) -> Task:
    if not values.get("harness"):
        values["harness"] = defaults.harness
    if values["harness"] == defaults.harness:
        given = values.get("harness_options") or {}
        values["harness_options"] = {**defaults.harness_options, **given} if isinstance(given, dict) else given
    if defaults.samples is not None:
        values["num_samples"] = defaults.samples
        minimum = values.get("min_samples")
        if isinstance(minimum, int):
            values["min_samples"] = min(minimum, defaults.samples)
    values.setdefault("task_id", _identity(values, place))
    try:
        return Task.model_validate(values)
    except ValidationError as error:
        raise place.invalid(error) from error


def _reader(row: Row, place: Place) -> Callable[[Row, Place], Row]:
    if "responses_create_params" in row:
        return nemo_gym.read
    if {"instance_id", "base_commit"} <= row.keys():
        return swebench.read
    if "tests" in row:
        return coding.read
    if any(name in row for name in QUESTION):
        return _math
    known = ", ".join(sorted(row)) or "none"
    raise place.error(
        "",
        "this is no task: it needs `instruction` (Towline's own schema), `prompt` with `answer` or `tests`, a SWE-bench "
        f"row's fields, or `responses_create_params`; its fields are: {known}",
    )


def _math(row: Row, place: Place) -> Row:
    question = next(name for name in QUESTION if name in row)
    text = instruction_text(row[question], place, question)
    answer = next((name for name in ANSWER if name in row), None)
    if answer is None:
        if isinstance(row.get("evaluator"), dict):
            return {"instruction": text}
        raise place.error("answer", f"missing; a row with `{question}` needs `answer`, `tests` or an `evaluator`")
    value = row[answer]
    if isinstance(value, bool) or not isinstance(value, str | int | float | list) or value in ("", []):
        raise place.error(answer, "must be text, a number, or a list of accepted ones")
    # A prompt says itself what it wants; a bare problem has to be told where its answer will be looked for.
    if question != "prompt" and "boxed" not in text:
        text += BOXED
    return {"instruction": text, "evaluator": {"kind": "answer", "answer": value}}


def _about(row: Row) -> Row:
    """What else a row says of itself in a few words (its level, its source): for whoever looks at results."""
    told = {*QUESTION, *ANSWER, *Task.model_fields, "tests", "problem_statement"}
    short = {name: value for name, value in row.items() if name not in told and isinstance(value, str | int | float)}
    return {name: value for name, value in short.items() if len(str(value)) <= _SHORT}


def _identity(row: Row, place: Place) -> str:
    for name in ("task_id", "instance_id", "id", "uuid"):
        value = row.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            return str(value)
    return f"{place.path.stem}-{place.line}"


def _object(line: str, place: Place) -> Row:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise place.error("", f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise place.error("", f"a task is a JSON object, not {type(value).__name__}")
    return value
