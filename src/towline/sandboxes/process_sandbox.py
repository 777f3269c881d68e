"""One `process` sandbox: its folder, its keeper, and how inside paths are mapped. See `process.py` for the rules."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pwd
import signal
import socket
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar

from towline.sandboxes import archives, process_keeper, trees
from towline.sandboxes.base import (
    Change,
    ChangeKind,
    Fate,
    PathMissing,
    SandboxError,
    Spec,
    Unsupported,
)
from towline.sandboxes.helping import SECONDS, within
from towline.sandboxes.pipes import given_to

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FOLDERS = ("/root", "/tmp")
"""Made in every sandbox."""


class ProcessProcess:
    """A live command."""

    def __init__(
        self,
        sandbox: ProcessSandbox,
        number: int,
        pipes: tuple[asyncio.StreamWriter, asyncio.StreamReader, asyncio.StreamReader],
    ):
        self._sandbox = sandbox
        self._number = number
        self.stdin, self.stdout, self.stderr = pipes
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self.code)

    async def kill(self) -> None:
        if not self.code.done():
            self._sandbox.send("signal", self._number, int(signal.SIGKILL))


class ProcessSandbox:
    """One folder and one keeper process. Made by `ProcessRuntime.create`."""

    def __init__(self, name: str, spec: Spec, folder: Path, lock: int | None = None):
        """`lock`: the node's, which the keeper inherits, so that the next node waits until it has ended."""
        self.id = name
        self._lock = lock
        self.spec = spec
        self.listener: socket.socket | None = None
        """None: the gateway is reached by its own address."""
        self.folder = folder
        self.root = folder / "root"
        self.gone = False
        self._numbers = 0
        self._starting: dict[int, asyncio.Future[None]] = {}
        self._live: dict[int, ProcessProcess] = {}
        self._killing: dict[int, asyncio.Future[int]] = {}
        self._keeper: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None

    @property
    def alive(self) -> bool:
        """Whether it can be used: not destroyed, and its keeper lives."""
        return not self.gone and self._control is not None

    async def fate(self) -> Fate:
        return Fate(not self.gone and self._control is None)

    def outside(self, path: str) -> str:
        """Where an inside path is on the host."""
        return str(self.root / _relative(path))

    async def open(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._keeper = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-I",
                    "-S",
                    process_keeper.__file__,
                    str(theirs.fileno()),
                    str(self.spec.seconds or 0),
                ),
                pass_fds=(theirs.fileno(), *(() if self._lock is None else (self._lock,))),
                env={},
                cwd="/",
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise SandboxError(f"cannot start the keeper of a process sandbox: {error}") from error
        finally:
            theirs.close()
        ours.setblocking(False)
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._hear)

    async def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> ProcessProcess:
        check_user(user or "")
        if not command:
            raise SandboxError("a command needs at least a program")
        folder = self.outside(cwd or self.spec.workdir)
        asked = {
            "command": [self._mapped(word) for word in command],
            "env": self._environment(dict(env or {})),
            "cwd": folder,
        }
        self._numbers += 1
        number = self._numbers
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            request = os.memfd_create("request")
            stack.callback(os.close, request)
            os.write(request, json.dumps(asked).encode("utf-8", "surrogateescape"))
            theirs, ours = [], []
            for reading in (True, False, False):
                pair = os.pipe()
                theirs.append(pair[0] if reading else pair[1])
                ours.append(pair[1] if reading else pair[0])
            for file in theirs:
                stack.callback(os.close, file)
            process = ProcessProcess(self, number, await _streams(ours))
            started = self._starting[number] = loop.create_future()
            self._live[number] = process
            self.send("start", number, files=[request, *theirs])
        try:
            await started
        except SandboxError:
            self._live.pop(number, None)
            raise
        finally:
            self._starting.pop(number, None)
        return process

    async def put(self, archive: bytes | Path, target: str) -> None:
        try:
            # Links may lead anywhere and are followed: commands here can write everywhere anyway.
            await asyncio.to_thread(archives.unpack, archive, self.outside(target), links="any", follow=True)
        except OSError as error:
            raise SandboxError(f"cannot put files at {target}: {error}") from error

    async def get(self, path: str, *, most: int = 256 * 1024 * 1024) -> bytes:
        return await asyncio.to_thread(self._collect, path, most)

    async def diff(self) -> list[Change]:
        """Everything in the folder but mounts: the root was empty, so all of it was added."""
        return await asyncio.to_thread(self._changes)

    async def kill(self) -> None:
        if self.gone or self._control is None:
            return
        self._numbers += 1
        done = self._killing[self._numbers] = asyncio.get_running_loop().create_future()
        self.send("kill", self._numbers)
        left = await within(SECONDS, done, f"the processes of sandbox {self.id} did not end")
        if left:
            raise SandboxError(f"{left} processes of sandbox {self.id} would not die; look for ones in state D with ps")

    async def destroy(self) -> None:
        if self.gone:
            return
        self.gone = True
        self._hang_up()
        if self._keeper is not None:
            await within(SECONDS, self._keeper.wait(), f"the keeper of sandbox {self.id} did not end")
        await asyncio.to_thread(trees.remove, self.folder)

    def send(self, *request: object, files: Sequence[int] = ()) -> None:
        if self._control is None:
            raise SandboxError(f"sandbox {self.id} has ended: destroyed, out of time, or its keeper was killed")
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], list(files))
        except OSError as error:
            raise SandboxError(f"sandbox {self.id} does not answer: {error}") from error

    def _hear(self) -> None:
        """Answers of the keeper; its end is the end of every command."""
        assert self._control is not None
        while True:
            try:
                data = self._control.recv(65_536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._hang_up()
                return
            what, number, *rest = json.loads(data)
            if what == "started":
                _settle(self._starting.get(number), None)
            elif what == "failed":
                _fail(self._starting.get(number), f"cannot start a command in sandbox {self.id}: {rest[0]}")
            elif what == "ended":
                process = self._live.pop(number, None)
                _settle(process.code if process else None, rest[0])
            elif what == "killed":
                _settle(self._killing.pop(number, None), rest[0])

    def _hang_up(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        for starting in self._starting.values():
            _fail(starting, f"sandbox {self.id} ended while a command was being started")
        for process in self._live.values():
            _settle(process.code, 128 + signal.SIGKILL)
        for killing in self._killing.values():
            _settle(killing, 0)
        self._live.clear()
        self._killing.clear()

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        base = {"PATH": PATH, "HOME": "/root", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
        merged = base | dict(self.spec.env) | dict(env)
        mapped = {name: ":".join(self._mapped(word) for word in value.split(":")) for name, value in merged.items()}
        return mapped | {"TOWLINE_ROOT": str(self.root)}

    def _mapped(self, word: str) -> str:
        if not word.startswith("/") or len(word) > 4096 or "\x00" in word:
            return word
        inside = self.root / _relative(word)
        try:
            if os.path.lexists(inside):
                return str(inside)
            new = not os.path.lexists(word) and inside.parent != self.root and inside.parent.is_dir()
            return str(inside) if new else word
        except OSError:
            return word

    def _collect(self, path: str, most: int) -> bytes:
        outside = self.outside(path)
        made = io.BytesIO()
        try:
            with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
                archives.add_tree(tar, os.path.basename(_relative(path)) or ".", outside, most)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise PathMissing(f"cannot get {path}: {error}") from error
        except (OSError, archives.ArchiveError) as error:
            raise SandboxError(f"cannot get {path}: {error}") from error
        return made.getvalue()

    def _changes(self) -> list[Change]:
        mounts = {_relative(mount.target) for mount in self.spec.mounts}
        given = {_relative(path) for path in (*FOLDERS, self.spec.workdir)} | mounts
        known = {"/".join(path.split("/")[:depth]) for path in given for depth in range(1, path.count("/") + 2)}
        changes: list[Change] = []
        for folder, folders, files in os.walk(self.root):
            inside = os.path.relpath(folder, self.root)
            at = "" if inside == "." else inside + "/"
            new = [at + name for name in folders + files if at + name not in known]
            changes += [Change("/" + path, ChangeKind.ADDED) for path in new]
            folders[:] = [name for name in folders if at + name not in mounts]
        return sorted(changes, key=lambda change: change.path)


def check_user(user: str) -> None:
    uid = os.getuid()
    names = {"", str(uid)}
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(uid).pw_name)
    if user not in names:
        raise Unsupported(
            f"process sandboxes run as the node's own user, not as {user!r}: use bubblewrap, docker or apptainer"
        )


def _relative(path: str) -> str:
    """An absolute inside path without its leading slash; dots cannot lead out."""
    if not path.startswith("/"):
        raise SandboxError(f"{path!r} is not an absolute path inside the sandbox")
    parts: list[str] = []
    for part in PurePosixPath(path).parts[1:]:
        if part == "..":
            del parts[-1:]
        else:
            parts.append(part)
    return "/".join(parts)


async def _streams(ours: Sequence[int]) -> tuple[asyncio.StreamWriter, asyncio.StreamReader, asyncio.StreamReader]:
    """Our ends of a command's pipes."""
    loop = asyncio.get_running_loop()
    files = [given_to(loop, ours[0], "wb"), *(given_to(loop, file, "rb") for file in ours[1:])]
    unused, out, errors = asyncio.StreamReader(), asyncio.StreamReader(), asyncio.StreamReader()
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.StreamReaderProtocol(unused), files[0])
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(out), files[1])
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(errors), files[2])
    return asyncio.StreamWriter(transport, protocol, None, loop), out, errors


_T = TypeVar("_T")


def _settle(future: asyncio.Future[_T] | None, value: _T) -> None:
    if future is not None and not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[None] | None, reason: str) -> None:
    if future is not None and not future.done():
        future.set_exception(SandboxError(reason))
