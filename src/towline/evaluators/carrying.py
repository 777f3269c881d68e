"""What goes from the agent's sandbox into the evaluation's: files and folders, as data, and nothing that points elsewhere.

An archive from the agent's sandbox is hostile. Before it is put anywhere it is written anew: devices, pipes and special
rights are left out, hard links stay within, and so do symbolic links. A link that leads out could show the verifier its own
expected answer in the place of the agent's; it stays only if it leads to the system's programs and libraries. What was
left out, and what was not there, is told in the notes; it is then judged as not done. What is there and cannot be carried
(too large, too deep, a loop of links) is an error: the evaluation would judge something else than what the agent left.
"""

from __future__ import annotations

import asyncio
import io
import posixpath
import tarfile
from collections.abc import Callable, Iterable

from towline.evaluators.base import Carried, EvaluationError
from towline.evaluators.inside import INSIDE, word
from towline.sandboxes import archives
from towline.sandboxes.base import PathMissing, Sandbox, SandboxError, execute

MOST = 256 * 1024 * 1024
"""Bytes of one path that is carried."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/dev/null")
"""Where a link may lead out to: places that hold no verifier's files."""
_NAMED = 5
"""How many of the things left out are named."""

Kept = Callable[[str], bool]


async def carry(sandbox: Sandbox, paths: Iterable[str], *, most: int = MOST) -> Carried:
    """Take the paths out of the agent's sandbox."""
    taken: dict[str, bytes] = {}
    notes: list[str] = []
    for path in dict.fromkeys(paths):
        if not path.strip("/"):
            notes.append("the whole root cannot be carried to the evaluation; name the folders that matter")
            continue
        try:
            raw = await sandbox.get(path, most=most)
            taken[path], left_out = await asyncio.to_thread(cleaned, raw, path)
        except PathMissing as error:
            notes.append(f"{path} was not carried to the evaluation: {error}")
            continue
        except (SandboxError, archives.ArchiveError) as error:
            raise EvaluationError(f"{path} cannot be carried to the evaluation: {error}") from error
        if left_out:
            more = f" and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
            notes.append(f"left out of {path}: {', '.join(left_out[:_NAMED])}{more}")
    return Carried(archives=taken, notes=notes)


async def bring(sandbox: Sandbox, carried: Carried) -> None:
    """Put what was carried into a clean sandbox, each path in the place of what is there."""
    for path, archive in carried.archives.items():
        await replace(sandbox, path, archive)


async def replace(sandbox: Sandbox, path: str, archive: bytes) -> None:
    """Put an archive of `path` in its place; what the agent deleted is gone here too."""
    # The folder itself may be a mount or the one that commands start in: what is in it goes, it stays.
    script = (
        f'path="$1"; path="{INSIDE}"; if [ -d "$path" ] && [ ! -L "$path" ]; '
        'then cd "$path" && find . -mindepth 1 -maxdepth 1 -exec rm -rf {} +; else rm -f "$path"; fi'
    )
    done = await execute(sandbox, ("sh", "-c", script, "sh", word(path)), cwd="/")
    if not done.ok:
        raise SandboxError(f"{path} cannot be cleared for what was carried: {done.text.strip()[-500:]}")
    await sandbox.put(archive, posixpath.dirname(path.rstrip("/")) or "/")


def cleaned(archive: bytes, path: str, keep: Kept | None = None) -> tuple[bytes, list[str]]:
    """The archive of `path` written anew, with what was left out. `keep` chooses by name relative to the path."""
    base = posixpath.normpath(path)
    own = posixpath.basename(base)
    left_out: list[str] = []
    regular: set[str] = set()
    written = io.BytesIO()
    # Names are checked by `archives.names`; only then is the archive gone through.
    archives.names(archive)
    with (
        tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as source,
        tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in source:
            name = posixpath.normpath(member.name)
            inside = "" if name == own else name.removeprefix(f"{own}/")
            if keep is not None and inside and not keep(inside):
                continue
            info = tarfile.TarInfo(name)
            info.mode, info.mtime, info.type = member.mode & 0o777, int(max(member.mtime, 0)), member.type
            if member.isreg():
                info.type, info.size = tarfile.REGTYPE, member.size
                target.addfile(info, source.extractfile(member))
                regular.add(name)
            elif member.isdir():
                target.addfile(info)
            elif member.issym() and inside and _harmless(member.linkname, posixpath.join(base, inside), base):
                info.linkname = member.linkname
                target.addfile(info)
            elif member.islnk() and posixpath.normpath(member.linkname) in regular:
                info.linkname = posixpath.normpath(member.linkname)
                target.addfile(info)
                regular.add(name)
            else:
                left_out.append(f"{inside or own}{f' -> {member.linkname}' if member.issym() else ''}")
    return written.getvalue(), left_out


def _harmless(target: str, link: str, base: str) -> bool:
    """Whether a link stays in the carried folder, or leads to the system.

    `..` may only stand at the beginning: after another link's name it would lead from wherever that one leads to.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    first = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    if not target or ".." in parts[first:]:
        return False
    place = posixpath.normpath(posixpath.join(posixpath.dirname(link), target))
    if target.startswith("/") and ".." in parts:
        return False
    return any(place == root or place.startswith(f"{root}/") for root in (base, *_SYSTEM))
