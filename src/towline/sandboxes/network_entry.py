"""What the helper of `network_door` does: enter a network namespace, listen there, hand the socket out.

It runs without site packages: nothing but the standard library.
"""

from __future__ import annotations

import socket
import sys

from towline.sandboxes import linux, network


def serve(channel: int, net: int, user: int, port: int) -> None:
    """Loopback may be down in a namespace that nobody has used yet."""
    try:
        if user >= 0:
            linux.setns(user, linux.CLONE_NEWUSER)
        linux.setns(net, linux.CLONE_NEWNET)
        linux.loopback_up()
        with network.listen(port) as made, socket.socket(fileno=channel) as out:
            socket.send_fds(out, [b"1"], [made.fileno()])
    except OSError as error:
        sys.exit(str(error))
