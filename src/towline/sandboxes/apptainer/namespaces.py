"""Another process's namespaces from outside: files in and out by a helper that enters them, and a guard."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import subprocess
from pathlib import Path
from typing import IO

from towline.sandboxes import linux
from towline.sandboxes.base import PathMissing, SandboxError
from towline.sandboxes.subprocesses import communicate, isolated_python, open_pidfd

_PROGRAM = (
    "from towline.sandboxes.apptainer import namespace_helper; "
    "namespace_helper.serve(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))"
)
_COPY_TIMEOUT = 1800.0
"""Seconds; the files may be gigabytes."""


def is_namespace_init(pid: int) -> bool:
    """Whether a process is the init of a PID namespace that is not ours."""
    try:
        with open(f"/proc/{pid}/status") as file:
            numbers = next(line for line in file if line.startswith("NSpid:")).split()[1:]
        return len(numbers) > 1 and numbers[-1] == "1" and pid_namespace(pid) != pid_namespace(os.getpid())
    except (OSError, StopIteration):
        return False


def pid_namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")


def processes(pid: int) -> list[int]:
    """The live processes of an init's namespace, except the init. Never our own namespace."""
    return [found for found, _ in linux.live_processes() if found != pid and shares_namespace(found, pid)]


def shares_namespace(pid: int, init: int) -> bool:
    """Whether a process is in the PID namespace of an init that is not ours."""
    try:
        return is_namespace_init(init) and pid_namespace(pid) == pid_namespace(init)
    except OSError:
        return False


def wait_gone(pid: int, seconds: float) -> bool:
    """Wait until a process that is not our child has exited."""
    with contextlib.suppress(ProcessLookupError), open_pidfd(pid) as pidfd:
        waiting = select.poll()
        waiting.register(pidfd, select.POLLIN)
        return bool(waiting.poll(seconds * 1000))
    return True


async def put(pid: int, archive: bytes | Path, target: str, max_bytes: int) -> None:
    """Unpack a tar below a path inside."""
    with contextlib.ExitStack() as stack:
        source: int | IO[bytes] = subprocess.PIPE
        if isinstance(archive, Path):
            source = stack.enter_context(contextlib.closing(await asyncio.to_thread(open, archive, "rb")))
        helper = await _helper(stack, "put", pid, target, max_bytes, source)
        stdin = archive if isinstance(archive, bytes) else None
        _, stderr = await communicate(helper, "putting files", stdin, seconds=_COPY_TIMEOUT)
    if helper.returncode:
        raise SandboxError(f"cannot put files at {target}: {stderr.decode('utf-8', 'replace').strip()}")


async def get(pid: int, path: str, max_bytes: int) -> bytes:
    """A tar of a path inside."""
    with contextlib.ExitStack() as stack:
        helper = await _helper(stack, "get", pid, path, max_bytes, subprocess.DEVNULL)
        data, stderr = await communicate(helper, "getting files", seconds=_COPY_TIMEOUT)
    if helper.returncode:
        reason = stderr.decode("utf-8", "replace").strip()
        missing = any(os.strerror(number) in reason for number in (errno.ENOENT, errno.ENOTDIR))
        raise (PathMissing if missing else SandboxError)(f"cannot get {path}: {reason}")
    return data


async def guard(pid: int, seconds: float | None) -> asyncio.subprocess.Process:
    """A process that kills another one when this process dies, closes its stdin, or `seconds` are over."""
    if not is_namespace_init(pid):
        raise SandboxError(f"process {pid} is not the init of its own PID namespace")
    limit = max(1, round(seconds)) if seconds is not None else 0
    with open_pidfd(pid) as pidfd:
        return await asyncio.create_subprocess_exec(
            *isolated_python(_PROGRAM, "guard", "-", limit, pidfd, -1),
            pass_fds=(pidfd,),
            stdin=asyncio.subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
        )


async def _helper(
    stack: contextlib.ExitStack, action: str, pid: int, path: str, max_bytes: int, source: int | IO[bytes]
) -> asyncio.subprocess.Process:
    if not path.startswith("/") or "\x00" in path:
        raise SandboxError(f"{path!r} is not an absolute path inside the sandbox")
    try:
        namespaces = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("user", "mnt")]
    except OSError as error:
        raise SandboxError(f"the sandbox has ended: {error.strerror}") from error
    for namespace in namespaces:
        stack.callback(os.close, namespace)
    return await asyncio.create_subprocess_exec(
        *isolated_python(_PROGRAM, action, path, max_bytes, *namespaces),
        pass_fds=namespaces,
        stdin=source,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={},
    )
