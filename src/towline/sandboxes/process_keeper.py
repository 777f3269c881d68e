"""The parent of everything in one `process` sandbox, as a program of its own: `python -I -S process_keeper.py FD SECONDS`.

It is a child subreaper: whatever a command leaves behind, daemons with sessions of their own too, becomes its child
and ends with it. It holds one end of a socket pair; when the other end closes, because the node ended the sandbox or
died itself, or when its time is up, it kills all it has and exits. Standard library only, one thread, no environment.

A request is one datagram: a JSON list, with open files beside it for `start`. An answer is one JSON list.
    ["start", n] + [request file, stdin, stdout, stderr] → ["started", n] or ["failed", n, reason]; later ["ended", n, code]
    ["signal", n, number]                                → nothing: the command's process group gets the signal
    ["kill", n]                                          → ["killed", n, how many processes were left]
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ROUNDS = 400
"""How often the tree is looked through before `kill` gives up on processes that do not die."""

_libc = ctypes.CDLL(None, use_errno=True)


def descendants(of: int) -> list[int]:
    """Every process below one, as /proc shows it now. Zombies are left out: they are dead."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            # The name is in brackets and may hold anything; what follows the last one is the state and the parent.
            state, parent, *_ = file.read().rpartition(b")")[2].split()
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    waiting = [of]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


class Keeper:
    """The loop."""

    def __init__(self, control: socket.socket, seconds: float):
        self._control = control
        self._until = time.monotonic() + seconds if seconds > 0 else None
        self._commands: dict[int, int] = {}
        """Number of a command by its process id, until it is reaped: an id in here cannot be anyone else's."""

    def run(self) -> None:
        waking, woken = os.pipe()
        os.set_blocking(waking, False)
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(waking, selectors.EVENT_READ)
            while True:
                left = None if self._until is None else self._until - time.monotonic()
                if left is not None and left <= 0:
                    return
                for key, _ in selector.select(left):
                    if key.fileobj is self._control:
                        if not self._serve():
                            return
                    else:
                        with contextlib.suppress(BlockingIOError):
                            os.read(waking, 4096)
                self._reap()

    def end(self) -> int:
        """Kill everything below; how many would not die."""
        for _ in range(_ROUNDS):
            left = descendants(os.getpid())
            if not left:
                break
            # Stopped first, so that nothing forks away between being listed and being killed.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for process in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(process, number)
            self._reap()
            time.sleep(0.002)
        self._reap()
        return len(descendants(os.getpid()))

    def _serve(self) -> bool:
        """One request; false when the other end has closed."""
        data, files, _, _ = socket.recv_fds(self._control, 65_536, 4)
        if not data:
            return False
        what, number, *rest = json.loads(data)
        try:
            if what == "start":
                self._start(number, *files)
            elif what == "signal":
                for process, command in self._commands.items():
                    if command == number:
                        with contextlib.suppress(ProcessLookupError, PermissionError):
                            os.killpg(process, rest[0])
            elif what == "kill":
                self._answer("killed", number, self.end())
        finally:
            for file in files:
                os.close(file)
        return True

    def _start(self, number: int, request: int, stdin: int, stdout: int, stderr: int) -> None:
        with open(os.dup(request), "rb") as file:
            file.seek(0)
            asked = json.load(file)
        keeper = os.getpid()

        def tied() -> None:
            # A keeper that is killed itself takes at least the commands it started with it.
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(128 + signal.SIGKILL)

        try:
            process = subprocess.Popen(
                asked["command"],
                cwd=asked["cwd"],
                env=asked["env"],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=tied,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._answer("failed", number, str(error))
            return
        process.returncode = 0  # It is reaped here, not by its object.
        self._commands[process.pid] = number
        self._answer("started", number)

    def _reap(self) -> None:
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            number = self._commands.pop(process, None)
            if number is not None:
                code = os.waitstatus_to_exitcode(status)
                self._answer("ended", number, code if code >= 0 else 128 - code)

    def _answer(self, *answer: object) -> None:
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(answer).encode())


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")
    # The node's terminal is not this program's business; the end of the socket is. Handled rather than ignored, since
    # what is ignored here would be ignored by every command too.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    keeper = Keeper(control, float(sys.argv[2]))
    try:
        keeper.run()
    finally:
        keeper.end()


if __name__ == "__main__":
    main()
