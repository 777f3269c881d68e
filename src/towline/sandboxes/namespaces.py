"""Another process's namespaces from outside: files put in and taken out by a helper that enters them, and a guard."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

from towline.sandboxes.base import PathMissing, SandboxError
from towline.sandboxes.helping import finished

_HELPER = (
    "import sys; sys.path.insert(0, sys.argv[1]); from towline.sandboxes import namespace_helper; "
    "namespace_helper.serve(sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))"
)
_PACKAGES = str(Path(__file__).parents[2])
_COPYING = 1800.0
"""Seconds for files that may be gigabytes."""


def is_apart(pid: int) -> bool:
    """Whether a process is the first of a PID namespace that is not ours."""
    try:
        with open(f"/proc/{pid}/status") as file:
            numbers = next(line for line in file if line.startswith("NSpid:")).split()[1:]
        return len(numbers) > 1 and numbers[-1] == "1" and pid_namespace(pid) != pid_namespace(os.getpid())
    except (OSError, StopIteration):
        return False


def pid_namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")


def processes(pid: int) -> list[int]:
    """The live processes of a first process's namespace, but for itself. Never ours: `is_apart` is asked first."""
    if not is_apart(pid):
        return []
    wanted = pid_namespace(pid)
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != pid:
            with contextlib.suppress(OSError):
                if pid_namespace(int(name)) == wanted:
                    with open(f"/proc/{name}/stat", "rb") as file:
                        if file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
                            found.append(int(name))
    return found


def signal_inside(pid: int, first: int, number: signal.Signals) -> None:
    """Signal a process of a namespace; one that has its number by now and is not of it is left alone."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if is_apart(first) and pid_namespace(pid) == pid_namespace(first):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def wait_gone(pid: int, seconds: float) -> bool:
    """Wait for the end of a process that is not our child."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        waiting = select.poll()
        waiting.register(handle, select.POLLIN)
        return bool(waiting.poll(seconds * 1000))
    finally:
        os.close(handle)


async def put(pid: int, archive: bytes | Path, target: str, most: int) -> None:
    """Unpack a tar below a path inside."""
    with contextlib.ExitStack() as stack:
        source: int | IO[bytes] = subprocess.PIPE
        if isinstance(archive, Path):
            source = stack.enter_context(contextlib.closing(await asyncio.to_thread(open, archive, "rb")))
        helper = await _helper(stack, "put", pid, target, most, source)
        given = archive if isinstance(archive, bytes) else None
        _, errors = await finished(helper, "putting files", given, seconds=_COPYING)
    if helper.returncode:
        raise SandboxError(f"cannot put files at {target}: {errors.decode('utf-8', 'replace').strip()}")


async def get(pid: int, path: str, most: int) -> bytes:
    """A tar of a path inside."""
    with contextlib.ExitStack() as stack:
        helper = await _helper(stack, "get", pid, path, most, subprocess.DEVNULL)
        data, errors = await finished(helper, "getting files", seconds=_COPYING)
    if helper.returncode:
        said = errors.decode("utf-8", "replace").strip()
        missing = any(os.strerror(number) in said for number in (errno.ENOENT, errno.ENOTDIR))
        raise (PathMissing if missing else SandboxError)(f"cannot get {path}: {said}")
    return data


async def guard(pid: int, seconds: float | None) -> asyncio.subprocess.Process:
    """A process that ends another one when this process dies, closes its input, or `seconds` are over."""
    if not is_apart(pid):
        raise SandboxError(f"process {pid} is not the first of a namespace of its own")
    handle = os.pidfd_open(pid)
    try:
        limit = str(max(1, round(seconds)) if seconds is not None else 0)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _HELPER, _PACKAGES, "guard", "-", limit, str(handle), "-1"),
            pass_fds=(handle,),
            stdin=asyncio.subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
        )
    finally:
        os.close(handle)


async def _helper(
    stack: contextlib.ExitStack, action: str, pid: int, path: str, most: int, source: int | IO[bytes]
) -> asyncio.subprocess.Process:
    if not path.startswith("/") or "\x00" in path:
        raise SandboxError(f"{path!r} is not an absolute path inside the sandbox")
    try:
        spaces = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("user", "mnt")]
    except OSError as error:
        raise SandboxError(f"the sandbox has ended: {error.strerror}") from error
    for space in spaces:
        stack.callback(os.close, space)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _HELPER, _PACKAGES, action, path, str(most), *map(str, spaces)),
        pass_fds=spaces,
        stdin=source,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={},
    )
