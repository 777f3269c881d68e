"""What a node leaves on the machine, written down so that the next one can remove it.

Each keeper has a folder below the data folder with two locks and a list of its control groups. The node holds one lock
as long as it lives, node and keeper together the other. A node that is killed leaves a keeper that ends its sandboxes and
itself: whoever comes next sees the first lock free, waits for the second, and removes what is left. Mounts need no list:
they live in namespaces that end with their processes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from towline.sandboxes import cgroups

_LIST = "groups.json"
_LOCK = "lock"
_NODE = "node"
_PREFIX = "keeper-"
_PATIENCE = 20.0
"""Seconds that a keeper without a node has to end: longer than it gives its sandboxes."""
_START = 0.5
"""Seconds that a child of a killed node may still hold what its parent held, before it becomes its own program."""
_MOMENT = 60.0


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
    notes = []
    for folder in sorted(data.glob(f"{_PREFIX}*")):
        with ExitStack() as opened:
            try:
                node, lock = (opened.enter_context((folder / name).open("rb+")) for name in (_NODE, _LOCK))
            except OSError:
                # Being made or removed by someone else at this moment, unless the moment was long ago.
                with suppress(OSError):
                    if time.time() - folder.stat().st_mtime > _MOMENT:
                        _remove(folder)
                continue
            if not _free(node.fileno(), _START):
                continue
            if not _free(lock.fileno(), _PATIENCE):
                notes.append(f"the keeper of {folder.name} does not end, although its node is gone")
                continue
            left = _remove(folder)
        notes.append(f"removed what an earlier keeper left in {folder.name}")
        if left:
            notes.append(f"control groups that would not go: {', '.join(left)}")
    return notes


def _locked(path: Path) -> int:
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _free(lock: int, seconds: float) -> bool:
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


def _remove(folder: Path) -> list[str]:
    """Remove a keeper's groups and its folder; returns groups that would not go."""
    listed = folder / _LIST
    left = []
    if listed.is_file():
        # The names are checked: a damaged list must not remove a group that is not ours.
        mine = f"towline-{folder.name.removeprefix(_PREFIX)}"
        left = cgroups.remove(path for path in json.loads(listed.read_text()) if Path(path).name == mine)
    shutil.rmtree(folder, ignore_errors=True)
    return left
