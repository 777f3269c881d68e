"""What goes from the agent's sandbox into the evaluation: files and folders, as data, with no link that leads out.

An archive from the agent's sandbox is hostile. It is rewritten in a worker (`hostile/trees.py`) before it is placed
anywhere: links that lead out or to what the verifier brings, devices, git's configuration and hooks stay behind. What was
dropped, and what was missing, is listed in the notes and scored as not done; what looks like a trick is in the findings.
What exists and cannot be copied (too large, too deep, a loop of links) is an error, because the evaluation would score
something else than the agent's work.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from towline.common.untrusted import workers
from towline.common.untrusted.workers import LimitExceeded, WorkerLimits
from towline.evaluators.base import AgentCaused, EvalInputs, EvaluationError
from towline.evaluators.hostile import trees
from towline.evaluators.sandbox_io import INSIDE_PATH, existing_paths, path_argument
from towline.sandboxes.base import PathMissing, Sandbox, SandboxError, execute
from towline.sandboxes.files import archives
from towline.schema import File

MAX_INPUT_BYTES = 256 * 1024 * 1024
"""Largest size of everything that is collected from one session."""
ARCHIVE_LIMITS = WorkerLimits(seconds=60.0, memory=4 * MAX_INPUT_BYTES + 256 * 1024 * 1024, result=2 * MAX_INPUT_BYTES)
"""What rewriting one archive may cost."""
_NAMED = 5
"""How many of the omitted entries are named in a note."""
_MOST_BROUGHT = 20_000
_MOST_LOADED = 500
"""How many paths that an interpreter may load by name are looked up in the clean sandbox."""


async def collect_inputs(
    sandbox: Sandbox,
    paths: Iterable[str],
    *,
    most: int = MAX_INPUT_BYTES,
    brought: Iterable[str] = (),
    keep_git: bool = False,
) -> EvalInputs:
    """Take the paths out of the agent's sandbox, rewritten. `brought` are the paths of the verifier's own files."""
    inputs = EvalInputs(archives={})
    taken: dict[str, bytes] = {}
    theirs = tuple(brought)
    left = most
    for path in dict.fromkeys(paths):
        if not path.strip("/"):
            inputs.notes.append("the whole root cannot be copied to the evaluation; name the folders that matter")
            continue
        try:
            raw = await sandbox.get(path, max_bytes=left)
            left -= len(raw)
            taken[path], left_out, findings, loaded = await carry(raw, path, theirs, keep_git=keep_git)
        except PathMissing as error:
            inputs.notes.append(f"{path} was not copied to the evaluation: {error}")
            continue
        except (SandboxError, archives.ArchiveError) as error:
            inputs.findings.append(("oversized", f"{path}: {error}"))
            raise EvaluationError(f"{path} cannot be copied to the evaluation: {error}") from error
        inputs.findings += findings
        inputs.loaded += loaded
        if left_out:
            more = f" and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
            inputs.notes.append(f"left out of {path}: {', '.join(left_out[:_NAMED])}{more}")
    inputs.archives = taken
    return inputs


async def carry(
    raw: bytes, path: str, brought: tuple[str, ...] = (), *, keep_git: bool = False, without_git: bool = False
) -> tuple[bytes, list[str], list[tuple[str, str]], list[str]]:
    """`trees.carry_archive` in a worker."""
    try:
        return await workers.run_async(
            ARCHIVE_LIMITS, trees.carry_archive, raw, path, brought, keep_git, without_git=without_git
        )
    except LimitExceeded as error:
        raise AgentCaused(f"{path} cannot be copied to the evaluation: {error}") from error


async def check_archive(archive: bytes) -> None:
    """Read an archive in a worker before this process unpacks it: what takes too long there is not unpacked here."""
    try:
        await workers.run_async(workers.DEFAULT_LIMITS, trees.count_members, archive)
    except LimitExceeded as error:
        raise archives.ArchiveError(f"the archive cannot be read: {error}") from error


def check_obstruction(inputs: EvalInputs) -> None:
    """Raise if something of the agent's is where the verifier needs to put a file or folder."""
    blocked = [detail for name, detail in inputs.findings if name == "in_the_way"]
    if blocked:
        raise EvaluationError(f"{blocked[0]} is in the way of a file or folder of the verifier")


async def place_inputs(sandbox: Sandbox, inputs: EvalInputs) -> None:
    """Put the inputs into a clean sandbox; each path replaces what is there.

    Files that interpreters and test runners load by themselves are those of the clean sandbox: the agent's own stay behind.
    """
    native = await _native(sandbox, inputs.loaded[:_MOST_LOADED])
    await _set_aside_config(sandbox, inputs, native)
    inputs.native = await module_names(sandbox, list(inputs.archives))
    for path, archive in inputs.archives.items():
        await replace_path(sandbox, path, archive)
    await _restore_config(sandbox, inputs, native)


@dataclass(slots=True)
class NativeFiles:
    """Paths of the inputs that the clean sandbox has too, and the contents of those that are put back."""

    paths: frozenset[str] = frozenset()
    kept: dict[str, bytes] | None = None


async def _native(sandbox: Sandbox, paths: list[str]) -> NativeFiles:
    if not paths:
        return NativeFiles()
    there = frozenset(await existing_paths(sandbox, paths))
    return NativeFiles(there, {})


async def module_names(sandbox: Sandbox, paths: list[str]) -> tuple[str, ...]:
    """Names of modules that a clean sandbox has in these folders: of files and folders, two levels deep."""
    script = (
        f'for path do path="{INSIDE_PATH}"; [ -d "$path" ] || continue; '
        'find "$path" -mindepth 1 -maxdepth 2 ! -path "*/.*" 2>/dev/null; done; true'
    )
    done = await execute(sandbox, ("sh", "-c", script, "sh", *map(path_argument, paths)), cwd="/", seconds=60)
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    names = {posixpath.basename(line).partition(".")[0] for line in lines}
    return tuple(sorted(name for name in names if name.isidentifier()))


async def _set_aside_config(sandbox: Sandbox, inputs: EvalInputs, native: NativeFiles) -> None:
    """Keep the clean sandbox's own configuration of tests, and report what the agent added."""
    for path in inputs.loaded[:_MOST_LOADED]:
        if is_test_config(path):
            if path in native.paths and native.kept is not None:
                native.kept[path] = await sandbox.get(path, max_bytes=1024 * 1024)
            else:
                inputs.findings.append(("test_config", path))
        elif path not in native.paths:
            inputs.findings.append(("shadowing_module", path))


async def _restore_config(sandbox: Sandbox, inputs: EvalInputs, native: NativeFiles) -> None:
    """Put the clean sandbox's own configuration of tests back, and remove the agent's."""
    added = [path for path in inputs.loaded if is_test_config(path)]
    if not added:
        return
    script = f'for path do path="{INSIDE_PATH}"; rm -rf "$path"; done'
    for start in range(0, len(added), 500):
        command = ("sh", "-c", script, "sh", *map(path_argument, added[start : start + 500]))
        await execute(sandbox, command, cwd="/")
    for path, archive in (native.kept or {}).items():
        await sandbox.put(archive, posixpath.dirname(path) or "/")


def is_test_config(path: str) -> bool:
    """Whether interpreters or test runners load the file by themselves, without any import that names it."""
    name = posixpath.basename(path)
    return name in trees.TEST_CONFIG or name.endswith(".pth")


def brought_paths(files: Iterable[File]) -> list[str]:
    """The paths of the verifier's own files, those of folders one by one."""
    found: list[str] = []
    for file in files:
        source = Path(file.source) if file.source is not None else None
        if source is None or not source.is_dir():
            found.append(file.target)
            continue
        names = [path.relative_to(source).as_posix() for path in source.rglob("*") if not path.is_dir()]
        found += [posixpath.join(file.target, name) for name in names[:_MOST_BROUGHT]]
    return found


async def replace_path(sandbox: Sandbox, path: str, archive: bytes) -> None:
    """Replace `path` with an archive of it; what the agent deleted is deleted here too."""
    # The folder itself may be a mount or the working folder: its contents are removed, the folder stays.
    script = (
        f'path="$1"; path="{INSIDE_PATH}"; if [ -d "$path" ] && [ ! -L "$path" ]; '
        'then cd "$path" && find . -mindepth 1 -maxdepth 1 -exec rm -rf {} +; else rm -f "$path"; fi'
    )
    done = await execute(sandbox, ("sh", "-c", script, "sh", path_argument(path)), cwd="/")
    if not done.ok:
        raise SandboxError(f"{path} cannot be cleared for the evaluation's inputs: {done.text.strip()[-500:]}")
    await sandbox.put(archive, posixpath.dirname(path.rstrip("/")) or "/")


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """A regular file or a symbolic link."""

    data: bytes
    """The content, or the target of the link."""
    mode: int
    link: bool = False


async def tree_entries(archive: bytes) -> dict[str, TreeEntry]:
    """Files and links of an archive, by name relative to its one folder; the name is empty for a single file."""
    try:
        found = await workers.run_async(ARCHIVE_LIMITS, trees.carried_entries, archive)
    except LimitExceeded as error:
        raise AgentCaused(f"the agent's files cannot be read: {error}") from error
    return {name: TreeEntry(data, mode, link) for name, (data, mode, link) in found.items()}


async def regular_files(archive: bytes, path: str) -> dict[str, bytes]:
    """The regular files of the archive of `path`, by absolute path."""
    return {
        posixpath.join(path, name) if name else path: entry.data
        for name, entry in (await tree_entries(archive)).items()
        if not entry.link
    }


def tree_changes(before: dict[str, TreeEntry], after: dict[str, TreeEntry]) -> dict[str, TreeEntry | None]:
    """What `after` adds or changes; `None` for deleted names."""
    made: dict[str, TreeEntry | None] = {name: entry for name, entry in after.items() if before.get(name) != entry}
    return made | {name: None for name in before if name not in after}
