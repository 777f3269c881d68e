"""Carried archives as data: the files of a tree by their paths, and what differs between two trees."""

from __future__ import annotations

import io
import posixpath
import tarfile
from dataclasses import dataclass

from towline.sandboxes import archives


@dataclass(frozen=True, slots=True)
class Entry:
    """A regular file or a symbolic link."""

    data: bytes
    """The content, or where the link leads."""
    mode: int
    link: bool = False


def entries(archive: bytes) -> dict[str, Entry]:
    """Files and links of an archive, by name relative to the one folder that it holds; empty for a single file."""
    found: dict[str, Entry] = {}
    archives.names(archive)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        for member in tar:
            name = posixpath.normpath(member.name).partition("/")[2]
            if member.isreg() or member.islnk():
                source = tar.extractfile(member)
                assert source is not None  # a regular file has content, a hard link that of its file
                found[name] = Entry(source.read(), member.mode & 0o777)
            elif member.issym():
                found[name] = Entry(member.linkname.encode("utf-8", "surrogateescape"), 0o777, link=True)
    return found


def contents(archive: bytes, path: str) -> dict[str, bytes]:
    """The regular files of the archive of `path`, by absolute path."""
    return {
        posixpath.join(path, name) if name else path: entry.data
        for name, entry in entries(archive).items()
        if not entry.link
    }


def changed(before: dict[str, Entry], after: dict[str, Entry]) -> dict[str, Entry | None]:
    """What is new or other in `after`; `None` for what is gone."""
    made: dict[str, Entry | None] = {name: entry for name, entry in after.items() if before.get(name) != entry}
    return made | {name: None for name in before if name not in after}
