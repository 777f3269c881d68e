"""A one-shot program that works inside another process's namespaces, where paths mean what they mean there.

`serve ACTION PATH MAX_BYTES USER_NS MOUNT_NS` enters the namespaces that it was given as open files, and then unpacks
its stdin below PATH (`put`) or packs PATH to its stdout (`get`). Symlinks, wherever they point, lead to places inside.
`serve guard - SECONDS PIDFD -1` instead waits until its stdin closes or its time is up, and then kills one process: the
init of a PID namespace, with which all others end. Nothing but the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import tarfile

from towline.errors import TowlineError
from towline.sandboxes import linux
from towline.sandboxes.files import archives


def serve(action: str, path: str, max_bytes: int, user: int, mount: int) -> None:
    try:
        if action == "guard":
            guard(user, max_bytes)
            return
        linux.setns(user, linux.CLONE_NEWUSER)
        linux.setns(mount, linux.CLONE_NEWNS)
        os.chdir("/")
        if action == "put":
            archives.unpack(sys.stdin.buffer, path, max_bytes=max_bytes, links="any", follow=True)
        else:
            with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                archives.add_tree(tar, os.path.basename(path.rstrip("/")) or ".", path, max_bytes)
    except (OSError, TowlineError) as error:
        sys.exit(str(error))


def guard(pidfd: int, seconds: int) -> None:
    """Kill a process when the node is gone or after `seconds`; 0 for no time limit."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    waiting = select.poll()
    waiting.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    waiting.register(pidfd, select.POLLIN)
    waiting.poll(seconds * 1000 if seconds else None)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return
