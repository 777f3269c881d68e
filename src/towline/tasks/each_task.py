"""Load tasks one by one: a row that cannot be loaded is reported with its place, and the others are loaded all the same."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from towline.common.untrusted.data_files import UnsafePath
from towline.schema import Task
from towline.schema.trust import Grant, RootRegistry
from towline.tasks import harbor, loading
from towline.tasks.fields import SourceLocation, TaskDefaults, TaskError


def load_each(
    paths: Sequence[str | Path],
    *,
    harness: str,
    trust: Collection[Grant] = (),
    registry: RootRegistry | None = None,
) -> Iterator[tuple[str, Task | TaskError]]:
    """Every task at the paths with its place, in order; `TaskError` in the place of one that cannot be loaded."""
    defaults = TaskDefaults(harness, trust=frozenset(trust), registry=registry or RootRegistry())
    for path in map(Path, paths):
        path = path if path.exists() else loading.SHIPPED.get(str(path), path)
        if path.is_file() and path.name != harbor.FILE:
            yield from _lines(path, defaults)
        elif path.is_dir() and not (path / harbor.FILE).is_file():
            inside = [entry for entry in sorted(path.iterdir()) if not entry.name.startswith(".")]
            parts = [e for e in inside if (e / harbor.FILE).is_file() or e.suffix in loading.JSONL_SUFFIXES]
            for part in parts or [path]:
                yield from _part(path, part, defaults)
        else:
            yield from _part(path, path, defaults)


def _part(folder: Path, part: Path, defaults: TaskDefaults) -> Iterator[tuple[str, Task | TaskError]]:
    """A Harbor folder or a file; one that was found in a folder must not be a link, as in `loading`."""
    try:
        if part != folder:
            try:
                defaults.folder(folder).find(part.name)
            except UnsafePath as error:
                raise SourceLocation(part).unsafe(error) from error
            if part.is_file():
                yield from _lines(part, defaults)
                return
        yield from loading.load_at(part, defaults)
    except TaskError as error:
        yield str(part), error


def _lines(path: Path, defaults: TaskDefaults) -> Iterator[tuple[str, Task | TaskError]]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        yield str(path), SourceLocation(path).error("", f"cannot be read: {error}")
        return
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        location = SourceLocation(path, number)
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise location.error("", f"a task is a JSON object, not {type(row).__name__}")
            yield str(location), loading.task_of(row, location, defaults)
        except TaskError as error:
            yield str(location), error
        except ValueError as error:
            yield str(location), location.error("", f"not JSON: {error}")
