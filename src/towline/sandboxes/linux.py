"""Linux system calls that Python does not wrap, and processes as /proc shows them.

Each call raises `OSError` with its own name. Nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # the same on every architecture since 5.1
_CLOSE_RANGE = 436
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_IDMAP = 0x00100000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_PR_CAP_AMBIENT, _PR_SET_CHILD_SUBREAPER = 47, 36

CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7}
"""What root inside keeps, to be root over its own files and processes. They are valid in the sandbox's user namespace only,
so none of them reaches a file, process or device of the host."""

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, result: int, what: str = "") -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}", what or None)
    return result


def _syscall(name: str, number: int, *arguments: int | bytes | None, what: str = "") -> int:
    packed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _call(name, _libc.syscall(ctypes.c_long(number), *packed), what)


def unshare(flags: int) -> None:
    _call("unshare", _libc.unshare(flags))


def setns(descriptor: int, flags: int = 0) -> None:
    _call("setns", _libc.setns(descriptor, flags))


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    arguments = (os.fsencode(source), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags))
    _call("mount", _libc.mount(*arguments, os.fsencode(data) or None), target)


def open_tree(path: str, *, recursive: bool = False) -> int:
    """A detached copy of the mount at a path, as a descriptor; `recursive` includes the mounts below it."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    return _syscall("open_tree", _OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags, what=path)


def map_owners(tree: int, user_namespace: int) -> None:
    """Map a detached mount's owners through a user namespace: files of uid 0 belong to that namespace's root."""
    attributes = struct.pack("<QQQQ", _MOUNT_ATTR_IDMAP, 0, 0, user_namespace)
    _syscall("mount_setattr", _MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attributes, len(attributes))


def move_mount(tree: int, target: str) -> None:
    _syscall("move_mount", _MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)


def close_others(keep: set[int]) -> None:
    """Close every descriptor above stderr except these."""
    first = 3
    for descriptor in [*sorted(number for number in keep if number > 2), 0x7FFFFFFF]:
        if descriptor > first:
            _syscall("close_range", _CLOSE_RANGE, first, descriptor - 1, 0)
        first = descriptor + 1


def prctl(option: int, *arguments: int) -> int:
    return _call("prctl", _libc.prctl(option, *(ctypes.c_ulong(value) for value in [*arguments, 0, 0, 0, 0][:4])))


def hide_from_ptrace() -> None:
    """No process of the same user may trace this one, until it executes another program."""
    prctl(_PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_with_parent() -> None:
    """Kill this process when the thread that forked it exits."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def nice_session() -> None:
    """Give the scheduler's group of this session the nice value of this process.

    Where the kernel groups processes by session (`kernel.sched_autogroup_enabled`), a nice value counts only between
    processes of one session, and a new session starts with an ordinary group. Best effort: without such groups, or when
    the kernel rejects too many changes at once, priorities stay as they are.
    """
    with suppress(OSError), open("/proc/self/autogroup", "w") as group:
        group.write(str(os.getpriority(os.PRIO_PROCESS, 0)))


def no_new_privileges() -> None:
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def limit_capabilities(keep: frozenset[int]) -> None:
    """Drop every capability but these from the bounding set, irrevocably."""
    for number in range(64):
        if number not in keep:
            try:
                prctl(_PR_CAPBSET_DROP, number)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                return  # past the last capability of this kernel


def set_capabilities(keep: frozenset[int]) -> None:
    """Hold exactly these capabilities, and pass on none by inheritance."""
    bits = sum(1 << number for number in keep)
    header = struct.pack("<Ii", 0x20080522, 0)
    low, high = bits & 0xFFFFFFFF, bits >> 32
    prctl(_PR_CAP_AMBIENT, 4)
    _syscall("capset", _CAPSET[platform.machine()], header, struct.pack("<IIIIII", low, low, 0, high, high, 0))


def load_filter(program: bytes) -> None:
    """Load a seccomp filter into this process, irrevocably."""
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    _syscall("seccomp", _SECCOMP[platform.machine()], 1, 0, head)


def loopback_up() -> None:
    """Bring up `lo` in this process's network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(control, 0x8913, request))[1]  # SIOCGIFFLAGS
        fcntl.ioctl(control, 0x8914, struct.pack("16sH14x", b"lo", flags | 1))  # SIOCSIFFLAGS, IFF_UP


def reaped_children() -> Iterator[tuple[int, int]]:
    """Children that have exited and their exit codes, 128 plus the number of a signal; does not wait."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        yield pid, code if code >= 0 else 128 - code


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; `OSError` if the process is gone."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name is in brackets and may contain anything; the fields follow the last bracket.
        return file.read().rpartition(b")")[2].decode("ascii").split()


def live_processes() -> Iterator[tuple[int, int]]:
    """Every process and its parent, as /proc shows them now. Zombies are dead, and left out."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                state, parent = stat_fields(int(name))[:2]
                if state not in "ZX":
                    yield int(name), int(parent)


def descendants(pid: int) -> list[int]:
    """Every live process below one."""
    children: dict[int, list[int]] = {}
    for child, parent in live_processes():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    remaining = [pid]
    while remaining:
        below = children.get(remaining.pop(), [])
        found += below
        remaining += below
    return found
