"""Who a sandbox's processes are, and which privileges they give up.

User mapping: a sandbox's users are user ids of the host that own nothing. As root each sandbox gets its own range of
ids, so that two sandboxes share no limit that the kernel counts per user. An ordinary user's own id becomes root
inside, followed by its ranges in /etc/subuid where there are any.

Restrictions: a process that enters namespaces inherits none of the sandbox's restrictions; it starts with every
capability there and no filter. So the spawner, once it has built its sandbox, lowers its own bounding set, sets
no_new_privs and loads the seccomp filter: whatever it starts is born confined. A child then only switches to its
user.
"""

from __future__ import annotations

import os
import pwd
import resource
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from towline.sandboxes import linux

_MAX_FILE_BYTES = 1 << 20
_MAX_OPEN_FILES = 4096
_OOM_SCORE = 500
"""Above the spawner's own: when memory is short, commands are killed first."""


@dataclass(frozen=True, slots=True)
class Restrictions:
    """What a sandbox's processes may not do."""

    filter: bytes
    """The seccomp program; empty for none."""
    capabilities: frozenset[int] | None
    """What root inside keeps; None keeps all (only for tests)."""
    processes: int | None
    """RLIMIT_NPROC, where no control group counts processes."""
    data_mb: int | None
    """RLIMIT_DATA of each process, where no control group counts memory."""


@dataclass(frozen=True, slots=True)
class SandboxUser:
    """A user of the root's /etc/passwd."""

    uid: int = 0
    gid: int = 0
    name: str = "root"
    home: str = "/root"
    groups: tuple[int, ...] = ()


def find_user(wanted: str, mapped: int) -> SandboxUser:
    """A user by name or number (`user` or `user:group`); `LookupError` if it is unknown to the root or not mapped."""
    if wanted in ("", "root", "0"):
        return SandboxUser()
    name, _, group = wanted.partition(":")
    found = None
    for line in _lines("/etc/passwd"):
        fields = line.split(":")
        if (
            len(fields) >= 6
            and (fields[0] == name or fields[2] == name)
            and fields[2].isdigit()
            and fields[3].isdigit()
        ):
            found = SandboxUser(int(fields[2]), int(fields[3]), fields[0], fields[5] or "/")
            break
    if found is None:
        if not name.isdigit():
            raise LookupError(f"the sandbox's root has no user {name!r}")
        found = SandboxUser(int(name), int(name), name, "/")
    groups = []
    gid = int(group) if group.isdigit() else None
    for line in _lines("/etc/group"):
        fields = line.split(":")
        if len(fields) >= 4 and fields[2].isdigit():
            if found.name in fields[3].split(",") and int(fields[2]) < mapped:
                groups.append(int(fields[2]))
            if group and fields[0] == group:
                gid = int(fields[2])
    if group and gid is None:
        raise LookupError(f"the sandbox's root has no group {group!r}")
    chosen = SandboxUser(found.uid, found.gid if gid is None else gid, found.name, found.home, tuple(groups))
    if max(chosen.uid, chosen.gid) >= mapped:
        raise LookupError(
            f"user {wanted!r} needs more than the {mapped} user ids of this sandbox: run as root, or install uidmap and "
            "give this user a range in /etc/subuid and /etc/subgid"
        )
    return chosen


def confine(restrictions: Restrictions) -> None:
    """Drop, in the spawner itself, what none of its children may have; they inherit what is left."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Programs that close "all" descriptors would be slow with the supervisor's own high limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_MAX_OPEN_FILES, files), files))
    if restrictions.processes is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (restrictions.processes, restrictions.processes))
    if restrictions.data_mb is not None:
        amount = restrictions.data_mb << 20
        resource.setrlimit(resource.RLIMIT_DATA, (amount, amount))
    if restrictions.capabilities is not None:
        linux.limit_capabilities(restrictions.capabilities)
        # The spawner itself must still be able to switch users; a command gets what the bounding set leaves.
        linux.set_capabilities(restrictions.capabilities | {linux.CAPABILITIES[name] for name in ("SETUID", "SETGID")})
    linux.no_new_privileges()
    if restrictions.filter:
        linux.load_filter(restrictions.filter)
    linux.hide_from_ptrace()


def switch_user(restrictions: Restrictions, user: SandboxUser) -> None:
    """Switch to a sandbox's user, in a child of the spawner; the last step before a command runs."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(str(_OOM_SCORE))
    if user.uid or user.gid or user.groups:
        os.setgroups(user.groups)
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
    if restrictions.capabilities is not None:
        linux.set_capabilities(restrictions.capabilities if user.uid == 0 else frozenset())
    # A change of user resets this, and this process still has the supervisor's memory.
    linux.hide_from_ptrace()


def _lines(path: str) -> list[str]:
    """The lines of a file that the sandbox may have replaced with anything."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    with os.fdopen(descriptor, "rb") as source:
        try:
            return source.read(_MAX_FILE_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:
            return []


_TOOL_TIMEOUT = 30.0

RANGE = 65_536
_FIRST_ID = 0x60000000
"""Far above ids in use, below the ids that some tools cannot represent."""
_SLOTS = 4096


class UserMapping(Protocol):
    mapped: int
    """How many user ids there are inside."""
    rootless: bool

    def acquire(self) -> int:
        """A slot: a range of user ids for one sandbox."""
        ...

    def release(self, slot: int) -> None: ...

    def outside(self, slot: int) -> int:
        """The host's user id of root inside."""
        ...

    def write(self, pid: int, slot: int) -> None:
        """Map the users of a process that has just created its user namespace."""
        ...


@dataclass(slots=True)
class RootUserMapping:
    """As root: one range of ids per sandbox."""

    first: int
    mapped: int
    slots: int
    free: list[int]
    rootless: bool = False

    @classmethod
    def make(cls) -> RootUserMapping:
        ours = _mapped_here()
        if ours >= _FIRST_ID + _SLOTS * RANGE:
            # Supervisors on one machine start at different slots: sharing a range weakens separation, nothing more.
            start = os.getpid() * 37 % _SLOTS
            return cls(_FIRST_ID, RANGE, _SLOTS, [(start + step) % _SLOTS for step in range(_SLOTS)])
        # Root of a user namespace with few ids: use all but its own.
        return cls(1, min(RANGE, max(1, ours - 1)), 1, [0])

    def acquire(self) -> int:
        return self.free.pop(0) if self.slots > 1 and self.free else 0

    def release(self, slot: int) -> None:
        if self.slots > 1:
            self.free.append(slot)

    def outside(self, slot: int) -> int:
        return self.first + slot * RANGE

    def write(self, pid: int, slot: int) -> None:
        line = f"0 {self.outside(slot)} {self.mapped}"
        _write(f"/proc/{pid}/uid_map", line)
        _write(f"/proc/{pid}/gid_map", line)


@dataclass(slots=True)
class RootlessUserMapping:
    """As an ordinary user: root inside is this user, other ids are its subordinate ids."""

    uids: tuple[int, int] | None
    gids: tuple[int, int] | None
    mapped: int
    rootless: bool = True

    @classmethod
    def make(cls) -> RootlessUserMapping:
        uids, gids = _subordinate("/etc/subuid"), _subordinate("/etc/subgid")
        if uids is None or gids is None or not shutil.which("newuidmap") or not shutil.which("newgidmap"):
            return cls(None, None, 1)
        return cls(uids, gids, 1 + min(uids[1], gids[1], RANGE - 1))

    def acquire(self) -> int:
        return 0

    def release(self, slot: int) -> None:
        pass

    def outside(self, slot: int) -> int:
        return os.getuid()

    def write(self, pid: int, slot: int) -> None:
        if self.uids is None or self.gids is None:
            _write(f"/proc/{pid}/setgroups", "deny")
            _write(f"/proc/{pid}/uid_map", f"0 {os.getuid()} 1")
            _write(f"/proc/{pid}/gid_map", f"0 {os.getgid()} 1")
            return
        for tool, own, (start, _) in (("newuidmap", os.getuid(), self.uids), ("newgidmap", os.getgid(), self.gids)):
            command = [tool, str(pid), "0", str(own), "1", "1", str(start), str(self.mapped - 1)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TOOL_TIMEOUT)
            except subprocess.TimeoutExpired:
                raise OSError(f"{tool} did not finish within {_TOOL_TIMEOUT:g} seconds") from None
            if done.returncode:
                raise OSError(f"{tool}: {done.stderr.strip() or done.returncode}")


def find_user_mapping() -> UserMapping:
    return RootUserMapping.make() if os.geteuid() == 0 else RootlessUserMapping.make()


def _mapped_here() -> int:
    with open("/proc/self/uid_map") as lines:
        return max(int(first) + int(count) for first, _, count in (line.split() for line in lines))


def _subordinate(path: str) -> tuple[int, int] | None:
    """The first range that a file grants to this user, by name or number."""
    uid = os.getuid()
    names = {str(uid)}
    with suppress(KeyError):
        names.add(pwd.getpwuid(uid).pw_name)
    try:
        with open(path) as lines:
            for line in lines:
                fields = line.strip().split(":")
                if len(fields) == 3 and fields[0] in names and int(fields[2]) > 0:
                    return int(fields[1]), int(fields[2])
    except (OSError, ValueError):
        pass
    return None


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
