"""A weaker guard of memory, for machines where no control group can hold it: look, add up, end what is too large.

Each process is held by RLIMIT_DATA at once; what all processes of a sandbox take together is looked at twice a second,
and a sandbox over its limit loses its processes. Between two looks it can grow past the limit, so this is named in a
runtime's notes and never counted as enforced.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

_EVERY = 0.5
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class _Watched:
    pid: int
    most: int


class Watch:
    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        self._next = 0.0

    def add(self, name: str, pid: int, most_mb: int) -> None:
        """Watch a sandbox by its spawner: everything inside is its child or a child of its children."""
        self._watched[name] = _Watched(pid, most_mb << 20)

    def remove(self, name: str) -> None:
        self._watched.pop(name, None)

    def next(self) -> float | None:
        return self._next if self._watched else None

    def over(self, now: float) -> list[str]:
        """The sandboxes that take more than they may, if it is time to look."""
        if not self._watched or now < self._next:
            return []
        self._next = time.monotonic() + _EVERY
        return [name for name, watched in self._watched.items() if _resident(watched.pid) > watched.most]


def _resident(root: int) -> int:
    """Bytes that a process and all below it hold and share with nobody."""
    total, todo = 0, [root]
    while todo:
        pid = todo.pop()
        try:
            with open(f"/proc/{pid}/statm") as fields:
                _, resident, shared = fields.read().split()[:3]
            total += (int(resident) - int(shared)) * _PAGE
            with open(f"/proc/{pid}/task/{pid}/children") as children:
                todo += map(int, children.read().split())
        except (OSError, ValueError):
            continue
    return total
