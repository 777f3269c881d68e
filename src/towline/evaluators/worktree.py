"""What changed in a work tree, taken out of one sandbox and applied in another.

In the agent's sandbox git may be anything by now, so that what it prints is only what the agent chose to hand in. The base
commit is named, so that committing hides nothing. Where git is not to be had there, the whole tree is compared with that
of a clean sandbox, by git if it has a repository (which knows what is ignored), else file by file.
"""

from __future__ import annotations

import asyncio
import difflib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field

from towline.evaluators import diffs
from towline.evaluators.base import EvaluationError
from towline.evaluators.carrying import cleaned, replace
from towline.evaluators.inside import INSIDE, word
from towline.evaluators.testfiles import TestFiles
from towline.evaluators.trees import Entry, changed, entries
from towline.sandboxes import archives
from towline.sandboxes.base import Sandbox, SandboxError, execute

MOST = 64 * 1024 * 1024
"""Bytes of a diff."""
_SECONDS = 300.0
_MOST_SHOWN = 40_000
"""Bytes of a file that is shown line by line: comparing costs the square of it where somebody wants it to."""
_MOST_LINES = 20_000
_ENV = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
_GIT = (
    "git -c safe.directory=* -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.quotePath=true "
    "-c core.autocrlf=false -c diff.noprefix=false -c diff.mnemonicPrefix=false"
)
_DIFF = (
    "--cached --binary --full-index --no-color --no-ext-diff --no-textconv --no-renames --src-prefix=a/ --dst-prefix=b/"
)
_TAKE = (
    'set -e; index=$(mktemp); trap \'rm -f "$index"\' EXIT; export GIT_INDEX_FILE="$index"; rm -f "$index"; '
    f'{_GIT} read-tree "$1"; {_GIT} add -A . >/dev/null; {_GIT} diff {_DIFF} "$1"'
)


@dataclass(slots=True)
class Change:
    """What an agent changed, without tests: a diff, or files."""

    diff: bytes = b""
    files: Mapping[str, Entry | None] = field(default_factory=dict)
    """By path in the repository; `None` for one that is deleted."""
    shown: bytes = b""
    """For a person."""
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def of_diff(cls, diff: bytes, is_test: TestFiles) -> Change:
        kept, left_out = diffs.without(diff, is_test)
        return cls(diff=kept, shown=kept, left_out=left_out)

    async def apply(self, sandbox: Sandbox, repository: str) -> str:
        """Make the change; why it cannot be made, or nothing."""
        if self.diff:
            return await apply_diff(sandbox, repository, self.diff)
        gone = [f"{repository}/{name}" for name, entry in self.files.items() if entry is None]
        for start in range(0, len(gone), 500):
            script = f'for path do path="{INSIDE}"; rm -rf "$path"; done'
            await execute(sandbox, ("sh", "-c", script, "sh", *map(word, gone[start : start + 500])), cwd="/")
        made = {name: entry for name, entry in self.files.items() if entry is not None}
        if made:
            try:
                await sandbox.put(_archive(made), repository)
            except (SandboxError, archives.ArchiveError) as error:
                return str(error)
        return ""


async def diff_by_git(sandbox: Sandbox, repository: str, base: str) -> bytes | None:
    """The diff between the base commit and the work tree, by the agent's own git; `None` if that cannot say."""
    try:
        done = await execute(
            sandbox, ("sh", "-c", _TAKE, "sh", base), env=_ENV, cwd=repository, seconds=_SECONDS, most=MOST
        )
    except SandboxError:
        return None
    return done.stdout if done.ok and not done.truncated else None


async def diff_of_tree(sandbox: Sandbox, repository: str, archive: bytes, is_test: TestFiles) -> Change:
    """What the agent's tree has that a clean one has not. The sandbox is used up."""
    before = await sandbox.get(repository)
    own, _ = await asyncio.to_thread(cleaned, archive, repository, _not_git)
    if any(name.partition("/")[2].startswith(".git/") for name in archives.names(before)):
        git, _ = await asyncio.to_thread(cleaned, before, repository, lambda name: not _not_git(name))
        await replace(sandbox, repository, git)
        await sandbox.put(own, repository.rstrip("/").rpartition("/")[0] or "/")
        diff = await diff_by_git(sandbox, repository, "HEAD")
        if diff is not None:
            return Change.of_diff(diff, is_test)
    return await asyncio.to_thread(_compared, before, own, is_test)


def _compared(before: bytes, after: bytes, is_test: TestFiles) -> Change:
    clean = {name: entry for name, entry in entries(before).items() if _not_git(name)}
    difference = changed(clean, entries(after))
    files = {name: entry for name, entry in difference.items() if not is_test(name)}
    return Change(files=files, shown=_shown(clean, files), left_out=sorted(set(difference) - set(files)))


async def apply_diff(sandbox: Sandbox, repository: str, diff: bytes) -> str:
    """Apply a diff whole or not at all; why it cannot be applied, or nothing."""
    command = f"{_GIT} apply --whitespace=nowarn -"
    # A repository around the folder would have git take the diff's paths for its own.
    env = {**_ENV, "GIT_CEILING_DIRECTORIES": repository.rstrip("/").rpartition("/")[0] or "/"}
    done = await execute(sandbox, ("sh", "-c", command), stdin=diff, env=env, cwd=repository, seconds=_SECONDS)
    if done.code in (126, 127):
        raise EvaluationError(f"a diff cannot be applied without git in the sandbox's root: {done.text.strip()[-300:]}")
    return "" if done.ok else done.text.strip()[-1000:] or f"git apply ended with {done.code}"


def _not_git(name: str) -> bool:
    return name != ".git" and not name.startswith(".git/")


def _archive(files: Mapping[str, Entry]) -> bytes:
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


def _shown(before: Mapping[str, Entry], files: Mapping[str, Entry | None]) -> bytes:
    """A unified diff of the text files, and a line for each of the others."""
    lines: list[str] = []
    for name in sorted(files):
        old, new = before.get(name), files[name]
        if sum(len(entry.data) for entry in (old, new) if entry) > _MOST_SHOWN or len(lines) > _MOST_LINES:
            lines.append(f"{name} differs\n")
            continue
        try:
            sides = [entry.data.decode().splitlines(keepends=True) if entry else [] for entry in (old, new)]
        except UnicodeDecodeError:
            lines.append(f"Binary file {name} differs\n")
            continue
        names = f"a/{name}" if old else "/dev/null", f"b/{name}" if new else "/dev/null"
        lines += difflib.unified_diff(sides[0], sides[1], names[0], names[1])
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
