"""What evaluators do inside sandboxes: put files, run a command with its output kept, read a file back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from towline.evaluators.base import EvaluationError
from towline.sandboxes import archives
from towline.sandboxes.base import Done, Sandbox, SandboxError, execute
from towline.schema import File

INSIDE = "$TOWLINE_ROOT${path#.}"
"""In a script: where the variable `path`, given as `word`, is. A sandbox without a root of its own maps words that are paths
where they exist, and says in the variable where its folder is, so that nothing outside is ever meant; elsewhere that is
empty."""
_LOGGED = 4 * 1024 * 1024
"""Bytes of an output that are kept with the session."""


def word(path: str) -> str:
    """A path as an argument of a script that uses `INSIDE`."""
    return f"./{path.lstrip('/')}"


async def put_files(sandbox: Sandbox, files: Iterable[File]) -> None:
    """The files where they belong; a source is one of this machine."""
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
            raise EvaluationError(f"{source}, which belongs at {file.target}, cannot be read: {error}") from error


async def put_folder(sandbox: Sandbox, source: Path, target: str) -> None:
    """What is in a folder of this machine."""
    if not await asyncio.to_thread(source.is_dir):
        raise EvaluationError(f"{source}, which belongs at {target}, is not a folder on this machine")
    await sandbox.put(await asyncio.to_thread(archives.pack_folder, source), target)


async def run(
    sandbox: Sandbox,
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    user: str = "",
    seconds: float | None = None,
) -> Done:
    """Run a command to its end and keep what it printed with the session."""
    done = await execute(sandbox, command, env=env, cwd=cwd, user=user or None, seconds=seconds)
    end = f"\n[timed out after {seconds:g} s]\n" if done.timed_out else f"\n[exit code {done.code}]\n"
    await asyncio.to_thread(log.write_bytes, done.stdout[-_LOGGED:] + done.stderr[-_LOGGED:] + end.encode())
    return done


async def read_regular(sandbox: Sandbox, path: str, *, most: int = 1024 * 1024) -> bytes | None:
    """A regular file's content; `None` if there is nothing at the path. Anything else there is an error."""
    if not await existing(sandbox, [path]):
        return None
    try:
        return archives.read_file(await sandbox.get(path, most=most + 65_536), path.rsplit("/", 1)[-1], most=most)
    except (archives.ArchiveError, SandboxError) as error:
        raise EvaluationError(f"{path} cannot be read: {error}") from error


async def existing(sandbox: Sandbox, paths: Sequence[str]) -> list[str]:
    """Which of the paths exist inside, dangling links too."""
    script = f'for path do path="{INSIDE}"; if [ -e "$path" ] || [ -L "$path" ]; then echo 1; else echo 0; fi; done'
    done = await execute(sandbox, ("sh", "-c", script, "sh", *map(word, paths)), cwd="/")
    found = done.stdout.split()
    if not done.ok or len(found) != len(paths):
        raise SandboxError(f"cannot look for {', '.join(paths)}: {done.text.strip()[-300:]}")
    return [path for path, there in zip(paths, found, strict=True) if there == b"1"]
