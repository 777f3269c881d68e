"""Files that one process at a time has locked; the kernel gives a lock back when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import time

_MOMENT = 3.0


def take(descriptor: int) -> None:
    """Lock an open file; raises `BlockingIOError` if another process keeps it.

    A process that was killed while it started another may leave a child that has not become its own program yet, and
    holds until then what its parent held: that takes a moment, which is waited for.
    """
    until = time.monotonic() + _MOMENT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.01)
        else:
            return
