"""The one process outside a sandbox that belongs to it: it builds the sandbox, then starts every command inside.

The supervisor forks it. It lives in the sandbox's control group and user namespace but not in its PID namespace, so
nothing inside can see it. When everything is mounted it starts bubblewrap, waits for the sandbox's `init`, and joins
its namespaces: from then on a command costs one fork. It holds no secret and no privilege outside the sandbox, and
exits with the supervisor.

Its children run a command, unpack files, pack files or list changes. Paths are resolved by the kernel in the
sandbox's own root and as a user of the sandbox, so a planted link leads nowhere else. A child writes the reason why
it failed to `errors`, as JSON, and nothing else.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import stat
import sys
import tarfile
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from towline.errors import TowlineError
from towline.sandboxes import linux, netns_listener, wire
from towline.sandboxes.bubblewrap.privileges import Restrictions, SandboxUser, confine, find_user, switch_user
from towline.sandboxes.files import archives, overlay

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_STDERR_BYTES = 4096
"""How much of bubblewrap's stderr goes into an error."""


def main(
    plan: dict[str, Any],
    restrictions: Restrictions,
    supervisor: socket.socket,
    node: socket.socket,
    lifeline: int,
    stubs: dict[str, int],
) -> NoReturn:
    """The main function of the forked process. Never returns."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        null = os.open("/dev/null", os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        linux.close_others({supervisor.fileno(), node.fileno(), lifeline, *stubs.values()})
        try:
            spawner = _Spawner(plan, restrictions, supervisor, node, stubs)
            spawner.build(lifeline)
        except (OSError, RuntimeError, LookupError, ValueError) as error:
            wire.send(supervisor, {"at": "failed", "error": str(error)})
            os._exit(1)
        os.close(lifeline)
        spawner.serve()
    except BaseException:
        with suppress(OSError):
            wire.send(supervisor, {"at": "failed", "error": traceback.format_exc(limit=5)})
    finally:
        os._exit(1)


class _Spawner:
    def __init__(
        self,
        plan: dict[str, Any],
        restrictions: Restrictions,
        supervisor: socket.socket,
        node: socket.socket,
        stubs: dict[str, int],
    ):
        self._plan, self._restrictions, self._supervisor, self._node, self._stubs = (
            plan,
            restrictions,
            supervisor,
            node,
            stubs,
        )
        self._trees: list[overlay.OverlayTree] = []
        self._known: frozenset[str] = frozenset()
        self._children: dict[int, dict[str, Any]] = {}
        """The exit message of each child, by pid."""

    def build(self, lifeline: int) -> None:
        plan = self._plan
        linux.unshare(linux.CLONE_NEWUSER)
        wire.send(self._supervisor, {"at": "user"})
        answer = wire.receive(self._supervisor)
        if answer is None:
            os._exit(1)
        sources = answer[1]
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        with suppress(PermissionError):
            os.setgroups([])
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
        listeners: list[socket.socket] = []
        if plan["network"] != "host" and "network" not in plan["unguarded"]:
            netns_listener.isolate_network()
            listeners = [netns_listener.listen_on_loopback(port) for port in plan["ports"]]
        if not sources:
            sources = overlay.open_sources_rootless(plan["sources"])
        arguments, self._trees = overlay.stage(plan, sources)
        for source in sources:
            os.close(source)
        first = self._start_bubblewrap(arguments, lifeline)
        pidfd = os.pidfd_open(first)
        wanted = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
        linux.setns(pidfd, wanted)
        with suppress(OSError):  # the kernel may have no control group namespaces
            linux.setns(pidfd, linux.CLONE_NEWCGROUP)
        os.close(pidfd)
        os.chdir("/")
        self._make_standard_folders()
        self._known = frozenset(path for tree in self._trees for path, _ in overlay.changes(tree, frozenset()))
        confine(self._restrictions)
        gc.disable()  # a collection in a fresh child would copy every page it touches
        wire.send(self._supervisor, {"at": "ready", "pid": first}, [listener.fileno() for listener in listeners])
        for listener in listeners:
            listener.close()

    def _start_bubblewrap(self, arguments: list[str], lifeline: int) -> int:
        """Start bubblewrap and wait until the sandbox's first process runs; returns its pid."""
        plan = self._plan
        ready_out, ready_in = os.pipe()
        stderr_out, stderr_in = os.pipe()
        info_out, info_in = os.pipe()
        # `init` is executed through its descriptor: the root needs no program of its own.
        os.set_inheritable(self._stubs["init"], True)
        os.set_inheritable(info_in, True)
        command = [
            plan["bwrap"],
            "--unshare-pid",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-cgroup-try",
            "--as-pid-1",
        ]
        command += ["--new-session", "--clearenv", "--cap-drop", "ALL", "--hostname", plan["hostname"], *arguments]
        command += ["--chdir", "/", "--info-fd", str(info_in), "--", f"/proc/self/fd/{self._stubs['init']}"]
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(lifeline, 0)
                os.dup2(ready_in, 1)
                os.dup2(stderr_in, 2)
                os.execve(command[0], command, {})
            except OSError as error:
                os.write(2, f"{command[0]}: {error}".encode())
            finally:
                os._exit(127)
        for descriptor in (ready_in, stderr_in, info_in):
            os.close(descriptor)
        os.set_inheritable(self._stubs["init"], False)
        info = b""
        while chunk := os.read(info_out, 4096):
            info += chunk
        if os.read(ready_out, 1) != b"\x01":
            stderr = os.read(stderr_out, _STDERR_BYTES).decode("utf-8", "replace").strip()
            raise RuntimeError(f"bubblewrap could not create the sandbox: {stderr or 'no error output'}")
        for descriptor in (ready_out, stderr_out, info_out):
            os.close(descriptor)
        return int(json.loads(info)["child-pid"])

    def _make_standard_folders(self) -> None:
        """Create the folders that every program expects, and the working folder."""
        plan = self._plan
        if not os.path.isdir("/tmp"):
            os.makedirs("/tmp", exist_ok=True)
            os.chmod("/tmp", 0o1777)
        user = find_user(plan["user"], plan["mapped"])
        workdir = plan["workdir"]
        if not os.path.isdir(workdir):
            make_folders(workdir, user)
        if user.uid and not os.path.isdir(user.home):
            make_folders(user.home, user)

    def serve(self) -> NoReturn:
        awake, waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # No file of the sandbox may ever be imported here.
        sys.path[:], sys.meta_path[:] = [], []
        poll = select.poll()
        for descriptor in (self._supervisor.fileno(), self._node.fileno(), awake):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == awake:
                    with suppress(BlockingIOError):
                        os.read(awake, 4096)
                elif descriptor == self._supervisor.fileno():
                    os._exit(0)  # the supervisor never writes to a serving spawner, so it is gone
                else:
                    received = wire.receive(self._node)
                    if received is None:
                        poll.unregister(self._node.fileno())
                    else:
                        self._handle(*received)
            self._reap()

    def _handle(self, message: dict[str, Any], descriptors: list[int]) -> None:
        try:
            if message["do"] == "signal":
                if message["pid"] in self._children:
                    with suppress(ProcessLookupError):
                        os.killpg(message["pid"], message["signal"])
                return
            self._spawn(message, descriptors)
        except (OSError, LookupError, ValueError) as error:
            self._send({"n": message["n"], "error": str(error), "kind": type(error).__name__})
        finally:
            for descriptor in descriptors:
                with suppress(OSError):
                    os.close(descriptor)

    def _spawn(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Fork a child for a request. A command replies when it runs and again when it exits, others when they exit."""
        starts = message["do"] == "start"
        error_out, error_in = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError:
            os.close(error_in)
            os.close(error_out)
            raise
        if pid == 0:
            run_child(
                message,
                descriptors,
                error_in,
                self._restrictions,
                self._plan,
                self._stubs["launch"],
                self._trees,
                self._known,
            )
        os.close(error_in)
        if starts:
            # Closed by a successful exec, or after the error was written.
            problem = os.read(error_out, 8192)
            os.close(error_out)
            self._children[pid] = {"ended": pid}
            if problem:
                self._send({"n": message["n"], **json.loads(problem)})
            else:
                self._send({"n": message["n"], "pid": pid})
        else:
            self._children[pid] = {"n": message["n"], "errors": error_out}

    def _reap(self) -> None:
        for pid, code in linux.reaped_children():
            message = self._children.pop(pid, None)
            if message is None:
                continue  # bubblewrap itself: the supervisor notices the sandbox's end
            message["code"] = code
            error_out = message.pop("errors", None)
            if error_out is not None:
                problem = os.read(error_out, 8192)
                os.close(error_out)
                message |= json.loads(problem) if problem else {}
            self._send(message)

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # a node that is gone needs no reply
            wire.send(self._node, message)


def run_child(
    message: dict[str, Any],
    descriptors: list[int],
    errors: int,
    restrictions: Restrictions,
    plan: dict[str, Any],
    launch: int,
    trees: list[overlay.OverlayTree],
    known: frozenset[str],
) -> NoReturn:
    """The main function of a child. Never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.setsid()
        linux.nice_session()
        work = message["do"]
        if work == "start":
            _start(message, descriptors, restrictions, plan, launch)
        elif work == "put":
            _put(message, descriptors[0], restrictions, plan)
        elif work == "get":
            _get(message, descriptors[0], restrictions)
        elif work == "diff":
            _diff(descriptors[0], restrictions, trees, known)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except (OSError, LookupError, ValueError, TowlineError) as error:
        os.write(errors, json.dumps({"error": str(error)[:4000], "kind": type(error).__name__}).encode())
    except BaseException as error:
        os.write(errors, json.dumps({"error": repr(error)[:4000], "kind": "internal"}).encode())
    finally:
        os._exit(code)


def _start(
    message: dict[str, Any], descriptors: list[int], restrictions: Restrictions, plan: dict[str, Any], launch: int
) -> None:
    wanted = message["user"]
    user = find_user(plan["user"] if wanted is None else wanted, plan["mapped"])
    environment = {"PATH": _PATH, "HOME": user.home, "USER": user.name, "LOGNAME": user.name, "LANG": "C.UTF-8"}
    environment |= {"HOSTNAME": plan["hostname"], **dict(plan["env"]), **message["env"]}
    for standard, descriptor in enumerate(descriptors):
        if user.uid:  # a program that opens /dev/stdout by name must own the pipe
            os.fchown(descriptor, user.uid, user.gid)
        os.dup2(descriptor, standard)
    switch_user(restrictions, user)
    os.chdir(message["cwd"] or plan["workdir"])
    command = message["command"]
    if "launch" in plan["unguarded"]:
        os.execvpe(command[0], command, environment)
    path = _resolve(command[0], environment.get("PATH", _PATH))
    os.execve(launch, [path, *command], environment)


def _resolve(name: str, path: str) -> str:
    """The program that a shell would run; without one, prints the reason and exits as a shell does."""
    candidates = [name] if "/" in name else [f"{folder or '.'}/{name}" for folder in path.split(":")]
    code = _NOT_FOUND
    for candidate in candidates:
        try:
            status = os.stat(candidate)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) and os.access(candidate, os.X_OK):
            return candidate
        code = _NOT_EXECUTABLE
    reason = "command not found" if code == _NOT_FOUND else "not an executable file"
    os.write(2, f"{name}: {reason}\n".encode("utf-8", "surrogateescape"))
    sys.exit(code)


def _put(message: dict[str, Any], source: int, restrictions: Restrictions, plan: dict[str, Any]) -> None:
    user = find_user(plan["user"], plan["mapped"])
    switch_user(restrictions, SandboxUser())
    make_folders(message["target"], user)
    with os.fdopen(os.dup(source), "rb") as archive:
        owner = (user.uid, user.gid) if user.uid else None
        archives.unpack(
            archive, message["target"], max_bytes=message["max_bytes"], links="any", follow=True, owner=owner
        )


def _get(message: dict[str, Any], target: int, restrictions: Restrictions) -> None:
    switch_user(restrictions, SandboxUser())
    path = message["path"].rstrip("/") or "/"
    real = os.path.realpath(path)
    with os.fdopen(os.dup(target), "wb") as out, tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        archives.add_tree(tar, os.path.basename(path) or ".", real, message["max_bytes"], message.get("skip", ()))


def _diff(target: int, restrictions: Restrictions, trees: list[overlay.OverlayTree], known: frozenset[str]) -> None:
    switch_user(restrictions, SandboxUser())
    found = [change for tree in trees for change in overlay.changes(tree, known)]
    with os.fdopen(os.dup(target), "w") as out:
        json.dump(found, out)


def make_folders(path: str, user: SandboxUser) -> None:
    """Create a folder and its missing parents, owned by the user."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path.rstrip("/")) or "/"
    for folder in reversed(missing):
        os.mkdir(folder, 0o755)
        if user.uid or user.gid:
            os.chown(folder, user.uid, user.gid)
