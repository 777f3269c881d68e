"""The seccomp filters of both architectures, run by an interpreter here, so that both are tested on every machine."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.sandboxes import stub_programs
from towline.sandboxes.bubblewrap import seccomp

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = "allow", "kill"


def judge(program: bytes, arch: int, number: int, *arguments: int) -> str:
    """The result of a call under a filter."""
    given = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("<IIQ6Q", number, arch, 0, *(value & 0xFFFFFFFFFFFFFFFF for value in given))
    position, accumulator = 0, 0
    for _ in range(len(program)):
        code, true, false, value = struct.unpack_from("<HBBI", program, position * 8)
        position += 1
        if code == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif code == 0x06:
            kind = value & 0xFFFF0000
            return {0x7FFF0000: ALLOW, 0x80000000: KILL}.get(kind) or errno.errorcode[value & 0xFFFF]
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            position += true if holds else false
    raise AssertionError("a filter must end")


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_denied_and_allowed_calls(machine: str, column: int) -> None:
    program, arch = seccomp.build(machine), MACHINES[machine]

    def ask(number: int, *arguments: int) -> str:
        return judge(program, arch, number, *arguments)

    for table, answer in ((seccomp._DENIED, "EPERM"), (seccomp._ABSENT, "ENOSYS")):
        for name, numbers in table.items():
            if (number := numbers[column]) is not None:
                assert ask(number) == answer, name
    clone, unshare, ioctl, ptrace = (
        call[column] for call in (seccomp._CLONE, seccomp._UNSHARE, seccomp._IOCTL, seccomp._PTRACE)
    )
    threads, plain_fork = 0x3D0F00, 17
    assert [ask(clone, flags) for flags in (threads, plain_fork)] == [ALLOW, ALLOW]
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert (ask(clone, flag | 17), ask(unshare, flag)) == ("EPERM", "EPERM")
    assert ask(unshare, 0x400) == ALLOW, "a thread's own files are no namespace"
    garbage = 0xDEADBEEF << 32
    assert [ask(ioctl, 0, command) for command in (0x5412, 0x5412 | garbage, 0x541C)] == ["EPERM"] * 3
    assert [ask(ioctl, 0, command) for command in (0x5413, 0x5401)] == [ALLOW] * 2
    assert [ask(ptrace, request) for request in (16, 0x4206, 16 | garbage)] == ["EPERM"] * 3
    assert ask(ptrace, 0) == ALLOW, "a debugger may start its own program"
    for call in (seccomp._SOCKET, seccomp._SOCKETPAIR):
        assert [ask(call[column], family) for family in (1, 2, 10, 16)] == [ALLOW] * 4
        assert [ask(call[column], family) for family in (0, 17, 38, 40, 1 << 31)] == ["EAFNOSUPPORT"] * 5
    ordinary = {"x86_64": (0, 1, 2, 9, 59, 202, 231, 257, 318), "aarch64": (56, 63, 64, 94, 98, 221, 222, 278)}
    assert {ask(number) for number in ordinary[machine]} == {ALLOW}
    for other in set(MACHINES.values()) - {arch} | {0x40000003, 0x40000028}:
        assert judge(program, other, 0) == KILL
    if machine == "x86_64":
        assert ask(0x40000000 | 1) == "ENOSYS", "x32"


@given(st.sampled_from(sorted(MACHINES)), st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**64 - 1), max_size=6))
def test_the_filter_decides_every_call(machine: str, number: int, arguments: list[int]) -> None:
    assert judge(seccomp.build(machine), MACHINES[machine], number, *arguments)


def test_programs_are_complete() -> None:
    """The jump distances and the data behind the code depend on its length."""
    for machine, length in (("x86_64", 80), ("aarch64", 88)):
        assert len(stub_programs.machine_code("init", machine)) == length
        for name in ("init", "launch"):
            program = stub_programs.elf_program(name, machine)
            assert program[:4] == b"\x7fELF"
            entry, header = struct.unpack_from("<QQ", program, 24)
            assert (entry, header) == (0x400000 + 120, 64)
            assert struct.unpack_from("<Q", program, 64 + 32)[0] == len(program)
