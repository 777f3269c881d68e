"""Escapes from a bubblewrap sandbox: every class that was tried and blocked stays blocked.

Each attempt is made with all guards, and without the one that stops it: by the runtime's private switch, or by the same
program without a sandbox. `test_rootless.py` runs this file again as an ordinary user.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.sandboxes import escape_attempts as attempts
from support.security.attack import attack, without
from support.security.sandbox_attempts import PYTHON, is_root, outcomes
from towline.sandboxes.base import Mount, SandboxSpec, execute
from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime
from towline.sandboxes.files import archives
from towline.schema import Network, Resources

PROCESS = ["seen", "signal", "environment", "working folder", "root folder", "memory", "attach"]
FILE = ["read", "climb", "through itself", "list", "write", "link", "unix socket"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, int]]:
    """A folder for sandboxes, a canary file of the host, and a process of the host that holds it."""
    folder = tmp_path_factory.mktemp("host")
    folder.chmod(0o755)
    canary = folder / "canary"
    canary.write_text("secret")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        sleeper = subprocess.Popen(["sleep", "600"], env={"CANARY": "secret", "PATH": os.defpath}, cwd=folder)
        try:
            yield tmp_path_factory.mktemp("sandboxes"), canary, sleeper.pid
        finally:
            sleeper.kill()
            sleeper.wait()


@attack("blocked: ptrace, processes", guard=without())
@pytest.mark.parametrize("way", PROCESS)
def test_a_process_of_the_host(place: tuple[Path, Path, int], way: str, unguarded: bool) -> bool:
    if way == "root folder" and not is_root():
        way = "seen"
    return bool(outcomes(*place, ("plain",) if unguarded else ())["processes"][way])


@attack("blocked: host files, sockets", guard=without())
@pytest.mark.parametrize("way", FILE)
def test_a_file_of_the_host(place: tuple[Path, Path, int], way: str, unguarded: bool) -> bool:
    tmp, canary, _ = place
    for left in ("-written", "-linked"):
        Path(f"{canary}{left}").unlink(missing_ok=True)
    gained = bool(outcomes(*place, ("plain",) if unguarded else ())["files"][way])
    assert unguarded or not Path(f"{canary}-written").exists()
    return gained


@attack("blocked: namespaces", guard=without())
@pytest.mark.parametrize("kind", ["user", "mount", "net", "pid", "uts", "ipc", "cgroup"])
def test_a_namespace_of_its_own(place: tuple[Path, Path, int], kind: str, unguarded: bool) -> bool:
    return outcomes(*place, ("seccomp",) if unguarded else ())["namespaces"][kind] == "done"


@attack("blocked: keyctl, system calls", guard=without())
@pytest.mark.parametrize("call", ["keyring", "handle", "io_uring", "terminal", "user namespace"])
def test_a_system_call(place: tuple[Path, Path, int], call: str, unguarded: bool) -> bool:
    """Refused by the filter; without it the kernel answers, whatever it says."""
    answer = outcomes(*place, ("seccomp",) if unguarded else ())["calls"][call]
    return bool(answer != ("ENOSYS" if call == "io_uring" else "EPERM"))


@attack("blocked: capabilities", guard=without())
@pytest.mark.parametrize("power", ["mount", "chroot", "raw socket", "host name"])
def test_a_power_of_root(place: tuple[Path, Path, int], power: str, unguarded: bool) -> bool:
    return bool(outcomes(*place, ("capabilities", "seccomp") if unguarded else ())["powers"][power])


async def _bomb(tmp_path: Path, unguarded: tuple[str, ...], limits: Resources, program: str, *arguments: object) -> Any:
    runtime = BubblewrapRuntime(tmp_path / "data", _unguarded=unguarded, defaults=limits)
    await runtime.open()
    try:
        mounts = (Mount(Path(PYTHON_HOME), "/opt/python"),)
        sandbox = await runtime.create(SandboxSpec(mounts=mounts, network=Network.NONE, resources=limits))
        done = await execute(sandbox, [PYTHON, "-I", "-c", program, *map(str, arguments)], seconds=60)
        return json.loads(done.stdout) if done.stdout else None
    finally:
        await runtime.close()


PYTHON_HOME = sys.base_prefix


@attack("blocked: bombs", guard=without())
async def test_a_fork_bomb(tmp_path: Path, unguarded: bool) -> bool:
    made = await _bomb(tmp_path, ("pids",) if unguarded else (), Resources(pids=48, disk_mb=32), attempts.FORK, 100)
    return bool(made == 100)


@attack("blocked: bombs", guard=without())
async def test_a_memory_bomb(tmp_path: Path, unguarded: bool) -> bool:
    limits = Resources(memory_mb=96, pids=100, disk_mb=32)
    return bool(await _bomb(tmp_path, ("memory",) if unguarded else (), limits, attempts.MEMORY, 200) == "all")


@attack("blocked: bombs", guard=without())
async def test_a_disk_bomb(tmp_path: Path, unguarded: bool) -> bool:
    written, _ = await _bomb(tmp_path, ("disk",) if unguarded else (), Resources(disk_mb=24), attempts.DISK, 40)
    return bool(written > 24)


@attack("blocked: host files", guard=without())
async def test_write_through_a_writable_mount(tmp_path: Path, unguarded: bool) -> bool:
    """A mount that may be written to is a throw-away copy."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("original")
    source.chmod(0o777)
    runtime = BubblewrapRuntime(tmp_path / "data", _unguarded=("overlay",) if unguarded else ())
    await runtime.open()
    try:
        spec = SandboxSpec(mounts=(Mount(source, "/loose", writable=True),), resources=Resources(disk_mb=16))
        await execute(await runtime.create(spec), ["sh", "-c", "echo changed > /loose/file; echo new > /loose/new"])
    finally:
        await runtime.close()
    return (source / "file").read_text() != "original" or (source / "new").exists()


if is_root():

    @attack("read: aggregate memory", guard=without())
    async def test_many_sandboxes_use_up_the_machine(tmp_path: Path, unguarded: bool) -> bool:
        """Each stays within its own limit; together they exceed the node's."""
        limits = Resources(memory_mb=96, pids=64, disk_mb=16)
        totals = Resources.model_construct(memory_mb=None if unguarded else 128, pids=None, cpus=None, disk_mb=None)
        runtime = BubblewrapRuntime(tmp_path / "data", totals=totals)
        await runtime.open()
        try:
            spec = SandboxSpec(mounts=(Mount(Path(PYTHON_HOME), "/opt/python"),), resources=limits)
            sandboxes = [await runtime.create(spec) for _ in range(3)]
            running = [await one.start([PYTHON, "-I", "-c", HOLD, "60"]) for one in sandboxes]
            held = [await process.stdout.readline() for process in running]
            health = [await one.health() for one in sandboxes]
            if not unguarded:
                assert sum(one.other_kills for one in health) >= 1, "killed by the total, and reported as such"
                assert sum(one.oom_kills for one in health) == 0, "none at its own limit"
            return held == [b"held\n"] * 3
        finally:
            await runtime.close()

    @attack("read: aggregate memory", guard=without())
    async def test_many_sandboxes_use_up_the_processes(tmp_path: Path, unguarded: bool) -> bool:
        limits = Resources(memory_mb=96, pids=60, disk_mb=16)
        totals = Resources.model_construct(memory_mb=None, pids=None if unguarded else 70, cpus=None, disk_mb=None)
        runtime = BubblewrapRuntime(tmp_path / "data", totals=totals)
        await runtime.open()
        try:
            spec = SandboxSpec(mounts=(Mount(Path(PYTHON_HOME), "/opt/python"),), resources=limits)
            sandboxes = [await runtime.create(spec) for _ in range(3)]
            done = [await one.start([PYTHON, "-I", "-c", FORKED, "30"]) for one in sandboxes]
            made = [int((await process.stdout.readline()) or 0) for process in done]
            return sum(made) >= 90
        finally:
            await runtime.close()


HOLD = """
import os, sys, time
kept = [bytearray(os.urandom(1024)) * 1024 for _ in range(int(sys.argv[1]))]
print("held", flush=True)
time.sleep(60)
"""
FORKED = """
import os, sys, time
made = 0
for _ in range(int(sys.argv[1])):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    made += 1
print(made, flush=True)
time.sleep(60)
"""


# Archives that come out of a sandbox


def _tar(*members: tuple[str, str, str]) -> bytes:
    """A tar of (kind, name, target or content)."""
    kinds = {"link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "file": tarfile.REGTYPE, "folder": tarfile.DIRTYPE}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for kind, name, value in members:
            member = tarfile.TarInfo(name)
            member.type = kinds[kind]
            member.mode = 0o755
            if kind in ("link", "hard"):
                member.linkname = value
                tar.addfile(member)
            else:
                member.size = len(value) if kind == "file" else 0
                tar.addfile(member, io.BytesIO(value.encode()) if kind == "file" else None)
    return out.getvalue()


@attack("blocked: traversal", guard=without())
@pytest.mark.parametrize(
    "way", ["parent", "absolute", "through a link", "through two links", "over a link", "hard link"]
)
def test_an_archive_that_writes_outside(tmp_path: Path, way: str, unguarded: bool) -> bool:
    """A file of the agent's archive lands outside of the folder that it is unpacked in."""
    outside, target = tmp_path / "outside", tmp_path / "in" / "target"
    outside.mkdir()
    target.mkdir(parents=True)
    (outside / "victim").write_text("original")
    archive = {
        "parent": _tar(("file", "../../outside/planted", "x")),
        "absolute": _tar(("file", f"{outside}/planted", "x")),
        "through a link": _tar(("link", "way", str(outside)), ("file", "way/planted", "x")),
        "through two links": _tar(
            ("folder", "a", ""),
            ("link", "a/up", "../../.."),
            ("link", "way", "a/up/outside"),
            ("file", "way/planted", "x"),
        ),
        "over a link": _tar(("link", "f", f"{outside}/planted"), ("file", "f/../f2", "y"), ("file", "f", "x")),
        "hard link": _tar(("link", "l", str(outside)), ("hard", "h", "l/victim"), ("file", "l/planted", "x")),
    }[way]
    if unguarded:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                _naive(tar, member, target)
    else:
        with contextlib.suppress(archives.ArchiveError):
            archives.unpack(archive, target)
    return (outside / "planted").exists() or (outside / "victim").read_text() != "original"


def _naive(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """As tar does it without any check."""
    path = target / member.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if member.issym():
            path.symlink_to(member.linkname)
        elif member.islnk():
            os.link(target / member.linkname, path)
        elif member.isdir():
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]
    except OSError:
        return
