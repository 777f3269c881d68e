"""The supervisor of one `process` sandbox: the parent of everything in it, as its own program.

It is a child subreaper: whatever a command leaves behind, including daemons with their own sessions, becomes its child
and ends with it. It holds one end of a socket; when the other end closes, because the node destroyed the sandbox or
died itself, or when its time is up, it kills everything it has and exits. Standard library only, one thread, no
environment.

Requests and replies are `wire` messages:
    {"do": "start", "command", "env", "cwd"} + [stdin, stdout, stderr] → {"pid"} or {"error"}; later {"ended": pid, "code"}
    {"do": "signal", "pid", "signal"}                                  → nothing; the command's process group gets the signal
    {"do": "kill"}                                                     → {"left": how many processes did not die}
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from typing import Any

from towline.sandboxes import linux, wire

_KILL_ROUNDS = 400
"""How often descendants are killed before `kill` gives up on processes that do not die."""


class ProcessSupervisor:
    def __init__(self, control: socket.socket, seconds: float):
        self._control = control
        self._deadline = time.monotonic() + seconds if seconds > 0 else None
        self._commands: set[int] = set()
        """Commands that are not reaped yet, so their process ids cannot have been reused."""

    def run(self) -> None:
        wakeup, signalled = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(signalled)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(wakeup, selectors.EVENT_READ)
            while True:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is not None and left <= 0:
                    return
                for key, _ in selector.select(left):
                    if key.fileobj is self._control:
                        if not self._handle_request():
                            return
                    else:
                        with contextlib.suppress(BlockingIOError):
                            os.read(wakeup, 4096)
                self._reap()

    def kill_all(self) -> int:
        """Kill every descendant; returns how many did not die."""
        for _ in range(_KILL_ROUNDS):
            left = linux.descendants(os.getpid())
            if not left:
                break
            # Stopped first, so that nothing forks between being listed and being killed.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
            self._reap()
            time.sleep(0.002)
        self._reap()
        return len(linux.descendants(os.getpid()))

    def _handle_request(self) -> bool:
        """Handle one request; false when the other end has closed."""
        received = wire.receive(self._control)
        if received is None:
            return False
        message, descriptors = received
        try:
            if message["do"] == "start":
                self._send({"n": message["n"], **self._start(message, descriptors)})
            elif message["do"] == "signal" and message["pid"] in self._commands:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(message["pid"], message["signal"])
            elif message["do"] == "kill":
                self._send({"n": message["n"], "left": self.kill_all()})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _start(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        supervisor = os.getpid()

        def prepare() -> None:
            linux.nice_session()
            # A supervisor that is killed takes at least the commands that it started with it.
            linux.kill_with_parent()
            if os.getppid() != supervisor:
                os._exit(128 + signal.SIGKILL)

        stdin, stdout, stderr = descriptors
        try:
            process = subprocess.Popen(
                message["command"],
                cwd=message["cwd"],
                env=message["env"],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=prepare,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return {"error": str(error)}
        process.returncode = 0  # `_reap` reaps it, not this object
        self._commands.add(process.pid)
        return {"pid": process.pid}

    def _reap(self) -> None:
        for pid, code in linux.reaped_children():
            if pid in self._commands:
                self._commands.discard(pid)
                self._send({"ended": pid, "code": code})

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            wire.send(self._control, message)


def main(descriptor: int, seconds: float) -> None:
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    linux.adopt_orphans()
    linux.nice_session()
    # Only the end of the socket stops this program, not the node's terminal. Signals are handled rather than ignored,
    # because every command would inherit an ignored signal.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    supervisor = ProcessSupervisor(control, seconds)
    try:
        supervisor.run()
    finally:
        supervisor.kill_all()
