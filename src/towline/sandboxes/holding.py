"""File locks that say who took them, so that one can tell a process that lives from one whose lock is still to be let go.

A lock may outlive the process that took it for a moment: a child that was forked, and has not become its own program yet,
holds what its parent held, and on a busy machine that moment is long. Helpers that inherit a lock hold it until they end.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

HELD = 120.0
"""Seconds that a lock of a process that is gone is waited for."""
_START = 0.5
"""Seconds that a lock is waited for which does not say who took it."""


def take(lock: int, seconds: float = 0.0) -> bool:
    """Take a lock, if it is free within so many seconds."""
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.005)
        else:
            return True


def take_from_the_dead(lock: int) -> bool:
    """Take a lock that is free, or whose process is gone; not that of a process which lives."""
    return take(lock) or take(lock, _patience(os.pread(lock, 200, 0)))


def sign(lock: int) -> None:
    """Write into a lock that is this process's own who has it."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{_space()} {os.getpid()} {_began(os.getpid())}".encode(), 0)


def _patience(holder: bytes) -> float:
    """How long to wait for a lock: not at all while the process is there that took it."""
    try:
        space, pid, began = holder.decode("ascii").split()
        if space != _space():
            return _START  # its number means nothing here
        return 0.0 if _began(int(pid)) == began else HELD
    except (UnicodeDecodeError, ValueError):
        return _START


def _space() -> str:
    """The namespace that process numbers are of."""
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _began(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty if it is gone, or dead and not yet buried."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
