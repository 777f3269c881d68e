"""From paths to tasks: Harbor folders, and JSON lines whose kind is recognized by their fields.

Files are data: their tasks name nothing of this machine but files in their own folder, opened without following links
(`fields.TaskDefaults.admit`); the user widens that with `--trust`.

The loader is chosen by what a path contains, never by its name alone. A folder with `task.toml` is a Harbor task; any other
folder contains Harbor tasks and JSONL files, one level down. Every error names the file, the line and the field.

| fields of a row | kind | scored by |
|---|---|---|
| `task_id`, `instruction` | Towline's own `Task` | its `evaluator` |
| `instance_id`, `base_commit`, `problem_statement` | SWE-bench, SWE-Gym, SWE-rebench | `patch` |
| the fields of SWE-smith, R2E-Gym or Multi-SWE (`swe_layouts.py`) | the same | `patch` |
| `responses_create_params` | NeMo Gym | `answer` if there is an `expected_answer` |
| `prompt`, `tests` | coding | the tests, in a clean sandbox |
| `prompt`, `problem` or `question`, with `answer` | math and STEM | `answer` |

A row of any kind may also have `environment`, `evaluator`, `timeouts`, `harness`, `harness_options`, `num_samples` and
`metadata` as in a `Task`; they override what the kind provides. A NeMo Gym row is kept whole in the task's metadata, so that
the NeMo Gym adapter can return it with its result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from towline.common.untrusted.data_files import UnsafePath
from towline.schema import Task
from towline.schema.trust import Grant, RootRegistry
from towline.tasks import coding, harbor, swe_layouts
from towline.tasks.fields import SourceLocation, TaskDefaults, TaskError, instruction_text

NEMO_GYM_FIELD = "responses_create_params"


def read_nemo_gym_row(row: dict[str, Any], location: SourceLocation) -> dict[str, Any]:
    params = row[NEMO_GYM_FIELD]
    if not isinstance(params, dict) or "input" not in params:
        raise location.error(NEMO_GYM_FIELD, "must be an object with `input`")
    text = instruction_text(params["input"], location, f"{NEMO_GYM_FIELD}.input")
    if params.get("instructions"):
        text = f"{instruction_text(params['instructions'], location, f'{NEMO_GYM_FIELD}.instructions')}\n\n{text}"
    made: dict[str, Any] = {"instruction": text, "metadata": {"nemo_gym": row}}
    answer = row.get("expected_answer", row.get("answer"))
    if isinstance(answer, str | int | float) and not isinstance(answer, bool):
        made["evaluator"] = {"kind": "answer", "answer": answer}
    return made


Row = dict[str, Any]

QUESTION = ("prompt", "problem", "question")
ANSWER = ("answer", "expected_answer", "ground_truth")
OVER = ("environment", "evaluator", "timeouts", "settings", "metadata")
"""Fields of a `Task` that a row may set; merged over what its kind provides."""
_SHORT = 200
"""Longest value, in characters, that is kept of a row's other fields."""
BOXED = "\n\nEnd your last message with the final answer in \\boxed{}."


def load_file(path: Path, defaults: TaskDefaults, *, found: bool = False) -> list[tuple[str, Task]]:
    """The tasks of a file, each with its location; empty lines are skipped. `found`: the user did not name it himself."""
    tasks = []
    try:
        follow = not found or defaults.folder(path.parent).links
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
        with open(descriptor, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    location = SourceLocation(path, number)
                    tasks.append((str(location), task_of(_object(line, location), location, defaults)))
    except UnicodeDecodeError as error:
        raise SourceLocation(path).error("", f"not UTF-8 text: {error}") from error
    except OSError as error:
        raise SourceLocation(path).error("", f"cannot be read: {error}") from error
    if not tasks:
        raise SourceLocation(path).error("", "the file contains no task")
    return tasks


def task_of(row: Row, location: SourceLocation, defaults: TaskDefaults) -> Task:
    """The task described by one row."""
    if "instruction" in row:
        return _task(dict(row), location, defaults)
    read = _reader(row, location)
    row = swe_layouts.own_fields(row)
    made = read(row, location)
    made.setdefault("task_id", _identity(row, location))
    made["metadata"] = _about(row) | made.get("metadata", {})
    for name in OVER:
        if name in row:
            if not isinstance(row[name], dict):
                raise location.error(name, "must be an object")
            # Another kind of evaluator shares no options with the row's own.
            replaces = name == "evaluator" and row[name].get("kind", made.get(name, {}).get("kind")) != made.get(
                name, {}
            ).get("kind")
            made[name] = dict(row[name]) if replaces else made.get(name, {}) | row[name]
    for name in ("harness", "harness_options", "num_samples", "min_samples", "grace_seconds", "priority"):
        if name in row:
            made[name] = row[name]
    return _task(made, location, defaults)


def _task(values: Row, location: SourceLocation, defaults: TaskDefaults) -> Task:
    if defaults.samples is not None:
        values["num_samples"] = defaults.samples
        minimum = values.get("min_samples")
        if isinstance(minimum, int):
            values["min_samples"] = min(minimum, defaults.samples)
    values.setdefault("task_id", _identity(values, location))
    return defaults.admit(values, location.path.parent, location)


def _reader(row: Row, location: SourceLocation) -> Callable[[Row, SourceLocation], Row]:
    if NEMO_GYM_FIELD in row:
        return (
            swe_layouts.read_nemo_gym_swe_row if swe_layouts.is_nemo_gym_swe(row[NEMO_GYM_FIELD]) else read_nemo_gym_row
        )
    if (software := swe_layouts.reader_of(row)) is not None:
        return software
    if "tests" in row:
        return coding.read_coding_row
    if any(name in row for name in QUESTION):
        return _math
    known = ", ".join(sorted(row)) or "none"
    raise location.error(
        "",
        "not a task: expected `instruction` (Towline's own schema), `prompt` with `answer` or `tests`, the fields of a "
        f"SWE-bench row, or `responses_create_params`; found: {known}",
    )


def _math(row: Row, location: SourceLocation) -> Row:
    question = next(name for name in QUESTION if name in row)
    text = instruction_text(row[question], location, question)
    answer = next((name for name in ANSWER if name in row), None)
    if answer is None:
        if isinstance(row.get("evaluator"), dict):
            return {"instruction": text}
        raise location.error("answer", f"missing; a row with `{question}` needs `answer`, `tests` or an `evaluator`")
    value = row[answer]
    if isinstance(value, bool) or not isinstance(value, str | int | float | list) or value in ("", []):
        raise location.error(answer, "must be text, a number, or a list of accepted answers")
    # A prompt states its own answer format; a bare problem must be told where its answer is expected.
    if question != "prompt" and "boxed" not in text:
        text += BOXED
    return {"instruction": text, "evaluator": {"kind": "answer", "answer": value}}


def _about(row: Row) -> Row:
    """The row's other short fields (its level, its source), kept as metadata for reading results."""
    used = {*QUESTION, *ANSWER, *Task.model_fields, "tests", "problem_statement"}
    short = {name: value for name, value in row.items() if name not in used and isinstance(value, str | int | float)}
    return {name: value for name, value in short.items() if len(str(value)) <= _SHORT}


def _identity(row: Row, location: SourceLocation) -> str:
    for name in ("task_id", "instance_id", "id", "uuid"):
        value = row.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            return str(value)
    return f"{location.path.stem}-{location.line}"


def _object(line: str, location: SourceLocation) -> Row:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise location.error("", f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise location.error("", f"a task is a JSON object, not {type(value).__name__}")
    return value


SHIPPED = {"miniature-swe": Path(__file__).with_name("miniature_swe.jsonl")}
"""Data sets that come with the package, by the name that stands for their path where no such path exists."""
JSONL_SUFFIXES = (".jsonl", ".ndjson")
"""Suffixes of files with one task per line."""


def load_tasks(
    paths: Sequence[str | Path],
    *,
    harness: str,
    samples: int | None = None,
    harness_options: Mapping[str, Any] | None = None,
    trust: Collection[Grant] = (),
    registry: RootRegistry | None = None,
    uploads: bool = False,
) -> list[Task]:
    """All tasks at the paths, in order. `harness` and its options are the defaults for tasks that name none; `samples`
    overrides every task's number of samples. `trust` is what the files may name besides their own folders."""
    defaults = TaskDefaults(
        harness,
        dict(harness_options or {}),
        samples,
        trust=frozenset(trust),
        registry=registry or RootRegistry(),
        uploads=uploads,
    )
    tasks: list[Task] = []
    origin: dict[str, str] = {}
    for path in map(Path, paths):
        for place, task in load_at(path, defaults):
            if task.task_id in origin:
                raise TaskError(f"{place}: the task id {task.task_id!r} is already used by {origin[task.task_id]}")
            origin[task.task_id] = place
            tasks.append(task)
    return tasks


def load_at(path: Path, defaults: TaskDefaults) -> list[tuple[str, Task]]:
    """The tasks at a path that the user names, which may be a link."""
    if path.is_dir():
        if (path / harbor.FILE).is_file():
            return [(str(path), harbor.load_folder(path, defaults))]
        return _in_folder(path, defaults)
    if path.is_file():
        if path.name == harbor.FILE:
            return [(str(path), harbor.load_folder(path.parent, defaults))]
        return load_file(path, defaults)
    if (shipped := SHIPPED.get(str(path))) is not None:
        return load_file(shipped, defaults)
    raise TaskError(f"{path} does not exist; shipped data sets: {', '.join(SHIPPED)}")


def _in_folder(path: Path, defaults: TaskDefaults) -> list[tuple[str, Task]]:
    """The tasks one level down, which are data: a link among them is refused."""
    inside = [entry for entry in sorted(path.iterdir()) if not entry.name.startswith(".")]
    folders = [entry for entry in inside if (entry / harbor.FILE).is_file()]
    files = [entry for entry in inside if entry not in folders and entry.suffix in JSONL_SUFFIXES]
    if not folders and not files:
        raise TaskError(f"{path}: no task found; expected Harbor folders with {harbor.FILE}, or *.jsonl files")
    found: list[tuple[str, Task]] = []
    for entry in (one for one in inside if one in folders or one in files):
        try:
            defaults.folder(path).find(entry.name)
        except UnsafePath as error:
            raise SourceLocation(entry).unsafe(error) from error
        if entry in folders:
            found.append((str(entry), harbor.load_folder(entry, defaults)))
        else:
            found += load_file(entry, defaults, found=True)
    return found
