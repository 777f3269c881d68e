"""Messages between the node, supervisors and spawners: one JSON object per packet, with file descriptors.

The sockets preserve packet boundaries (`SOCK_SEQPACKET`), so descriptors arrive with the message they belong to. A
message too long for a packet travels in a memory file whose descriptor comes first.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

_MAX_INLINE = 60_000
_MAX_DESCRIPTORS = 250
_MAX_BYTES = 32 * 1024 * 1024

WireMessage = dict[str, Any]


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, message: WireMessage, descriptors: Sequence[int] = ()) -> None:
    """Send a message; the sender keeps its descriptors."""
    data = json.dumps(message, separators=(",", ":")).encode("utf-8", "surrogateescape")
    if len(data) <= _MAX_INLINE:
        socket.send_fds(channel, [b"=" + data], descriptors)
        return
    spill = os.memfd_create("towline-message")
    try:
        os.write(spill, data)
        socket.send_fds(channel, [b"+"], [spill, *descriptors])
    finally:
        os.close(spill)


def receive(channel: socket.socket) -> tuple[WireMessage, list[int]] | None:
    """The next message and its descriptors; None when the peer is gone."""
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, _MAX_INLINE + 1, _MAX_DESCRIPTORS)
    except ConnectionError:
        return None
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if not data:
        return None
    if data[:1] == b"+":
        spill = descriptors.pop(0)
        data = b"=" + os.pread(spill, _MAX_BYTES, 0)
        os.close(spill)
    return json.loads(data[1:].decode("utf-8", "surrogateescape")), descriptors
