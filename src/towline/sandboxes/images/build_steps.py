"""Runs the steps of a Dockerfile in a sandbox, and extracts their changes as a layer.

The layer is written as the kernel's overlay reads it: changed files with their owners and modes, the folders above them
as they are inside, and a device 0/0 for each deleted path (which any user may create since Linux 5.8). The sandbox's
own `tar` packs the files; the archive is unpacked like any other untrusted one.
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

from towline.sandboxes.base import ChangeKind, PathChange, Runtime, Sandbox, SandboxSpec, execute
from towline.sandboxes.files import archives, folders
from towline.sandboxes.images import root_tar
from towline.sandboxes.images.build_plan import BuildPlan, CopyStep, RunStep, Step, WorkdirStep
from towline.sandboxes.images.dockerfile import BuildContext, DockerfileError
from towline.sandboxes.images.root_tar import Owners

OnProgress = Callable[[str], None]
_VIRTUAL_FOLDERS = ("/dev", "/proc", "/sys")
_SCRATCH = "/.towline-build"
_MAX_OUTPUT_CHARS = 2000
"""How much of a failed step's output goes into its error."""
_MAX_LAYER_BYTES = 64 << 30
_WORDS = {RunStep: "RUN", CopyStep: "COPY", WorkdirStep: "WORKDIR"}
_CHOWN_BATCH = 500
_MAX_ARGUMENT_CHARS = 60_000
"""Of one command."""


async def run_steps(
    runtime: Runtime,
    spec: SandboxSpec,
    plan: BuildPlan,
    files: BuildContext,
    layer: Path,
    seconds: float,
    on_progress: OnProgress | None,
) -> dict[str, Any]:
    """Fill `layer`; returns the other fields of a `BuiltEnvironment`."""
    notes = list(plan.notes)
    await runtime.prepare(spec)
    sandbox = await runtime.create(spec)
    try:
        runner = _StepRunner(sandbox, files, seconds)
        for step in plan.steps:
            if on_progress is not None:
                on_progress(f"line {step.line}: {_WORDS[type(step)]}")
            await runner.run(step)
        # A daemon that a step left behind would still write while the layer is read.
        await sandbox.kill()
        notes += await _extract_layer(sandbox, layer)
    finally:
        await sandbox.destroy()
    return {"env": plan.env, "workdir": plan.workdir, "user": plan.user, "notes": notes}


class _StepRunner:
    def __init__(self, sandbox: Sandbox, files: BuildContext, seconds: float):
        self._sandbox = sandbox
        self._files = files
        self._deadline = time.monotonic() + seconds

    async def run(self, step: Step) -> None:
        match step:
            case WorkdirStep():
                await self._sandbox.put(archives.pack({}), step.path)
            case RunStep():
                await self._run(step)
            case CopyStep():
                await self._copy(step)

    async def _run(self, step: RunStep) -> None:
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
            seconds=max(self._deadline - time.monotonic(), 0.01),
        )
        if not done.ok:
            why = "timed out" if done.timed_out else f"exited with code {done.code}"
            raise DockerfileError(f"Dockerfile line {step.line}: RUN {why}: {done.text[-_MAX_OUTPUT_CHARS:].strip()}")

    async def _copy(self, step: CopyStep) -> None:
        with tempfile.TemporaryFile() as file:
            folder, paths, unpacked = await self._gather(step, file)
            if paths:
                await self._put(file, folder)
        for archive in unpacked:
            with tempfile.TemporaryFile() as file:
                await asyncio.to_thread(_plain_tar, archive, file)
                await self._put(file, step.target)
        for start in range(0, len(paths) if step.chown else 0, _CHOWN_BATCH):
            batch = [f"{folder.rstrip('/')}/{path}" for path in paths[start : start + _CHOWN_BATCH]]
            done = await execute(self._sandbox, ["chown", "-h", step.chown, "--", *batch])
            if not done.ok:
                raise DockerfileError(
                    f"Dockerfile line {step.line}: --chown={step.chown}: {done.text[-_MAX_OUTPUT_CHARS:].strip()}"
                )

    async def _put(self, file: IO[bytes], folder: str) -> None:
        # By its descriptor: the file has no other name, and disappears by itself.
        await self._sandbox.put(Path(f"/proc/self/fd/{file.fileno()}"), folder)

    async def _gather(self, step: CopyStep, out: IO[bytes]) -> tuple[str, list[str], list[Path]]:
        """Write a tar of a COPY's files; returns its target folder, its names, and archives to unpack."""
        matches: list[str] = []
        for source in step.sources:
            found = self._files.match(source)
            if not found:
                raise DockerfileError(
                    f"Dockerfile line {step.line}: cannot copy {source!r}: it is not in {self._files.folder}"
                )
            matches += found
        single = len(matches) + len(step.documents) == 1
        is_file = single and not step.target.endswith("/") and not (matches and self._files.is_folder(matches[0]))
        if is_file and not await self._is_folder(step.target):
            folder, _, name = step.target.rpartition("/")
            return await asyncio.to_thread(self._pack, step, matches, out, folder or "/", name)
        return await asyncio.to_thread(self._pack, step, matches, out, step.target, "")

    def _pack(
        self, step: CopyStep, matches: list[str], out: IO[bytes], folder: str, name: str
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
                    # The source itself may be a symlink; it is followed, but never out of the folder.
                    path = folders.resolve_inside(self._files.folder, match)
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


async def _extract_layer(sandbox: Sandbox, layer: Path) -> list[str]:
    """Write what differs from the root; returns notes about what cannot be kept."""
    changes = [change for change in await sandbox.diff() if not _is_excluded(change)]
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
        unpacked = await asyncio.to_thread(
            root_tar.unpack, Path(file.name), layer, max_bytes=_MAX_LAYER_BYTES, owners=owners, joined=True
        )
    if unpacked.foreign and owners is None:
        return [
            f"{unpacked.foreign} files have other owners than root; without root on the host, root owns them in the layer"
        ]
    return []


def _batches(paths: Sequence[str]) -> Iterator[list[str]]:
    """As many paths at a time as fit into one command."""
    batch: list[str] = []
    length = 0
    for path in paths:
        batch.append("." + path)
        length += len(path) + 2
        if length > _MAX_ARGUMENT_CHARS:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


async def _pack_inside(sandbox: Sandbox, names: Sequence[str], file: Any) -> None:
    """Append a tar of some files to a file; concatenated tars are read as one."""
    process = await sandbox.start(["tar", "-C", "/", "-c", "-f", "-", "--no-recursion", "--", *names], cwd="/")
    process.stdin.close()

    async def save() -> None:
        while chunk := await process.stdout.read(1 << 20):
            await asyncio.to_thread(file.write, chunk)

    _, errors, code = await asyncio.gather(save(), process.stderr.read(), process.wait())
    file.flush()
    if code != 0:
        raise DockerfileError(
            f"Dockerfile: cannot extract the layer, which needs `tar` in the root (exit code {code}): "
            + errors[-_MAX_OUTPUT_CHARS:].decode("utf-8", "replace").strip()
        )


def _is_excluded(change: PathChange) -> bool:
    return any(change.path == place or change.path.startswith(place + "/") for place in (*_VIRTUAL_FOLDERS, _SCRATCH))


def _mark_deleted(layer: Path, deleted: Sequence[str]) -> None:
    for path in deleted:
        place = folders.resolve_inside(layer, path, last=False)
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
        # A user that may read a folder must also be able to enter it.
        info.mode = mode | ((mode & 0o444) >> 2 if stat.S_ISDIR(about.st_mode) else 0)
    if stat.S_ISDIR(about.st_mode):
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
    else:
        with open(path, "rb") as file:
            info.size = os.fstat(file.fileno()).st_size
            tar.addfile(info, file)


def _plain_tar(archive: Path, out: IO[bytes]) -> None:
    """Rewrite an archive, however compressed, as a plain tar."""
    with tarfile.open(archive, "r:*") as source, tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as to:
        for member in source:
            to.addfile(member, source.extractfile(member) if member.isreg() else None)
    out.seek(0)
