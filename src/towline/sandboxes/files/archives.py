"""Tar archives in and out of sandboxes: their author is not trusted, and unpacking one cannot leave its folder.

The invariant of `unpack`: nothing is created, changed or read outside the folder, whatever the archive says. Every name
is walked one component at a time by directory descriptors, so no symlink, whether old or created by the archive itself,
is followed by accident. A symlink is created only if following it ends inside (`_stays_inside`): its `..` come first
and are no more than the real folders above it. Devices, pipes and symlinks that lead out are skipped and returned by
name; absolute names, `..` in names and anything larger than allowed are errors. Artifacts that the node keeps are unpacked
here; what is carried to the evaluation is filtered before, in `evaluators/eval_inputs.py`.

The sandbox supervisor imports this module and must stay small: nothing but the standard library.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

from towline.errors import TowlineError

MAX_BYTES = 1024 * 1024 * 1024
"""Default limit of the total size of the files in one archive."""
MAX_ENTRIES = 200_000
_MTIME = 1_000_000_000
"""Modification time of packed bytes, which have none: equal content packs to equal archives."""
_CHUNK = 1 << 20
_MAX_DEPTH = 200
"""Folders inside each other in a packed tree; each takes a descriptor and a frame while it is read."""
_HOLE_COST = 3
"""How many times a byte that was never written counts against the budget, besides as a byte."""
_MOST_HOLES = 1000
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

LinkPolicy = Literal["inside", "any"]


class ArchiveError(TowlineError):
    """An archive is broken, too large, or tries to leave its folder."""

    failure = "sandbox"


def pack(files: Mapping[str, bytes | Path], *, modes: Mapping[str, int] | None = None) -> bytes:
    """A tar of files by name. A `Path` is a local file or folder; it keeps its mode unless `modes` overrides it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for given, content in files.items():
            name = "/".join(_parts(given))
            mode = (modes or {}).get(given)
            if isinstance(content, Path):
                _add_path(tar, name, content, mode)
            else:
                tar.addfile(
                    _info(name, tarfile.REGTYPE, 0o644 if mode is None else mode, len(content)), io.BytesIO(content)
                )
    return buffer.getvalue()


def pack_folder_entry(name: str, mode: int) -> bytes:
    """A tar of one empty folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(_info("/".join(_parts(name)), tarfile.DIRTYPE, mode, 0))
    return buffer.getvalue()


def pack_folder(folder: Path) -> bytes:
    """A tar of the contents of a folder, names relative to it. Symlinks stay symlinks; devices and sockets are skipped."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        # The folder itself is named by its path, which may lead through links; nothing below it does.
        base = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _add_entries(tar, "", ".", base, MAX_BYTES, 0)
        finally:
            os.close(base)
    return buffer.getvalue()


def unpack(
    archive: bytes | Path | IO[bytes],
    folder: Path | str,
    *,
    max_bytes: int = MAX_BYTES,
    max_entries: int = MAX_ENTRIES,
    links: LinkPolicy = "inside",
    follow: bool = False,
    owner: tuple[int, int] | None = None,
) -> list[str]:
    """Unpack an uncompressed tar under `folder`, which is created; returns the names that were skipped.

    `links="any"` keeps symlinks that lead out, for use inside a sandbox, where there is no outside. `follow` walks through
    symlinks to folders that existed before, never through one that the archive created.
    """
    os.makedirs(folder, exist_ok=True)
    base = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _open(archive) as tar:
            return _Unpacker(base, max_bytes, links, follow, owner).run(tar, max_entries)
    finally:
        os.close(base)


def member_names(archive: bytes | Path | IO[bytes], *, max_entries: int = MAX_ENTRIES) -> list[str]:
    """The checked names of an archive's entries; nothing is written."""
    with _open(archive) as tar:
        return ["/".join(_parts(member.name)) for member in _members(tar, max_entries)]


def read_file(archive: bytes | Path | IO[bytes], name: str, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of one regular file of an archive, by its name or, if it is the only file, by ``""``."""
    wanted = "/".join(_parts(name)) if name else ""
    with _open(archive) as tar:
        found = None
        for member in _members(tar, MAX_ENTRIES):
            if member.isreg() and (not wanted or "/".join(_parts(member.name)) == wanted):
                if found is not None and not wanted:
                    raise ArchiveError("the archive has more than one file: pass the name of one")
                found = member
        if found is None:
            raise ArchiveError(f"the archive has no file {wanted!r}" if wanted else "the archive has no file")
        if found.size > max_bytes:
            raise ArchiveError(f"{found.name!r} has {found.size} bytes, more than the limit of {max_bytes}")
        source = tar.extractfile(found)
        assert source is not None  # a regular file has content
        return source.read()


def add_tree(tar: tarfile.TarFile, name: str, path: str, budget: int, skip: Collection[str] = ()) -> int:
    """Add a file or folder of an untrusted tree to a tar, never through a symlink; returns the rest of `budget` bytes.

    The tree is walked by directory descriptors: a folder that becomes a link meanwhile is not followed either.
    `ArchiveError` if it exceeds the budget: an archive is complete or not made at all. Entries of the folder itself that
    are named in `skip` are left out.
    """
    folder, entry = os.path.split(path.rstrip("/") or "/")
    parent = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _add_at(tar, name, entry or ".", parent, budget, 0, skip)
    finally:
        os.close(parent)


def _add_at(
    tar: tarfile.TarFile, name: str, entry: str, parent: int, budget: int, depth: int, skip: Collection[str] = ()
) -> int:
    status = os.lstat(entry, dir_fd=parent)
    kind, link = _kind(status.st_mode), ""
    if kind is None:
        return budget
    if kind == tarfile.SYMTYPE:
        link = os.readlink(entry, dir_fd=parent)
    budget -= 1024
    if kind == tarfile.REGTYPE:
        return _add_regular(tar, name, entry, parent, budget)
    if budget < 0:
        raise ArchiveError("larger than the size limit")
    info = _info(name, kind, stat.S_IMODE(status.st_mode), 0, int(status.st_mtime))
    info.linkname = link
    tar.addfile(info)
    return _add_entries(tar, f"{name}/", entry, parent, budget, depth, skip) if kind == tarfile.DIRTYPE else budget


def _add_entries(
    tar: tarfile.TarFile, prefix: str, entry: str, parent: int, budget: int, depth: int, skip: Collection[str] = ()
) -> int:
    if depth >= _MAX_DEPTH:
        raise ArchiveError(f"more than {_MAX_DEPTH} folders inside each other")
    folder = os.open(entry, _FOLDER, dir_fd=parent)
    try:
        for inside in sorted(set(os.listdir(folder)).difference(skip)):
            # A file that vanishes while a live tree is read counts as absent.
            with suppress(FileNotFoundError):
                budget = _add_at(tar, prefix + inside, inside, folder, budget, depth + 1)
    finally:
        os.close(folder)
    return budget


def _add_regular(tar: tarfile.TarFile, name: str, entry: str, parent: int, budget: int) -> int:
    descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    with os.fdopen(descriptor, "rb") as source:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return budget
        cost = status.st_size + _HOLE_COST * _holes(descriptor, status)
        if cost > budget:
            raise ArchiveError(
                "larger than the size limit" if status.st_size > budget else "too large for a sparse file"
            )
        info = _info(name, tarfile.REGTYPE, stat.S_IMODE(status.st_mode), status.st_size, int(status.st_mtime))
        # A file that shrinks while it is read is padded, so that the archive stays valid.
        tar.addfile(info, _FixedSize(source, status.st_size))
        return budget - cost


def _holes(descriptor: int, status: os.stat_result) -> int:
    """Bytes of a file that its author never wrote: a sparse file costs its reader more than its author."""
    if status.st_blocks * 512 >= status.st_size:
        return 0
    holes = end = 0
    try:
        for _ in range(_MOST_HOLES):
            if end >= status.st_size:
                break
            start = os.lseek(descriptor, end, os.SEEK_HOLE)
            try:
                end = os.lseek(descriptor, start, os.SEEK_DATA)
            except OSError:
                end = status.st_size
            holes += max(0, min(end, status.st_size) - start)
    except OSError:
        return 0
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)
    return holes


def _add_path(tar: tarfile.TarFile, name: str, path: Path, mode: int | None) -> None:
    status = path.lstat()
    if stat.S_ISREG(status.st_mode):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as source:
            size = os.fstat(descriptor).st_size
            info = _info(name, tarfile.REGTYPE, stat.S_IMODE(status.st_mode) if mode is None else mode, size)
            info.mtime = int(status.st_mtime)
            tar.addfile(info, _FixedSize(source, size))
    elif mode is not None:
        raise ArchiveError(f"{path}: a mode can only be set for a file")
    else:
        add_tree(tar, name, str(path), MAX_BYTES)


def _info(name: str, kind: bytes, mode: int, size: int, mtime: int = _MTIME) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size, info.mtime = kind, mode & 0o777, size, max(mtime, 0)
    return info


def _kind(mode: int) -> bytes | None:
    if stat.S_ISREG(mode):
        return tarfile.REGTYPE
    if stat.S_ISDIR(mode):
        return tarfile.DIRTYPE
    return tarfile.SYMTYPE if stat.S_ISLNK(mode) else None


class _FixedSize(io.RawIOBase):
    """The first `size` bytes of a file, padded with zeros if it has become shorter."""

    def __init__(self, source: IO[bytes], size: int):
        self._source, self._left = source, size

    def read(self, size: int = -1) -> bytes:
        want = self._left if size < 0 else min(size, self._left)
        data = self._source.read(want)
        self._left -= want
        return data + bytes(want - len(data))


def _parts(name: str) -> list[str]:
    """A name's components; `ArchiveError` if it is not a plain relative name."""
    if name.startswith("/") or "\x00" in name:
        raise ArchiveError(f"{name!r} is not a relative name")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ArchiveError(f"{name!r} leaves the archive's folder")
    return parts


def _members(tar: tarfile.TarFile, max_entries: int) -> Iterator[tarfile.TarInfo]:
    for count, member in enumerate(tar, 1):
        if count > max_entries:
            raise ArchiveError(f"the archive has more than {max_entries} entries")
        yield member


@contextmanager
def _open(archive: bytes | Path | IO[bytes]) -> Iterator[tarfile.TarFile]:
    """Uncompressed archives only: the unpacked files can then never be larger than what was read."""
    try:
        if isinstance(archive, bytes):
            with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
                yield tar
        elif isinstance(archive, Path):
            with tarfile.open(archive, mode="r:") as tar:
                yield tar
        else:
            with tarfile.open(fileobj=archive, mode="r|") as tar:
                yield tar
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise ArchiveError(f"not a readable tar archive: {error}") from error


class _Unpacker:
    def __init__(self, base: int, max_bytes: int, links: LinkPolicy, follow: bool, owner: tuple[int, int] | None):
        self._base, self._left, self._max_bytes = base, max_bytes, max_bytes
        self._links, self._follow, self._owner = links, follow, owner
        self._created_links: set[tuple[int, int]] = set()
        self._created_files: set[str] = set()
        self._modes: list[tuple[list[str], int]] = []
        """Permissions of folders, set last: a read-only folder must still receive its files."""

    def run(self, tar: tarfile.TarFile, max_entries: int) -> list[str]:
        skipped = []
        for member in _members(tar, max_entries):
            parts = _parts(member.name)
            if not parts:
                continue
            if member.isdir():
                os.close(self._folder(parts))
                self._modes.append((parts, member.mode & 0o777))
            elif not self._leaf(tar, member, parts):
                skipped.append("/".join(parts))
        for parts, mode in reversed(self._modes):
            descriptor = self._folder(parts)
            os.fchmod(descriptor, mode | (0 if self._links == "any" else stat.S_IRWXU))
            os.close(descriptor)
        return skipped

    def _leaf(self, tar: tarfile.TarFile, member: tarfile.TarInfo, parts: list[str]) -> bool:
        if not (member.isreg() or member.issym() or member.islnk()):
            return False
        if member.issym() and self._links == "inside" and not _stays_inside(member.linkname, len(parts) - 1):
            return False
        folder, name = self._folder(parts[:-1]), parts[-1]
        try:
            try:
                if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                    os.unlink(name, dir_fd=folder)
            except FileNotFoundError:
                pass
            if member.issym():
                os.symlink(member.linkname, name, dir_fd=folder)
                created = os.lstat(name, dir_fd=folder)
                self._created_links.add((created.st_dev, created.st_ino))
            elif member.islnk():
                self._hard_link(member, folder, name)
            else:
                self._regular(tar, member, folder, name)
            if member.isreg() or member.islnk():
                self._created_files.add("/".join(parts))
            if self._owner is not None and not member.islnk():
                os.chown(name, *self._owner, dir_fd=folder, follow_symlinks=False)
        except IsADirectoryError as error:
            raise ArchiveError(f"{member.name!r} already exists as a folder") from error
        except FileExistsError as error:
            raise ArchiveError(f"{member.name!r} already exists and is not a file") from error
        finally:
            os.close(folder)
        return True

    def _regular(self, tar: tarfile.TarFile, member: tarfile.TarInfo, folder: int, name: str) -> None:
        self._left -= member.size
        if self._left < 0:
            raise ArchiveError(f"the archive has more than {self._max_bytes} bytes")
        source = tar.extractfile(member)
        assert source is not None  # a regular file has content
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=folder)
        with os.fdopen(descriptor, "wb", buffering=0) as target:
            while chunk := source.read(_CHUNK):
                while chunk:
                    chunk = chunk[target.write(chunk) :]
            os.fchmod(descriptor, member.mode & 0o777)
            with suppress(OverflowError, OSError):  # a time that this system cannot represent is not worth failing for
                os.utime(descriptor, (member.mtime, member.mtime))

    def _hard_link(self, member: tarfile.TarInfo, folder: int, name: str) -> None:
        source = _parts(member.linkname)
        if "/".join(source) not in self._created_files:
            raise ArchiveError(
                f"{member.name!r} is a hard link to {member.linkname!r}, which is not a file of the archive"
            )
        there = self._folder(source[:-1])
        try:
            os.link(source[-1], name, src_dir_fd=there, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(there)

    def _folder(self, parts: list[str]) -> int:
        """A descriptor of a folder below the base, created if missing."""
        here = os.dup(self._base)
        try:
            for part in parts:
                try:
                    os.mkdir(part, 0o755, dir_fd=here)
                    if self._owner is not None:
                        os.chown(part, *self._owner, dir_fd=here, follow_symlinks=False)
                except FileExistsError:
                    pass
                flags = _FOLDER
                status = os.lstat(part, dir_fd=here)
                if (
                    stat.S_ISLNK(status.st_mode)
                    and self._follow
                    and (status.st_dev, status.st_ino) not in self._created_links
                ):
                    flags &= ~os.O_NOFOLLOW
                below = os.open(part, flags, dir_fd=here)
                os.close(here)
                here = below
        except OSError as error:
            os.close(here)
            raise ArchiveError(f"{'/'.join(parts)!r} cannot be a folder: {error.strerror}") from error
        return here


def _stays_inside(target: str, depth: int) -> bool:
    """Whether a symlink that is `depth` real folders below the base cannot lead out of it."""
    if not target or target.startswith("/"):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    return up <= depth and ".." not in parts[up:]
