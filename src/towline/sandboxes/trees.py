"""Folders that others filled: deleting, measuring and naming in them without ever following a link out."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from towline.sandboxes import holding
from towline.sandboxes.base import SandboxError

_LINKS = 40
"""Symbolic links in one path, as the kernel counts them."""


def remove(folder: Path) -> None:
    """Delete a tree whose owner may have taken rights from its folders."""
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            return
        for at, folders, _ in os.walk(folder):
            for name in (".", *folders):
                path = os.path.join(at, name)
                if not os.path.islink(path):
                    with contextlib.suppress(OSError):
                        os.chmod(path, 0o700)
    raise SandboxError(f"cannot delete {folder}; look at who owns what is in it")


def size(folder: Path) -> int:
    """Bytes that a tree takes, each hard-linked file once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for at, folders, files in os.walk(folder):
        for name in folders + files:
            with contextlib.suppress(FileNotFoundError):
                about = os.lstat(os.path.join(at, name))
                if about.st_nlink == 1 or stat.S_ISDIR(about.st_mode) or (about.st_dev, about.st_ino) not in seen:
                    seen.add((about.st_dev, about.st_ino))
                    total += about.st_blocks * 512
    return total


def within(root: Path, path: str, *, last: bool = True) -> Path:
    """Where a path leads when `root` is `/`: links are followed as if inside, and nothing leads out.

    The last part is followed if `last`. What does not exist is taken as it is written. Only for trees that nobody
    changes meanwhile.
    """
    done: list[str] = []
    waiting = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    links = 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            del done[-1:]
            continue
        here = root.joinpath(*done, part)
        if (waiting or last) and here.is_symlink():
            links += 1
            if links > _LINKS:
                raise SandboxError(f"too many symbolic links in {path!r}")
            target = os.readlink(here)
            if target.startswith("/"):
                done = []
            waiting += [part for part in reversed(target.split("/")) if part not in ("", ".")]
        else:
            done.append(part)
    return root.joinpath(*done)


def entries(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a folder in a fixed order: its path relative to the folder, and what it is."""
    for at, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(folders + files):
            path = os.path.join(at, name)
            yield os.path.relpath(path, folder), os.lstat(path)


def digest(folder: Path, names: list[str]) -> str:
    """A hash of files and folders below `folder`, by name, kind, mode and content."""
    total = hashlib.sha256()
    for name in sorted(names):
        path = folder / name
        about = os.lstat(path)
        total.update(f"{len(name)}:{name}:{about.st_mode:o}:".encode("utf-8", "surrogateescape"))
        if stat.S_ISLNK(about.st_mode):
            total.update(os.fsencode(os.readlink(path)) + b"\0")
        elif stat.S_ISREG(about.st_mode):
            with open(path, "rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def hold(folder: Path) -> int:
    """Make a node's folder and lock it for this process; closing the descriptor lets go of it.

    The lock of a node that is gone is waited for: helpers that inherited it hold it until they have ended.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not holding.take_from_the_dead(lock):
        os.close(lock)
        raise SandboxError(f"{folder} is in use by another node; give each a data folder of its own")
    holding.sign(lock)
    return lock
