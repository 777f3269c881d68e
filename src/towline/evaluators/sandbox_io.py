"""Evaluators' access to sandboxes: put files, run a command and keep its output, read a file back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from towline.evaluators.base import EvaluationError
from towline.sandboxes.base import CommandResult, Sandbox, SandboxError, execute
from towline.sandboxes.files import archives
from towline.schema import File

INSIDE_PATH = "$TOWLINE_ROOT${path#.}"
"""In a script: the real location of the variable `path`, which is passed as `path_argument`. A sandbox without a root of its
own maps arguments that are existing paths, and sets `TOWLINE_ROOT` to its folder, so that nothing outside is ever addressed;
elsewhere the variable is empty."""
LOGGED_BYTES = 4 * 1024 * 1024
"""Bytes of output that are kept with the session."""


def path_argument(path: str) -> str:
    """A path as an argument for a script that uses `INSIDE_PATH`."""
    return f"./{path.lstrip('/')}"


async def put_files(sandbox: Sandbox, files: Iterable[File]) -> None:
    """Put each file at its target; a `source` is a path on the node."""
    for file in files:
        name = file.target.strip("/")
        if file.source is None:
            await sandbox.put(archives.pack({name: file.data or b""}, modes={name: file.mode}), "/")
            continue
        source = Path(file.source)
        try:
            if await asyncio.to_thread(source.is_dir):
                await put_folder(sandbox, source, file.target)
            else:
                await sandbox.put(await asyncio.to_thread(archives.pack, {name: source}), "/")
        except OSError as error:
            raise EvaluationError(f"{source} (for {file.target}) cannot be read: {error}") from error


async def put_folder(sandbox: Sandbox, source: Path, target: str) -> None:
    """Put the contents of a folder on the node."""
    if not await asyncio.to_thread(source.is_dir):
        raise EvaluationError(f"{source} (for {target}) is not a folder on the node")
    await sandbox.put(await asyncio.to_thread(archives.pack_folder, source), target)


async def run_logged(
    sandbox: Sandbox,
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    user: str = "",
    seconds: float | None = None,
) -> CommandResult:
    """Run a command to its end and keep its output with the session."""
    done = await execute(sandbox, command, env=env, cwd=cwd, user=user or None, seconds=seconds)
    end = f"\n[timed out after {seconds:g} s]\n" if done.timed_out else f"\n[exit code {done.code}]\n"
    await asyncio.to_thread(log.write_bytes, done.stdout[-LOGGED_BYTES:] + done.stderr[-LOGGED_BYTES:] + end.encode())
    return done


async def read_regular_file(sandbox: Sandbox, path: str, *, most: int = 1024 * 1024) -> bytes | None:
    """The content of a regular file; `None` if the path does not exist. Anything else at the path is an error."""
    if not await existing_paths(sandbox, [path]):
        return None
    try:
        return archives.read_file(
            await sandbox.get(path, max_bytes=most + 65_536), path.rsplit("/", 1)[-1], max_bytes=most
        )
    except (archives.ArchiveError, SandboxError) as error:
        raise EvaluationError(f"{path} cannot be read: {error}") from error


async def existing_paths(sandbox: Sandbox, paths: Sequence[str]) -> list[str]:
    """The paths that exist inside, including dangling links."""
    script = (
        f'for path do path="{INSIDE_PATH}"; if [ -e "$path" ] || [ -L "$path" ]; then echo 1; else echo 0; fi; done'
    )
    done = await execute(sandbox, ("sh", "-c", script, "sh", *map(path_argument, paths)), cwd="/")
    found = done.stdout.split()
    if not done.ok or len(found) != len(paths):
        raise SandboxError(f"cannot check for {', '.join(paths)}: {done.text.strip()[-300:]}")
    return [path for path, there in zip(paths, found, strict=True) if there == b"1"]
