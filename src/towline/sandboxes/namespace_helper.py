"""A one-shot program that works inside another process's mounts: `put` and `get` where the paths mean what they mean there.

`python -I -S -c … serve ACTION PATH MOST USER_NS MOUNT_NS`: it enters the namespaces that it was given as open files, and
then unpacks its standard input below PATH, or packs PATH to its standard output. Whatever links there are, they lead to
places inside. A `guard` instead waits until its standard input closes or its time is up, and then kills one process:
the first of a PID namespace, with which all others end. Nothing but the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import tarfile

from towline.errors import TowlineError
from towline.sandboxes import archives, linux


def serve(action: str, path: str, most: int, user: int, mount: int) -> None:
    try:
        if action == "guard":
            guard(user, most)
            return
        linux.setns(user, linux.CLONE_NEWUSER)
        linux.setns(mount, linux.CLONE_NEWNS)
        os.chdir("/")
        if action == "put":
            archives.unpack(sys.stdin.buffer, path, most=most, links="any", follow=True)
        else:
            with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                archives.add_tree(tar, os.path.basename(path.rstrip("/")) or ".", path, most)
    except (OSError, TowlineError) as error:
        sys.exit(str(error))


def guard(pidfd: int, seconds: int) -> None:
    """`seconds` is 0 for no limit but the node's own life."""
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
