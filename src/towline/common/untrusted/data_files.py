"""Files that untrusted data names: opened below one folder, without following a link at any component.

`DataFolder` is the one way to reach such files. A path is plain (`plain_parts`): relative, without `..`, `~`, a scheme or
characters that cannot be seen. It is walked by directory descriptors with `O_NOFOLLOW`, so a symlink in any component is
refused wherever it leads, and only regular files and folders are opened: no device, pipe or socket. The folder itself is
named by the user and may be reached through links.

Only the standard library and `towline.errors`: the sandbox supervisor imports it with `archives.py`.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from towline.errors import ConfigError

MAX_TEXT = 16 * 1024 * 1024
"""Largest text file, in bytes, that is read from a data folder."""
_MAX_PATH = 4096
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of characters that cannot be seen."""


class UnsafePath(ConfigError):
    """A path that leaves its folder, goes through a link, or is neither a file nor a folder."""


def plain_parts(path: str) -> tuple[str, ...]:
    """The components of a plain relative path; `.` is the folder itself. Raises `UnsafePath` for any other.

    Look-alikes (full-width dots and slashes, a no-break space) are judged by what they look like.
    """
    if not path or len(path) > _MAX_PATH:
        raise UnsafePath(f"a path has 1 to {_MAX_PATH} characters")
    if any(_is_hidden(character) for character in path):
        raise UnsafePath(f"{path!r} has characters that cannot be seen")
    for spelling in (path, unicodedata.normalize("NFKC", path)):
        if spelling.startswith(("/", "~")) or "\\" in spelling or _SCHEME.match(spelling):
            raise UnsafePath(f"{path!r} is not a path relative to its folder")
        if any(part.strip() == ".." for part in spelling.split("/")):
            raise UnsafePath(f"{path!r} leaves its folder")
    return tuple(part for part in path.split("/") if part not in ("", "."))


def _is_hidden(character: str) -> bool:
    category = unicodedata.category(character)
    return category in _HIDDEN or (category == "Zs" and character != " ")


@contextmanager
def opened_below(folder: Path, path: str) -> Iterator[tuple[int, os.stat_result]]:
    """A descriptor of a regular file or a folder below `folder`, and its status; no link is followed."""
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        parts = plain_parts(path)
        for number, part in enumerate(parts, 1):
            flags = _FLAGS if number == len(parts) else _FLAGS | os.O_DIRECTORY
            try:
                below = os.open(part, flags, dir_fd=here)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK) and _is_link(part, here):
                    link = "/".join(parts[:number])
                    raise UnsafePath(f"{folder / link} is a symbolic link, which is not followed") from error
                if error.errno == errno.ENXIO:
                    raise UnsafePath(f"{folder / path} is neither a file nor a folder") from error
                raise OSError(error.errno, error.strerror, str(folder / path)) from error
            os.close(here)
            here = below
        status = os.fstat(here)
        if not (is_regular(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise UnsafePath(f"{folder / path} is neither a file nor a folder")
        yield here, status
    finally:
        os.close(here)


def is_regular(mode: int) -> bool:
    """Whether it is a file with an end, which is read without side effects."""
    return stat.S_ISREG(mode)


def _is_link(name: str, folder: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class DataFolder:
    """A folder of untrusted data, and its files. With `links` the user trusts its links too."""

    path: Path
    links: bool = False

    def find(self, name: str) -> Path:
        """The absolute path of a file or folder below, checked. Raises `UnsafePath` or `OSError`."""
        if self.links:
            os.stat(self.path / name)
            return (self.path / name).absolute()
        with opened_below(self.path, name):
            return self.path.absolute().joinpath(*plain_parts(name))

    def read_bytes(self, name: str, max_bytes: int) -> bytes:
        """The content of a regular file below."""
        if self.links:
            return _read(os.open(self.path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), name, max_bytes)
        with opened_below(self.path, name) as (descriptor, _):
            return _read(os.dup(descriptor), str(self.path / name), max_bytes)

    def read_text(self, name: str) -> str:
        """The text of a regular file below, as UTF-8."""
        return self.read_bytes(name, MAX_TEXT).decode("utf-8")

    def is_file(self, name: str) -> bool:
        """Whether a regular file is there. Raises `UnsafePath` if a link is."""
        return self._has(name, stat.S_IFREG)

    def is_folder(self, name: str) -> bool:
        """Whether a folder is there. Raises `UnsafePath` if a link is."""
        return self._has(name, stat.S_IFDIR)

    def _has(self, name: str, kind: int) -> bool:
        try:
            if self.links:
                return stat.S_IFMT(os.stat(self.path / name).st_mode) == kind
            with opened_below(self.path, name) as (_, status):
                return stat.S_IFMT(status.st_mode) == kind
        except (FileNotFoundError, NotADirectoryError):
            return False


def _read(descriptor: int, name: str, max_bytes: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        if not is_regular(os.fstat(descriptor).st_mode):
            raise UnsafePath(f"{name} is not a regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise UnsafePath(f"{name} has more than {max_bytes} bytes")
    return data
