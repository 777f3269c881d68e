"""Who a sandbox's users are outside: user ids of the host that own nothing.

As root each sandbox gets a range of its own, so that no limit that the kernel counts by user is shared between two. An
ordinary user's own id becomes root inside, with the ranges of /etc/subuid behind it where there are any.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

_PATIENCE = 30.0

RANGE = 65_536
_FIRST = 0x60000000
"""Far above what people and packages use, below the ids that some tools cannot hold."""
_SLOTS = 4096


class Identity(Protocol):
    mapped: int
    """How many user ids there are inside."""
    rootless: bool

    def take(self) -> int: ...

    def give_back(self, slot: int) -> None: ...

    def outside(self, slot: int) -> int:
        """Who root inside is on the host."""
        ...

    def write(self, pid: int, slot: int) -> None:
        """Map the users of a process that has just made its user namespace."""
        ...


@dataclass(slots=True)
class RootIdentity:
    """A range of ids a sandbox; only root may write such maps."""

    first: int
    mapped: int
    slots: int
    free: list[int]
    rootless: bool = False

    @classmethod
    def make(cls) -> RootIdentity:
        ours = _mapped_here()
        if ours >= _FIRST + _SLOTS * RANGE:
            # Two keepers on one machine begin at different places: sharing a range costs separation, nothing more.
            start = os.getpid() * 37 % _SLOTS
            return cls(_FIRST, RANGE, _SLOTS, [(start + step) % _SLOTS for step in range(_SLOTS)])
        # Root of a user namespace with few ids: all but its own.
        return cls(1, min(RANGE, max(1, ours - 1)), 1, [0])

    def take(self) -> int:
        return self.free.pop(0) if self.slots > 1 and self.free else 0

    def give_back(self, slot: int) -> None:
        if self.slots > 1:
            self.free.append(slot)

    def outside(self, slot: int) -> int:
        return self.first + slot * RANGE

    def write(self, pid: int, slot: int) -> None:
        line = f"0 {self.outside(slot)} {self.mapped}"
        _write(f"/proc/{pid}/uid_map", line)
        _write(f"/proc/{pid}/gid_map", line)


@dataclass(slots=True)
class OwnIdentity:
    """An ordinary user: root inside is this user, and the rest are its subordinate ids."""

    uids: tuple[int, int] | None
    gids: tuple[int, int] | None
    mapped: int
    rootless: bool = True

    @classmethod
    def make(cls) -> OwnIdentity:
        uids, gids = _subordinate("/etc/subuid"), _subordinate("/etc/subgid")
        if uids is None or gids is None or not shutil.which("newuidmap") or not shutil.which("newgidmap"):
            return cls(None, None, 1)
        return cls(uids, gids, 1 + min(uids[1], gids[1], RANGE - 1))

    def take(self) -> int:
        return 0

    def give_back(self, slot: int) -> None:
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
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
            except subprocess.TimeoutExpired:
                raise OSError(f"{tool} did not end within {_PATIENCE:g} seconds") from None
            if done.returncode:
                raise OSError(f"{tool}: {done.stderr.strip() or done.returncode}")


def find() -> RootIdentity | OwnIdentity:
    return RootIdentity.make() if os.geteuid() == 0 else OwnIdentity.make()


def _mapped_here() -> int:
    with open("/proc/self/uid_map") as lines:
        return max(int(first) + int(count) for first, _, count in (line.split() for line in lines))


def _subordinate(path: str) -> tuple[int, int] | None:
    """The first range that a file grants this user, by name or by number."""
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
