"""Resource limits: one control group per sandbox, in whichever hierarchies this machine has (v1, v2, or both).

A controller is used where its hierarchy lets this process create groups, below its own group first and at the top
second (root only). What is found is tested before it is promised: a group is created, a limit written and read back.
The v2 hierarchy is used even when it has no controllers, for `cgroup.kill`.

`MemoryWatch` is the weaker fallback where no control group can limit memory: RLIMIT_DATA limits each process, and the
total of a sandbox is polled twice per second. Between two polls a sandbox can exceed its limit, so this is named in a
runtime's notes and never counted as enforced.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

_PERIOD = 100_000
_CONTROLLERS = ("memory", "pids", "cpu")
LIMITS = {"memory_mb": "memory", "pids": "pids", "cpus": "cpu"}
"""Which controller enforces which limit."""
_MEMORY_SHARE = 0.8
"""How much of the machine's memory all sandboxes of a node may use together."""
_PIDS_SHARE = 0.5
_CLOSE = 1 << 20
"""Bytes below a limit at which an allocation may already have failed."""


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    version: int
    controllers: frozenset[str]
    mounted: str
    own: str
    """This process's own group, as a folder."""
    root: str = "/"
    """The group at the top of the mount."""


@dataclass(slots=True)
class Cgroups:
    """Where a supervisor creates its groups: one folder per hierarchy, named after the supervisor."""

    folders: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By controller (and `kill` for the v2 hierarchy): its version and the supervisor's folder."""
    notes: list[str] = field(default_factory=list)

    def limit_total(self, totals: dict[str, float | None]) -> None:
        """Bound all groups below the supervisor's own together. What cannot be bounded is noted."""
        for limit, value in totals.items():
            if value is None:
                continue
            version, folder = self.folders.get(LIMITS[limit], (0, ""))
            try:
                if version and _limit(version, folder, LIMITS[limit], value):
                    continue
                problem = "no control group"
            except (OSError, ValueError) as error:
                problem = str(error)
            self.notes.append(f"the total {limit}={value:g} of all sandboxes is not enforced: {problem}")

    def create(self, name: str, limits: dict[str, float | None], slack: int) -> list[str]:
        """Create a sandbox's groups with its limits; returns their folders. `slack` processes are added to `pids`."""
        made: list[str] = []
        try:
            for folder in self._needed(limits):
                path = f"{folder}/{name}"
                os.mkdir(path)
                made.append(path)
            for limit, controller in LIMITS.items():
                value = limits.get(limit)
                if value is not None and controller in self.folders:
                    version, folder = self.folders[controller]
                    extra = slack if controller == "pids" else 0
                    _limit(version, f"{folder}/{name}", controller, value + extra)
        except OSError:
            remove(made)
            raise
        return made

    def _needed(self, limits: dict[str, float | None]) -> list[str]:
        """The folders of controllers with a limit, and of those that kill best: each costs a move per new sandbox."""
        held = {controller for limit, controller in LIMITS.items() if limits.get(limit) is not None}
        wanted = [folder for controller, (_, folder) in self.folders.items() if controller in held | {"kill"}]
        return list(dict.fromkeys(wanted)) or self._homes()[:1]

    def _homes(self) -> list[str]:
        return list(dict.fromkeys(folder for _, folder in self.folders.values()))

    def close(self) -> None:
        remove(self._homes())


def find_cgroups(name: str) -> Cgroups:
    """Find usable hierarchies and create the supervisor's folder in each."""
    found = Cgroups()
    hierarchies = _hierarchies()
    for hierarchy in hierarchies:
        wanted = [controller for controller in _CONTROLLERS if controller in hierarchy.controllers]
        if not wanted and hierarchy.version == 1:
            continue
        for parent in dict.fromkeys((hierarchy.own, hierarchy.mounted)):
            folder = f"{parent}/{name}"
            usable = _probe(hierarchy, parent, folder, wanted)
            if usable is None:
                continue
            if wanted and not usable and parent != hierarchy.mounted:
                remove([folder])
                continue
            found.folders |= {controller: (hierarchy.version, folder) for controller in usable}
            if hierarchy.version == 2:
                found.folders["kill"] = (2, folder)
            break
    missing = [controller for controller in _CONTROLLERS if controller not in found.folders]
    if missing:
        found.notes.append(
            f"no control group for {', '.join(missing)}: run as root, or in a delegated group "
            "(systemd-run --user --scope -p Delegate=yes …)"
        )
    return found


@dataclass(frozen=True, slots=True)
class MachineShare:
    """What all sandboxes of a node may use together unless the operator says otherwise."""

    memory_mb: int
    pids: int | None


def machine_share() -> MachineShare:
    """A share of what this machine, or the control group that this process runs in, has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [total, *(_read_limit(f"{folder}/{name}") for folder in folders_of(os.getpid()) for name in _MEMORY_FILES)]
    known = [limit for limit in limits if limit]
    processes = _read_limit("/proc/sys/kernel/pid_max")
    return MachineShare(int(min(known) * _MEMORY_SHARE) >> 20, int(processes * _PIDS_SHARE) if processes else None)


_MEMORY_FILES = ("memory.max", "memory.limit_in_bytes")


def _read_limit(path: str) -> int:
    """A number in a file; 0 if there is none."""
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def enter(folders: Iterable[str], pid: int) -> None:
    """Move a process into groups; its children inherit them."""
    for folder in folders:
        _write(f"{folder}/cgroup.procs", str(pid))


def processes(folders: Iterable[str]) -> set[int]:
    pids: set[int] = set()
    for folder in folders:
        with suppress(OSError), open(f"{folder}/cgroup.procs") as listing:
            pids |= {int(line) for line in listing if line.strip() != "0"}
    return pids


@dataclass(frozen=True, slots=True)
class OomKills:
    """Processes of a group that ran out of memory."""

    own: int = 0
    """Killed by the group's own limit."""
    total: int = 0
    """Killed because all sandboxes together, or the machine, had no memory left: no fault of this group alone."""


def count_oom_kills(folders: Iterable[str]) -> OomKills:
    """How many processes of these groups were killed for memory, and by whose limit."""
    kills, reached = 0, False
    for folder in folders:
        for name, mark in (("memory.events", "oom"), ("memory.oom_control", "")):
            with suppress(OSError, ValueError), open(f"{folder}/{name}") as listing:
                counts = dict(line.split() for line in listing)
                kills = max(kills, int(counts.get("oom_kill", 0)))
                # The old hierarchy only says how much was used at most.
                reached |= bool(int(counts.get(mark, 0))) if mark else _reached_limit(folder)
    return OomKills(kills, 0) if reached else OomKills(0, kills)


def _reached_limit(folder: str) -> bool:
    """Whether a group of the old hierarchy ever used nearly all that its limit allows."""
    most, limit = _read_limit(f"{folder}/memory.max_usage_in_bytes"), _read_limit(f"{folder}/memory.limit_in_bytes")
    return most >= limit - max(_CLOSE, limit // 50)


def oom_kills(folders: Iterable[str]) -> int:
    """How many processes the memory limit of these groups has killed."""
    return count_oom_kills(folders).own


def folders_of(pid: int) -> list[str]:
    """The folders of a process's groups."""
    paths: dict[str, str] = {}
    with suppress(OSError), open(f"/proc/{pid}/cgroup") as lines:
        for line in lines:
            _, listed, path = line.rstrip("\n").split(":", 2)
            paths |= dict.fromkeys(listed.split(","), path)
    found = []
    for hierarchy in _hierarchies():
        names = hierarchy.controllers if hierarchy.version == 1 else {""}
        own = [paths[name] for name in names if name in paths]
        found += [_folder(hierarchy.mounted, hierarchy.root, path) for path in own[:1]]
    return found


def kill(folders: Iterable[str]) -> None:
    """Kill every process in the groups; atomically where there is a v2 group."""
    folders = list(folders)
    for folder in folders:
        with suppress(OSError):
            _write(f"{folder}/cgroup.kill", "1")
    for pid in processes(folders):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def remove_empty(folders: list[str]) -> bool:
    """Remove empty groups; returns whether all are gone."""
    for folder in folders:
        with suppress(FileNotFoundError):
            try:
                os.rmdir(folder)
            except OSError:
                return False
    return True


def remove(folders: Iterable[str], timeout: float = 5.0) -> list[str]:
    """Kill everything in these groups and their subgroups and remove them; returns those that could not be removed."""
    deadline = time.monotonic() + timeout
    left = [inner for folder in folders if os.path.isdir(folder) for inner in _below(folder)]
    while left:
        kill(left)
        left = [folder for folder in left if not remove_empty([folder])]
        if left and time.monotonic() > deadline:
            return left
        if left:
            time.sleep(0.002)
    return []


def find_by_name(name: str) -> list[str]:
    """Groups of that name in any hierarchy, for a supervisor that died before it reported its folders."""
    mounted = dict.fromkeys(hierarchy.mounted for hierarchy in _hierarchies())
    return [f"{path}/{name}" for root in mounted for path, folders, _ in os.walk(root) if name in folders]


def _below(folder: str) -> list[str]:
    return [path for path, _, _ in os.walk(folder, topdown=False)]


def _probe(hierarchy: _Hierarchy, parent: str, folder: str, wanted: list[str]) -> list[str] | None:
    """Create the supervisor's folder and probe which controllers work there; None if it cannot be created."""
    try:
        os.mkdir(folder)
    except OSError:
        return None
    if hierarchy.version == 2:
        for controller in wanted:
            with suppress(OSError):
                _enable(parent, controller)
                _write(f"{folder}/cgroup.subtree_control", f"+{controller}")
    usable = []
    probe = f"{folder}/probe"
    try:
        os.mkdir(probe)
        for controller in wanted:
            with suppress(OSError, ValueError):
                if _limit(hierarchy.version, probe, controller, {"memory": 64, "pids": 64, "cpu": 1.0}[controller]):
                    usable.append(controller)
    except OSError:
        pass
    remove([probe])
    return usable


def _enable(parent: str, controller: str) -> None:
    """Enable a v2 controller for subgroups. A group with processes cannot; if they are all ours, they move aside."""
    with open(f"{parent}/cgroup.subtree_control") as listing:
        if controller in listing.read().split():
            return
    try:
        _write(f"{parent}/cgroup.subtree_control", f"+{controller}")
    except OSError:
        ours = {os.getpid(), os.getppid()}
        if not processes([parent]) <= ours:
            raise
        aside = f"{parent}/towline-node"
        os.makedirs(aside, exist_ok=True)
        for pid in processes([parent]):
            enter([aside], pid)
        _write(f"{parent}/cgroup.subtree_control", f"+{controller}")


def _limit(version: int, folder: str, controller: str, value: float) -> bool:
    """Write a limit and read it back; returns whether the kernel accepted it."""
    if controller == "memory":
        amount = str(int(value) * 1024 * 1024)
        if version == 2:
            with suppress(OSError):
                _write(f"{folder}/memory.swap.max", "0")
            return _set(f"{folder}/memory.max", amount)
        taken = _set(f"{folder}/memory.limit_in_bytes", amount)
        with suppress(OSError):  # exists only where swap is accounted
            _write(f"{folder}/memory.memsw.limit_in_bytes", amount)
        return taken
    if controller == "pids":
        return _set(f"{folder}/pids.max", str(int(value)))
    quota = str(max(1000, int(value * _PERIOD)))
    if version == 2:
        return _set(f"{folder}/cpu.max", f"{quota} {_PERIOD}")
    return _set(f"{folder}/cpu.cfs_period_us", str(_PERIOD)) and _set(f"{folder}/cpu.cfs_quota_us", quota)


def _set(path: str, value: str) -> bool:
    _write(path, value)
    with open(path) as stored:
        return stored.read().strip() == value


def _write(path: str, value: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)


def _hierarchies() -> list[_Hierarchy]:
    own: dict[str, str] = {}
    with open("/proc/self/cgroup") as lines:
        for line in lines:
            _, listed, path = line.rstrip("\n").split(":", 2)
            own[listed] = path
    found = []
    with open("/proc/self/mountinfo") as lines:
        for line in lines:
            before, _, after = line.rstrip("\n").partition(" - ")
            root, mounted = before.split()[3:5]
            kind, _, options = after.split()[:3]
            if kind == "cgroup2":
                controllers = _words(f"{mounted}/cgroup.controllers")
                found.append(_Hierarchy(2, controllers, mounted, _folder(mounted, root, own.get("", "/")), root))
            elif kind == "cgroup":
                held = frozenset(options.split(",")) & frozenset(_CONTROLLERS)
                path = next((path for names, path in own.items() if held & set(names.split(","))), "/")
                found.append(_Hierarchy(1, held, mounted, _folder(mounted, root, path), root))
    return found


def _words(path: str) -> frozenset[str]:
    try:
        with open(path) as listing:
            return frozenset(listing.read().split())
    except OSError:
        return frozenset()


def _folder(mounted: str, root: str, path: str) -> str:
    """A group's folder; the mount may itself show only a part of the hierarchy."""
    inner = path[len(root) :] if root != "/" and path.startswith(root) else path
    return (mounted + "/" + inner.strip("/")).rstrip("/")


_WATCH_SECONDS = 0.5
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class _Watched:
    pid: int
    limit: int


class MemoryWatch:
    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        self._next = 0.0

    def add(self, name: str, pid: int, limit_mb: int) -> None:
        """Watch a sandbox by its spawner: everything inside is its descendant."""
        self._watched[name] = _Watched(pid, limit_mb << 20)

    def remove(self, name: str) -> None:
        self._watched.pop(name, None)

    def next_poll(self) -> float | None:
        return self._next if self._watched else None

    def over(self, now: float) -> list[str]:
        """The sandboxes above their limit, if a poll is due."""
        if not self._watched or now < self._next:
            return []
        self._next = time.monotonic() + _WATCH_SECONDS
        return [name for name, watched in self._watched.items() if _resident(watched.pid) > watched.limit]


def _resident(root: int) -> int:
    """Unshared resident bytes of a process and its descendants."""
    total, todo = 0, [root]
    while todo:
        pid = todo.pop()
        try:
            with open(f"/proc/{pid}/statm") as fields:
                _, resident, shared = fields.read().split()[:3]
            total += (int(resident) - int(shared)) * _PAGE
            with open(f"/proc/{pid}/task/{pid}/children") as children:
                todo += map(int, children.read().split())
        except (OSError, ValueError):
            continue
    return total
