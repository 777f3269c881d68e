"""The steps of a Dockerfile, run in a sandbox, and what they changed taken out as a layer.

The layer is written as the kernel's overlay reads it: changed files with their owners and modes, the folders above them
as they are inside, and a device 0/0 for each path that was deleted (which any user may make since Linux 5.8). What comes
out of the sandbox is a tar that its own `tar` wrote; it is unpacked like any other that is not trusted.
"""

from __future__ import annotations

import asyncio
import io
import os
import stat
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from towline.sandboxes import archives, root_tar, trees
from towline.sandboxes.base import Change, ChangeKind, Runtime, Sandbox, Spec, execute
from towline.sandboxes.build_context import Context
from towline.sandboxes.dockerfile_plan import Copy, Folder, Plan, Run, Step
from towline.sandboxes.dockerfile_syntax import DockerfileError
from towline.sandboxes.root_tar import Owners

Say = Callable[[str], None]
_NOT_FILES = ("/dev", "/proc", "/sys")
_SCRATCH = "/.towline-build"
_SHOWN = 2000
"""Characters of a failed step's output that are told."""
_MOST_LAYER = 64 << 30
_WORDS = {Run: "RUN", Copy: "COPY", Folder: "WORKDIR"}
_BATCH = 500
_ARGUMENTS = 60_000
"""Characters of one command's arguments."""


async def run_steps(
    runtime: Runtime, spec: Spec, plan: Plan, files: Context, layer: Path, seconds: float, say: Say | None
) -> dict[str, Any]:
    """Fill `layer`; what a `Built` says besides."""
    notes = list(plan.notes)
    await runtime.prepare(spec)
    sandbox = await runtime.create(spec)
    try:
        steps = _Steps(sandbox, files, seconds)
        for step in plan.steps:
            if say is not None:
                say(f"line {step.line}: {_WORDS[type(step)]}")
            await steps.do(step)
        # A daemon that a step left would still write while the layer is read.
        await sandbox.kill()
        notes += await _take_out(sandbox, layer)
    finally:
        await sandbox.destroy()
    return {"env": plan.env, "workdir": plan.workdir, "user": plan.user, "notes": notes}


class _Steps:
    def __init__(self, sandbox: Sandbox, files: Context, seconds: float):
        self._sandbox = sandbox
        self._files = files
        self._until = time.monotonic() + seconds

    async def do(self, step: Step) -> None:
        match step:
            case Folder():
                await self._sandbox.put(archives.pack({}), step.path)
            case Run():
                await self._run(step)
            case Copy():
                await self._copy(step)

    async def _run(self, step: Run) -> None:
        command = list(step.command)
        if step.script is not None:
            await self._sandbox.put(archives.pack({"script": step.script.encode()}, modes={"script": 0o755}), _SCRATCH)
            command = [f"{_SCRATCH}/script"]
        done = await execute(
            self._sandbox,
            command,
            env=step.env,
            cwd=step.cwd,
            user=step.user or None,
            seconds=max(self._until - time.monotonic(), 0.01),
        )
        if not done.ok:
            why = "ran out of time" if done.timed_out else f"ended with {done.code}"
            raise DockerfileError(f"Dockerfile line {step.line}: RUN {why}: {done.text[-_SHOWN:].strip()}")

    async def _copy(self, step: Copy) -> None:
        with tempfile.TemporaryFile() as file:
            folder, paths, unpacked = await self._gather(step, file)
            if paths:
                await self._put(file, folder)
        for archive in unpacked:
            with tempfile.TemporaryFile() as file:
                await asyncio.to_thread(_plain_tar, archive, file)
                await self._put(file, step.target)
        for start in range(0, len(paths) if step.chown else 0, _BATCH):
            batch = [f"{folder.rstrip('/')}/{path}" for path in paths[start : start + _BATCH]]
            done = await execute(self._sandbox, ["chown", "-h", step.chown, "--", *batch])
            if not done.ok:
                raise DockerfileError(
                    f"Dockerfile line {step.line}: --chown={step.chown}: {done.text[-_SHOWN:].strip()}"
                )

    async def _put(self, file: IO[bytes], folder: str) -> None:
        # By its place among open files: it has no other name, and goes away by itself.
        await self._sandbox.put(Path(f"/proc/self/fd/{file.fileno()}"), folder)

    async def _gather(self, step: Copy, out: IO[bytes]) -> tuple[str, list[str], list[Path]]:
        """Write a tar of what a COPY brings: the folder that it belongs in, its names, and archives to unpack."""
        matches: list[str] = []
        for source in step.sources:
            found = self._files.match(source)
            if not found:
                raise DockerfileError(
                    f"Dockerfile line {step.line}: there is no {source!r} in {self._files.folder} to copy"
                )
            matches += found
        single = len(matches) + len(step.documents) == 1
        is_file = single and not step.target.endswith("/") and not (matches and self._files.is_folder(matches[0]))
        if is_file and not await self._is_folder(step.target):
            folder, _, name = step.target.rpartition("/")
            return await asyncio.to_thread(self._pack, step, matches, out, folder or "/", name)
        return await asyncio.to_thread(self._pack, step, matches, out, step.target, "")

    def _pack(
        self, step: Copy, matches: list[str], out: IO[bytes], folder: str, name: str
    ) -> tuple[str, list[str], list[Path]]:
        names: list[str] = []
        unpacked: list[Path] = []
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for document, text in step.documents:
                names.append(name or document)
                info = _info(names[-1], stat.S_IFREG | (step.chmod or 0o644))
                data = text.encode("utf-8", "surrogateescape")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            for match in matches:
                if self._files.is_folder(match):
                    entries = [(below, self._files.folder / match / below) for below in self._files.below(match)]
                else:
                    # The source itself may be a link; it is followed, but never out of the folder.
                    path = trees.within(self._files.folder, match)
                    if step.unpack and path.is_file() and tarfile.is_tarfile(path):
                        unpacked.append(path)
                        continue
                    entries = [(name or os.path.basename(match), path)]
                for below, path in entries:
                    _add(tar, below, path, step.chmod)
                    names.append(below)
        out.seek(0)
        return folder, names, unpacked

    async def _is_folder(self, path: str) -> bool:
        done = await execute(self._sandbox, ["/bin/sh", "-c", 'test -d "$1"', "sh", path])
        return done.ok


async def _take_out(sandbox: Sandbox, layer: Path) -> list[str]:
    """Write what is not as the root had it; notes about what cannot be kept."""
    changes = [change for change in await sandbox.diff() if not _outside(change)]
    deleted = [change.path for change in changes if change.kind is ChangeKind.DELETED]
    kept = {change.path for change in changes} - set(deleted)
    above = {path[:at] for path in (*kept, *deleted) for at in range(1, len(path)) if path[at] == "/"}
    listed = sorted(kept | above)
    await asyncio.to_thread(_mark_deleted, layer, deleted)
    if not listed:
        return []
    with tempfile.NamedTemporaryFile() as file:
        for batch in _batches(listed):
            await _pack_inside(sandbox, batch, file)
        owners = Owners() if os.geteuid() == 0 else None
        made = await asyncio.to_thread(
            root_tar.unpack, Path(file.name), layer, most=_MOST_LAYER, owners=owners, joined=True
        )
    if made.others and owners is None:
        return [
            f"{made.others} files belong to other users than root; without root on the host, they are root's in the layer"
        ]
    return []


def _batches(paths: Sequence[str]) -> Iterator[list[str]]:
    """As many paths at a time as one command can be given."""
    batch: list[str] = []
    length = 0
    for path in paths:
        batch.append("." + path)
        length += len(path) + 2
        if length > _ARGUMENTS:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


async def _pack_inside(sandbox: Sandbox, names: Sequence[str], file: Any) -> None:
    """Add a tar of some files to a file; tars one after the other are read as one."""
    process = await sandbox.start(["tar", "-C", "/", "-c", "-f", "-", "--no-recursion", "--", *names], cwd="/")
    process.stdin.close()

    async def save() -> None:
        while chunk := await process.stdout.read(1 << 20):
            await asyncio.to_thread(file.write, chunk)

    _, errors, code = await asyncio.gather(save(), process.stderr.read(), process.wait())
    file.flush()
    if code != 0:
        raise DockerfileError(
            f"Dockerfile: the layer cannot be taken out, which needs `tar` in the root ({code}): "
            + errors[-_SHOWN:].decode("utf-8", "replace").strip()
        )


def _outside(change: Change) -> bool:
    return any(change.path == place or change.path.startswith(place + "/") for place in (*_NOT_FILES, _SCRATCH))


def _mark_deleted(layer: Path, deleted: Sequence[str]) -> None:
    for path in deleted:
        place = trees.within(layer, path, last=False)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(place, stat.S_IFCHR, os.makedev(0, 0))


def _info(name: str, mode: int, mtime: float = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = stat.S_IMODE(mode) & 0o777, int(mtime)
    return info


def _add(tar: tarfile.TarFile, name: str, path: Path, mode: int | None) -> None:
    about = os.lstat(path)
    info = _info(name, about.st_mode, about.st_mtime)
    if stat.S_ISLNK(about.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
        tar.addfile(info)
        return
    if mode is not None:
        # A folder stays one that can be entered by whoever may read it.
        info.mode = mode | ((mode & 0o444) >> 2 if stat.S_ISDIR(about.st_mode) else 0)
    if stat.S_ISDIR(about.st_mode):
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
    else:
        with open(path, "rb") as file:
            info.size = os.fstat(file.fileno()).st_size
            tar.addfile(info, file)


def _plain_tar(archive: Path, out: IO[bytes]) -> None:
    """An archive of the folder, whatever it is packed with, as a plain tar."""
    with tarfile.open(archive, "r:*") as source, tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as to:
        for member in source:
            to.addfile(member, source.extractfile(member) if member.isreg() else None)
    out.seek(0)
