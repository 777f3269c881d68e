"""Files that only their owner may read: secrets, and folders with secrets in them.

A secret is read only from a regular file that belongs to this user and that no other user can read; symlinks are not
followed. A file that another user could have placed or read is refused, never repaired.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from towline.errors import ConfigError

_MOST = 1 << 20
PRIVATE_UMASK = 0o077
"""The umask of a process whose files are for its user alone."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def write_private(path: Path, text: str) -> None:
    """Write a file with mode 0600 in one step, durably."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(draft, flags, 0o600), "w") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_private(path: Path) -> str | None:
    """The text of a file that is only this user's; `None` if there is none, or another user could have read or made it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not is_private(os.fstat(descriptor)):
            return None
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return file.read(_MOST).decode()
    return None


def private_opener(path: str, flags: int) -> int:
    """For `open`: a file that it creates has mode 0600."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def is_private(found: os.stat_result) -> bool:
    """Whether it is a regular file of this user that no other user can read or write."""
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS


def private_folder(path: Path) -> None:
    """Create a folder with mode 0700, or take all other users' access to an existing one; parents keep theirs.

    Raises `ConfigError` if it belongs to another user.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
        raise ConfigError(f"{path} belongs to another user (uid {found.st_uid}): choose another folder")
    if found.st_mode & _OTHERS and (found.st_uid == os.geteuid() or os.geteuid() == 0):
        path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)


def secure_folder(path: Path) -> None:
    """Create a folder for one user's data, or take other users' access to an existing one, its files and its folders.

    Only one level deep: what is below cannot be reached without the folders on the way.
    """
    private_folder(path)
    with os.scandir(path) as entries:
        for entry in entries:
            found = entry.stat(follow_symlinks=False)
            wanted = stat.S_IMODE(found.st_mode) & ~_OTHERS
            mine = found.st_uid == os.geteuid() and (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode))
            if mine and wanted != stat.S_IMODE(found.st_mode):
                # A file may be removed meanwhile, as those of SQLite are.
                with contextlib.suppress(FileNotFoundError):
                    os.chmod(entry.path, wanted)
