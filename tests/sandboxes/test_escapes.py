"""Escape attempts on bubblewrap sandboxes: each succeeds without its guard, and fails with it.

A guard is removed by the runtime's private switch, or the same attempt is made by a plain process without a sandbox.
After every attempt the node must still create another sandbox, and in the end nothing may be left. Run by root these are
root's sandboxes; `test_bubblewrap_rootless.py` runs this file again as an ordinary user.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from support.sandboxes import contract
from support.sandboxes import escape_attempts as attempts
from support.sandboxes.sandbox_leftovers import Traces
from towline.sandboxes import linux
from towline.sandboxes.base import GATEWAY_PORT, CommandResult, Mount, Sandbox, SandboxSpec, execute
from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime
from towline.sandboxes.files import archives
from towline.schema import Network, Resources

ROOT = os.geteuid() == 0
PYTHON = f"/opt/python/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
SPEC = SandboxSpec(mounts=(Mount(Path(sys.base_prefix), "/opt/python"),), network=Network.GATEWAY)


@contextlib.asynccontextmanager
async def opened(tmp_path: Path, *unguarded: str, **settings: Any) -> AsyncIterator[BubblewrapRuntime]:
    """A runtime with some guards removed; it must survive and leave nothing behind."""
    data = tmp_path / ("data-" + "-".join(unguarded))
    runtime = BubblewrapRuntime(data, _unguarded=unguarded, **settings)
    await runtime.open()
    traces = Traces(data)
    try:
        yield runtime
        traces.record(runtime)
        async with contract.made(runtime, SandboxSpec(resources=Resources(disk_mb=16))) as another:
            assert (await execute(another, ["echo", "well"])).stdout == b"well\n", "the node still works"
    finally:
        await runtime.close()
    assert traces.left() == []


async def attempt(sandbox: Sandbox, program: str, *arguments: object, seconds: float = 60) -> CommandResult:
    return await execute(sandbox, [PYTHON, "-I", "-c", program, *map(str, arguments)], seconds=seconds)


async def outcome(tmp_path: Path, unguarded: tuple[str, ...], program: str, *arguments: object, **changes: Any) -> Any:
    """What an attempt prints, in its own sandbox."""
    async with opened(tmp_path, *unguarded) as runtime, contract.made(runtime, SPEC, **changes) as sandbox:
        done = await attempt(sandbox, program, *arguments)
        assert done.stdout, (done.code, done.text)
        return json.loads(done.stdout)


def plain(program: str, *arguments: object) -> Any:
    """What the same attempt prints without a sandbox."""
    command = [sys.executable, "-I", "-c", program, *map(str, arguments)]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)


@contextlib.contextmanager
def greeting(listener: socket.socket) -> Iterator[socket.socket]:
    """Greets every client."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"reached")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def own_address() -> str:
    """An address of this machine that is not loopback; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            raise AssertionError(
                "this test needs a network interface with a route: ip link add dummy0 type dummy"
            ) from None
        return str(probe.getsockname()[0])


async def test_host_loopback_outside_addresses_and_abstract_sockets(tmp_path: Path) -> None:
    name = f"towline-{secrets.token_hex(8)}"
    abstract = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    abstract.bind(f"\0{name}")
    abstract.listen()
    address = own_address()
    with (
        greeting(socket.create_server(("127.0.0.1", 0))) as loopback,
        greeting(socket.create_server((address, 0))) as outside,
        greeting(abstract),
    ):
        where = (loopback.getsockname()[1], address, outside.getsockname()[1], name)
        free = await outcome(tmp_path, ("network",), attempts.CONNECT, *where)
        assert free == {"loopback": "reached", "outside": "reached", "abstract": "reached"}
        for network in (Network.NONE, Network.GATEWAY):
            held = await outcome(tmp_path, (), attempts.CONNECT, *where, network=network)
            assert held == {"loopback": "ECONNREFUSED", "outside": "ENETUNREACH", "abstract": "ECONNREFUSED"}


async def test_other_sandboxes_listeners_files_and_processes(tmp_path: Path) -> None:
    secret = secrets.token_hex(16)
    shared = tmp_path / "shared"
    shared.mkdir()
    spec = dataclasses.replace(SPEC, mounts=(*SPEC.mounts, Mount(shared, "/shared", writable=True)))
    for unguarded in ((), ("overlay",)):
        async with (
            opened(tmp_path, *unguarded) as runtime,
            contract.made(runtime, spec) as one,
            contract.made(runtime, spec) as two,
        ):
            await contract.sh(one, f"for d in /tmp /dev/shm /root /work /shared; do echo {secret} > $d/file; done")
            running = await one.start(["sh", "-c", "sleep 60", secret])
            seen = await execute(two, ["sh", "-c", "cat /tmp/file /dev/shm/file /root/file /work/file /shared/file"])
            assert seen.stdout.decode() == (f"{secret}\n" if unguarded else ""), "only files shared without an overlay"
            found = await attempt(two, attempts.SEARCH, secret, "tmp/file")
            assert json.loads(found.stdout) == []
            assert "cmdline" in plain(attempts.SEARCH, secret, "tmp/file"), (
                "the host sees the other sandbox's processes"
            )
            # Each sandbox has its own gateway: the same address leads to two listeners.
            listening = [sandbox.listener for sandbox in (one, two)]
            assert listening[0] is not None
            assert listening[1] is not None
            with greeting(listening[1].dup()):
                reached = await attempt(two, attempts.CONNECT, GATEWAY_PORT, "127.0.0.1", GATEWAY_PORT, "none")
            assert json.loads(reached.stdout)["loopback"] == "reached"
            listening[0].setblocking(False)
            with pytest.raises(BlockingIOError):
                listening[0].accept()
            await running.kill()
    assert (shared / "file").read_text().strip() == secret, "as the sandbox without an overlay left it"


async def test_host_secrets_and_verifier_files(tmp_path: Path) -> None:
    secret = secrets.token_hex(16)
    tests = tmp_path / "verifier"
    tests.mkdir(mode=0o755)
    (tests / "expected").write_text(secret)
    holder = _hold(secret, tests)
    try:
        assert plain(attempts.SEARCH, secret, tests / "expected") == ["environ", "path", "root"] or plain(
            attempts.SEARCH, secret, "expected"
        ) == ["environ", "root"]
        assert await outcome(tmp_path, (), attempts.SEARCH, secret, tests / "expected") == []
        async with opened(tmp_path) as runtime, contract.made(runtime, SPEC) as sandbox:
            listing = await contract.sh(
                sandbox, "ls -A /home /root /opt /srv /mnt /var/lib /etc; ls -A /sys; cat /etc/passwd"
            )
            for private in ("shadow", "sudoers", "ssh\n", "machine-id", "hostname.bak", "fstab"):
                assert private not in listing
            assert "python\n" in listing, "the spec's mounts are visible"
            # The evaluator's files are mounted in a separate sandbox, after the agent's is gone.
            await sandbox.kill()
        mounted = dataclasses.replace(SPEC, mounts=(*SPEC.mounts, Mount(tests, "/tests")))
        async with opened(tmp_path) as runtime, contract.made(runtime, mounted) as evaluation:
            assert await contract.sh(evaluation, "cat /tests/expected") == secret
    finally:
        holder.kill()
        holder.wait()


def _hold(secret: str, folder: Path) -> subprocess.Popen[bytes]:
    """A process of the host with a secret in its environment and a private working folder."""
    return subprocess.Popen(["sleep", "60"], env={"SECRET": secret}, cwd=folder)


async def test_writing_outside_the_overlay(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    script = "echo changed > /loose/file; rm -f /loose/old; echo changed > /fixed/file"
    for unguarded in (("overlay",), ()):
        (source / "file").write_text("original")
        (source / "old").write_text("old")
        mounts = (Mount(source, "/loose", writable=True), Mount(source, "/fixed"))
        async with (
            opened(tmp_path, *unguarded) as runtime,
            contract.made(runtime, SandboxSpec(mounts=mounts)) as sandbox,
        ):
            done = await execute(sandbox, ["sh", "-c", script])
            assert not done.ok, "the read-only mount stays read-only in either case"
            assert (await execute(sandbox, ["cat", "/loose/file"])).stdout == b"changed\n"
        assert (source / "file").read_text() == ("changed\n" if unguarded else "original")
        assert (source / "old").exists() == (not unguarded)


async def test_fork_bomb(tmp_path: Path) -> None:
    limits = Resources(pids=48, disk_mb=64)
    assert await outcome(tmp_path, ("pids",), attempts.FORK, 120, resources=limits) == 120
    assert 8 < await outcome(tmp_path, (), attempts.FORK, 120, resources=limits) < 48


async def test_memory_bomb(tmp_path: Path) -> None:
    """With control groups the kernel enforces the limit; without, each process is limited and the total is polled."""
    limits = Resources(memory_mb=96, pids=200, disk_mb=64)
    for unguarded in (("memory",), ()):
        async with (
            opened(tmp_path, *unguarded, defaults=limits) as runtime,
            contract.made(runtime, SPEC, resources=limits) as sandbox,
        ):
            alone = await attempt(sandbox, attempts.MEMORY, 256)
            together = await attempt(sandbox, attempts.MANY_MEMORIES, 40, 6)
            if unguarded:
                assert [json.loads(done.stdout) for done in (alone, together)] == ["all", "all"]
            else:
                assert alone.stdout in (b"", b'"refused"\n')
                assert together.stdout in (b"", b'"refused"\n')
            # While killed processes are still being torn down, a poll counts their memory and ends what runs beside them.
            usable = [await execute(sandbox, ["echo", "usable"])]
            while usable[-1].stdout != b"usable\n" and len(usable) < 100:
                usable.append(await execute(sandbox, ["echo", "usable"]))
            assert usable[-1].stdout == b"usable\n", [done.stdout for done in usable]


async def test_disk_bomb(tmp_path: Path) -> None:
    limits = Resources(disk_mb=24)
    written, outside = await outcome(tmp_path, ("disk",), attempts.DISK, 64, resources=limits)
    assert written > 64
    assert outside == []
    written, outside = await outcome(tmp_path, (), attempts.DISK, 64, resources=limits)
    assert 16 <= written <= 24
    assert outside == []


async def test_orphan_daemons(tmp_path: Path) -> None:
    token = secrets.token_hex(16)
    async with opened(tmp_path) as runtime, contract.made(runtime, SPEC) as sandbox:
        process = await sandbox.start([PYTHON, "-I", "-c", attempts.DAEMON, token])
        assert await process.wait() == 0
        await contract.sh(sandbox, "until [ -e lives ]; do sleep 0.05; done", seconds=30)
        await process.kill()
        assert contract.processes(token), "killing a command and its group does not kill its daemons"
        await sandbox.kill()
        assert contract.processes(token) == []


async def test_symlinks_in_artifacts(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    async with opened(tmp_path) as runtime, contract.made(runtime, SPEC) as sandbox:
        await contract.sh(
            sandbox,
            f"mkdir out; ln -s {outside} out/way; ln -s {outside}/secret out/leak; echo x > out/kept; mkfifo out/p",
        )
        artifact = await sandbox.get("/work/out")
    # A hand-made archive could contain a file behind its own symlink.
    with tarfile.open(fileobj=(edited := BytesIO()), mode="w") as tar:
        with tarfile.open(fileobj=BytesIO(artifact)) as original:
            for member in original:
                tar.addfile(member, original.extractfile(member) if member.isreg() else None)
        planted = tarfile.TarInfo("out/way/planted")
        tar.addfile(planted, BytesIO())
    with tarfile.open(fileobj=BytesIO(edited.getvalue())) as naive:
        naive.extractall(tmp_path / "naive", filter="fully_trusted")
    assert (outside / "planted").exists()
    assert (tmp_path / "naive/out/leak").read_text() == "secret"
    (outside / "planted").unlink()
    assert sorted(archives.unpack(edited.getvalue(), tmp_path / "safe")) == ["out/leak", "out/way"]
    assert not (outside / "planted").exists()
    assert (tmp_path / "safe/out/kept").read_text() == "x\n"
    assert not (tmp_path / "safe/out/leak").exists()


async def test_control_routes(tmp_path: Path) -> None:
    """A sandbox's listener serves only one session's provider routes; the control routes are on another listener."""
    ask = attempts.program("""
import http.client
def status(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0
print(json.dumps([status(int(sys.argv[1]), "/healthz"), status(int(sys.argv[1]), "/v1/policy"), status(int(sys.argv[2]), "/healthz")]))
""")
    answers = {}
    for unguarded in (("network",), ()):
        async with opened(tmp_path, *unguarded) as runtime, contract.made(runtime, SPEC) as sandbox:
            control = await asyncio.start_server(_respond(200), "127.0.0.1", 0)
            door = None
            if sandbox.listener is not None:
                sandbox.listener.setblocking(False)
                door = await asyncio.start_server(_respond(404), sock=sandbox.listener)
            port = control.sockets[0].getsockname()[1]
            done = await attempt(sandbox, ask, GATEWAY_PORT, port)
            answers[unguarded] = json.loads(done.stdout)
            for server in filter(None, (control, door)):
                server.close()
    assert answers[("network",)][2] == 200, "on the host's network the control listener is reachable"
    assert answers[()] == [404, 404, 0]


def _respond(status: int) -> Any:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
        await writer.drain()
        writer.close()

    return answer


async def test_capabilities(tmp_path: Path) -> None:
    free = await outcome(tmp_path, ("capabilities", "seccomp"), attempts.POWERS)
    assert free["powers"] & 1 << 21, "without the guard, root inside has CAP_SYS_ADMIN in its namespaces"
    assert [free[name] for name in ("mount", "chroot", "raw socket", "host name")] == [True] * 4
    held = await outcome(tmp_path, ("seccomp",), attempts.POWERS)
    assert held["powers"] & ~sum(1 << number for number in linux.CAPABILITIES.values()) == 0
    assert [held[name] for name in ("mount", "chroot", "raw socket", "host name")] == [False] * 4


async def test_system_calls(tmp_path: Path) -> None:
    free = await outcome(tmp_path, ("seccomp",), attempts.SYSTEM_CALLS)
    held = await outcome(tmp_path, (), attempts.SYSTEM_CALLS)
    assert free["user namespace"] == "done"
    assert free["keyring"] == "done"
    assert free["terminal"] in ("done", "EIO"), "newer kernels refuse it anyway"
    refusals = {"io_uring": "ENOSYS", "vsock": "EAFNOSUPPORT", "alg": "EAFNOSUPPORT"}
    assert held == {name: refusals.get(name, "EPERM") for name in held}
    changed = {name for name in held if held[name] != free[name]}
    assert changed >= {"user namespace", "keyring", "io_uring", "handle", "terminal"}, free


async def test_system_calls_by_other_numbers(tmp_path: Path) -> None:
    if platform.machine() != "x86_64":
        return  # other architectures have one set of numbers
    for unguarded in (("seccomp",), ()):
        async with opened(tmp_path, *unguarded) as runtime, contract.made(runtime, SPEC) as sandbox:
            done = await attempt(sandbox, attempts.OTHER_NUMBERS)
            lines = [json.loads(line) for line in done.stdout.splitlines()]
            if unguarded:
                assert len(lines) == 2 or done.code == 128 + 11, "a kernel without 32-bit calls faults"
            else:
                assert lines == [["x32", False]]
                assert done.code == 128 + 31, "killed by SIGSYS"


async def test_the_supervisors_own_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is a symlink to /proc/self/exe must not reach the supervisor's interpreter."""
    copy = tmp_path / "copied-interpreter"
    shutil.copytree(sys.base_prefix, copy, symlinks=True, ignore=_all_but_the_library)
    executable = copy / "bin" / Path(PYTHON).name
    assert executable.is_file()
    executable.chmod(0o777)  # writable, as a user's own interpreter is for a sandbox of that user
    for folder in (tmp_path, *tmp_path.parents[:3]):
        with contextlib.suppress(PermissionError):
            folder.chmod(folder.stat().st_mode | 0o055)
    monkeypatch.setattr(sys, "executable", str(executable))
    for unguarded in (("launch",), ()):
        async with opened(tmp_path, *unguarded) as runtime, contract.made(runtime, SPEC) as sandbox:
            await contract.sh(sandbox, "ln -s /proc/self/exe trap; echo '#!/proc/self/exe' > script; chmod +x script")
            watching = asyncio.create_task(attempt(sandbox, attempts.REWRITE, 4))
            for _ in range(10):
                for trap in ("/work/trap", "/work/script"):
                    with contextlib.suppress(TimeoutError):
                        await execute(sandbox, [trap, "-c", "import time; time.sleep(0.2)"], seconds=5)
                if watching.done():
                    break
            result = json.loads((await watching).stdout)
        if unguarded:
            # Kernels differ in whether a running executable can be written; in both cases the host's file was reached.
            assert result in ("writable", "ETXTBSY")
        else:
            assert result == "not reached"


def _all_but_the_library(folder: str, names: list[str]) -> set[str]:
    """Skip what a supervisor does not import."""
    large = {
        "site-packages",
        "test",
        "tests",
        "idlelib",
        "ensurepip",
        "share",
        "include",
        "__pycache__",
        "config-3.11-x86_64-linux-gnu",
    }
    return {name for name in names if name in large or name.endswith(".a")}
