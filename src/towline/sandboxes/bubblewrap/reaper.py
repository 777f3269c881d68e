"""Removes what crashed nodes left on the machine: supervisors, control groups, folders.

Each supervisor has a folder below the data folder with two locks and a list of its control groups. The node holds one
lock while it lives; node and supervisor together hold the other. A node that is killed leaves a supervisor that ends
its sandboxes and itself: the next node sees the first lock free, waits for the second, and removes what is left. Mounts
need no list: they live in namespaces that end with their processes.

The lock of a node that is gone may be held for a moment longer (see `files/folders.py`), and is waited for. A supervisor
that does not exit is killed, which ends its sandboxes too. Folders are created, and found unfinished, only under one
lock: an unfinished one is known to be a leftover.

Invariant: when `reap` returns, nothing is left of nodes that were gone when it was called, or a note says what.

The names on disk (`keeper-*`, `groups.json`, `lock`, `node`) and of control groups (`towline-*`) are a format: every
version of Towline must find the leftovers of every other one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from towline.sandboxes import cgroups
from towline.sandboxes.files import folders

_GROUP_LIST = "groups.json"
_LOCK = "lock"
_NODE = "node"
_PREFIX = "keeper-"
SUPERVISOR_PROGRAM = "from towline.sandboxes.bubblewrap.supervisor import main; main(int(sys.argv[1]))"
"""What a supervisor runs, by `isolated_python`."""
_IS_SUPERVISOR = re.compile(rb"from towline\.sandboxes\.[\w.]+ import main; main\(int\(sys\.argv\[\d\]\)\)")
"""Recognizes the command line of a supervisor, also of one that another version of Towline started."""
_EXIT_TIMEOUT = 30.0
"""Seconds for a supervisor without a node to exit before it is killed: longer than it gives its own sandboxes."""


@dataclass(slots=True)
class SupervisorFolder:
    """The folder of one supervisor."""

    folder: Path
    lock: int
    """A descriptor that the supervisor inherits: the lock is free when both this process and the supervisor are gone."""
    node: int
    """A descriptor that no process inherits: its lock is free when this process is gone."""

    @property
    def group(self) -> str:
        return _group_name(self.folder)

    @classmethod
    def make(cls, data: Path) -> SupervisorFolder:
        folder = data / f"{_PREFIX}{uuid.uuid4().hex[:12]}"
        with _creating(data):
            folder.mkdir(parents=True)
            folder.chmod(0o700)
            node, lock = (_locked(folder / name) for name in (_NODE, _LOCK))
        return cls(folder, lock, node)

    def record(self, groups: object) -> None:
        (self.folder / _GROUP_LIST).write_text(json.dumps(groups))

    def remove(self) -> None:
        _remove(self.folder)
        for lock in (self.lock, self.node):
            os.close(lock)


def reap(data: Path) -> list[str]:
    """End and remove the leftovers of nodes that are gone; returns notes of what was found."""
    notes: list[str] = []
    for folder in sorted(data.glob(f"{_PREFIX}*")):
        with ExitStack() as opened:
            with _creating(data):  # else a lock that exists and is not taken yet could be that of a starting node
                try:
                    node, lock = (opened.enter_context((folder / name).open("rb+")) for name in (_NODE, _LOCK))
                    free = folders.try_lock(node.fileno())
                except OSError:
                    notes += _remove_unfinished(folder)
                    continue
            if not free and not folders.lock_unless_owner_lives(node.fileno()):
                continue
            if not folders.try_lock(lock.fileno(), _EXIT_TIMEOUT):
                # The node is certainly gone, so its own supervisor holds this lock.
                _kill_supervisor(folder / _LOCK)
                if not folders.try_lock(lock.fileno(), _EXIT_TIMEOUT):
                    notes.append(f"the supervisor of {folder.name} does not exit, although its node is gone")
                    continue
            left = _remove(folder)
        notes.append(f"removed leftovers of an earlier supervisor in {folder.name}")
        if left:
            notes.append(f"control groups that could not be removed: {', '.join(left)}")
    return notes


def _remove_unfinished(folder: Path) -> list[str]:
    """Remove a folder without its locks: its node was killed while creating or removing it."""
    if not folder.is_dir():
        return []
    _remove(folder)
    return [f"removed the unfinished folder {folder.name} of an earlier node"]


@contextlib.contextmanager
def _creating(data: Path) -> Iterator[None]:
    """While held, a folder that is being created cannot be mistaken for a leftover."""
    data.mkdir(parents=True, exist_ok=True)
    lock = os.open(data, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        folders.try_lock(lock, folders.OWNER_EXIT_TIMEOUT)
        yield
    finally:
        os.close(lock)


def _locked(path: Path) -> int:
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    # Written before it is taken: a lock that is held always names its owner.
    folders.write_owner(lock)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _kill_supervisor(path: Path) -> None:
    """Kill the supervisor that has a lock open. Another node may have it open too, to see whether it is free."""
    wanted = os.path.realpath(path)
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with suppress(OSError):
            if not _IS_SUPERVISOR.search(Path(f"/proc/{entry}/cmdline").read_bytes()):
                continue
            if any(os.readlink(link.path) == wanted for link in os.scandir(f"/proc/{entry}/fd")):
                os.kill(int(entry), signal.SIGKILL)


def _remove(folder: Path) -> list[str]:
    """Remove a supervisor's groups and its folder; returns groups that could not be removed."""
    left = cgroups.remove(_groups(folder), timeout=_EXIT_TIMEOUT)
    shutil.rmtree(folder, ignore_errors=True)
    return left


def _groups(folder: Path) -> list[str]:
    """The control groups of a supervisor: those on its list or, without a list, those with its name.

    Names are checked: a damaged list must not remove a group that is not ours.
    """
    own = _group_name(folder)
    try:
        listed = json.loads((folder / _GROUP_LIST).read_text())
        found = [path for path in listed if isinstance(path, str) and Path(path).name == own]
    except (OSError, TypeError, ValueError):
        found = []
    return found or cgroups.find_by_name(own)


def _group_name(folder: Path) -> str:
    return f"towline-{folder.name.removeprefix(_PREFIX)}"
