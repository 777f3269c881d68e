"""From an empty sandbox to the place a task describes: its files, then its set-up commands.

The agent's sandbox and the evaluator's are furnished by the same function from the same environment, so that they differ
by nothing but what the agent did.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from towline.errors import TowlineError
from towline.sandboxes import archives
from towline.sandboxes.base import Sandbox, execute
from towline.schema import Environment, Step

_SAID = 2000
"""Characters of a failed command's output that reach the error."""


class FurnishError(TowlineError):
    """The environment cannot be set up as the task says: the task's own fault, with what its command printed."""

    failure = "setup"


async def furnish(sandbox: Sandbox, environment: Environment | Step, log: Path | None = None) -> None:
    """Put the files of an environment, or those that come with a step, into the sandbox and run its set-up."""
    given: dict[str, bytes] = {}
    modes: dict[str, int] = {}
    for file in environment.files:
        if file.source is not None:
            await _put_source(sandbox, Path(file.source), file.target)
        else:
            name = file.target.lstrip("/")
            given[name], modes[name] = file.data or b"", file.mode
    if given:
        await sandbox.put(archives.pack(given, modes=modes), "/")
    for command in environment.setup:
        done = await execute(sandbox, ("sh", "-c", command))
        if log is not None:
            await asyncio.to_thread(_append, log, f"$ {command}\n{done.text}\n")
        if not done.ok:
            raise FurnishError(f"set-up command {command!r} ended with {done.code}: {done.text[-_SAID:].strip()}")


async def write_files(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    """Text files by absolute path, readable by whoever runs inside."""
    if files:
        packed = {path.lstrip("/"): text.encode() for path, text in files.items()}
        await sandbox.put(archives.pack(packed, modes=dict.fromkeys(packed, 0o600)), "/")


async def _put_source(sandbox: Sandbox, source: Path, target: str) -> None:
    try:
        archive, where = await asyncio.to_thread(_packed, source, target)
    except OSError as error:
        raise FurnishError(f"{source}, which belongs at {target}, cannot be read: {error.strerror}") from error
    await sandbox.put(archive, where)


def _packed(source: Path, target: str) -> tuple[bytes, str]:
    if source.is_dir():
        return archives.pack_folder(source), target
    name = target.lstrip("/")
    return archives.pack({name: source}, modes={name: os.stat(source).st_mode & 0o777}), "/"


def _append(path: Path, text: str) -> None:
    with open(path, "a", encoding="utf-8", errors="replace") as file:
        file.write(text)
