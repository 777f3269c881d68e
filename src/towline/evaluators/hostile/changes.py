"""Diffs and trees of an agent: which files a change names, and which of them are tests.

Diffs are not trusted. A section whose paths cannot be determined for certain is dropped: a file that cannot be named cannot
be proven not to be a test. So is a section that continues after its hunks, where another diff would name files of its own.
Symbolic links that lead out of the repository are dropped too.
"""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from towline.evaluators.hostile.trees import carried_entries

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
    if not _ends_with_its_hunks(lines[body:]):
        certain = False
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


def _ends_with_its_hunks(body: list[bytes]) -> bool:
    """Whether nothing but hunks, or one binary patch, follows the header of a section."""
    left = (0, 0)
    binary = bool(body) and not body[0].startswith(b"@@ ")
    for line in body:
        inside, left = any(left), _after(line, left)
        if inside or line.startswith((b"@@ ", b"\\ ")) or not line.strip():
            continue
        if not binary or line.startswith((b"--- ", b"+++ ", b"Index: ", b"*** ")):
            return False
    return True


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


_MOST_SHOWN = 40_000
"""Largest file, in bytes, that is shown line by line: an adversarial comparison costs the square of its size."""
_MOST_LINES = 20_000
_MOST_COMPARED = 2_000_000
"""Bytes of all files that are shown line by line."""

Entry = tuple[bytes, int, bool]
"""Content or target, mode, whether it is a link."""


def compare_trees(
    before: bytes, after: bytes, patterns: list[str], named: list[str]
) -> tuple[dict[str, Entry | None], list[str], bytes]:
    """What `after` changes, without tests; the tests that were left out; and a diff to show."""
    is_test = TestFileMatcher(patterns, named)
    clean = {name: entry for name, entry in carried_entries(before).items() if _not_git(name)}
    own = carried_entries(after)
    changed: dict[str, Entry | None] = {name: entry for name, entry in own.items() if clean.get(name) != entry}
    changed |= {name: None for name in clean if name not in own}
    files = {name: entry for name, entry in changed.items() if not is_test(name)}
    return files, sorted(set(changed) - set(files)), _shown(clean, files)


def _not_git(name: str) -> bool:
    return name != ".git" and not name.startswith(".git/")


def _shown(before: dict[str, Entry], files: dict[str, Entry | None]) -> bytes:
    """A unified diff of the text files, and a line for each of the others."""
    lines: list[str] = []
    left = _MOST_COMPARED
    for name in sorted(files):
        old, new = before.get(name), files[name]
        size = sum(len(entry[0]) for entry in (old, new) if entry)
        if size > min(left, _MOST_SHOWN) or len(lines) > _MOST_LINES:
            lines.append(f"{name} differs\n")
            continue
        left -= size
        try:
            sides = [entry[0].decode().splitlines(keepends=True) if entry else [] for entry in (old, new)]
        except UnicodeDecodeError:
            lines.append(f"Binary file {name} differs\n")
            continue
        names = f"a/{name}" if old else "/dev/null", f"b/{name}" if new else "/dev/null"
        lines += difflib.unified_diff(sides[0], sides[1], names[0], names[1])
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")


def kept_diff(diff: bytes, patterns: list[str], named: list[str]) -> tuple[bytes, list[str]]:
    """`without_files`, without tests."""
    return without_files(diff, TestFileMatcher(patterns, named))
