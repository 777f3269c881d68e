"""The network of a sandbox: a namespace with nothing but loopback, and one socket that the gateway listens on.

The socket is opened inside the namespace and handed out: the process that holds it accepts the connections itself.
Nothing runs inside for it, and there is no other way out.
"""

from __future__ import annotations

import socket

from towline.sandboxes import linux

_BACKLOG = 1024


def isolate() -> None:
    """Put this process into a new network namespace with loopback up."""
    linux.unshare(linux.CLONE_NEWNET)
    linux.loopback_up()


def listen(port: int) -> socket.socket:
    """A socket that listens on this namespace's loopback."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(_BACKLOG)
    return listener
