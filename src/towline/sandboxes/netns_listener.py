"""The gateway's listening socket inside a sandbox's network namespace.

The socket is opened inside the namespace and handed out: the process that holds it accepts the connections itself.
Nothing runs inside the sandbox for it, and there is no other way out.

A process with threads cannot enter a user namespace, so for a running sandbox `open_listener` starts this module as a
one-shot helper program: it gets the namespaces as open files, enters them, listens, passes the socket back and ends.
Since the files are opened by the node, a process id that was reused in the meantime cannot mislead the helper.

The sandbox supervisor and the helper run without site packages: importing this module needs only the standard
library.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

from towline.sandboxes import linux

_BACKLOG = 1024
_PROGRAM = "from towline.sandboxes import netns_listener; netns_listener.serve_listener(*map(int, sys.argv[1:]))"


def isolate_network() -> None:
    """Put this process into a new network namespace with loopback up."""
    linux.unshare(linux.CLONE_NEWNET)
    linux.loopback_up()


def listen_on_loopback(port: int) -> socket.socket:
    """A socket that listens on 127.0.0.1 of this process's network namespace."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(_BACKLOG)
    return listener


def serve_listener(channel: int, net: int, user: int, port: int) -> None:
    """The helper program: enter the namespaces, listen, and send the socket through `channel`."""
    try:
        if user >= 0:
            linux.setns(user, linux.CLONE_NEWUSER)
        linux.setns(net, linux.CLONE_NEWNET)
        linux.loopback_up()  # it may still be down in a namespace that no process has used yet
        with listen_on_loopback(port) as listener, socket.socket(fileno=channel) as out:
            socket.send_fds(out, [b"1"], [listener.fileno()])
    except OSError as error:
        sys.exit(str(error))


async def open_listener(pid: int, port: int) -> socket.socket:
    """A socket that listens on 127.0.0.1 in the network namespace of a process.

    Needs root, or the user that owns that namespace.
    """
    import asyncio

    from towline.sandboxes.base import SandboxError
    from towline.sandboxes.subprocesses import communicate, isolated_python

    with contextlib.ExitStack() as stack:
        try:
            net = _open_namespace(stack, f"/proc/{pid}/ns/net")
            user = _open_namespace(stack, f"/proc/{pid}/ns/user")
        except OSError as error:
            raise SandboxError(
                f"cannot enter the network namespace of process {pid} ({error.strerror}): network `gateway` needs Towline "
                "to run as root on the sandbox's machine, or as the user that owns the sandbox"
            ) from error
        if os.path.samestat(os.fstat(user), os.stat("/proc/self/ns/user")):
            user = -1
        ours, theirs = socket.socketpair()
        stack.enter_context(ours)
        stack.enter_context(theirs)
        helper = await asyncio.create_subprocess_exec(
            *isolated_python(_PROGRAM, theirs.fileno(), net, user, port),
            pass_fds=[theirs.fileno(), net, *([user] if user >= 0 else [])],
            env={},
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, stderr = await communicate(helper, "the helper that listens inside the sandbox")
        theirs.close()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        if helper.returncode != 0 or not descriptors:
            raise SandboxError(
                f"cannot listen in the sandbox's network namespace: {stderr.decode('utf-8', 'replace').strip()}"
            )
        listener = socket.socket(fileno=descriptors[0])
        listener.set_inheritable(False)
        return listener


def _open_namespace(stack: contextlib.ExitStack, path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor
