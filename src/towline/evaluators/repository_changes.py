"""The agent's change to a repository: taken out of one sandbox, cleared of tests, applied in another.

In the agent's sandbox git may be anything by now, so what it prints is only what the agent chose to submit. The base commit
is named, so that committing hides nothing. Where git is unavailable, the whole tree is compared with that of a clean
sandbox: by git if it has a repository (which knows what is ignored), else file by file.

Diffs are not trusted. A section whose paths cannot be determined for certain is dropped: a file that cannot be named cannot
be proven not to be a test. Symbolic links that lead out of the repository are dropped too.
"""

from __future__ import annotations

import asyncio
import difflib
import io
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from towline.evaluators.base import EvaluationError
from towline.evaluators.eval_inputs import TreeEntry, replace_path, sanitize_archive, tree_changes, tree_entries
from towline.evaluators.sandbox_io import INSIDE_PATH, path_argument
from towline.sandboxes.base import Sandbox, SandboxError, execute
from towline.sandboxes.files import archives

_START = b"diff --git "
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_ESCAPES = {
    b"n": b"\n",
    b"t": b"\t",
    b'"': b'"',
    b"\\": b"\\",
    b"a": b"\a",
    b"b": b"\b",
    b"f": b"\f",
    b"r": b"\r",
    b"v": b"\v",
}


@dataclass(frozen=True, slots=True)
class DiffSection:
    """The part of a diff for one file."""

    data: bytes
    paths: tuple[str, ...]
    """All paths that it names, old and new; empty if they cannot be determined."""
    link: str | None
    """The target of a symbolic link that it creates."""


def diff_sections(diff: bytes) -> list[DiffSection]:
    """The sections of a diff in git's format, in order; text before the first is ignored."""
    found: list[list[bytes]] = []
    left = (0, 0)
    for line in diff.splitlines(keepends=True):
        # A line of a hunk may look like a header; a file can start only between hunks.
        inside, left = any(left), _after(line, left)
        if not inside and line.startswith(_START):
            found.append([])
        if found:
            found[-1].append(line)
    return [_section(lines) for lines in found]


def without_files(diff: bytes, dropped: Callable[[str], bool]) -> tuple[bytes, list[str]]:
    """The diff without files that `dropped` matches and without links that lead out, and what was left out."""
    kept, left_out = [], []
    for section in diff_sections(diff):
        name = section.paths[-1] if section.paths else "a file with an ambiguous name"
        if not section.paths or any(map(dropped, section.paths)) or _leads_out(section):
            left_out.append(name)
        else:
            kept.append(section.data)
    return b"".join(kept), left_out


def _after(line: bytes, left: tuple[int, int]) -> tuple[int, int]:
    """How many old and new lines of the hunk remain."""
    old, new = left
    if old or new:
        if line[:1] == b"-":
            return max(old - 1, 0), new
        if line[:1] == b"+":
            return old, max(new - 1, 0)
        if line[:1] == b"\\":
            return left
        return max(old - 1, 0), max(new - 1, 0)
    hunk = re.match(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line)
    if hunk:
        return int(hunk[1] or 1), int(hunk[2] or 1)
    return 0, 0


def _section(lines: list[bytes]) -> DiffSection:
    paths: list[str] = []
    certain = True
    link_mode = False
    body = len(lines)
    for index, line in enumerate(lines[1:], 1):
        if line.startswith((b"@@ ", b"GIT binary patch", b"Binary files ")):
            body = index
            break
        rest = line.rstrip(b"\r\n").partition(b" ")[2]
        if line.startswith((b"new file mode 120000", b"new mode 120000")):
            link_mode = True
        if line.startswith((b"--- ", b"+++ ")):
            certain &= _add(paths, rest, prefix=True)
        elif line.startswith((b"rename from ", b"rename to ", b"copy from ", b"copy to ")):
            certain &= _add(paths, rest.partition(b" ")[2], prefix=False)
    header = _header(lines[0][len(_START) :].rstrip(b"\r\n"))
    if header is not None:
        paths += [path for path in header if path not in paths]
    elif not paths:
        certain = False
    link = None
    if link_mode:
        added = [line[1:].rstrip(b"\r\n") for line in lines[body:] if line.startswith(b"+")]
        link = b"".join(added).decode("utf-8", "surrogateescape")
    return DiffSection(b"".join(lines), tuple(dict.fromkeys(paths)) if certain else (), link)


def _add(paths: list[str], text: bytes, *, prefix: bool) -> bool:
    """Add one path of a header line; whether it could be determined."""
    text = text.rstrip(b"\t")
    if text == b"/dev/null":
        return True
    path = _unquoted(text)
    if path is None:
        return False
    if prefix:
        first, slash, path = path.partition("/")
        if not slash or first not in ("a", "b"):
            return False
    clean = posixpath.normpath(path)
    if not path or clean.startswith(("/", "..")):
        return False
    if clean not in paths:
        paths.append(clean)
    return True


def _header(text: bytes) -> list[str] | None:
    """Both paths of `a/x b/x`. Paths with spaces can be determined only if both are the same."""
    if text.startswith(b'"'):
        first = _QUOTED.match(text)
        if first is None or text[first.end() : first.end() + 1] != b" ":
            return None
        sides = [first[0], text[first.end() + 1 :]]
    elif text.endswith(b'"') and b' "' in text:
        at = text.index(b' "')
        sides = [text[:at], text[at + 1 :]]
    else:
        half = len(text) // 2
        if text[half : half + 1] == b" " and text[2:half] == text[half + 3 :]:
            sides = [text[:half], text[half + 1 :]]
        elif text.count(b" ") == 1:
            sides = text.split(b" ")
        else:
            return None
    paths: list[str] = []
    return paths if all(_add(paths, side, prefix=True) for side in sides) else None


def _unquoted(text: bytes) -> str | None:
    if not text.startswith(b'"'):
        return text.decode("utf-8", "surrogateescape")
    quoted = _QUOTED.fullmatch(text)
    if quoted is None:
        return None

    def plain(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 8) & 0xFF]) if code[:1].isdigit() else _ESCAPES.get(code, code)

    return re.sub(rb"\\([0-7]{1,3}|.)", plain, quoted[1]).decode("utf-8", "surrogateescape")


def _leads_out(section: DiffSection) -> bool:
    if section.link is None:
        return False
    parts = [part for part in section.link.split("/") if part not in ("", ".")]
    up = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    return section.link.startswith("/") or ".." in parts[up:] or up > section.paths[-1].count("/")


TEST_PATTERNS = (
    "tests/*",
    "test/*",
    "*/tests/*",
    "*/test/*",
    "__tests__/*",
    "*/__tests__/*",
    "test_*.py",
    "*/test_*.py",
    "*_test.py",
    "*_test.go",
    "conftest.py",
    "*/conftest.py",
    "*.test.[jt]s",
    "*.test.[jt]sx",
    "*.spec.[jt]s",
    "*.spec.[jt]sx",
    "pytest.ini",
    "sitecustomize.py",
    "*/sitecustomize.py",
    "usercustomize.py",
    "*/usercustomize.py",
)
"""Shell patterns of paths relative to the repository; `*` also matches `/`."""
COMPILED_PATTERNS = ("*.pyc", "*.pyo", "__pycache__/*", "*/__pycache__/*")
"""Files that could replace a test without having a test's name."""


class TestFileMatcher:
    """Whether a path belongs to the tests: by pattern, or because the verifier provides a file at that path."""

    __test__ = False

    def __init__(self, patterns: Iterable[str], named: Iterable[str] = ()):
        self.patterns = (*patterns, *COMPILED_PATTERNS)
        self.named = frozenset(map(posixpath.normpath, named))
        # Covers a file where the verifier needs a folder, and anything below a file of the verifier.
        self._above = {
            "/".join(name.split("/")[:depth]) for name in self.named for depth in range(1, name.count("/") + 1)
        }

    def __call__(self, path: str) -> bool:
        path = posixpath.normpath(path)
        parts = path.split("/")
        under = any("/".join(parts[:depth]) in self.named for depth in range(1, len(parts) + 1))
        folder = f"{path}/"
        return (
            under
            or path in self._above
            or any(fnmatchcase(path, pattern) or fnmatchcase(folder, pattern) for pattern in self.patterns)
        )


MAX_DIFF_BYTES = 64 * 1024 * 1024
"""Largest diff, in bytes."""
_SECONDS = 300.0
_MOST_SHOWN = 40_000
"""Largest file, in bytes, that is shown line by line: an adversarial comparison costs the square of its size."""
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


_TREE = (
    'set -e; index=$(mktemp); trap \'rm -f "$index"\' EXIT; export GIT_INDEX_FILE="$index"; rm -f "$index"; '
    f"{_GIT} read-tree HEAD; {_GIT} add -A . >/dev/null; {_GIT} write-tree"
)


@dataclass(slots=True)
class RepositoryChange:
    """An agent's change without tests: a diff, or files."""

    diff: bytes = b""
    files: Mapping[str, TreeEntry | None] = field(default_factory=dict)
    """By path in the repository; `None` for a deleted file."""
    shown: bytes = b""
    """For the session's log."""
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def of_diff(cls, diff: bytes, is_test: TestFileMatcher) -> RepositoryChange:
        kept, left_out = without_files(diff, is_test)
        return cls(diff=kept, shown=kept, left_out=left_out)

    async def apply(self, sandbox: Sandbox, repository: str) -> str:
        """Apply the change; returns why it does not apply, or an empty string."""
        if self.diff:
            return await apply_diff(sandbox, repository, self.diff)
        gone = [f"{repository}/{name}" for name, entry in self.files.items() if entry is None]
        for start in range(0, len(gone), 500):
            script = f'for path do path="{INSIDE_PATH}"; rm -rf "$path"; done'
            await execute(sandbox, ("sh", "-c", script, "sh", *map(path_argument, gone[start : start + 500])), cwd="/")
        made = {name: entry for name, entry in self.files.items() if entry is not None}
        if made:
            try:
                await sandbox.put(_archive(made), repository)
            except (SandboxError, archives.ArchiveError) as error:
                return str(error)
        return ""


async def diff_by_git(sandbox: Sandbox, repository: str, base: str) -> bytes | None:
    """The diff between the base commit and the work tree, by the agent's own git; `None` if that fails."""
    try:
        done = await execute(
            sandbox,
            ("sh", "-c", _TAKE, "sh", base),
            env=_ENV,
            cwd=repository,
            seconds=_SECONDS,
            max_bytes=MAX_DIFF_BYTES,
        )
    except SandboxError:
        return None
    return done.stdout if done.ok and not done.truncated else None


async def diff_of_tree(sandbox: Sandbox, repository: str, archive: bytes, is_test: TestFileMatcher) -> RepositoryChange:
    """The agent's tree compared with the clean one in `sandbox`, which cannot be used afterwards."""
    # The work tree of a clean environment may differ from its HEAD: only what the agent changed is its change.
    start = await execute(sandbox, ("sh", "-c", _TREE), env=_ENV, cwd=repository, seconds=_SECONDS)
    before = await sandbox.get(repository)
    own, _ = await asyncio.to_thread(sanitize_archive, archive, repository, _not_git)
    if any(name.partition("/")[2].startswith(".git/") for name in archives.member_names(before)):
        git, _ = await asyncio.to_thread(sanitize_archive, before, repository, lambda name: not _not_git(name))
        await replace_path(sandbox, repository, git)
        await sandbox.put(own, repository.rstrip("/").rpartition("/")[0] or "/")
        diff = await diff_by_git(sandbox, repository, start.stdout.decode().strip() if start.ok else "HEAD")
        if diff is not None:
            return RepositoryChange.of_diff(diff, is_test)
    return await asyncio.to_thread(_compared, before, own, is_test)


def _compared(before: bytes, after: bytes, is_test: TestFileMatcher) -> RepositoryChange:
    clean = {name: entry for name, entry in tree_entries(before).items() if _not_git(name)}
    difference = tree_changes(clean, tree_entries(after))
    files = {name: entry for name, entry in difference.items() if not is_test(name)}
    return RepositoryChange(files=files, shown=_shown(clean, files), left_out=sorted(set(difference) - set(files)))


async def apply_diff(sandbox: Sandbox, repository: str, diff: bytes) -> str:
    """Apply a diff completely or not at all; returns why it does not apply, or an empty string."""
    command = f"{_GIT} apply --whitespace=nowarn -"
    # Otherwise a repository around the folder would make git resolve the diff's paths against itself.
    env = {**_ENV, "GIT_CEILING_DIRECTORIES": repository.rstrip("/").rpartition("/")[0] or "/"}
    done = await execute(sandbox, ("sh", "-c", command), stdin=diff, env=env, cwd=repository, seconds=_SECONDS)
    if done.code in (126, 127):
        raise EvaluationError(f"applying a diff needs git in the sandbox's root: {done.text.strip()[-300:]}")
    return "" if done.ok else done.text.strip()[-1000:] or f"git apply exited with code {done.code}"


def _not_git(name: str) -> bool:
    return name != ".git" and not name.startswith(".git/")


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


def _shown(before: Mapping[str, TreeEntry], files: Mapping[str, TreeEntry | None]) -> bytes:
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
