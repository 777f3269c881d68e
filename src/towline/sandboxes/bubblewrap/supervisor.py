"""The sandbox supervisor: the process that creates, watches and ends every sandbox of a node.

Single-threaded, small (nothing but the standard library), one per node. It exchanges `wire` messages with the node over
one socket; when that closes, for whatever reason, every sandbox ends. Each sandbox's `init` in turn reads from a socket
whose other end only the supervisor holds: a supervisor that is killed takes its sandboxes with it.

A sandbox is created in steps, so that many can be created at once: fork a spawner; when it has its user namespace,
write its user map and open the sources; when it reports that the sandbox is ready, hand its socket to the node.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from towline.sandboxes import cgroups, linux, stub_programs, wire
from towline.sandboxes.bubblewrap import privileges, seccomp, spawner
from towline.sandboxes.bubblewrap.privileges import Restrictions
from towline.sandboxes.files import overlay

KILL_TIMEOUT = 10.0
"""Seconds after which processes that do not die are reported rather than waited for."""


@dataclass(slots=True)
class SandboxRecord:
    name: str
    plan: dict[str, Any]
    number: int
    """Number of the create request, which is answered when the sandbox is ready."""
    slot: int
    """Its range of user ids."""
    groups: list[str]
    pid: int
    """Process id of its spawner."""
    spawner: socket.socket
    node: socket.socket
    lifeline: socket.socket
    """Its `init` ends when this closes."""
    ready: bool = False
    """The create request has been answered."""
    pidfd: int | None = None
    """Process descriptor of its `init`."""
    namespaces: tuple[int, int] | None = None
    """Descriptors of its user and PID namespaces."""
    deadline: float | None = None
    destroy_requests: list[int] = field(default_factory=list)
    """Numbers of the destroy requests, which are answered when the sandbox is gone."""
    ended_at: float | None = None
    spawner_gone: bool = False
    notes: list[str] = field(default_factory=list)
    oom_kills: int = 0
    """Processes that its memory limit has killed, as last counted."""
    other_kills: int = 0
    """Processes that were killed because all sandboxes together had no memory left."""


def has_exited(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def kill_all(user: int, pids: int) -> NoReturn:
    """Enter a PID namespace and signal every process in it until none is left. Never returns: call it in a fork."""
    try:
        linux.setns(user)
        linux.setns(pids)
        inner = os.fork()
        if inner:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 0xFF)
        deadline = time.monotonic() + KILL_TIMEOUT
        while time.monotonic() < deadline:
            try:
                # All at once: the kernel lets no fork slip through. `init` and the sender are exempt.
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                os._exit(0)
            time.sleep(0.0005)
    finally:
        os._exit(1)


_OWN_PROCESSES = 3
"""Processes that every sandbox has on top of its `pids` limit: the spawner, bubblewrap and `init`."""
_POLL_SECONDS = 0.002


class SandboxSupervisor:
    def __init__(self, node: socket.socket, settings: dict[str, Any]):
        self._node = node
        self._unguarded: list[str] = settings["unguarded"]
        self._bwrap: str = settings["bwrap"]
        self._cgroups = cgroups.find_cgroups(settings["name"]) if settings["cgroups"] else cgroups.Cgroups()
        if "total" not in self._unguarded:
            self._cgroups.limit_total(settings.get("totals", {}))
        self._user_mapping = privileges.find_user_mapping()
        self._filter = seccomp.build()
        self._stubs = {name: stub_programs.sealed_memfd(name) for name in ("init", "launch")}
        for descriptor in self._stubs.values():
            os.set_inheritable(descriptor, False)
        self._records: dict[str, SandboxRecord] = {}
        self._poll = select.poll()
        self._sockets: dict[int, SandboxRecord] = {}
        self._inits: dict[int, SandboxRecord] = {}
        self._killing: dict[int, tuple[str, int | None]] = {}
        """Helpers that kill a sandbox's processes, by pid: the sandbox, and the request to answer."""
        self._wakeup, signalled = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._stopping = False
        self._memory_watch = cgroups.MemoryWatch()

    def run(self) -> None:
        linux.adopt_orphans()
        enforced = {limit for limit, controller in cgroups.LIMITS.items() if controller in self._cgroups.folders}
        facts = {
            "controllers": sorted(enforced),
            "mapped": self._user_mapping.mapped,
            "rootless": self._user_mapping.rootless,
            "notes": self._cgroups.notes,
            "folders": sorted({folder for _, folder in self._cgroups.folders.values()}),
        }
        gc.freeze()
        wire.send(self._node, {"facts": facts})
        for descriptor in (self._node.fileno(), self._wakeup):
            self._poll.register(descriptor, select.POLLIN)
        while not self._stopping:
            for descriptor, _ in self._poll.poll(self._timeout()):
                if descriptor == self._node.fileno():
                    self._handle_request()
                elif descriptor == self._wakeup:
                    with suppress(BlockingIOError):
                        os.read(self._wakeup, 4096)
                elif descriptor in self._sockets:
                    self._on_spawner(self._sockets[descriptor])
                elif descriptor in self._inits:
                    # The first process has exited, for whatever reason: so has the sandbox.
                    self._poll.unregister(descriptor)
                    self._end(self._inits.pop(descriptor))
            self._reap()
            self._check_sandboxes()
        self._shut_down()

    def _on_signal(self, number: int, _: object) -> None:
        if number == signal.SIGTERM:
            self._stopping = True

    def _timeout(self) -> int:
        now = time.monotonic()
        times = [
            record.deadline
            for record in self._records.values()
            if record.deadline is not None and record.ended_at is None
        ]
        if any(record.ended_at is not None for record in self._records.values()):
            times.append(now + _POLL_SECONDS)
        if (watching := self._memory_watch.next_poll()) is not None:
            times.append(watching)
        return max(0, int((min(times) - now) * 1000) + 1) if times else 60_000

    def _handle_request(self) -> None:
        received = wire.receive(self._node)
        if received is None:
            self._stopping = True
            return
        message, descriptors = received
        for descriptor in descriptors:
            os.close(descriptor)
        number = message["n"]
        try:
            if message["do"] == "create":
                self._create(message["plan"], number)
                return
            record = self._records.get(message["id"])
            if record is None:
                self._send({"n": number})
            elif message["do"] == "health":
                self._count_oom_kills(record)
                self._send({"n": number, "oom_kills": record.oom_kills, "other_kills": record.other_kills})
            elif message["do"] == "kill":
                self._kill_inside(record, number)
            elif message["do"] == "destroy":
                record.destroy_requests.append(number)
                self._end(record)
        except OSError as error:
            self._send({"n": number, "error": str(error)})

    def _create(self, plan: dict[str, Any], number: int) -> None:
        name = plan["id"]
        plan |= {"mapped": self._user_mapping.mapped, "unguarded": self._unguarded, "bwrap": self._bwrap}
        groups = self._cgroups.create(name, plan["limits"], _OWN_PROCESSES)
        supervisor_end, spawner_end = wire.pair()
        node_end, served_end = wire.pair()
        # A socket pair rather than a pipe, whose other end a process inside could open by /proc/1/fd and hold.
        lifeline, holding = socket.socketpair()
        restrictions = self._restrictions(plan)
        try:
            pid = os.fork()
        except OSError:
            cgroups.remove(groups)
            raise
        if pid == 0:
            spawner.main(plan, restrictions, spawner_end, served_end, lifeline.fileno(), self._stubs)
        lifeline.close()
        spawner_end.close()
        served_end.close()
        record = SandboxRecord(
            name, plan, number, self._user_mapping.acquire(), groups, pid, supervisor_end, node_end, holding
        )
        self._records[name] = record
        self._sockets[supervisor_end.fileno()] = record
        self._poll.register(supervisor_end.fileno(), select.POLLIN)
        try:
            cgroups.enter(groups, pid)
        except OSError as error:
            self._fail(record, str(error))

    def _restrictions(self, plan: dict[str, Any]) -> Restrictions:
        off = self._unguarded
        capabilities = set(linux.CAPABILITIES.values())
        processes = None
        if "pids" not in self._cgroups.folders and plan["limits"]["pids"] is not None:
            # Counted per user, so root inside must stay one user.
            processes = int(plan["limits"]["pids"]) + _OWN_PROCESSES
            capabilities -= {linux.CAPABILITIES["SETUID"], linux.CAPABILITIES["SETGID"]}
        data = None if "memory" in self._cgroups.folders else plan["limits"]["memory_mb"]
        return Restrictions(
            b"" if "seccomp" in off else self._filter,
            None if "capabilities" in off else frozenset(capabilities),
            processes,
            int(data) if data is not None else None,
        )

    def _on_spawner(self, record: SandboxRecord) -> None:
        """A spawner reports its next step, or has exited."""
        received = wire.receive(record.spawner)
        try:
            if received is None:
                self._poll.unregister(record.spawner.fileno())
                self._fail(record, "the sandbox ended while it was being created" if not record.ready else "")
                return
            message, descriptors = received
            if message["at"] == "user":
                self._user_mapping.write(record.pid, record.slot)
                self._send_sources(record)
            elif message["at"] == "ready":
                self._ready(record, message["pid"], descriptors)
            else:
                self._fail(record, message["error"])
        except OSError as error:
            self._fail(record, str(error))

    def _send_sources(self, record: SandboxRecord) -> None:
        sources: list[int] = []
        try:
            if not self._user_mapping.rootless:
                namespace = os.open(f"/proc/{record.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    sources, record.notes = overlay.open_sources(record.plan["sources"], namespace)
                finally:
                    os.close(namespace)
            wire.send(record.spawner, {"go": True}, sources)
        finally:
            for source in sources:
                os.close(source)

    def _ready(self, record: SandboxRecord, pid: int, descriptors: list[int]) -> None:
        record.pidfd = os.pidfd_open(pid)
        self._inits[record.pidfd] = record
        self._poll.register(record.pidfd, select.POLLIN)
        flags = os.O_RDONLY | os.O_CLOEXEC
        record.namespaces = (os.open(f"/proc/{pid}/ns/user", flags), os.open(f"/proc/{pid}/ns/pid", flags))
        record.ready = True
        seconds = record.plan["seconds"]
        record.deadline = None if seconds is None else time.monotonic() + seconds
        memory_mb = record.plan["limits"]["memory_mb"]
        if memory_mb is not None and "memory" not in self._cgroups.folders:
            self._memory_watch.add(record.name, record.pid, int(memory_mb))
        owner = self._user_mapping.outside(record.slot)
        self._send({"n": record.number, "notes": record.notes, "owner": owner}, [record.node.fileno(), *descriptors])
        record.node.close()
        for descriptor in descriptors:
            os.close(descriptor)

    def _fail(self, record: SandboxRecord, why: str) -> None:
        if not record.ready:
            self._send({"n": record.number, "error": why})
            record.ready = True
        self._end(record)

    def _kill_inside(self, record: SandboxRecord, number: int | None = None) -> None:
        """Kill every process inside but `init`; the request is answered when they are gone."""
        if record.namespaces is None:
            if number is not None:
                self._send({"n": number})
            return
        helper = os.fork()
        if helper == 0:
            kill_all(*record.namespaces)
        self._killing[helper] = (record.name, number)

    def _killed(self, name: str, number: int | None, code: int) -> None:
        if number is not None:
            problem = {"error": f"the processes of {name} do not die"} if code else {}
            self._send({"n": number, **problem})

    def _count_oom_kills(self, record: SandboxRecord) -> None:
        found = cgroups.count_oom_kills(record.groups)
        record.oom_kills = max(record.oom_kills, found.own)
        record.other_kills = max(record.other_kills, found.total)

    def _end(self, record: SandboxRecord) -> None:
        """Start to end a sandbox; `_check_sandboxes` completes it."""
        if record.ended_at is not None:
            return
        self._count_oom_kills(record)
        record.ended_at = time.monotonic()
        self._memory_watch.remove(record.name)
        record.lifeline.close()
        if record.pidfd is not None:
            with suppress(OSError):
                signal.pidfd_send_signal(record.pidfd, signal.SIGKILL)
        if not record.spawner_gone:
            with suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)
        cgroups.kill(record.groups)

    def _check_sandboxes(self) -> None:
        now = time.monotonic()
        for name in self._memory_watch.over(now):
            with suppress(OSError):
                self._records[name].oom_kills += 1
                self._kill_inside(self._records[name])
        for record in list(self._records.values()):
            if record.ended_at is None:
                if record.deadline is not None and now >= record.deadline:
                    self._end(record)
                continue
            if self._is_gone(record):
                self._forget(record, "")
            elif now - record.ended_at > KILL_TIMEOUT:
                self._forget(
                    record, f"the processes of {record.name} do not die: {sorted(cgroups.processes(record.groups))}"
                )

    def _is_gone(self, record: SandboxRecord) -> bool:
        if not record.spawner_gone:
            return False
        if record.pidfd is not None and not has_exited(record.pidfd):
            return False
        if not cgroups.remove_empty(record.groups):
            cgroups.kill(record.groups)
            return False
        return True

    def _forget(self, record: SandboxRecord, problem: str) -> None:
        del self._records[record.name]
        self._sockets.pop(record.spawner.fileno(), None)
        with suppress(KeyError):
            self._poll.unregister(record.spawner.fileno())
        record.spawner.close()
        record.node.close()
        if record.pidfd is not None:
            if self._inits.pop(record.pidfd, None) is not None:
                self._poll.unregister(record.pidfd)
            os.close(record.pidfd)
        for namespace in record.namespaces or ():
            os.close(namespace)
        self._user_mapping.release(record.slot)
        for number in record.destroy_requests:
            self._send({"n": number, **({"error": problem} if problem else {})})
        if not record.destroy_requests:
            kills = {"oom_kills": record.oom_kills, "other_kills": record.other_kills}
            self._send({"gone": record.name, **kills})

    def _reap(self) -> None:
        for pid, code in linux.reaped_children():
            if pid in self._killing:
                self._killed(*self._killing.pop(pid), code)
                continue
            for record in self._records.values():
                if record.pid == pid:
                    record.spawner_gone = True
                    self._end(record)

    def _send(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        with suppress(OSError):  # a node that is gone needs no reply
            wire.send(self._node, message, descriptors or [])

    def _shut_down(self) -> None:
        for record in list(self._records.values()):
            self._end(record)
        deadline = time.monotonic() + KILL_TIMEOUT
        while self._records and time.monotonic() < deadline:
            self._reap()
            self._check_sandboxes()
            time.sleep(_POLL_SECONDS)
        self._kill_descendants()
        self._cgroups.close()

    def _kill_descendants(self) -> None:
        """Kill descendants that are in no sandbox yet: a spawner's bubblewrap, a helper. Orphans become this process's own
        children, so when it has no child left, nothing is left."""
        deadline = time.monotonic() + KILL_TIMEOUT
        while time.monotonic() < deadline:
            try:
                if os.waitpid(-1, os.WNOHANG)[0]:
                    continue
            except ChildProcessError:
                return
            for pid in linux.descendants(os.getpid()):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)


def main(descriptor: int) -> NoReturn:
    linux.nice_session()
    node = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a few descriptors per sandbox, hundreds of sandboxes
    received = wire.receive(node)
    if received is None:
        sys.exit(1)
    try:
        supervisor = SandboxSupervisor(node, received[0])
    except OSError as error:
        wire.send(node, {"error": str(error)})
        sys.exit(1)
    supervisor.run()
    sys.exit(0)
