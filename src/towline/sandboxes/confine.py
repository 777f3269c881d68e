"""What a spawner gives up for good before it runs anything of a sandbox's.

A process that enters namespaces inherits none of the sandbox's restrictions: it starts with every capability there and
no filter. So the spawner, once it has built its sandbox, lowers its own bounding set, forgoes new privileges and loads
the filter: whatever it starts is born confined. A child then only becomes its user.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from dataclasses import dataclass

from towline.sandboxes import linux

_LINE_BYTES = 1 << 20
_FILES = 4096
_OOM = 500
"""Above the spawner's own: when memory is short, commands are killed first."""


@dataclass(frozen=True, slots=True)
class Guards:
    """What holds a sandbox's processes."""

    filter: bytes
    """The seccomp program; empty for none."""
    capabilities: frozenset[int] | None
    """What root inside keeps; None leaves all, which is for tests that show why."""
    processes: int | None
    """Most processes of each user, where no control group counts them."""
    data_mb: int | None
    """Most memory of each process, where no control group counts it."""


@dataclass(frozen=True, slots=True)
class User:
    """Someone of the root's /etc/passwd."""

    uid: int = 0
    gid: int = 0
    name: str = "root"
    home: str = "/root"
    groups: tuple[int, ...] = ()


def find_user(wanted: str, mapped: int) -> User:
    """A user by name or number (`user` or `user:group`); `LookupError` if the root does not know it or it is not mapped."""
    if wanted in ("", "root", "0"):
        return User()
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
            found = User(int(fields[2]), int(fields[3]), fields[0], fields[5] or "/")
            break
    if found is None:
        if not name.isdigit():
            raise LookupError(f"the root has no user {name!r}")
        found = User(int(name), int(name), name, "/")
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
        raise LookupError(f"the root has no group {group!r}")
    chosen = User(found.uid, found.gid if gid is None else gid, found.name, found.home, tuple(groups))
    if max(chosen.uid, chosen.gid) >= mapped:
        raise LookupError(
            f"user {wanted!r} needs more than the {mapped} user ids of this sandbox: run as root, or install uidmap and "
            "give this user a range in /etc/subuid and /etc/subgid"
        )
    return chosen


def confine(guards: Guards) -> None:
    """Give up, in the spawner itself, what nothing that it starts may have; every child is born with what is left."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Programs that close "all" descriptors take long when the keeper's own high limit is theirs.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_FILES, files), files))
    if guards.processes is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (guards.processes, guards.processes))
    if guards.data_mb is not None:
        amount = guards.data_mb << 20
        resource.setrlimit(resource.RLIMIT_DATA, (amount, amount))
    if guards.capabilities is not None:
        linux.limit_capabilities(guards.capabilities)
        # The spawner itself must still be able to become another user; a command gets what the bounding set leaves.
        linux.set_capabilities(guards.capabilities | {linux.CAPABILITIES[name] for name in ("SETUID", "SETGID")})
    linux.no_new_privileges()
    if guards.filter:
        linux.load_filter(guards.filter)
    linux.hide_from_ptrace()


def become(guards: Guards, user: User) -> None:
    """Become a sandbox's user, in a child of the spawner; the last thing before a command runs."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(str(_OOM))
    if user.uid or user.gid or user.groups:
        os.setgroups(user.groups)
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
    if guards.capabilities is not None:
        linux.set_capabilities(guards.capabilities if user.uid == 0 else frozenset())
    # A change of user resets this, and what is in memory here is the keeper's.
    linux.hide_from_ptrace()


def _lines(path: str) -> list[str]:
    """The lines of a file that the sandbox may have replaced by anything."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    with os.fdopen(descriptor, "rb") as source:
        try:
            return source.read(_LINE_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:
            return []
