"""What a node leaves on the machine, written down so that the next one can remove it.

Each keeper has a folder below the data folder with two locks and a list of its control groups. The node holds one lock
as long as it lives, node and keeper together the other. A node that is killed leaves a keeper that ends its sandboxes and
itself: whoever comes next sees the first lock free, waits for the second, and removes what is left. Mounts need no list:
they live in namespaces that end with their processes.

The lock of a node that is gone may be held for a moment more (see `holding`), and is waited for. A keeper that does not end
is killed, which ends its sandboxes too. Folders are made, and found unfinished, only under one lock: an unfinished one is
known to be left behind.

Invariant: when `reap` returns, nothing is left of nodes that were gone when it was called, or a note says what.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from towline.sandboxes import cgroups, holding

_LIST = "groups.json"
_LOCK = "lock"
_NODE = "node"
_PREFIX = "keeper-"
START_KEEPER = (
    "import sys; sys.path.insert(0, sys.argv[1]); from towline.sandboxes.keeper import main; main(int(sys.argv[2]))"
)
"""The program of a keeper: by this a keeper is known."""
_PATIENCE = 30.0
"""Seconds that a keeper without a node has to end before it is killed: longer than it gives its sandboxes."""


@dataclass(slots=True)
class Instance:
    """One keeper's folder."""

    folder: Path
    lock: int
    """A descriptor that the keeper inherits: the lock is free when both this process and the keeper are gone."""
    node: int
    """One that nobody inherits: its lock is free when this process is gone."""

    @property
    def group(self) -> str:
        return f"towline-{self.folder.name.removeprefix(_PREFIX)}"

    @classmethod
    def make(cls, data: Path) -> Instance:
        folder = data / f"{_PREFIX}{uuid.uuid4().hex[:12]}"
        with _making(data):
            folder.mkdir(parents=True)
            folder.chmod(0o700)
            node, lock = (_locked(folder / name) for name in (_NODE, _LOCK))
        return cls(folder, lock, node)

    def record(self, groups: object) -> None:
        (self.folder / _LIST).write_text(json.dumps(groups))

    def remove(self) -> None:
        _remove(self.folder)
        for lock in (self.lock, self.node):
            os.close(lock)


def reap(data: Path) -> list[str]:
    """End and remove what nodes that are gone have left; says what was found."""
    notes: list[str] = []
    for folder in sorted(data.glob(f"{_PREFIX}*")):
        with ExitStack() as opened:
            with _making(data):  # else a lock that is there and not yet taken would be that of a node which begins
                try:
                    node, lock = (opened.enter_context((folder / name).open("rb+")) for name in (_NODE, _LOCK))
                    free = holding.take(node.fileno())
                except OSError:
                    notes += _unfinished(folder)
                    continue
            if not free and not holding.take_from_the_dead(node.fileno()):
                continue
            if not holding.take(lock.fileno(), _PATIENCE):
                # The node is gone for certain: the keeper that holds this lock is its own.
                _kill_keeper(folder / _LOCK)
                if not holding.take(lock.fileno(), _PATIENCE):
                    notes.append(f"the keeper of {folder.name} does not end, although its node is gone")
                    continue
            left = _remove(folder)
        notes.append(f"removed what an earlier keeper left in {folder.name}")
        if left:
            notes.append(f"control groups that would not go: {', '.join(left)}")
    return notes


def _unfinished(folder: Path) -> list[str]:
    """Remove a folder without its locks: a node was killed while it made it, or while it removed it."""
    if not folder.is_dir():
        return []
    _remove(folder)
    return [f"removed what an earlier node began in {folder.name}"]


@contextlib.contextmanager
def _making(data: Path) -> Iterator[None]:
    """While a folder is made, nobody takes it for one that was left behind."""
    data.mkdir(parents=True, exist_ok=True)
    lock = os.open(data, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        holding.take(lock, holding.HELD)
        yield
    finally:
        os.close(lock)


def _locked(path: Path) -> int:
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    # Before it is taken: a lock that is held always says by whom.
    holding.sign(lock)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _kill_keeper(path: Path) -> None:
    """Kill the keeper that has a lock open. Another node may have it open too, to see whether it is free."""
    wanted = os.path.realpath(path)
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with suppress(OSError):
            if START_KEEPER.encode() not in Path(f"/proc/{entry}/cmdline").read_bytes():
                continue
            if any(os.readlink(link.path) == wanted for link in os.scandir(f"/proc/{entry}/fd")):
                os.kill(int(entry), signal.SIGKILL)


def _remove(folder: Path) -> list[str]:
    """Remove a keeper's groups and its folder; returns groups that would not go."""
    left = cgroups.remove(_groups(folder), patience=_PATIENCE)
    shutil.rmtree(folder, ignore_errors=True)
    return left


def _groups(folder: Path) -> list[str]:
    """The control groups of a keeper: those on its list, and, if there is no list, those that bear its name.

    The names are checked: a damaged list must not remove a group that is not ours.
    """
    mine = f"towline-{folder.name.removeprefix(_PREFIX)}"
    try:
        listed = json.loads((folder / _LIST).read_text())
        found = [path for path in listed if isinstance(path, str) and Path(path).name == mine]
    except (OSError, TypeError, ValueError):
        found = []
    return found or cgroups.named(mine)
