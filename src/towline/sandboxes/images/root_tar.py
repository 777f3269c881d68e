"""Unpacks the tar of a root file system.

Such a tar is downloaded data, so nothing in it is written outside the folder, whatever its names and symlinks say. But
unlike an archive from a sandbox it is a whole system: absolute symlinks, hard links and setuid programs are normal and
kept. Device nodes, pipes and sockets are skipped: every runtime has its own `/dev`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from towline.sandboxes.base import SandboxError
from towline.sandboxes.files import folders

OnBytesRead = Callable[[int, int], None]
"""Called with the bytes of the archive read so far, and its size."""
_MAGIC_ZSTD = b"\x28\xb5\x2f\xfd"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Owners:
    """Which of the host's ids own the files: an inside id `i` is `uid + i` and `gid + i` outside.

    Its repr is part of the cache keys of roots.
    """

    uid: int = 0
    gid: int = 0
    count: int = 65_536
    """Number of ids; larger ids become the last but one, `nobody`."""

    def outside(self, uid: int, gid: int) -> tuple[int, int]:
        nobody = self.count - 2
        return self.uid + (uid if uid < self.count else nobody), self.gid + (gid if gid < self.count else nobody)


@dataclass(slots=True)
class UnpackResult:
    """What was unpacked."""

    files: int = 0
    bytes: int = 0
    skipped: list[str] = field(default_factory=list)
    """Names of device nodes and the like."""
    foreign: int = 0
    """How many members have an owner other than root."""


def unpack(
    archive: Path | IO[bytes],
    folder: Path,
    *,
    max_bytes: int,
    owners: Owners | None,
    joined: bool = False,
    progress: OnBytesRead | None = None,
) -> UnpackResult:
    """Unpack a tar, plain or compressed by gzip, bzip2, xz or zstd, into an empty folder. A stream is a plain tar.

    More than `max_bytes` of content are refused. `joined` reads several concatenated tars as one. Without `owners`
    everything belongs to the user of this process.
    """
    done = UnpackResult()
    name = archive if isinstance(archive, Path) else "the image"
    made_folders: dict[Path, tarfile.TarInfo] = {}
    try:
        with _stream(archive, progress) as stream, tarfile.open(fileobj=stream, mode="r|*", ignore_zeros=joined) as tar:
            for member in tar:
                done.foreign += bool(member.uid or member.gid)
                _unpack_member(tar, member, folder, done, made_folders, max_bytes, owners)
        if progress is not None and isinstance(archive, Path):
            progress(archive.stat().st_size, archive.stat().st_size)
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise SandboxError(f"{name} is not a tar of a root file system: {error}") from error
    except OSError as error:
        raise SandboxError(f"cannot unpack {name}: {error}") from error
    if not done.files and not made_folders:
        raise SandboxError(f"{name} is empty: it is not a root file system")
    if {"manifest.json", "oci-layout"} & {name for name in os.listdir(folder) if not (folder / name).is_dir()}:
        raise SandboxError(
            f"{name} is a saved image, not a root file system: use `docker export` of a container, or load it into "
            "an engine with `docker load` and use the image's name"
        )
    # Last, deepest first: a read-only folder could not have been filled.
    for path, member in sorted(made_folders.items(), reverse=True):
        if path.is_dir() and not path.is_symlink():
            _own(path, member, owners)
            os.chmod(path, member.mode & 0o7777)
            os.utime(path, (member.mtime, member.mtime))
    return done


def _unpack_member(
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    folder: Path,
    done: UnpackResult,
    made_folders: dict[Path, tarfile.TarInfo],
    max_bytes: int,
    owners: Owners | None,
) -> None:
    """Unpack one member. Symlinks in its path are followed inside the folder only; its own name is never followed."""
    path = folders.resolve_inside(folder, member.name, last=False)
    if path == folder:
        if member.isdir():
            made_folders[path] = member
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if member.isdir():
        if path.is_symlink() and folders.resolve_inside(folder, member.name).is_dir():
            return
        _clear(path, keep_folder=True)
        path.mkdir(exist_ok=True)
        made_folders[path] = member
        return
    _clear(path, keep_folder=False)
    made_folders.pop(path, None)
    if member.issym():
        os.symlink(member.linkname, path)
    elif member.islnk():
        source = folders.resolve_inside(folder, member.linkname, last=False)
        if not os.path.lexists(source) or source.is_dir():
            raise SandboxError(
                f"{member.name!r} is a hard link to {member.linkname!r}, which is not a file of the archive"
            )
        os.link(source, path, follow_symlinks=False)
        done.files += 1
        return
    elif member.isreg():
        done.bytes += member.size
        if done.bytes > max_bytes:
            raise SandboxError(f"more than {max_bytes:,} bytes of files: raise `node.cache_bytes`")
        content = tar.extractfile(member)
        assert content is not None
        with open(path, "xb") as file:
            shutil.copyfileobj(content, file, _CHUNK)
        _own(path, member, owners)
        # After chown, which clears setuid.
        os.chmod(path, member.mode & 0o7777)
        os.utime(path, (member.mtime, member.mtime))
        done.files += 1
        return
    else:
        done.skipped.append(member.name)
        return
    _own(path, member, owners)
    done.files += 1


def _own(path: Path, member: tarfile.TarInfo, owners: Owners | None) -> None:
    if owners is not None:
        os.chown(path, *owners.outside(member.uid, member.gid), follow_symlinks=False)


def _clear(path: Path, *, keep_folder: bool) -> None:
    """Remove what an earlier member put at a path."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            path.unlink()
        elif not keep_folder:
            folders.remove(path)


class _ProgressReader:
    """A file that reports how far it has been read."""

    def __init__(self, file: IO[bytes], total: int, progress: OnBytesRead):
        self._file = file
        self._total = total
        self._progress = progress

    def read(self, count: int = -1) -> bytes:
        data = self._file.read(count)
        self._progress(self._file.tell(), self._total)
        return data


@contextlib.contextmanager
def _stream(archive: Path | IO[bytes], progress: OnBytesRead | None) -> Iterator[IO[bytes]]:
    if not isinstance(archive, Path):
        yield archive
        return
    with open(archive, "rb") as file:
        zstd = file.read(4) == _MAGIC_ZSTD
        file.seek(0)
        total = os.fstat(file.fileno()).st_size
        raw = cast(IO[bytes], _ProgressReader(file, total, progress)) if progress else file
        if not zstd:
            yield raw
            return
        # Costly to import and rarely needed; the standard library has no zstd yet.
        import pyarrow

        with pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd") as stream:
            yield cast(IO[bytes], stream)
