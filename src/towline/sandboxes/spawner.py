"""The one process outside a sandbox that belongs to it: it builds the sandbox, then starts every command inside.

It is forked by the keeper, lives in the sandbox's control group and user namespace, and is not in its PID namespace, so
nothing inside can see it. When everything is mounted it starts bubblewrap, waits for the sandbox's `init`, and joins its
namespaces: from then on a command costs one fork. It holds no secret and no privilege outside the sandbox, and it ends
when the keeper does.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from towline.sandboxes import inside, linux, network, overlay, wire
from towline.sandboxes.confine import Guards, confine, find_user

_SAID = 4096
"""Most of bubblewrap's own words that go into an error."""


def main(
    plan: dict[str, Any],
    guards: Guards,
    keeper: socket.socket,
    node: socket.socket,
    lifeline: int,
    stubs: dict[str, int],
) -> NoReturn:
    """Never returns: the process was forked for this."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        null = os.open("/dev/null", os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        linux.close_others({keeper.fileno(), node.fileno(), lifeline, *stubs.values()})
        try:
            spawner = _Spawner(plan, guards, keeper, node, stubs)
            spawner.build(lifeline)
        except (OSError, RuntimeError, LookupError, ValueError) as error:
            wire.send(keeper, {"at": "failed", "error": str(error)})
            os._exit(1)
        os.close(lifeline)
        spawner.serve()
    except BaseException:
        with suppress(OSError):
            wire.send(keeper, {"at": "failed", "error": traceback.format_exc(limit=5)})
    finally:
        os._exit(1)


class _Spawner:
    def __init__(
        self, plan: dict[str, Any], guards: Guards, keeper: socket.socket, node: socket.socket, stubs: dict[str, int]
    ):
        self._plan, self._guards, self._keeper, self._node, self._stubs = plan, guards, keeper, node, stubs
        self._trees: list[overlay.Tree] = []
        self._known: frozenset[str] = frozenset()
        self._waiting: dict[int, dict[str, Any]] = {}
        """Children whose end someone waits for, and the message that tells it."""

    def build(self, lifeline: int) -> None:
        plan = self._plan
        linux.unshare(linux.CLONE_NEWUSER)
        wire.send(self._keeper, {"at": "user"})
        answer = wire.receive(self._keeper)
        if answer is None:
            os._exit(1)
        sources = answer[1]
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        with suppress(PermissionError):
            os.setgroups([])
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
        listener = None
        if plan["network"] != "open" and "network" not in plan["unguarded"]:
            network.isolate()
        if plan["network"] == "gateway" and "network" not in plan["unguarded"]:
            listener = network.listen(plan["port"])
        if not sources:
            sources = overlay.open_sources_rootless(plan["sources"])
        arguments, self._trees = overlay.stage(plan, sources)
        for source in sources:
            os.close(source)
        first = self._start_bubblewrap(arguments, lifeline)
        pidfd = linux.pidfd_open(first)
        wanted = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
        linux.setns(pidfd, wanted)
        with suppress(OSError):  # a kernel without control group namespaces
            linux.setns(pidfd, linux.CLONE_NEWCGROUP)
        os.close(pidfd)
        os.chdir("/")
        self._furnish()
        self._known = frozenset(path for tree in self._trees for path, _ in overlay.changes(tree, frozenset()))
        confine(self._guards)
        gc.disable()  # a collection in a fresh child would copy every page it looks at
        wire.send(self._keeper, {"at": "ready", "pid": first}, [listener.fileno()] if listener is not None else [])
        if listener is not None:
            listener.close()

    def _start_bubblewrap(self, arguments: list[str], lifeline: int) -> int:
        """Start bubblewrap and wait until the sandbox's first process runs; its pid."""
        plan = self._plan
        ready, readied = os.pipe()
        said, saying = os.pipe()
        informed, informing = os.pipe()
        # `init` is executed through its descriptor: the root needs no program of its own.
        os.set_inheritable(self._stubs["init"], True)
        os.set_inheritable(informing, True)
        command = [
            plan["bwrap"],
            "--unshare-pid",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-cgroup-try",
            "--as-pid-1",
        ]
        command += ["--new-session", "--clearenv", "--cap-drop", "ALL", "--hostname", plan["hostname"], *arguments]
        command += ["--chdir", "/", "--info-fd", str(informing), "--", f"/proc/self/fd/{self._stubs['init']}"]
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(lifeline, 0)
                os.dup2(readied, 1)
                os.dup2(saying, 2)
                os.execve(command[0], command, {})
            except OSError as error:
                os.write(2, f"{command[0]}: {error}".encode())
            finally:
                os._exit(127)
        for descriptor in (readied, saying, informing):
            os.close(descriptor)
        os.set_inheritable(self._stubs["init"], False)
        info = b""
        while chunk := os.read(informed, 4096):
            info += chunk
        if os.read(ready, 1) != b"\x01":
            words = os.read(said, _SAID).decode("utf-8", "replace").strip()
            raise RuntimeError(f"bubblewrap could not make the sandbox: {words or 'it said nothing'}")
        for descriptor in (ready, said, informed):
            os.close(descriptor)
        return int(json.loads(info)["child-pid"])

    def _furnish(self) -> None:
        """Folders that every program expects, and the working folder."""
        plan = self._plan
        if not os.path.isdir("/tmp"):
            os.makedirs("/tmp", exist_ok=True)
            os.chmod("/tmp", 0o1777)
        user = find_user(plan["user"], plan["mapped"])
        workdir = plan["workdir"]
        if not os.path.isdir(workdir):
            inside.make_folders(workdir, user)
        if user.uid and not os.path.isdir(user.home):
            inside.make_folders(user.home, user)

    def serve(self) -> NoReturn:
        awake, waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Nothing of the sandbox's files may ever be imported here.
        sys.path[:], sys.meta_path[:] = [], []
        poll = select.poll()
        for descriptor in (self._keeper.fileno(), self._node.fileno(), awake):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == awake:
                    with suppress(BlockingIOError):
                        os.read(awake, 4096)
                elif descriptor == self._keeper.fileno():
                    os._exit(0)  # the keeper never speaks to a spawner that serves: it is gone
                else:
                    received = wire.receive(self._node)
                    if received is None:
                        poll.unregister(self._node.fileno())
                    else:
                        self._answer(*received)
            self._reap()

    def _answer(self, message: dict[str, Any], descriptors: list[int]) -> None:
        try:
            if message["do"] == "signal":
                if message["pid"] in self._waiting:
                    with suppress(ProcessLookupError):
                        os.killpg(message["pid"], message["signal"])
                return
            self._spawn(message, descriptors)
        except (OSError, LookupError, ValueError) as error:
            self._tell({"n": message["n"], "error": str(error), "kind": type(error).__name__})
        finally:
            for descriptor in descriptors:
                with suppress(OSError):
                    os.close(descriptor)

    def _spawn(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Fork a child for a piece of work. A command answers when it runs and again when it ends, the rest at the end."""
        starts = message["do"] == "start"
        known, telling = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError:
            os.close(telling)
            os.close(known)
            raise
        if pid == 0:
            inside.child(
                message, descriptors, telling, self._guards, self._plan, self._stubs["launch"], self._trees, self._known
            )
        os.close(telling)
        if starts:
            # Closed by the program's start, or after the reason why there is none.
            problem = os.read(known, 8192)
            os.close(known)
            self._waiting[pid] = {"ended": pid}
            if problem:
                self._tell({"n": message["n"], **json.loads(problem)})
            else:
                self._tell({"n": message["n"], "pid": pid})
        else:
            self._waiting[pid] = {"n": message["n"], "known": known}

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            message = self._waiting.pop(pid, None)
            if message is None:
                continue  # bubblewrap itself: the keeper sees the sandbox end
            code = os.waitstatus_to_exitcode(status)
            message["code"] = code if code >= 0 else 128 - code
            known = message.pop("known", None)
            if known is not None:
                problem = os.read(known, 8192)
                os.close(known)
                message |= json.loads(problem) if problem else {}
            self._tell(message)

    def _tell(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # a node that is gone needs no answer
            wire.send(self._node, message)
