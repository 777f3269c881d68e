"""The processes below this one, read from /proc: who descends from a server, and what it left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection
from pathlib import Path

_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""


def adopt_orphans() -> None:
    """Make this process the parent of every process that its descendants leave behind."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)


def parents() -> dict[int, int]:
    """The parent of each live process."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError):
                state, parent, *_ = Path("/proc", entry, "stat").read_text().rsplit(")", 1)[1].split()
                if state not in "ZX":
                    found[int(entry)] = int(parent)
    return found


def descendants(*roots: int) -> list[int]:
    """Live processes below these, sorted."""
    tree = parents()
    known: set[int] = set(roots)
    while fresh := {pid for pid, parent in tree.items() if parent in known} - known:
        known |= fresh
    return sorted(known - set(roots))


def children(pids: Collection[int]) -> list[int]:
    """Live processes that these started themselves, sorted."""
    return sorted(pid for pid, parent in parents().items() if parent in pids)


def command_line(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
