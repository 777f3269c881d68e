"""One sandbox as the keeper holds it, and the two questions about its end: has it ended, and end all that runs in it."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from towline.sandboxes import linux

PATIENCE = 10.0
"""Seconds after which processes that will not end are reported rather than waited for."""


@dataclass(slots=True)
class Kept:
    """A sandbox."""

    name: str
    plan: dict[str, Any]
    number: int
    """Of the request that is to be answered when it is ready."""
    slot: int
    groups: list[str]
    pid: int
    spawner: socket.socket
    node: socket.socket
    lifeline: socket.socket
    """Its `init` ends when this closes."""
    made: bool = False
    pidfd: int | None = None
    """Of its `init`."""
    spaces: tuple[int, int] | None = None
    """Its user and PID namespaces."""
    deadline: float | None = None
    ending: list[int] = field(default_factory=list)
    """Requests to answer when it is gone."""
    ended_at: float | None = None
    spawner_gone: bool = False
    notes: list[str] = field(default_factory=list)
    memory_kills: int = 0
    """Times that its memory limit has ended processes, as last counted."""


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def kill_all(user: int, pids: int) -> NoReturn:
    """Enter a PID namespace and send one signal to all that it shows, until nobody is left to get it."""
    try:
        linux.setns(user)
        linux.setns(pids)
        inner = os.fork()
        if inner:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 0xFF)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                # To all at once: the kernel lets no fork slip through between. `init` and the sender are left out.
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                os._exit(0)
            time.sleep(0.0005)
    finally:
        os._exit(1)
