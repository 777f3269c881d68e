"""The process that holds every sandbox of a node: it makes them, watches them, and ends them when the node is gone.

Single-threaded, small (nothing but the standard library) and started once a node. It speaks `wire` messages with the
node over one socket; when that closes, for whatever reason, every sandbox ends. Each sandbox's `init` in turn reads from
a socket whose other end only the keeper holds: a keeper that is killed takes its sandboxes with it.

A sandbox is made in steps, so that many can be made at once: fork a spawner; when it has its user namespace, write its
user map and open the sources; when it reports that the sandbox is ready, hand its socket to the node.
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
from typing import Any, NoReturn

from towline.sandboxes import cgroups, identity, linux, memory, overlay, seccomp, spawner, stubs, wire
from towline.sandboxes.confine import Guards
from towline.sandboxes.kept import PATIENCE, Kept, has_ended, kill_all
from towline.sandboxes.process_keeper import descendants

_OWN_PROCESSES = 3
"""Of every sandbox: the spawner, bubblewrap and `init`."""
_SOON = 0.002


class Keeper:
    def __init__(self, node: socket.socket, settings: dict[str, Any]):
        self._node = node
        self._unguarded: list[str] = settings["unguarded"]
        self._bwrap: str = settings["bwrap"]
        self._groups = cgroups.find(settings["name"]) if settings["cgroups"] else cgroups.Cgroups()
        self._identity = identity.find()
        self._filter = seccomp.build()
        self._stubs = {name: stubs.sealed(name) for name in ("init", "launch")}
        for descriptor in self._stubs.values():
            os.set_inheritable(descriptor, False)
        self._kept: dict[str, Kept] = {}
        self._poll = select.poll()
        self._sockets: dict[int, Kept] = {}
        self._inits: dict[int, Kept] = {}
        self._killing: dict[int, tuple[str, int | None]] = {}
        """Helpers that end a sandbox's processes: the sandbox, and the request to answer."""
        self._awake, waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, self._signalled)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._stopping = False
        self._watch = memory.Watch()

    def run(self) -> None:
        linux.adopt_orphans()
        enforced = {limit for limit, controller in cgroups.LIMITS.items() if controller in self._groups.folders}
        facts = {
            "controllers": sorted(enforced),
            "mapped": self._identity.mapped,
            "rootless": self._identity.rootless,
            "notes": self._groups.notes,
            "folders": sorted({folder for _, folder in self._groups.folders.values()}),
        }
        gc.freeze()
        wire.send(self._node, {"facts": facts})
        for descriptor in (self._node.fileno(), self._awake):
            self._poll.register(descriptor, select.POLLIN)
        while not self._stopping:
            for descriptor, _ in self._poll.poll(self._timeout()):
                if descriptor == self._node.fileno():
                    self._hear()
                elif descriptor == self._awake:
                    with suppress(BlockingIOError):
                        os.read(self._awake, 4096)
                elif descriptor in self._sockets:
                    self._follow(self._sockets[descriptor])
                elif descriptor in self._inits:
                    # The first process has ended, whatever ended it: so has the sandbox.
                    self._poll.unregister(descriptor)
                    self._end(self._inits.pop(descriptor))
            self._reap()
            self._look()
        self._finish()

    def _signalled(self, number: int, _: object) -> None:
        if number == signal.SIGTERM:
            self._stopping = True

    def _timeout(self) -> int:
        now = time.monotonic()
        times = [kept.deadline for kept in self._kept.values() if kept.deadline is not None and kept.ended_at is None]
        if any(kept.ended_at is not None for kept in self._kept.values()):
            times.append(now + _SOON)
        if (watching := self._watch.next()) is not None:
            times.append(watching)
        return max(0, int((min(times) - now) * 1000) + 1) if times else 60_000

    def _hear(self) -> None:
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
            kept = self._kept.get(message["id"])
            if kept is None:
                self._tell({"n": number})
            elif message["do"] == "fate":
                self._tell({"n": number, "memory_kills": self._count_kills(kept)})
            elif message["do"] == "kill":
                self._kill_inside(kept, number)
            elif message["do"] == "destroy":
                kept.ending.append(number)
                self._end(kept)
        except OSError as error:
            self._tell({"n": number, "error": str(error)})

    def _create(self, plan: dict[str, Any], number: int) -> None:
        name = plan["id"]
        plan |= {"mapped": self._identity.mapped, "unguarded": self._unguarded, "bwrap": self._bwrap}
        groups = self._groups.create(name, plan["limits"], _OWN_PROCESSES)
        keeper_end, spawner_end = wire.pair()
        node_end, served_end = wire.pair()
        # Sockets and not a pipe, whose other end a process inside could open by /proc/1/fd and hold.
        lifeline, holding = socket.socketpair()
        guards = self._guards(plan)
        try:
            pid = os.fork()
        except OSError:
            cgroups.remove(groups)
            raise
        if pid == 0:
            spawner.main(plan, guards, spawner_end, served_end, lifeline.fileno(), self._stubs)
        lifeline.close()
        spawner_end.close()
        served_end.close()
        kept = Kept(name, plan, number, self._identity.take(), groups, pid, keeper_end, node_end, holding)
        self._kept[name] = kept
        self._sockets[keeper_end.fileno()] = kept
        self._poll.register(keeper_end.fileno(), select.POLLIN)
        try:
            cgroups.enter(groups, pid)
        except OSError as error:
            self._fail(kept, str(error))

    def _guards(self, plan: dict[str, Any]) -> Guards:
        off = self._unguarded
        capabilities = set(linux.CAPABILITIES.values())
        processes = None
        if "pids" not in self._groups.folders and plan["limits"]["pids"] is not None:
            # Counted by user, so root inside must stay one user.
            processes = int(plan["limits"]["pids"]) + _OWN_PROCESSES
            capabilities -= {linux.CAPABILITIES["SETUID"], linux.CAPABILITIES["SETGID"]}
        data = None if "memory" in self._groups.folders else plan["limits"]["memory_mb"]
        return Guards(
            b"" if "seccomp" in off else self._filter,
            None if "capabilities" in off else frozenset(capabilities),
            processes,
            int(data) if data is not None else None,
        )

    def _follow(self, kept: Kept) -> None:
        """A spawner has taken its next step, or has ended."""
        received = wire.receive(kept.spawner)
        try:
            if received is None:
                self._poll.unregister(kept.spawner.fileno())
                self._fail(kept, "the sandbox ended while it was made" if not kept.made else "")
                return
            message, descriptors = received
            if message["at"] == "user":
                self._identity.write(kept.pid, kept.slot)
                self._send_sources(kept)
            elif message["at"] == "ready":
                self._ready(kept, message["pid"], descriptors)
            else:
                self._fail(kept, message["error"])
        except OSError as error:
            self._fail(kept, str(error))

    def _send_sources(self, kept: Kept) -> None:
        sources: list[int] = []
        try:
            if not self._identity.rootless:
                space = os.open(f"/proc/{kept.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    sources, kept.notes = overlay.open_sources(kept.plan["sources"], space)
                finally:
                    os.close(space)
            wire.send(kept.spawner, {"go": True}, sources)
        finally:
            for source in sources:
                os.close(source)

    def _ready(self, kept: Kept, pid: int, descriptors: list[int]) -> None:
        kept.pidfd = linux.pidfd_open(pid)
        self._inits[kept.pidfd] = kept
        self._poll.register(kept.pidfd, select.POLLIN)
        flags = os.O_RDONLY | os.O_CLOEXEC
        kept.spaces = (os.open(f"/proc/{pid}/ns/user", flags), os.open(f"/proc/{pid}/ns/pid", flags))
        kept.made = True
        seconds = kept.plan["seconds"]
        kept.deadline = None if seconds is None else time.monotonic() + seconds
        memory_mb = kept.plan["limits"]["memory_mb"]
        if memory_mb is not None and "memory" not in self._groups.folders:
            self._watch.add(kept.name, kept.pid, int(memory_mb))
        owner = self._identity.outside(kept.slot)
        self._tell({"n": kept.number, "notes": kept.notes, "owner": owner}, [kept.node.fileno(), *descriptors])
        kept.node.close()
        for descriptor in descriptors:
            os.close(descriptor)

    def _fail(self, kept: Kept, why: str) -> None:
        if not kept.made:
            self._tell({"n": kept.number, "error": why})
            kept.made = True
        self._end(kept)

    def _kill_inside(self, kept: Kept, number: int | None = None) -> None:
        """End every process inside but `init`; the request is answered when they are gone."""
        if kept.spaces is None:
            if number is not None:
                self._tell({"n": number})
            return
        helper = os.fork()
        if helper == 0:
            kill_all(*kept.spaces)
        self._killing[helper] = (kept.name, number)

    def _killed(self, name: str, number: int | None, status: int) -> None:
        if number is not None:
            problem = {"error": f"the processes of {name} do not end"} if status else {}
            self._tell({"n": number, **problem})

    def _count_kills(self, kept: Kept) -> int:
        kept.memory_kills = max(kept.memory_kills, cgroups.memory_kills(kept.groups))
        return kept.memory_kills

    def _end(self, kept: Kept) -> None:
        """Begin to end a sandbox; `_look` sees to the rest."""
        if kept.ended_at is not None:
            return
        self._count_kills(kept)
        kept.ended_at = time.monotonic()
        self._watch.remove(kept.name)
        kept.lifeline.close()
        if kept.pidfd is not None:
            with suppress(OSError):
                linux.pidfd_kill(kept.pidfd, signal.SIGKILL)
        if not kept.spawner_gone:
            with suppress(ProcessLookupError):
                os.kill(kept.pid, signal.SIGKILL)
        cgroups.kill(kept.groups)

    def _look(self) -> None:
        now = time.monotonic()
        for name in self._watch.over(now):
            with suppress(OSError):
                self._kept[name].memory_kills += 1
                self._kill_inside(self._kept[name])
        for kept in list(self._kept.values()):
            if kept.ended_at is None:
                if kept.deadline is not None and now >= kept.deadline:
                    self._end(kept)
                continue
            if self._is_gone(kept):
                self._forget(kept, "")
            elif now - kept.ended_at > PATIENCE:
                self._forget(kept, f"the processes of {kept.name} do not end: {sorted(cgroups.processes(kept.groups))}")

    def _is_gone(self, kept: Kept) -> bool:
        if not kept.spawner_gone:
            return False
        if kept.pidfd is not None and not has_ended(kept.pidfd):
            return False
        if not cgroups.gone(kept.groups):
            cgroups.kill(kept.groups)
            return False
        return True

    def _forget(self, kept: Kept, problem: str) -> None:
        del self._kept[kept.name]
        self._sockets.pop(kept.spawner.fileno(), None)
        with suppress(KeyError):
            self._poll.unregister(kept.spawner.fileno())
        kept.spawner.close()
        kept.node.close()
        if kept.pidfd is not None:
            if self._inits.pop(kept.pidfd, None) is not None:
                self._poll.unregister(kept.pidfd)
            os.close(kept.pidfd)
        for space in kept.spaces or ():
            os.close(space)
        self._identity.give_back(kept.slot)
        for number in kept.ending:
            self._tell({"n": number, **({"error": problem} if problem else {})})
        if not kept.ending:
            self._tell({"gone": kept.name, "memory_kills": kept.memory_kills})

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._killing:
                self._killed(*self._killing.pop(pid), status)
                continue
            for kept in self._kept.values():
                if kept.pid == pid:
                    kept.spawner_gone = True
                    self._end(kept)

    def _tell(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        with suppress(OSError):  # a node that is gone needs no answer
            wire.send(self._node, message, descriptors or [])

    def _finish(self) -> None:
        for kept in list(self._kept.values()):
            self._end(kept)
        deadline = time.monotonic() + PATIENCE
        while self._kept and time.monotonic() < deadline:
            self._reap()
            self._look()
            time.sleep(_SOON)
        self._end_the_rest()
        self._groups.close()

    def _end_the_rest(self) -> None:
        """End what is below this process and in no sandbox yet: a spawner's bubblewrap, a helper. What their parents leave
        becomes this process's own, so that when it has no child, there is nothing."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                if os.waitpid(-1, os.WNOHANG)[0]:
                    continue
            except ChildProcessError:
                return
            for pid in descendants(os.getpid()):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_SOON)


def main(descriptor: int) -> NoReturn:
    node = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a few descriptors a sandbox, hundreds of sandboxes
    received = wire.receive(node)
    if received is None:
        sys.exit(1)
    try:
        keeper = Keeper(node, received[0])
    except OSError as error:
        wire.send(node, {"error": str(error)})
        sys.exit(1)
    keeper.run()
    sys.exit(0)
