"""A listening socket on the loopback of another process's network namespace.

A process with threads cannot enter a user namespace, so a one-shot helper does: it gets the namespaces as open files,
enters them, listens, passes the socket back and ends. Nothing runs inside the sandbox for it, and since the files were
opened here, a process id that has become someone else's meanwhile cannot mislead it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path

from towline.sandboxes.base import GATEWAY_PORT, SandboxError
from towline.sandboxes.helping import finished

_HELPER = (
    "import sys; sys.path.insert(0, sys.argv[1]); from towline.sandboxes import network_entry; "
    "network_entry.serve(*map(int, sys.argv[2:]))"
)


async def listener(pid: int, port: int = GATEWAY_PORT) -> socket.socket:
    """A socket that listens on 127.0.0.1 where a process lives. Needs root, or to be the owner of that namespace."""
    with contextlib.ExitStack() as stack:
        try:
            net = _opened(stack, f"/proc/{pid}/ns/net")
            user = _opened(stack, f"/proc/{pid}/ns/user")
        except OSError as error:
            raise SandboxError(
                f"cannot enter the network of process {pid} ({error.strerror}): network `gateway` needs Towline to run as "
                "root on the machine of the sandbox, or as the user that owns it"
            ) from error
        if os.path.samestat(os.fstat(user), os.stat("/proc/self/ns/user")):
            user = -1
        ours, theirs = socket.socketpair()
        stack.enter_context(ours)
        stack.enter_context(theirs)
        files = [theirs.fileno(), net, *([user] if user >= 0 else [])]
        package = str(Path(__file__).parents[2])
        helper = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _HELPER, package, str(theirs.fileno()), str(net), str(user), str(port)),
            pass_fds=files,
            env={},
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await finished(helper, "the helper that listens inside")
        theirs.close()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        if helper.returncode != 0 or not descriptors:
            raise SandboxError(f"cannot listen inside the sandbox's network: {said.decode('utf-8', 'replace').strip()}")
        made = socket.socket(fileno=descriptors[0])
        made.set_inheritable(False)
        return made


def _opened(stack: contextlib.ExitStack, path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor
