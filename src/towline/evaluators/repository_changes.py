"""The agent's change to a repository: taken out of one sandbox as files, cleared of tests, applied in another.

Only contents leave the agent's sandbox: its git, its configuration and its history are not asked. In a clean sandbox a clean
git compares the agent's tree with the untouched one and names the files that differ (it knows what is ignored); where that
has no repository, the trees are compared file by file. What is applied are the contents of the named files.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from towline.common.untrusted import workers
from towline.common.untrusted.workers import LimitExceeded
from towline.evaluators.base import AgentCaused, EvalInputs, EvaluationError
from towline.evaluators.eval_inputs import ARCHIVE_LIMITS, MAX_INPUT_BYTES, TreeEntry, carry, tree_entries
from towline.evaluators.hostile.changes import (
    COMPILED_PATTERNS,
    TEST_PATTERNS,
    DiffSection,
    TestFileMatcher,
    compare_trees,
    diff_sections,
    kept_diff,
    without_files,
)
from towline.evaluators.sandbox_io import INSIDE_PATH, path_argument
from towline.sandboxes.base import GetsWithout, PathMissing, Sandbox, SandboxError, execute
from towline.sandboxes.files import archives

__all__ = [
    "COMPILED_PATTERNS",
    "TEST_PATTERNS",
    "DiffSection",
    "RepositoryChange",
    "TestFileMatcher",
    "apply_diff",
    "change_of_tree",
    "collect_repository",
    "diff_sections",
    "without_files",
]

MAX_SHOWN_BYTES = 4 * 1024 * 1024
"""Bytes of the agent's diff that are kept for the log."""
_MAX_NAMES_BYTES = 16 * 1024 * 1024
_SECONDS = 300.0
_NO_REPOSITORY = 3
_ENV = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "LC_ALL": "C",
}
_GIT = (
    "git -c safe.directory=* -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.quotePath=true "
    "-c core.autocrlf=false -c core.attributesFile=/dev/null -c core.excludesFile=/dev/null -c diff.external= "
    "-c diff.noprefix=false -c diff.mnemonicPrefix=false"
)
_DIFF = "--cached --no-color --no-ext-diff --no-textconv --no-renames --ignore-submodules=all"
_INDEX = 'export GIT_INDEX_FILE="$PWD/.git/towline-index"'
_BEFORE = (
    f"[ -d .git ] && command -v git >/dev/null || exit {_NO_REPOSITORY}; set -e; {_INDEX}; {_GIT} read-tree HEAD; "
    f"{_GIT} add -A . >/dev/null 2>&1; {_GIT} write-tree; "
    "find . -mindepth 1 -maxdepth 1 ! -name .git -exec rm -rf {} +"
)
"""In a clean sandbox: print the id of its tree, and remove the work tree."""
_NAMES = f'set -e; {_INDEX}; {_GIT} add -A . >/dev/null 2>&1; {_GIT} diff {_DIFF} --name-only -z "$1"'
_SHOW = f'{_INDEX}; {_GIT} diff {_DIFF} --src-prefix=a/ --dst-prefix=b/ "$1"'


@dataclass(slots=True)
class RepositoryChange:
    """An agent's change without tests: files, or a diff."""

    diff: bytes = b""
    files: Mapping[str, TreeEntry | None] = field(default_factory=dict)
    """By path in the repository; `None` for a deleted file."""
    shown: bytes = b""
    """For the session's log."""
    left_out: list[str] = field(default_factory=list)

    @classmethod
    async def of_diff(cls, diff: bytes, is_test: TestFileMatcher) -> RepositoryChange:
        kept, left_out = await in_worker(kept_diff, diff, list(is_test.patterns), sorted(is_test.named))
        return cls(diff=kept, shown=kept, left_out=left_out)

    async def apply(self, sandbox: Sandbox, repository: str) -> str:
        """Apply the change; returns why it does not apply, or an empty string."""
        if self.diff:
            return await apply_diff(sandbox, repository, self.diff)
        gone = [name for name, entry in self.files.items() if entry is None]
        made = {name: entry for name, entry in self.files.items() if entry is not None}
        # A folder whose files are all gone may be in the place of a new file.
        await _each(sandbox, repository, gone, 'rm -rf "$path"')
        await _each(sandbox, repository, list(made), '[ ! -d "$path" ] || [ -L "$path" ] || rmdir "$path"')
        if made:
            try:
                await sandbox.put(_archive(made), repository)
            except (SandboxError, archives.ArchiveError) as error:
                return str(error)
        return ""


P = ParamSpec("P")
T = TypeVar("T")


async def in_worker(function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """A function over the agent's files in a worker; what is too much for it is the agent's doing."""
    try:
        return await workers.run_async(ARCHIVE_LIMITS, function, *arguments, **keywords)
    except LimitExceeded as error:
        raise AgentCaused(f"the agent's files cannot be read: {error}") from error


async def _each(sandbox: Sandbox, repository: str, names: Sequence[str], command: str) -> None:
    script = f'for path do path="{INSIDE_PATH}"; {command}; done; true'
    for start in range(0, len(names), 500):
        paths = [path_argument(f"{repository}/{name}") for name in names[start : start + 500]]
        await execute(sandbox, ("sh", "-c", script, "sh", *paths), cwd="/", seconds=_SECONDS)


async def collect_repository(sandbox: Sandbox, repository: str, brought: Sequence[str]) -> EvalInputs:
    """The agent's tree without `.git`, read without running any of its programs."""
    inputs = EvalInputs(archives={})
    try:
        if isinstance(sandbox, GetsWithout):
            raw = await sandbox.get_without(repository, (".git",), max_bytes=MAX_INPUT_BYTES)
        else:
            raw = await sandbox.get(repository, max_bytes=MAX_INPUT_BYTES)
        own, left_out, findings, loaded = await carry(raw, repository, tuple(brought), without_git=True)
    except PathMissing as error:
        inputs.notes.append(f"{repository} was not copied to the evaluation: {error}")
        name = repository.rstrip("/").rsplit("/", 1)[-1]
        own, left_out, findings, loaded = archives.pack_folder_entry(name, 0o755), [], [], []
    except (SandboxError, archives.ArchiveError) as error:
        raise EvaluationError(f"{repository} cannot be copied to the evaluation: {error}") from error
    inputs.archives, inputs.findings, inputs.loaded = {repository: own}, findings, loaded
    if left_out:
        inputs.notes.append(f"left out of {repository}: {', '.join(left_out[:5])}{', …' if left_out[5:] else ''}")
    return inputs


async def change_of_tree(sandbox: Sandbox, repository: str, own: bytes, is_test: TestFileMatcher) -> RepositoryChange:
    """The agent's tree compared with the clean one in `sandbox`, which cannot be used afterwards."""
    done = await execute(sandbox, ("sh", "-c", _BEFORE), env=_ENV, cwd=repository, seconds=_SECONDS)
    if done.code == _NO_REPOSITORY:
        return await _compared(sandbox, repository, own, is_test)
    if not done.ok:
        raise EvaluationError(f"the clean repository at {repository} cannot be read: {done.text.strip()[-300:]}")
    tree = done.stdout.decode().strip()
    await sandbox.put(own, repository.rstrip("/").rpartition("/")[0] or "/")
    listing = ("sh", "-c", _NAMES, "sh", tree)
    found = await execute(sandbox, listing, env=_ENV, cwd=repository, seconds=_SECONDS, max_bytes=_MAX_NAMES_BYTES)
    if not found.ok or found.truncated:
        raise EvaluationError(f"the agent's tree cannot be compared: {found.text.strip()[-300:]}")
    names = [name.decode("utf-8", "surrogateescape") for name in found.stdout.split(b"\0") if name]
    showing = ("sh", "-c", _SHOW, "sh", tree)
    shown = await execute(sandbox, showing, env=_ENV, cwd=repository, seconds=_SECONDS, max_bytes=MAX_SHOWN_BYTES)
    entries = await tree_entries(own)
    kept = {name: entries.get(name) for name in names if not is_test(name)}
    return RepositoryChange(files=kept, shown=shown.stdout, left_out=[name for name in names if name not in kept])


async def _compared(sandbox: Sandbox, repository: str, own: bytes, is_test: TestFileMatcher) -> RepositoryChange:
    before = await sandbox.get(repository)
    files, left_out, shown = await in_worker(compare_trees, before, own, list(is_test.patterns), sorted(is_test.named))
    entries = {name: None if entry is None else TreeEntry(*entry) for name, entry in files.items()}
    return RepositoryChange(files=entries, shown=shown, left_out=left_out)


async def apply_diff(sandbox: Sandbox, repository: str, diff: bytes) -> str:
    """Apply a diff completely or not at all; returns why it does not apply, or an empty string."""
    command = f"{_GIT} apply --whitespace=nowarn -"
    # Otherwise a repository around the folder would make git resolve the diff's paths against itself.
    env = {**_ENV, "GIT_CEILING_DIRECTORIES": repository.rstrip("/").rpartition("/")[0] or "/"}
    done = await execute(sandbox, ("sh", "-c", command), stdin=diff, env=env, cwd=repository, seconds=_SECONDS)
    if done.code in (126, 127):
        raise EvaluationError(f"applying a diff needs git in the sandbox's root: {done.text.strip()[-300:]}")
    return "" if done.ok else done.text.strip()[-1000:] or f"git apply exited with code {done.code}"


def _archive(files: Mapping[str, TreeEntry]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, entry in files.items():
            info = tarfile.TarInfo(name)
            info.mode = entry.mode
            if entry.link:
                info.type, info.linkname = tarfile.SYMTYPE, entry.data.decode("utf-8", "surrogateescape")
                tar.addfile(info)
            else:
                info.size = len(entry.data)
                tar.addfile(info, io.BytesIO(entry.data))
    return made.getvalue()
