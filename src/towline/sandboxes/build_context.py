"""The files that a Dockerfile may copy: a folder without what its .dockerignore names. Pure but for reading the folder.

Patterns are those of Docker: `*`, `?` and `[…]` stay within one part of a path, `**` is any number of parts, a leading
`!` takes a match back, the last match counts, and what is true of a folder is true of all that is in it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from towline.sandboxes import trees
from towline.sandboxes.base import SandboxError

_MOST_FILES = 100_000


class Context:
    """A build context: the relative paths in it, files, links and folders, in a fixed order."""

    def __init__(self, folder: Path, ignored: Sequence[str] = ()):
        self.folder = folder
        self.paths: list[str] = []
        for path, about in trees.entries(folder):
            if len(self.paths) >= _MOST_FILES:
                raise SandboxError(
                    f"{folder} has more than {_MOST_FILES:,} files to build from; name some in .dockerignore"
                )
            kind = about.st_mode
            if (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or stat.S_ISLNK(kind)) and not is_ignored(path, ignored):
                self.paths.append(path)
        self._known = set(self.paths)

    @classmethod
    def read(cls, folder: Path, dockerfile: Path) -> Context:
        """With the .dockerignore of the Dockerfile itself, or of the folder."""
        if not folder.is_dir():
            raise SandboxError(f"there is no folder {folder} to build from")
        for file in (dockerfile.with_name(dockerfile.name + ".dockerignore"), folder / ".dockerignore"):
            if file.is_file():
                return cls(folder, patterns(file.read_text("utf-8", "replace")))
        return cls(folder)

    def digest(self) -> str:
        return trees.digest(self.folder, self.paths)

    def match(self, source: str) -> list[str]:
        """The paths that a source of COPY names; `""` is the folder itself. Nothing outside can be named."""
        wanted = _plain(source)
        if not wanted:
            return [""]
        if wanted in self._known:
            return [wanted]
        expression = _compiled(wanted)
        return [path for path in self.paths if expression.fullmatch(path)]

    def below(self, path: str) -> list[str]:
        """What is in a folder, relative to it."""
        start = path + "/" if path else ""
        return [known[len(start) :] for known in self.paths if known.startswith(start)]

    def is_folder(self, path: str) -> bool:
        return not path or stat.S_ISDIR(os.lstat(self.folder / path).st_mode)


def patterns(text: str) -> list[str]:
    """The lines of a .dockerignore that say something."""
    found = []
    for line in text.lstrip("\ufeff").splitlines():
        if line.startswith("#") or not line.strip():
            continue
        negated = line.strip().startswith("!")
        plain = _plain(line.strip().lstrip("!").strip())
        if plain:
            found.append(("!" if negated else "") + plain)
    return found


def is_ignored(path: str, ignored: Sequence[str]) -> bool:
    """Whether the last pattern that matches a path, or a folder above it, leaves it out."""
    result = False
    parts = path.split("/")
    for pattern in ignored:
        expression = _compiled(pattern.removeprefix("!"))
        if any(expression.fullmatch("/".join(parts[:depth])) for depth in range(1, len(parts) + 1)):
            result = not pattern.startswith("!")
    return result


def _plain(path: str) -> str:
    """A path relative to the folder: leading slashes and dots are dropped, and dots cannot lead out."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    out = ""
    at = 0
    while at < len(pattern):
        rest = pattern[at:]
        if rest.startswith("**/"):
            out, at = out + "(?:.*/)?", at + 3
        elif rest.startswith("**"):
            out, at = out + ".*", at + 2
        elif rest[0] == "*":
            out, at = out + "[^/]*", at + 1
        elif rest[0] == "?":
            out, at = out + "[^/]", at + 1
        elif rest[0] == "[" and (choice := re.match(r"\[(\^?)((?:\\.|[^\]\\])+)\]", rest)):
            inside = choice[2].replace("[", "\\[")
            out, at = out + f"(?!/)[{choice[1]}{inside}]", at + choice.end()
        elif rest[0] == "\\" and len(rest) > 1:
            out, at = out + re.escape(rest[1]), at + 2
        else:
            out, at = out + re.escape(rest[0]), at + 1
    try:
        return re.compile(out, re.DOTALL)
    except re.error as error:
        raise SandboxError(f"{pattern!r} is not a pattern of file names: {error}") from error
