"""Unpacking the tar of a root file system.

Such a tar is data that someone downloaded, so nothing in it is written outside the folder, whatever its names and
links say; but unlike what comes out of a sandbox it is a whole system: absolute links, hard links and set-user-id
programs are normal and kept. Device nodes, pipes and sockets are left out: every runtime brings its own `/dev`.
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

from towline.sandboxes import trees
from towline.sandboxes.base import SandboxError

Progress = Callable[[int, int], None]
"""Told how many of how many bytes of the archive have been read."""
_MAGIC_ZSTD = b"\x28\xb5\x2f\xfd"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Owners:
    """Which of the host's ids own files: an inside id `i` is `uid + i` and `gid + i` outside."""

    uid: int = 0
    gid: int = 0
    count: int = 65_536
    """How many ids there are; one past them becomes the last but one, which is nobody's."""

    def outside(self, uid: int, gid: int) -> tuple[int, int]:
        nobody = self.count - 2
        return self.uid + (uid if uid < self.count else nobody), self.gid + (gid if gid < self.count else nobody)


@dataclass(slots=True)
class Unpacked:
    """What became of a tar."""

    files: int = 0
    bytes: int = 0
    left_out: list[str] = field(default_factory=list)
    """Names of device nodes and the like."""
    others: int = 0
    """How many members belong to someone else than root."""


def unpack(
    archive: Path,
    folder: Path,
    *,
    most: int,
    owners: Owners | None,
    joined: bool = False,
    progress: Progress | None = None,
) -> Unpacked:
    """Unpack a tar, plain or compressed by gzip, bzip2, xz or zstd, into an empty folder.

    More than `most` bytes of content are refused. `joined` reads several tars, one after the other, as one. Without
    `owners` everything belongs to whoever runs this.
    """
    done = Unpacked()
    folders: dict[Path, tarfile.TarInfo] = {}
    try:
        with _stream(archive, progress) as stream, tarfile.open(fileobj=stream, mode="r|*", ignore_zeros=joined) as tar:
            for member in tar:
                done.others += bool(member.uid or member.gid)
                _place(tar, member, folder, done, folders, most, owners)
        if progress is not None:
            progress(archive.stat().st_size, archive.stat().st_size)
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise SandboxError(f"{archive} is not a tar of a root file system: {error}") from error
    except OSError as error:
        raise SandboxError(f"cannot unpack {archive}: {error}") from error
    if not done.files and not folders:
        raise SandboxError(f"{archive} is empty: it is no root file system")
    if {"manifest.json", "oci-layout"} & {name for name in os.listdir(folder) if not (folder / name).is_dir()}:
        raise SandboxError(
            f"{archive} is a saved image, not a root file system: use `docker export` of a container, or give it to an "
            "engine by `docker load` and name the image"
        )
    # Last, deepest first: a folder that may not be written could not have been filled.
    for path, member in sorted(folders.items(), reverse=True):
        if path.is_dir() and not path.is_symlink():
            _own(path, member, owners)
            os.chmod(path, member.mode & 0o7777)
            os.utime(path, (member.mtime, member.mtime))
    return done


def _place(
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    folder: Path,
    done: Unpacked,
    folders: dict[Path, tarfile.TarInfo],
    most: int,
    owners: Owners | None,
) -> None:
    """One member. Links in the path to it are followed inside the folder only; its own name never is a link."""
    path = trees.within(folder, member.name, last=False)
    if path == folder:
        if member.isdir():
            folders[path] = member
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if member.isdir():
        if path.is_symlink() and trees.within(folder, member.name).is_dir():
            return
        _clear(path, keep_folder=True)
        path.mkdir(exist_ok=True)
        folders[path] = member
        return
    _clear(path, keep_folder=False)
    folders.pop(path, None)
    if member.issym():
        os.symlink(member.linkname, path)
    elif member.islnk():
        source = trees.within(folder, member.linkname, last=False)
        if not os.path.lexists(source) or source.is_dir():
            raise SandboxError(
                f"{member.name!r} is a hard link to {member.linkname!r}, which is not a file of the archive"
            )
        os.link(source, path, follow_symlinks=False)
        done.files += 1
        return
    elif member.isreg():
        done.bytes += member.size
        if done.bytes > most:
            raise SandboxError(f"more than {most:,} bytes of files: give the cache of roots more room")
        content = tar.extractfile(member)
        assert content is not None
        with open(path, "xb") as file:
            shutil.copyfileobj(content, file, _CHUNK)
        _own(path, member, owners)
        # After the owner, which takes set-user-id away.
        os.chmod(path, member.mode & 0o7777)
        os.utime(path, (member.mtime, member.mtime))
        done.files += 1
        return
    else:
        done.left_out.append(member.name)
        return
    _own(path, member, owners)
    done.files += 1


def _own(path: Path, member: tarfile.TarInfo, owners: Owners | None) -> None:
    if owners is not None:
        os.chown(path, *owners.outside(member.uid, member.gid), follow_symlinks=False)


def _clear(path: Path, *, keep_folder: bool) -> None:
    """Take away what an earlier member put at a path."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            path.unlink()
        elif not keep_folder:
            trees.remove(path)


class _Counted:
    """A file that tells how far it has been read."""

    def __init__(self, file: IO[bytes], total: int, progress: Progress):
        self._file = file
        self._total = total
        self._progress = progress

    def read(self, count: int = -1) -> bytes:
        data = self._file.read(count)
        self._progress(self._file.tell(), self._total)
        return data


@contextlib.contextmanager
def _stream(archive: Path, progress: Progress | None) -> Iterator[IO[bytes]]:
    with open(archive, "rb") as file:
        zstd = file.read(4) == _MAGIC_ZSTD
        file.seek(0)
        total = os.fstat(file.fileno()).st_size
        raw = cast(IO[bytes], _Counted(file, total, progress)) if progress else file
        if not zstd:
            yield raw
            return
        # Costly to import and rarely needed; the standard library has no zstd yet.
        import pyarrow

        with pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd") as stream:
            yield cast(IO[bytes], stream)
