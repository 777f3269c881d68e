"""What a node leaves on the machine, written down so that the next one can remove it.

Each keeper has a folder below the data folder with a lock that it holds as long as it lives, and a list of its control
groups. A folder whose lock is free belongs to a keeper that is gone. Mounts need no list: they live in namespaces that
end with their processes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from towline.sandboxes import cgroups

_LIST = "groups.json"
_LOCK = "lock"
_PREFIX = "keeper-"


@dataclass(slots=True)
class Instance:
    """One keeper's folder."""

    folder: Path
    lock: int
    """A descriptor that the keeper inherits: the lock is free when both this process and the keeper are gone."""

    @property
    def group(self) -> str:
        return f"towline-{self.folder.name.removeprefix(_PREFIX)}"

    @classmethod
    def make(cls, data: Path) -> Instance:
        folder = data / f"{_PREFIX}{uuid.uuid4().hex[:12]}"
        folder.mkdir(parents=True)
        folder.chmod(0o700)
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(folder, lock)

    def record(self, groups: object) -> None:
        (self.folder / _LIST).write_text(json.dumps(groups))

    def remove(self) -> None:
        _remove(self.folder)
        os.close(self.lock)


def reap(data: Path) -> list[str]:
    """End and remove what keepers that are gone have left; says what was found."""
    notes = []
    for folder in sorted(data.glob(f"{_PREFIX}*")):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # being made, or being removed, by someone else
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        left = _remove(folder)
        os.close(lock)
        notes.append(f"removed what an earlier keeper left in {folder.name}")
        if left:
            notes.append(f"control groups that would not go: {', '.join(left)}")
    return notes


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
