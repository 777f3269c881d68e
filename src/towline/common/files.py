"""Files on disk: atomic writes, folders that appear complete, caches, locks between processes, and quarantine.

Invariants: when `write_atomically` or the block of `atomic_file` returns, the file is complete and durable under its name;
when it raises, or the machine stops, the name holds what it held before. The kernel releases a lock when its process ends,
however it ends. Damaged files are moved to quarantine: kept unchanged, never deleted, each reported in one log line.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from towline.common.text import one_line


def user_cache_folder(name: str) -> Path:
    """`towline/NAME` in the user's cache. As the XDG specification asks, a relative `XDG_CACHE_HOME` is ignored."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "towline" / name


@contextlib.contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file to write that replaces `path` when the block ends: write, fsync, rename, fsync the folder."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_atomically(path: Path, data: Any, mode: int = 0o666) -> None:
    """Write bytes, or anything with the buffer protocol, as one file; `mode` as of open(2)."""
    with atomic_file(path, mode) as file:
        file.write(data)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def replace_folder(made: Path, place: Path, prefix: str = ".replaced-") -> None:
    """Move a finished folder to its place on the same file system; an older one there is removed.

    No folder can be renamed over another: the old one is first moved to a folder whose name starts with `prefix`.
    """
    if place.exists():
        with tempfile.TemporaryDirectory(dir=made.parent, prefix=prefix) as old:
            place.rename(Path(old) / "old")
            made.rename(place)
    else:
        made.rename(place)


_GRACE_SECONDS = 3.0


def lock_file(descriptor: int) -> None:
    """Lock an open file; raises `BlockingIOError` if another process keeps it for more than a few seconds.

    A process that is killed while it forks may leave a child that has not yet called exec and holds the lock until then.
    """
    until = time.monotonic() + _GRACE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.01)
        else:
            return


log = logging.getLogger("towline.common.files")
QUARANTINE = "quarantine"


class Quarantine:
    """A folder of unreadable files, for people to inspect. No code reads from it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def move(self, path: Path, why: str) -> Path:
        """Move a file or folder here, under a unique name."""
        place = self._place(path.name)
        # Not `rename`: the quarantine may be on another file system.
        shutil.move(path, place)
        self._report(path, place, why)
        return place

    def copy(self, path: Path, why: str) -> Path:
        """Copy a file that is about to be replaced."""
        place = self._place(path.name)
        shutil.copy2(path, place)
        self._report(path, place, why)
        return place

    def place(self, name: str, why: str) -> Path:
        """A free path here, for the caller to write to."""
        place = self._place(name)
        self._report(Path(name), place, why)
        return place

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents; anything else in its place is moved here."""
        if path.exists() and not path.is_dir():
            self.move(path, "expected a folder, found a file")
        path.mkdir(parents=True, exist_ok=True)

    def _place(self, name: str) -> Path:
        if self.folder.exists() and not self.folder.is_dir():
            self.folder.rename(self.folder.with_name(f"{self.folder.name}-{secrets.token_hex(4)}"))
        self.folder.mkdir(parents=True, exist_ok=True)
        # A name may come from a damaged record: it stays inside the folder, and the file system accepts it.
        name = re.sub(r"[^A-Za-z0-9._-]", "-", name)[-200:]
        place = self.folder / name
        return place if not place.exists() else self.folder / f"{name}-{secrets.token_hex(4)}"

    def _report(self, path: Path, place: Path, why: str) -> None:
        log.error("damaged: %s: %s; kept unchanged in %s", path, one_line(why), place)
