"""The seccomp filter of a sandbox: system calls that no program inside may make.

A deny list, because any program may run inside. Denied are calls that reach beyond the sandbox's own files and
processes (mounts, other processes' memory, kernel keys, modules, clocks), calls that gain privileges (new namespaces),
and calls that ordinary programs can do without but exploits use (bpf, io_uring, userfaultfd, unusual socket families).
Programs that sandbox themselves with namespaces therefore fail inside, by design.

`clone3` hides its flags from filters, so it returns ENOSYS, upon which C libraries use `clone`. Calls by another
architecture's numbers (32-bit, x32) would pass unseen and are denied as a whole.
"""

from __future__ import annotations

import errno
import platform
import struct

from towline.sandboxes.linux import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
)

_CLONE_NEWTIME = 0x80
_NAMESPACES = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

# name: (x86_64, aarch64); None where an architecture lacks the call
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "sysfs": (139, None),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "ustat": (136, None),
    "vhangup": (153, 58),
}
_ABSENT: dict[str, tuple[int | None, int | None]] = {
    "clone3": (435, 435),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
}
"""Return ENOSYS, as if this kernel did not have them: programs then use their fallback."""
_CLONE, _UNSHARE, _IOCTL, _PTRACE = (56, 220), (272, 97), (16, 29), (101, 117)
_SOCKET, _SOCKETPAIR = (41, 198), (53, 199)
_FAMILIES = (1, 2, 10, 16)
"""Unix, IPv4, IPv6 and netlink. Others may ignore network namespaces (vsock does)."""
_TERMINAL = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX inject input into a terminal."""
_ATTACH = (16, 0x4206)
"""PTRACE_ATTACH and PTRACE_SEIZE; a debugger that starts its own program needs neither."""

_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCH, _FIRST, _SECOND = 0, 4, 16, 24
"""Offsets in `struct seccomp_data`; of an argument the low 32 bits, which is all that the kernel reads of those used
here."""


def build(machine: str = "") -> bytes:
    """The filter for this machine, as an array of `struct sock_filter`."""
    machine = machine or platform.machine()
    column = list(_MACHINES).index(machine)
    code = [
        _op(_LOAD, _ARCH),
        _op(_JEQ, _MACHINES[machine], 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        code += [_op(_JGE, _X32, 0, 1), _op(_RETURN, _ERRNO | errno.ENOSYS)]
    for table, number in ((_DENIED, errno.EPERM), (_ABSENT, errno.ENOSYS)):
        for call in table.values():
            wanted = call[column]
            if wanted is not None:
                code += [_op(_JEQ, wanted, 0, 1), _op(_RETURN, _ERRNO | number)]
    code += _deny_if(_CLONE[column], _FIRST, [(_JSET, _NAMESPACES)], errno.EPERM)
    code += _deny_if(_UNSHARE[column], _FIRST, [(_JSET, _NAMESPACES | _CLONE_NEWTIME)], errno.EPERM)
    code += _deny_if(_IOCTL[column], _SECOND, [(_JEQ, value) for value in _TERMINAL], errno.EPERM)
    code += _deny_if(_PTRACE[column], _FIRST, [(_JEQ, value) for value in _ATTACH], errno.EPERM)
    for call in (_SOCKET, _SOCKETPAIR):
        code += _deny_unless(call[column], _FIRST, _FAMILIES, errno.EAFNOSUPPORT)
    return b"".join([*code, _op(_RETURN, _ALLOW)])


def _op(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, true, false, value)


def _deny_if(call: int, argument: int, tests: list[tuple[int, int]], number: int) -> list[bytes]:
    """Deny a call if one of the tests on its argument holds; afterwards the accumulator holds the call's number again."""
    block = [_op(_LOAD, argument)]
    for test, value in tests:
        block += [_op(test, value, 0, 1), _op(_RETURN, _ERRNO | number)]
    block.append(_op(_LOAD, _NUMBER))
    return [_op(_JEQ, call, 0, len(block)), *block]


def _deny_unless(call: int, argument: int, allowed: tuple[int, ...], number: int) -> list[bytes]:
    """Deny a call whose argument is not in `allowed`."""
    block = [_op(_LOAD, argument)]
    for index, value in enumerate(allowed):
        block.append(_op(_JEQ, value, len(allowed) - index, 0))
    block += [_op(_RETURN, _ERRNO | number), _op(_LOAD, _NUMBER)]
    return [_op(_JEQ, call, 0, len(block)), *block]
