"""The few calls of the Linux kernel that Python has no function for, each raising `OSError` with its own name."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18

_OPEN_TREE, _MOVE_MOUNT, _PIDFD_OPEN, _MOUNT_SETATTR = 428, 429, 434, 442  # the same on every machine since 5.1
_PIDFD_SEND_SIGNAL = 424
_CLOSE_RANGE = 436
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_IDMAP = 0x00100000
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_PR_CAP_AMBIENT, _PR_SET_CHILD_SUBREAPER = 47, 36

CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7}
"""Those that root inside keeps: what makes it root over its own files and processes. They count in the sandbox's user
namespace only, so none of them reaches a file, process or device of the host."""

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
    """A detached copy of the mount at a path, as a descriptor; recursive with what is mounted below it."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    return _syscall("open_tree", _OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags, what=path)


def map_owners(tree: int, user_namespace: int) -> None:
    """Show a detached mount's owners through a user namespace: its files of uid 0 belong to that namespace's root."""
    attributes = struct.pack("<QQQQ", _MOUNT_ATTR_IDMAP, 0, 0, user_namespace)
    _syscall("mount_setattr", _MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attributes, len(attributes))


def move_mount(tree: int, target: str) -> None:
    _syscall("move_mount", _MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)


def pidfd_open(pid: int) -> int:
    return _syscall("pidfd_open", _PIDFD_OPEN, pid, 0)


def pidfd_kill(pidfd: int, number: int) -> None:
    _syscall("pidfd_send_signal", _PIDFD_SEND_SIGNAL, pidfd, number, None, 0)


def close_others(keep: set[int]) -> None:
    """Close every descriptor above standard error but those."""
    first = 3
    for descriptor in [*sorted(number for number in keep if number > 2), 0x7FFFFFFF]:
        if descriptor > first:
            _syscall("close_range", _CLOSE_RANGE, first, descriptor - 1, 0)
        first = descriptor + 1


def prctl(option: int, *arguments: int) -> int:
    return _call("prctl", _libc.prctl(option, *(ctypes.c_ulong(value) for value in [*arguments, 0, 0, 0, 0][:4])))


def hide_from_ptrace() -> None:
    """No process of the same user may look into this one, until it executes another program."""
    prctl(_PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def no_new_privileges() -> None:
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def limit_capabilities(keep: frozenset[int]) -> None:
    """Take every capability but those out of the bounding set, for good."""
    for number in range(64):
        if number not in keep:
            try:
                prctl(_PR_CAPBSET_DROP, number)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                return  # past the last one that this kernel knows


def set_capabilities(keep: frozenset[int]) -> None:
    """Hold exactly these, and hand none on by inheritance."""
    bits = sum(1 << number for number in keep)
    header = struct.pack("<Ii", 0x20080522, 0)
    low, high = bits & 0xFFFFFFFF, bits >> 32
    prctl(_PR_CAP_AMBIENT, 4)
    _syscall("capset", _CAPSET[platform.machine()], header, struct.pack("<IIIIII", low, low, 0, high, high, 0))


def load_filter(program: bytes) -> None:
    """Load a seccomp filter into this process, for good."""
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    _syscall("seccomp", _SECCOMP[platform.machine()], 1, 0, head)


def loopback_up() -> None:
    """Bring up `lo` in this process's network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(control, 0x8913, request))[1]  # SIOCGIFFLAGS
        fcntl.ioctl(control, 0x8914, struct.pack("16sH14x", b"lo", flags | 1))  # SIOCSIFFLAGS, IFF_UP
