"""Tar archives in and out of sandboxes: whoever wrote one is not trusted, and unpacking one cannot leave its folder.

The invariant of `unpack`: nothing is made, changed or read outside the folder, whatever the archive says. Every name is
walked one component at a time by directory descriptors, so that no link, old or made by the archive itself, is followed
by accident. A symbolic link is made only if following it ends inside: its `..` stand at its beginning and are no more
than the real folders above it. Devices, pipes and links that lead out are left out and named in the answer; absolute
names, `..` in names and anything larger than allowed are errors.

This module is imported by the keeper, which must stay small: nothing but the standard library.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

from towline.errors import TowlineError

MOST_BYTES = 1024 * 1024 * 1024
"""Most that one archive may hold, all files together, unless the caller says otherwise."""
MOST_ENTRIES = 200_000
_MTIME = 1_000_000_000
"""Of packed content that has no time of its own: equal content packs to equal bytes."""
_CHUNK = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Links = Literal["inside", "any"]


class ArchiveError(TowlineError):
    """An archive that is broken, too large, or tries to leave its folder."""

    failure = "sandbox"


def pack(files: Mapping[str, bytes | Path], *, modes: Mapping[str, int] | None = None) -> bytes:
    """A tar of files by name. A `Path` is a file or folder of this machine; its own mode is kept unless `modes` says."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for given, content in files.items():
            name = "/".join(_parts(given))
            mode = (modes or {}).get(given)
            if isinstance(content, Path):
                _add_path(tar, name, content, mode)
            else:
                tar.addfile(
                    _info(name, tarfile.REGTYPE, 0o644 if mode is None else mode, len(content)), io.BytesIO(content)
                )
    return made.getvalue()


def pack_folder(folder: Path) -> bytes:
    """A tar of what is in a folder, names relative to it. Links stay links; devices and sockets are left out."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(folder.iterdir()):
            _add_path(tar, path.name, path, None)
    return made.getvalue()


def unpack(
    archive: bytes | Path | IO[bytes],
    folder: Path | str,
    *,
    most: int = MOST_BYTES,
    entries: int = MOST_ENTRIES,
    links: Links = "inside",
    follow: bool = False,
    owner: tuple[int, int] | None = None,
) -> list[str]:
    """Unpack an uncompressed tar under `folder`, which is made, and return the names that were left out.

    `links="any"` keeps links that lead out, for use inside a sandbox, where there is no out. `follow` walks through links
    to folders that were there before, never through one that the archive made.
    """
    os.makedirs(folder, exist_ok=True)
    base = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _opened(archive) as tar:
            return _Unpacking(base, most, links, follow, owner).run(tar, entries)
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise ArchiveError(f"not a readable tar archive: {error}") from error
    finally:
        os.close(base)


def names(archive: bytes | Path | IO[bytes], *, entries: int = MOST_ENTRIES) -> list[str]:
    """What an archive says it holds; the names are checked, nothing is written."""
    with _reading(archive) as tar:
        return ["/".join(_parts(member.name)) for member in _members(tar, entries)]


def read_file(archive: bytes | Path | IO[bytes], name: str, *, most: int = MOST_BYTES) -> bytes:
    """The content of one regular file of an archive, by its name or, where there is only one file, by ``""``."""
    wanted = "/".join(_parts(name)) if name else ""
    with _reading(archive) as tar:
        found = None
        for member in _members(tar, MOST_ENTRIES):
            if member.isreg() and (not wanted or "/".join(_parts(member.name)) == wanted):
                if found is not None and not wanted:
                    raise ArchiveError("the archive holds more than one file: name the one that is wanted")
                found = member
        if found is None:
            raise ArchiveError(f"the archive holds no file {wanted!r}" if wanted else "the archive holds no file")
        if found.size > most:
            raise ArchiveError(f"{found.name!r} has {found.size} bytes, more than the {most} allowed")
        source = tar.extractfile(found)
        assert source is not None  # a regular file has content
        return source.read()


def add_tree(tar: tarfile.TarFile, name: str, path: str, budget: int) -> int:
    """Add a file or folder of an untrusted tree to a tar, never through a link; what is left of `budget` bytes.

    `ArchiveError` when there is more than the budget: an archive is whole or not made at all.
    """
    status = os.lstat(path)
    kind, link = _kind(status.st_mode), ""
    if kind is None:
        return budget
    if kind == tarfile.SYMTYPE:
        link = os.readlink(path)
    budget -= 1024
    if kind == tarfile.REGTYPE:
        return _add_regular(tar, name, path, budget)
    if budget < 0:
        raise ArchiveError("more than the bytes allowed")
    info = _info(name, kind, stat.S_IMODE(status.st_mode), 0, int(status.st_mtime))
    info.linkname = link
    tar.addfile(info)
    if kind == tarfile.DIRTYPE:
        for entry in sorted(os.listdir(path)):
            # What vanishes while a live tree is read was not there.
            with suppress(FileNotFoundError):
                budget = add_tree(tar, f"{name}/{entry}", f"{path}/{entry}", budget)
    return budget


def _add_regular(tar: tarfile.TarFile, name: str, path: str, budget: int) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as source:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return budget
        if status.st_size > budget:
            raise ArchiveError("more than the bytes allowed")
        info = _info(name, tarfile.REGTYPE, stat.S_IMODE(status.st_mode), status.st_size, int(status.st_mtime))
        # A file that shrinks while it is read is filled up, so that the archive stays whole.
        tar.addfile(info, _Exactly(source, status.st_size))
        return budget - status.st_size


def _add_path(tar: tarfile.TarFile, name: str, path: Path, mode: int | None) -> None:
    status = path.lstat()
    if stat.S_ISREG(status.st_mode):
        with path.open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            info = _info(name, tarfile.REGTYPE, stat.S_IMODE(status.st_mode) if mode is None else mode, size)
            info.mtime = int(status.st_mtime)
            tar.addfile(info, _Exactly(source, size))
    elif mode is not None:
        raise ArchiveError(f"{path}: a mode can be given for a file only")
    else:
        add_tree(tar, name, str(path), MOST_BYTES)


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


class _Exactly(io.RawIOBase):
    """A file's first `size` bytes, with zeros where it has become shorter."""

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
        raise ArchiveError(f"{name!r} is not a name inside the archive's folder")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ArchiveError(f"{name!r} leaves the archive's folder")
    return parts


def _members(tar: tarfile.TarFile, entries: int) -> Iterator[tarfile.TarInfo]:
    for count, member in enumerate(tar, 1):
        if count > entries:
            raise ArchiveError(f"the archive has more than {entries} entries")
        yield member


@contextmanager
def _reading(archive: bytes | Path | IO[bytes]) -> Iterator[tarfile.TarFile]:
    try:
        with _opened(archive) as tar:
            yield tar
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise ArchiveError(f"not a readable tar archive: {error}") from error


@contextmanager
def _opened(archive: bytes | Path | IO[bytes]) -> Iterator[tarfile.TarFile]:
    # Uncompressed only: what is unpacked can then never be larger than what was read.
    if isinstance(archive, bytes):
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            yield tar
    elif isinstance(archive, Path):
        with tarfile.open(archive, mode="r:") as tar:
            yield tar
    else:
        with tarfile.open(fileobj=archive, mode="r|") as tar:
            yield tar


class _Unpacking:
    def __init__(self, base: int, most: int, links: Links, follow: bool, owner: tuple[int, int] | None):
        self._base, self._left, self._most = base, most, most
        self._links, self._follow, self._owner = links, follow, owner
        self._made_links: set[tuple[int, int]] = set()
        self._made_files: set[str] = set()
        self._modes: list[tuple[list[str], int]] = []
        """Of folders, set last: one that may not be written to still takes its files."""

    def run(self, tar: tarfile.TarFile, entries: int) -> list[str]:
        left_out = []
        for member in _members(tar, entries):
            parts = _parts(member.name)
            if not parts:
                continue
            if member.isdir():
                os.close(self._folder(parts))
                self._modes.append((parts, member.mode & 0o777))
            elif not self._leaf(tar, member, parts):
                left_out.append("/".join(parts))
        for parts, mode in reversed(self._modes):
            descriptor = self._folder(parts)
            os.fchmod(descriptor, mode | (0 if self._links == "any" else stat.S_IRWXU))
            os.close(descriptor)
        return left_out

    def _leaf(self, tar: tarfile.TarFile, member: tarfile.TarInfo, parts: list[str]) -> bool:
        if not (member.isreg() or member.issym() or member.islnk()):
            return False
        if member.issym() and self._links == "inside" and not _stays(member.linkname, len(parts) - 1):
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
                made = os.lstat(name, dir_fd=folder)
                self._made_links.add((made.st_dev, made.st_ino))
            elif member.islnk():
                self._hard_link(member, folder, name)
            else:
                self._regular(tar, member, folder, name)
            if member.isreg() or member.islnk():
                self._made_files.add("/".join(parts))
            if self._owner is not None and not member.islnk():
                os.chown(name, *self._owner, dir_fd=folder, follow_symlinks=False)
        except IsADirectoryError as error:
            raise ArchiveError(f"{member.name!r} is a folder already") from error
        except FileExistsError as error:
            raise ArchiveError(f"{member.name!r} is there already and is not a file") from error
        finally:
            os.close(folder)
        return True

    def _regular(self, tar: tarfile.TarFile, member: tarfile.TarInfo, folder: int, name: str) -> None:
        self._left -= member.size
        if self._left < 0:
            raise ArchiveError(f"the archive holds more than {self._most} bytes")
        source = tar.extractfile(member)
        assert source is not None  # a regular file has content
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=folder)
        with os.fdopen(descriptor, "wb", buffering=0) as target:
            while chunk := source.read(_CHUNK):
                while chunk:
                    chunk = chunk[target.write(chunk) :]
            os.fchmod(descriptor, member.mode & 0o777)
            with suppress(OverflowError, OSError):  # a time that this system cannot hold is no reason to fail
                os.utime(descriptor, (member.mtime, member.mtime))

    def _hard_link(self, member: tarfile.TarInfo, folder: int, name: str) -> None:
        source = _parts(member.linkname)
        if "/".join(source) not in self._made_files:
            raise ArchiveError(
                f"{member.name!r} is a hard link to {member.linkname!r}, which the archive did not bring"
            )
        there = self._folder(source[:-1])
        try:
            os.link(source[-1], name, src_dir_fd=there, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(there)

    def _folder(self, parts: list[str]) -> int:
        """A descriptor of a folder below the base, made where it is missing."""
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
                    and (status.st_dev, status.st_ino) not in self._made_links
                ):
                    flags &= ~os.O_NOFOLLOW
                below = os.open(part, flags, dir_fd=here)
                os.close(here)
                here = below
        except OSError as error:
            os.close(here)
            raise ArchiveError(f"{'/'.join(parts)!r} cannot be a folder: {error.strerror}") from error
        return here


def _stays(target: str, depth: int) -> bool:
    """Whether a link that stands `depth` real folders below the base cannot lead out of it."""
    if not target or target.startswith("/"):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    return up <= depth and ".." not in parts[up:]
