"""A git diff as sections, one a file, so that whole files can be left out of it. Nothing of it is trusted.

A section whose paths cannot be told for certain is left out: a file that nobody can name cannot be cleared of being a test.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass

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
class Section:
    """The part of a diff that is about one file."""

    data: bytes
    paths: tuple[str, ...]
    """Every path that it names, old and new; empty if they cannot be told."""
    link: str | None
    """Where a symbolic link that it makes leads."""


def sections(diff: bytes) -> list[Section]:
    """The sections of a diff in git's format, in order; what stands before the first is nothing."""
    found: list[list[bytes]] = []
    left = (0, 0)
    for line in diff.splitlines(keepends=True):
        # A line of a hunk may look like a header; only between hunks can a file start.
        inside, left = any(left), _after(line, left)
        if not inside and line.startswith(_START):
            found.append([])
        if found:
            found[-1].append(line)
    return [_section(lines) for lines in found]


def without(diff: bytes, dropped: Callable[[str], bool]) -> tuple[bytes, list[str]]:
    """The diff without the files that `dropped` names, without links that lead out, and what was left out."""
    kept, left_out = [], []
    for section in sections(diff):
        name = section.paths[-1] if section.paths else "a file whose name cannot be told"
        if not section.paths or any(map(dropped, section.paths)) or _leads_out(section):
            left_out.append(name)
        else:
            kept.append(section.data)
    return b"".join(kept), left_out


def _after(line: bytes, left: tuple[int, int]) -> tuple[int, int]:
    """How many old and new lines of the hunk are still to come."""
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


def _section(lines: list[bytes]) -> Section:
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
    return Section(b"".join(lines), tuple(dict.fromkeys(paths)) if certain else (), link)


def _add(paths: list[str], text: bytes, *, prefix: bool) -> bool:
    """Note one path of a header line; whether it could be told."""
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
    """Both paths of `a/x b/x`. With blanks in them they can be told only if both are the same."""
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


def _leads_out(section: Section) -> bool:
    if section.link is None:
        return False
    parts = [part for part in section.link.split("/") if part not in ("", ".")]
    up = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    return section.link.startswith("/") or ".." in parts[up:] or up > section.paths[-1].count("/")
