"""Escape attempts that only need to be tried once per set of removed guards: all of them in one sandbox, cached.

Each program prints JSON. Nothing here can harm the machine without its guard: files and processes under attack are the
test's own, and every bomb is bounded.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.sandboxes import escape_attempts as attempts
from towline.sandboxes.base import Mount, SandboxSpec, execute
from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime
from towline.schema import Network, Resources

PYTHON = f"/opt/python/bin/python{sys.version_info[0]}.{sys.version_info[1]}"

NAMESPACES = attempts.program("""
flags = {"user": 0x10000000, "mount": 0x20000, "net": 0x40000000, "pid": 0x20000000, "uts": 0x4000000, "ipc": 0x8000000, "cgroup": 0x2000000}
def tried(flag, with_user):
    reading, writing = os.pipe()
    if os.fork() == 0:
        ctypes.set_errno(0)
        result = libc.unshare(flag | (0x10000000 if with_user else 0))
        os.write(writing, b"done" if result == 0 else errno.errorcode[ctypes.get_errno()].encode())
        os._exit(0)
    os.close(writing)
    return os.read(reading, 50).decode()
print(json.dumps({name: tried(flag, name != "user") for name, flag in flags.items()}))
""")
"""New namespaces, in which the kernel shows root much more of itself."""

PROCESSES = attempts.program("""
pid, ours = int(sys.argv[1]), os.getpid()
def tried(action):
    try:
        return bool(action())
    except OSError:
        return False
def attach():
    if libc.ptrace(16, pid, 0, 0):
        raise OSError(ctypes.get_errno(), "ptrace")
    os.waitpid(pid, 0x40000000)
    libc.ptrace(17, pid, 0, 0)
    return True
def read_memory():
    first = open(f"/proc/{pid}/maps").readline().split("-")[0]
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(int(first, 16))
        return memory.read(4) == b"\\x7fELF"
print(json.dumps({
    "seen": os.path.exists(f"/proc/{pid}") and "sleep" in open(f"/proc/{pid}/comm").read(),
    "signal": tried(lambda: os.kill(pid, 0) is None and "sleep" in open(f"/proc/{pid}/comm").read()),
    "environment": tried(lambda: b"CANARY=" in open(f"/proc/{pid}/environ", "rb").read()),
    "working folder": tried(lambda: os.path.exists(f"/proc/{pid}/cwd/canary")),
    "root folder": tried(lambda: os.path.exists(f"/proc/{pid}/root" + sys.argv[2])),
    "memory": tried(read_memory),
    "attach": tried(attach),
    "namespace": tried(lambda: os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")),
}))
""")
"""What can be done to a process of the host."""

FILES = attempts.program("""
canary = sys.argv[1]
def tried(action):
    try:
        return bool(action())
    except OSError:
        return False
def climbed():
    for depth in range(1, 12):
        try:
            if open("/".join([".."] * depth) + canary).read():
                return True
        except OSError:
            pass
    return False
def connected():
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(sys.argv[2])
        return True
print(json.dumps({
    "read": tried(lambda: open(canary).read()),
    "climb": climbed(),
    "through init": tried(lambda: open("/proc/1/root" + canary).read()),
    "through itself": tried(lambda: open("/proc/self/root" + canary).read()),
    "list": tried(lambda: "canary" in os.listdir(os.path.dirname(canary))),
    "write": tried(lambda: open(canary + "-written", "w").write("x")),
    "link": tried(lambda: os.link(canary, canary + "-linked") is None),
    "unix socket": tried(connected),
}))
""")
"""Files and sockets of the host."""

_cache: dict[tuple[str, ...], dict[str, Any]] = {}


def outcomes(tmp: Path, canary: Path, sleeper: int, unguarded: tuple[str, ...]) -> dict[str, Any]:
    """By program, what it printed in a sandbox without these guards; `plain`: without a sandbox."""
    programs = {
        "namespaces": (NAMESPACES,),
        "processes": (PROCESSES, str(sleeper), str(canary)),
        "files": (FILES, str(canary), str(canary.with_name("socket"))),
        "calls": (attempts.SYSTEM_CALLS,),
        "powers": (attempts.POWERS,),
    }
    if unguarded not in _cache:
        _cache[unguarded] = (
            {name: _plain(*program) for name, program in programs.items() if name in ("processes", "files")}
            if unguarded == ("plain",)
            else asyncio.run(_inside(tmp, unguarded, programs))
        )
    return _cache[unguarded]


def _plain(program: str, *arguments: str) -> Any:
    command = [sys.executable, "-I", "-c", program, *arguments]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)


async def _inside(tmp: Path, unguarded: tuple[str, ...], programs: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    runtime = BubblewrapRuntime(tmp / ("data-" + "-".join(unguarded)), _unguarded=unguarded)
    await runtime.open()
    try:
        spec = SandboxSpec(
            mounts=(Mount(Path(sys.base_prefix), "/opt/python"),),
            network=Network.GATEWAY,
            resources=Resources(disk_mb=32),
        )
        sandbox = await runtime.create(spec)
        found = {}
        for name, (program, *arguments) in programs.items():
            done = await execute(sandbox, [PYTHON, "-I", "-c", program, *arguments], seconds=60)
            assert done.stdout, (name, done.code, done.text)
            found[name] = json.loads(done.stdout)
        return found
    finally:
        await runtime.close()


def is_root() -> bool:
    return os.geteuid() == 0
