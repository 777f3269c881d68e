"""The leak audit: what would give the answer away before the agent runs, and which of the verifier's files it changed.

Before RUN, in the prepared sandbox: paths that must not exist yet (`Evaluator.leaks`), copies of the verifier's or the
solution's files under any name (matched by content), and git repositories that hold more than the commit the agent starts
from, because the fix is often one git command away. Everything in the object store must be reachable from HEAD or staged:
no branch or tag further on, no stash, no reflog, no unreachable object. In a repository of many objects only commits are
checked. Any finding fails the session with its reason. After RUN, files that the tests rely on and the agent changed are
listed in the notes.

What the images of published data sets are known to hold is removed first (`swe/concealment.py`). A task whose environment
must contain what looks like a leak says so: `metadata = {"leak_audit": false}`.
"""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol, runtime_checkable

from towline.evaluators.base import Evaluator
from towline.evaluators.sandbox_io import INSIDE_PATH, existing_paths, path_argument
from towline.evaluators.swe.concealment import START_REF, Conceals, conceal
from towline.sandboxes.base import ChangeKind, Sandbox, SandboxError, execute
from towline.schema import Task

_MIN_BYTES = 24
"""Shorter files are equal by chance."""
_MOST_FILES = 500
_SECONDS = 120.0

FileFingerprint = tuple[int, str]
"""Size and SHA-256."""


def file_fingerprints(folders: Iterable[Path], context: str) -> dict[FileFingerprint, str]:
    """The files of the folders, by content.

    A data file that is also in the environment's build folder (`context`) is shared on purpose; a script of the verifier or
    the solution never is.
    """
    shared = {_fingerprint(path) for path in _regular_files([Path(context)])} if context else set()
    found: dict[FileFingerprint, str] = {}
    for path in _regular_files(folders):
        mark = _fingerprint(path)
        script = path.suffix in (".sh", ".py") or "expected" in path.name
        if mark[0] >= _MIN_BYTES and (script or mark not in shared):
            found.setdefault(mark, f"{path.parent.name}/{path.name}")
    return found


async def find_copies(
    sandbox: Sandbox, known: Mapping[FileFingerprint, str], folders: Sequence[str]
) -> list[tuple[str, str]]:
    """Files inside with the content of known ones: their path, and the known file."""
    if not known:
        return []
    sizes = " -o ".join(f"-size {size}c" for size in sorted({size for size, _ in known}))
    # Uses the shell's own test, because not every root has xargs; missing folders are skipped.
    script = (
        f'for path do path="{INSIDE_PATH}"; [ -d "$path" ] || continue; '
        rf"find \"$path\" -xdev -type f \( {sizes} \) -exec sha256sum {{}} + 2>/dev/null; done; true"
    ).replace('\\"', '"')
    done = await execute(sandbox, ("sh", "-c", script, "sh", *map(path_argument, folders)), cwd="/", seconds=_SECONDS)
    if not done.ok:
        raise SandboxError(f"the leak audit could not search {', '.join(folders)}: {done.text.strip()[-300:]}")
    by_hash = {digest: name for (_, digest), name in known.items()}
    lines = (line.partition("  ") for line in done.stdout.decode("utf-8", "replace").splitlines())
    return [(path, by_hash[digest]) for digest, _, path in lines if digest in by_hash]


async def file_hashes(sandbox: Sandbox, paths: Sequence[str]) -> dict[str, str]:
    """SHA-256 of regular files inside, by path; other paths are omitted."""
    found: dict[str, str] = {}
    script = f'for path do given=${{path#.}}; path="{INSIDE_PATH}"; [ -f "$path" ] && [ ! -L "$path" ] || continue; '
    script += 'sum=$(sha256sum <"$path") && printf "%s  %s\\n" "${sum%% *}" "$given"; done; true'
    for start in range(0, len(paths), 500):
        command = ("sh", "-c", script, "sh", *map(path_argument, paths[start : start + 500]))
        done = await execute(sandbox, command, cwd="/", seconds=_SECONDS)
        lines = (line.partition("  ") for line in done.stdout.decode("utf-8", "replace").splitlines())
        found |= {path: digest for digest, _, path in lines}
    return found


def _regular_files(folders: Iterable[Path]) -> list[Path]:
    found = [path for folder in folders if folder.is_dir() for path in sorted(folder.rglob("*"))]
    return [path for path in found if path.is_file() and not path.is_symlink()][:_MOST_FILES]


def _fingerprint(path: Path) -> FileFingerprint:
    with open(path, "rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


MAX_OBJECTS = 50_000
"""Up to this many, every object is checked; above, every commit."""
_CURE = (
    "clean it in the environment's set-up: delete other refs and stashes, run `git reflog expire --expire=now --all` and "
    "`git gc --prune=now`"
)
_FIND = (
    f'for path do path="{INSIDE_PATH}"; [ -d "$path" ] || continue; '
    'find "$path" -maxdepth 4 -name .git -prune 2>/dev/null; done; true'
)
_AUDIT = r"""
command -v git >/dev/null || { echo "no-git"; exit 0; }
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 LC_ALL=C
g() { git -c safe.directory='*' "$@"; }
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
[ -s "$(g rev-parse --git-path objects/info/alternates)" ] && echo "alternates"
if ! g rev-parse -q --verify 'HEAD^{commit}' >/dev/null; then
  g cat-file --batch-all-objects --batch-check='%(objecttype)' | grep -q commit && echo "no-head"
  exit 0
fi
if [ -n "$1" ]; then
  g merge-base --is-ancestor "$1" HEAD 2>/dev/null || echo "base"
fi
start=$([ -z "$4" ] || g rev-parse -q --verify "$4^{commit}")
g for-each-ref --format='%(refname)' | while read -r ref; do
  [ "$ref" != "$4" ] || continue
  commit=$(g rev-parse -q --verify "$ref^{commit}") || continue
  g merge-base --is-ancestor "$commit" HEAD || echo "ref $ref"
done
g cat-file --batch-all-objects --batch-check='%(objectname) %(objecttype)' >"$dir/all" || exit 1
if [ "$(wc -l <"$dir/all")" -le "$2" ]; then
  g rev-list --objects HEAD $start | cut -d' ' -f1 >"$dir/given"
  g ls-files -s | cut -d' ' -f2 >>"$dir/given"
  g for-each-ref --format='%(objectname)' >>"$dir/given"
else
  g rev-list HEAD $start >"$dir/given"
  grep ' commit$' "$dir/all" >"$dir/commits"; mv "$dir/commits" "$dir/all"
fi
awk 'NR == FNR { given[$1] = 1; next } !($1 in given) { print "object " $2 " " $1 }' "$dir/given" "$dir/all"
"""


async def audit_repositories(sandbox: Sandbox, workdir: str, base: str, start: str = "") -> list[str]:
    """Problems of the repositories under the working folder. `start`: a reference that may be ahead of HEAD, because it is
    what the agent starts from."""
    done = await execute(sandbox, ("sh", "-c", _FIND, "sh", path_argument(workdir)), cwd="/", seconds=_SECONDS)
    problems = []
    for found in done.stdout.decode("utf-8", "replace").splitlines():
        repository = found.removesuffix("/.git")
        problems += [f"{repository}: {problem}" for problem in await _audit_repository(sandbox, found, base, start)]
    return problems


async def _audit_repository(sandbox: Sandbox, git: str, base: str, start: str) -> list[str]:
    # In a submodule or worktree .git is a file; git resolves it from the folder that contains it.
    command = ("sh", "-c", f'cd "${{3%/.git}}" || exit 1\n{_AUDIT}', "sh", base, str(MAX_OBJECTS), git, start)
    done = await execute(sandbox, command, cwd="/", seconds=_SECONDS)
    if not done.ok:
        raise SandboxError(f"the leak audit could not read the repository at {git}: {done.text.strip()[-300:]}")
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    said: list[str] = []
    if "no-git" in lines:
        return ["its history cannot be audited because the root has no git: install git, or remove .git"]
    if "base" in lines:
        said.append(f"HEAD does not contain the base commit {base[:12]}")
    if "alternates" in lines:
        said.append("it borrows objects from another repository (alternates)")
    if "no-head" in lines:
        said.append(f"it holds commits but HEAD points to none of them; {_CURE}")
    refs = [line.removeprefix("ref ") for line in lines if line.startswith("ref ")]
    if refs:
        said.append(f"{_some(refs)} is ahead of HEAD; {_CURE}")
    objects = [line.removeprefix("object ") for line in lines if line.startswith("object ")]
    if objects and not refs:
        kinds = {kind: sum(o.startswith(f"{kind} ") for o in objects) for kind in ("commit", "tree", "blob", "tag")}
        counted = ", ".join(f"{number} {kind}{'s' if number > 1 else ''}" for kind, number in kinds.items() if number)
        said.append(f"{counted} unreachable from HEAD may hold the answer ({objects[0]}); {_CURE}")
    return said


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


SYSTEM_PATTERNS = (
    "/usr/bin/*",
    "/usr/local/bin/*",
    "/usr/sbin/*",
    "/bin/*",
    "/sbin/*",
    "/usr/lib/python3*/*",
    "/usr/local/lib/python3*/*",
    "/etc/ld.so.preload",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d/*",
    "/etc/gitconfig",
    "/etc/environment",
    "/etc/profile.d/*",
    "/root/.bashrc",
    "/root/.profile",
    "/root/.gitconfig",
    "/root/.local/lib/python3*/*",
    "/opt/*/lib/python3*/*",
    "/etc/profile",
    "/etc/bash.bashrc",
    "/tests",
    "/tests/*",
    "/logs/verifier/*",
)
"""What every verifier relies on: programs, Python's library, and a shell's startup files."""
_NAMED = 8
_MOST_REMEMBERED = 4096
_MOST_HASHED = 2000


@runtime_checkable
class HasSecrets(Protocol):
    """An evaluator with files that must not be in the agent's sandbox under any name."""

    def secrets(self) -> tuple[Path, ...]: ...


@runtime_checkable
class HasBaseCommit(Protocol):
    """An evaluator that knows the commit the agent starts from."""

    @property
    def base(self) -> str: ...


@runtime_checkable
class HasReliedOnFiles(Protocol):
    """An evaluator whose tests rely on files of the working folder: patterns relative to it."""

    def relies_on(self) -> tuple[str, ...]: ...


Seen = Mapping[str, tuple[ChangeKind, str]]
"""Changed paths that a verifier relies on, each with the kind of change and a hash of its content."""
_before: OrderedDict[str, Seen] = OrderedDict()
"""By sandbox id, what had already changed when the agent started: done by the set-up, not by the agent."""


async def audit_before_run(sandbox: Sandbox, task: Task, evaluator: Evaluator) -> list[str]:
    """What in the prepared sandbox would give the answer away; each finding says what to do. What the evaluator conceals is
    removed first."""
    await conceal(sandbox, task, evaluator)
    await _remember(sandbox, task, evaluator)
    if task.metadata.get("leak_audit") is False:
        return []
    problems = []
    hidden = list(evaluator.leaks())
    if hidden:
        problems += [f"{path} exists before the agent runs" for path in await existing_paths(sandbox, hidden)]
    if isinstance(evaluator, HasSecrets):
        known = await asyncio.to_thread(file_fingerprints, evaluator.secrets(), task.environment.build)
        problems += [
            f"{path} is a copy of {secret}, a file of the verifier or the solution: remove it from the environment"
            for path, secret in await find_copies(sandbox, known, _searched(task))
        ]
    base = evaluator.base if isinstance(evaluator, HasBaseCommit) else ""
    start = START_REF if isinstance(evaluator, Conceals) and evaluator.concealed_history else ""
    problems += await audit_repositories(sandbox, task.environment.workdir, base, start)
    return problems


async def audit_after_run(
    sandbox: Sandbox, task: Task, evaluator: Evaluator, findings: list[tuple[str, str]] | None = None
) -> list[str]:
    """Files that the verifier relies on and the agent changed, also as findings. For information: the evaluation uses none
    of them unless the task asks to be evaluated in the agent's own sandbox."""
    before = _before.pop(sandbox.id, {})
    try:
        after = await _relied_on(sandbox, task, evaluator)
    except SandboxError as error:
        return [f"the agent's changes could not be audited: {error}"]
    touched = {
        path: ChangeKind.CHANGED if path in before else seen[0]
        for path, seen in after.items()
        if before.get(path) != seen
    }
    touched |= {path: ChangeKind.DELETED for path in before if path not in after}
    if not touched:
        return []
    if findings is not None:
        findings += [(_finding(path), f"{path} ({kind})") for path, kind in sorted(touched.items())]
    named = ", ".join(f"{path} ({kind})" for path, kind in sorted(touched.items())[:_NAMED])
    more = f" and {len(touched) - _NAMED} more" if len(touched) > _NAMED else ""
    return [f"the agent changed files that the verifier relies on: {named}{more}"]


def _finding(path: str) -> str:
    if path == "/etc/ld.so.preload":
        return "loader_preload"
    return "changed_programs" if any(fnmatchcase(path, pattern) for pattern in SYSTEM_PATTERNS) else "edited_tests"


def _searched(task: Task) -> Sequence[str]:
    """Folders that are searched for copies."""
    return list(dict.fromkeys([task.environment.workdir, "/root", "/home", "/opt", "/tmp", "/srv", "/mnt"]))


async def _relied_on(sandbox: Sandbox, task: Task, evaluator: Evaluator) -> Seen:
    """Paths that the verifier relies on and that differ from the root."""
    patterns = list(SYSTEM_PATTERNS)
    if isinstance(evaluator, HasReliedOnFiles):
        # Patterns are relative to the repository, which usually is the working folder.
        patterns += [posixpath.join(task.environment.workdir, pattern) for pattern in evaluator.relies_on()]
    changes = {
        change.path: change.kind
        for change in await sandbox.diff()
        if any(fnmatchcase(change.path, pattern) for pattern in patterns)
    }
    there = [path for path, kind in changes.items() if kind is not ChangeKind.DELETED]
    hashes = await file_hashes(sandbox, there[:_MOST_HASHED])
    return {path: (kind, hashes.get(path, "")) for path, kind in changes.items()}


async def _remember(sandbox: Sandbox, task: Task, evaluator: Evaluator) -> None:
    try:
        _before[sandbox.id] = await _relied_on(sandbox, task, evaluator)
    except SandboxError:
        return
    # A session that ends before its audit leaves its entry; the number is bounded.
    while len(_before) > _MOST_REMEMBERED:
        _before.popitem(last=False)
