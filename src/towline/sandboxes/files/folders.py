"""Folders on the host: locks that name their owner, and untrusted trees.

A lock that names its owner tells a live owner from one that is gone. A lock may outlive the process that took it for a
moment: a forked child that has not executed its own program yet still holds what its parent held, and on a busy machine
that moment is long. Helpers that inherit a lock hold it until they exit.

Untrusted trees are deleted, measured, resolved and hashed without ever following a symlink out of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from towline.sandboxes import linux
from towline.sandboxes.base import SandboxError

OWNER_EXIT_TIMEOUT = 120.0
"""Seconds to wait for the lock of a process that is gone."""
_UNKNOWN_OWNER_TIMEOUT = 0.5
"""Seconds to wait for a lock that does not name its owner."""


def try_lock(lock: int, seconds: float = 0.0) -> bool:
    """Take a lock if it becomes free within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        else:
            return True


def lock_unless_owner_lives(lock: int) -> bool:
    """Take a lock that is free or whose owner is gone, waiting for what the owner left; not that of a live owner."""
    return try_lock(lock) or try_lock(lock, _timeout_for(os.pread(lock, 200, 0)))


def write_owner(lock: int) -> None:
    """Write this process into its own lock file."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{_pid_namespace()} {os.getpid()} {start_time(os.getpid())}".encode(), 0)


def lock_data_folder(folder: Path) -> int:
    """Create a node's folder and lock it for this process; closing the returned descriptor releases it.

    The lock of a node that is gone is waited for: helpers that inherited it hold it until they exit.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not lock_unless_owner_lives(lock):
        os.close(lock)
        raise SandboxError(f"{folder} is in use by another node: give each node its own data folder")
    write_owner(lock)
    return lock


def _timeout_for(owner: bytes) -> float:
    """How long to wait for a lock: not at all while its owner lives."""
    try:
        namespace, pid, started = owner.decode("ascii").split()
        if namespace != _pid_namespace():
            return _UNKNOWN_OWNER_TIMEOUT  # its process id means nothing here
        return 0.0 if start_time(int(pid)) == started else OWNER_EXIT_TIMEOUT
    except (UnicodeDecodeError, ValueError):
        return _UNKNOWN_OWNER_TIMEOUT


def _pid_namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def start_time(pid: int) -> str:
    """When a process started, in kernel ticks; empty if it is gone or a zombie."""
    try:
        state, *fields = linux.stat_fields(pid)
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


_LINKS = 40
"""Symlinks in one path, the kernel's own limit."""


def remove(folder: Path) -> None:
    """Delete a tree, including folders whose permissions forbid it."""
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
    raise SandboxError(f"cannot delete {folder}: check who owns the files in it")


def size(folder: Path) -> int:
    """Bytes on disk of a tree, each hard-linked file counted once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for at, folders, files in os.walk(folder):
        for name in folders + files:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(os.path.join(at, name))
                if status.st_nlink == 1 or stat.S_ISDIR(status.st_mode) or (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    total += status.st_blocks * 512
    return total


def resolve_inside(root: Path, path: str, *, last: bool = True) -> Path:
    """Resolve a path as if `root` were `/`: symlinks are followed inside it, and nothing leads out.

    The last component is followed if `last`. What does not exist is taken literally. Only for trees that do not change
    meanwhile.
    """
    resolved: list[str] = []
    remaining = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    links = 0
    while remaining:
        part = remaining.pop()
        if part == "..":
            del resolved[-1:]
            continue
        here = root.joinpath(*resolved, part)
        if (remaining or last) and here.is_symlink():
            links += 1
            if links > _LINKS:
                raise SandboxError(f"too many symlinks in {path!r}")
            target = os.readlink(here)
            if target.startswith("/"):
                resolved = []
            remaining += [part for part in reversed(target.split("/")) if part not in ("", ".")]
        else:
            resolved.append(part)
    return root.joinpath(*resolved)


def entries(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a folder in a fixed order: the relative path and its status."""
    for at, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(folders + files):
            path = os.path.join(at, name)
            yield os.path.relpath(path, folder), os.lstat(path)


def digest(folder: Path, names: list[str]) -> str:
    """A hash of paths below `folder`: their names, types, modes and contents."""
    total = hashlib.sha256()
    for name in sorted(names):
        path = folder / name
        status = os.lstat(path)
        total.update(f"{len(name)}:{name}:{status.st_mode:o}:".encode("utf-8", "surrogateescape"))
        if stat.S_ISLNK(status.st_mode):
            total.update(os.fsencode(os.readlink(path)) + b"\0")
        elif stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()
