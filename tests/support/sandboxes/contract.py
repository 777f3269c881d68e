"""The contract of every sandbox runtime, as checks that each runtime's tests run.

A check takes an open runtime and a spec to vary, creates its own sandboxes and leaves none. It needs a root with a POSIX
shell, `cat`, `sleep`, `head`, `tr` and `id`, which busybox has. `CHECKS` apply to every runtime; `LIMITS` to those that
claim to enforce the limit of that name; `ISOLATION` to those that isolate.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from towline.sandboxes import linux
from towline.sandboxes.base import (
    GATEWAY_PORT,
    ChangeKind,
    Mount,
    PathChange,
    PathMissing,
    Runtime,
    Sandbox,
    SandboxError,
    SandboxSpec,
    execute,
    sandbox_health,
)
from towline.sandboxes.files import archives
from towline.schema import Network, Resources

Check = Callable[[Runtime, SandboxSpec, Path], Awaitable[None]]


@contextlib.asynccontextmanager
async def made(runtime: Runtime, spec: SandboxSpec, **changes: object) -> AsyncIterator[Sandbox]:
    """A sandbox of a spec with changes, destroyed at the end."""
    spec = dataclasses.replace(spec, **changes)  # type: ignore[arg-type]
    await runtime.prepare(spec)
    sandbox = await runtime.create(spec)
    try:
        yield sandbox
    finally:
        await sandbox.destroy()


async def sh(sandbox: Sandbox, script: str, **options: object) -> str:
    """The stdout of a script, which must succeed."""
    done = await execute(sandbox, ["sh", "-c", script], **options)  # type: ignore[arg-type]
    assert done.ok, (done.code, done.text)
    return done.stdout.decode()


def processes(token: str) -> list[int]:
    """Processes on this machine that have a token in their arguments."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
                if token.encode() in file.read() and int(name) != os.getpid():
                    found.append(int(name))
    return found


async def files_go_in_and_come_out(runtime: Runtime, spec: SandboxSpec, tmp_path: Path) -> None:
    """Put a file, run a command that reads it and writes another one, get that back, see it in the diff."""
    async with made(runtime, spec) as sandbox:
        await sandbox.put(
            archives.pack({"in/question": b"6 * 7", "tool": b"#!/bin/sh\necho tool $1\n"}, modes={"tool": 0o755}),
            "/work",
        )
        tar = tmp_path / "more.tar"
        tar.write_bytes(archives.pack({"more": bytes(3_000_000)}))
        await sandbox.put(tar, "/work/deep/er")
        assert (
            await sh(sandbox, "echo $(($(cat in/question))) > answer; ./tool 1; head -c 3 deep/er/more | tr '\\0' x")
            == "tool 1\nxxx"
        )
        assert archives.read_file(await sandbox.get("/work/answer"), "answer") == b"42\n"
        names = set(archives.member_names(await sandbox.get("/work")))
        assert {"work/in/question", "work/tool", "work/answer", "work/deep/er/more"} <= names
        changes = await sandbox.diff()
        assert PathChange("/work/answer", ChangeKind.ADDED) in changes
        assert PathChange("/work/in/question", ChangeKind.ADDED) in changes
        assert [change.path for change in changes] == sorted({change.path for change in changes})
        for missing in ("/work/nothing", "/work/answer/nothing"):
            with pytest.raises(PathMissing):
                await sandbox.get(missing)
        with pytest.raises(SandboxError):
            await sandbox.get("/work/deep", max_bytes=1_000_000)
    # The next sandbox starts clean.
    async with made(runtime, spec) as sandbox:
        assert "/work/answer" not in {change.path for change in await sandbox.diff()}
        with pytest.raises(SandboxError):
            await sandbox.get("/work/answer")


async def commands_have_streams_exit_codes_and_their_own_environment(
    runtime: Runtime, spec: SandboxSpec, tmp_path: Path
) -> None:
    os.environ["TOWLINE_TEST_SECRET"] = "of the node"
    try:
        async with made(runtime, spec, env=(("OF_SPEC", "spec"), ("BOTH", "spec"))) as sandbox:
            process = await sandbox.start(["sh", "-c", 'read line; echo "got $line"; echo oops >&2; cat; exit 7'])
            process.stdin.write(b"one\n")
            await process.stdin.drain()
            assert await asyncio.wait_for(process.stdout.readline(), 20) == b"got one\n", "while it runs"
            process.stdin.write(b"two\n" * 100_000)
            process.stdin.close()
            rest, errors = await asyncio.gather(process.stdout.read(), process.stderr.read())
            assert (len(rest), errors, await process.wait()) == (400_000, b"oops\n", 7)
            assert await process.wait() == 7

            seen = await sh(
                sandbox, 'echo "$OF_SPEC $BOTH $OF_CALL [$TOWLINE_TEST_SECRET]"', env={"BOTH": "call", "OF_CALL": "x y"}
            )
            assert seen == "spec call x y []\n"
            await sandbox.put(archives.pack({"here": b""}), "/some/where")
            assert await sh(sandbox, "echo *", cwd="/some/where") == "here\n"
            assert (await execute(sandbox, ["sh", "-c", "kill -9 $$"])).code == 137
            slow = await execute(sandbox, ["sh", "-c", "echo begun; sleep 60"], seconds=1.0)
            assert (slow.timed_out, slow.stdout, slow.code) == (True, b"begun\n", 137)
            cut = await execute(sandbox, ["sh", "-c", "head -c 100000 /dev/zero"], max_bytes=1000)
            assert (cut.code, len(cut.stdout), cut.truncated) == (0, 1000, True)
            no_such = None
            with contextlib.suppress(SandboxError):
                no_such = await execute(sandbox, ["no-such-program"])
            assert no_such is None or no_such.code in (126, 127, 255), (
                "refused, or the exit code of a shell or of Apptainer"
            )
    finally:
        del os.environ["TOWLINE_TEST_SECRET"]


async def kill_ends_everything_and_the_files_stay(runtime: Runtime, spec: SandboxSpec, tmp_path: Path) -> None:
    token = "token" + secrets.token_hex(8)
    loop = f"sh -c 'while :; do sleep 1; done' {token}"
    async with made(runtime, spec) as sandbox:
        # A child, a daemon in its own session, and an orphan.
        await sh(
            sandbox,
            f"echo kept > file; {loop} >/dev/null 2>&1 & setsid {loop} >/dev/null 2>&1 & (({loop} >/dev/null 2>&1 &) &)",
        )
        running = await sandbox.start(["sh", "-c", f"{loop}; echo never"])
        for _ in range(100):
            if len(processes(token)) >= 4:
                break
            await asyncio.sleep(0.05)
        assert len(processes(token)) >= 4, (processes(token), running)
        await sandbox.kill()
        assert processes(token) == []
        assert await asyncio.wait_for(running.wait(), 10) == 137
        assert archives.read_file(await sandbox.get("/work/file"), "") == b"kept\n"
        assert await sh(sandbox, "cat file") == "kept\n"
        await sh(sandbox, f"setsid {loop} >/dev/null 2>&1 &")
    assert processes(token) == []
    await sandbox.destroy()


async def mounts_are_seen_and_their_sources_stay(runtime: Runtime, spec: SandboxSpec, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        await _mounts_are_seen(runtime, spec, Path(name))


async def _mounts_are_seen(runtime: Runtime, spec: SandboxSpec, source: Path) -> None:
    os.chmod(source, 0o755)
    (source / "bin").mkdir()
    (source / "bin/tool").write_text("#!/bin/sh\necho installed\n")
    (source / "bin/tool").chmod(0o755)
    mounts = (Mount(source, "/opt/towline/tool"), Mount(source, "/opt/towline/loose", writable=True))
    async with made(runtime, spec, mounts=mounts) as sandbox:
        assert (await execute(sandbox, ["/opt/towline/tool/bin/tool"])).stdout == b"installed\n"
        beside = await execute(sandbox, ["cp", "/opt/towline/tool/bin/tool", "/opt/towline/loose/copy"])
        assert beside.ok, beside.text
        assert (await execute(sandbox, ["cat", "/opt/towline/loose/copy"])).stdout.startswith(b"#!/bin/sh")
        if runtime.facts.isolated:
            assert not (await execute(sandbox, ["cp", "/opt/towline/loose/copy", "/opt/towline/tool/copy"])).ok
        assert not any(
            change.path.startswith("/opt/towline/") and change.path.count("/") > 3 for change in await sandbox.diff()
        )
    assert (os.listdir(source), os.listdir(source / "bin")) == (["bin"], ["tool"])


async def the_gateway_is_reached_and_nothing_else(runtime: Runtime, spec: SandboxSpec, tmp_path: Path) -> None:
    host = socket.create_server(("127.0.0.1", 0))
    port = host.getsockname()[1]
    async with made(runtime, spec, network=Network.GATEWAY) as sandbox:
        assert sandbox.listener is not None
        sandbox.listener.setblocking(False)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 8\r\n\r\ngateway\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, sock=sandbox.listener)
        try:
            output = await sh(sandbox, f"busybox wget -q -O - http://127.0.0.1:{GATEWAY_PORT}/", seconds=30)
            assert output == "gateway\n"
            closed = await execute(
                sandbox, ["busybox", "wget", "-q", "-T", "3", "-O", "-", f"http://127.0.0.1:{port}/"], seconds=30
            )
            assert not closed.ok
            away = await execute(
                sandbox, ["busybox", "wget", "-q", "-T", "3", "-O", "-", "http://192.0.2.1/"], seconds=30
            )
            assert not away.ok
            assert not closed.timed_out
            assert not away.timed_out, "refused immediately: there is no route"
        finally:
            server.close()
    host.close()


async def capabilities_are_few(runtime: Runtime, spec: SandboxSpec, tmp_path: Path) -> None:
    async with made(runtime, spec) as sandbox:
        status = dict(
            line.split(":\t", 1) for line in (await sh(sandbox, "cat /proc/self/status")).splitlines() if ":\t" in line
        )
        kept = sum(1 << number for number in linux.CAPABILITIES.values())
        assert int(status["CapEff"], 16) & ~kept == 0, "only what root needs for its own files"
        assert int(status["CapBnd"], 16) & ~kept == 0
        assert status["NoNewPrivs"] == "1"
        assert not (await execute(sandbox, ["sh", "-c", "echo x > /proc/sys/kernel/hostname"])).ok
    async with made(runtime, spec, network=Network.NONE) as sandbox:
        assert sandbox.listener is None
        devices = await sh(sandbox, "cat /proc/net/dev")
        assert [line.split(":")[0].strip() for line in devices.splitlines()[2:]] in (["lo"], [])


async def memory_is_bounded(runtime: Runtime, spec: SandboxSpec, tmp_path: Path) -> None:
    limited = spec.resources.model_copy(update={"memory_mb": 64})
    eat = "x=$(head -c 200000000 /dev/zero | tr '\\0' a); echo alive ${#x}"
    async with made(runtime, spec, resources=limited) as sandbox:
        done = await execute(sandbox, ["sh", "-c", eat], seconds=60)
        assert b"alive" not in done.stdout
        assert not done.timed_out
        health = await sandbox_health(sandbox, killed=done.code == 137)
        assert not health.ended
        assert health.oom_kills >= 1
        await sandbox.kill()
        assert await sh(sandbox, "echo lives") == "lives\n"


async def processes_are_bounded(runtime: Runtime, spec: SandboxSpec, tmp_path: Path) -> None:
    token = "token" + secrets.token_hex(8)
    bomb = f"i=0; while [ $i -lt 60 ]; do sh -c 'sleep 60' {token} & i=$((i+1)); done; echo all"
    async with made(runtime, spec, resources=spec.resources.model_copy(update={"pids": 24})) as sandbox:
        done = await execute(sandbox, ["sh", "-c", bomb], seconds=20)
        assert b"all" not in done.stdout
        assert len(processes(token)) <= 24
        await sandbox.kill()
        assert processes(token) == []


async def the_disk_is_bounded(runtime: Runtime, spec: SandboxSpec, tmp_path: Path) -> None:
    async with made(runtime, spec, resources=spec.resources.model_copy(update={"disk_mb": 16})) as sandbox:
        for place in ("/work", "/tmp", "/home", "/var/big"):
            await execute(sandbox, ["sh", "-c", f"mkdir -p {place}"])
            done = await execute(
                sandbox,
                ["sh", "-c", f"head -c 64000000 /dev/zero > {place}/big && echo whole; rm -f {place}/big"],
                seconds=60,
            )
            assert b"whole" not in done.stdout, place
        await sh(sandbox, "head -c 1000000 /dev/zero > /work/small")


async def time_is_bounded(runtime: Runtime, spec: SandboxSpec, tmp_path: Path) -> None:
    token = "token" + secrets.token_hex(8)
    async with made(runtime, spec, seconds=2.0) as sandbox:
        process = await sandbox.start(["sh", "-c", "while :; do sleep 1; done", token])
        assert await asyncio.wait_for(process.wait(), 60) != 0
        assert processes(token) == []


CHECKS: list[Check] = [
    files_go_in_and_come_out,
    commands_have_streams_exit_codes_and_their_own_environment,
    kill_ends_everything_and_the_files_stay,
    mounts_are_seen_and_their_sources_stay,
]
ISOLATION: list[Check] = [the_gateway_is_reached_and_nothing_else, capabilities_are_few]
LIMITS: dict[str, Check] = {
    "memory_mb": memory_is_bounded,
    "pids": processes_are_bounded,
    "disk_mb": the_disk_is_bounded,
    "seconds": time_is_bounded,
}
SMALL = Resources(memory_mb=256, pids=128, disk_mb=64)
"""Limits for a spec whose runtime enforces them."""
