"""Two static programs of a few dozen bytes, `init` and `launch`, so that a root file system may be completely empty.

`init` is the first process of a sandbox. The kernel reaps orphans for it (it ignores SIGCHLD). It writes one byte to
its stdout when it runs, and exits, and everything in its PID namespace with it, when its stdin closes: the holder of
the other end keeps the sandbox alive.

`launch` executes a command: its first argument is the path, the rest are the command's. So this sealed file is always
between a sandbox's files and the supervisor's own executable: a command that is a symlink to `/proc/self/exe` reaches
`launch`, never the interpreter that the supervisor runs on.

Both are sealed memory files. The instructions are beside their bytes.
"""

from __future__ import annotations

import fcntl
import os
import platform
import struct

_IGNORE = struct.pack("<QQQQ", 1, 0, 0, 0)
"""A `struct sigaction` that says SIG_IGN; its first byte is also what `init` writes."""

_X86_64 = {
    "machine": 62,
    "init": """
        b80d000000      mov eax, 13 (rt_sigaction)
        bf11000000      mov edi, 17 (SIGCHLD)
        488d353f000000  lea rsi, [rip + 63] (the data behind the code)
        31d2            xor edx, edx
        41ba08000000    mov r10d, 8
        0f05            syscall
        b801000000      mov eax, 1 (write)
        bf01000000      mov edi, 1
        ba01000000      mov edx, 1
        0f05            syscall
        31c0            again: xor eax, eax (read)
        31ff            xor edi, edi
        4889e6          mov rsi, rsp
        ba01000000      mov edx, 1
        0f05            syscall
        4883f8fc        cmp rax, -4 (EINTR)
        74ec            je again
        4885c0          test rax, rax
        7fe7            jg again
        b8e7000000      mov eax, 231 (exit_group)
        31ff            xor edi, edi
        0f05            syscall
        0000            the data is aligned
    """,
    "launch": """
        488b0424        mov rax, [rsp] (argc)
        488b7c2408      mov rdi, [rsp + 8] (argv[0], the path)
        488d742410      lea rsi, [rsp + 16] (argv from 1 on)
        488d54c410      lea rdx, [rsp + rax * 8 + 16] (the environment)
        b83b000000      mov eax, 59 (execve)
        0f05            syscall
        bf7e000000      mov edi, 126
        83f8fe          cmp eax, -2 (ENOENT)
        7502            jne out
        ffc7            inc edi
        b8e7000000      out: mov eax, 231 (exit_group)
        0f05            syscall
    """,
}
_AARCH64 = {
    "machine": 183,
    "init": """
        200280d2  mov x0, #17 (SIGCHLD)
        a1020010  adr x1, 84 (the data behind the code)
        020080d2  mov x2, #0
        030180d2  mov x3, #8
        c81080d2  mov x8, #134 (rt_sigaction)
        010000d4  svc #0
        200080d2  mov x0, #1
        220080d2  mov x2, #1
        080880d2  mov x8, #64 (write)
        010000d4  svc #0
        000080d2  again: mov x0, #0
        e1030091  mov x1, sp
        220080d2  mov x2, #1
        e80780d2  mov x8, #63 (read)
        010000d4  svc #0
        1f0000f1  cmp x0, #0
        4cffff54  b.gt again
        1f1000b1  cmn x0, #4 (EINTR)
        00ffff54  b.eq again
        000080d2  mov x0, #0
        c80b80d2  mov x8, #94 (exit_group)
        010000d4  svc #0
    """,
    "launch": """
        e90340f9  ldr x9, [sp] (argc)
        e00740f9  ldr x0, [sp, #8] (argv[0], the path)
        e1430091  add x1, sp, #16 (argv from 1 on)
        220c098b  add x2, x1, x9, lsl #3 (the environment)
        a81b80d2  mov x8, #221 (execve)
        010000d4  svc #0
        1f0800b1  cmn x0, #2 (ENOENT)
        c00f80d2  mov x0, #126
        41000054  b.ne out
        e00f80d2  mov x0, #127
        c80b80d2  out: mov x8, #94 (exit_group)
        010000d4  svc #0
    """,
}
_MACHINES = {"x86_64": _X86_64, "aarch64": _AARCH64}
_BASE = 0x400000


def elf_program(name: str, machine: str = "") -> bytes:
    """The ELF file of `init` or `launch`."""
    table = _MACHINES[machine or platform.machine()]
    code = machine_code(name, machine)
    body = code + _IGNORE if name == "init" else code
    headers = 64 + 56
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    elf = ident + struct.pack("<HHIQQQIHHHHHH", 2, table["machine"], 1, _BASE + headers, 64, 0, 0, 64, 56, 1, 64, 0, 0)
    size = headers + len(body)
    return elf + struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x10000) + body


def machine_code(name: str, machine: str = "") -> bytes:
    lines = str(_MACHINES[machine or platform.machine()][name]).split("\n")
    return bytes.fromhex("".join(line.split()[0] for line in lines if line.strip()))


def sealed_memfd(name: str) -> int:
    """A descriptor of the program in a sealed memory file; it survives `exec`."""
    descriptor = os.memfd_create(f"towline-{name}", os.MFD_ALLOW_SEALING)
    os.write(descriptor, elf_program(name))
    os.fchmod(descriptor, 0o555)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
