"""Pipes for an event loop, which closes what it is given.

uvloop does so twice: the descriptor by itself, then the file object around it, whose number may by then be that of a file
that another thread has just opened. So uvloop is lent an object that knows its number and closes nothing.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any


class _Lent:
    """A descriptor whose end is the loop's own affair."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        return None


def given_to(loop: asyncio.AbstractEventLoop, descriptor: int, mode: str) -> Any:
    """What `connect_read_pipe` or `connect_write_pipe` of this loop is called with; the loop then owns the descriptor."""
    if type(loop).__module__.partition(".")[0] == "uvloop":
        return _Lent(descriptor)
    return os.fdopen(descriptor, mode, 0)
