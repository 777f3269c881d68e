"""Archives on their way into a container: owned by the sandbox's user, below a folder that may not be there yet."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

from towline.sandboxes import archives
from towline.sandboxes.base import SandboxError

_MODES = 0o777


def owned(archive: bytes | Path, below: list[str], owner: tuple[int, int], out: IO[bytes]) -> None:
    """Write the same archive with an owner, its names below some new folders. Names that lead out are errors."""
    archives.names(archive)
    with (
        tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as to,
        tarfile.open(fileobj=io.BytesIO(archive), mode="r:")
        if isinstance(archive, bytes)
        else tarfile.open(archive, mode="r:") as source,
    ):
        for depth in range(1, len(below) + 1):
            folder = tarfile.TarInfo("/".join(below[:depth]))
            folder.type, folder.mode, folder.uid, folder.gid = tarfile.DIRTYPE, 0o755, *owner
            to.addfile(folder)
        prefix = "".join(part + "/" for part in below)
        for member in source:
            if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                continue
            if not member.name.strip("./"):
                continue
            content = source.extractfile(member) if member.isreg() else None
            member.name = prefix + member.name
            if member.islnk():
                member.linkname = prefix + member.linkname
            member.uid, member.gid, member.uname, member.gname = *owner, "", ""
            member.mode &= _MODES
            member.pax_headers = {}
            to.addfile(member, content)
    out.seek(0)


async def chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(file.read, 1 << 20):
        yield chunk


def ids(user: str, passwd: bytes) -> tuple[int, int]:
    """The numbers of `name`, `uid` or `uid:gid`."""
    name, _, group = user.partition(":")
    for line in passwd.decode("utf-8", "replace").splitlines():
        fields = line.split(":")
        if len(fields) > 3 and name in (fields[0], fields[2]) and fields[2].isdecimal() and fields[3].isdecimal():
            return int(fields[2]), int(group) if group.isdecimal() else int(fields[3])
    if not name.isdecimal():
        raise SandboxError(f"the sandbox's root has no user {name!r}")
    return int(name), int(group) if group.isdecimal() else 0
