"""What goes from the agent's sandbox into the evaluation: files and folders, as data, with no link that leads out.

An archive from the agent's sandbox is hostile. `sanitize_archive` rewrites it before it is placed anywhere: devices, pipes
and special permissions are dropped; hard links and symbolic links that lead out of the archive are refused
(`_is_safe_link`). A link that leads out could present the verifier's own expected answer as the agent's; it is kept only if
it leads to the system's programs and libraries. What was dropped, and what was missing, is listed in the notes and scored as
not done. What exists and cannot be copied (too large, too deep, a loop of links) is an error, because the evaluation would
score something else than the agent's work.
"""

from __future__ import annotations

import asyncio
import io
import posixpath
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from towline.evaluators.base import EvalInputs, EvaluationError
from towline.evaluators.sandbox_io import INSIDE_PATH, path_argument
from towline.sandboxes.base import PathMissing, Sandbox, SandboxError, execute
from towline.sandboxes.files import archives

MAX_INPUT_BYTES = 256 * 1024 * 1024
"""Largest size of one collected path."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/dev/null")
"""Where a link may lead out to: locations without files of the verifier."""
_NAMED = 5
"""How many of the omitted entries are named in a note."""

KeepName = Callable[[str], bool]


async def collect_inputs(sandbox: Sandbox, paths: Iterable[str], *, most: int = MAX_INPUT_BYTES) -> EvalInputs:
    """Take the paths out of the agent's sandbox, sanitized."""
    taken: dict[str, bytes] = {}
    notes: list[str] = []
    for path in dict.fromkeys(paths):
        if not path.strip("/"):
            notes.append("the whole root cannot be copied to the evaluation; name the folders that matter")
            continue
        try:
            raw = await sandbox.get(path, max_bytes=most)
            taken[path], left_out = await asyncio.to_thread(sanitize_archive, raw, path)
        except PathMissing as error:
            notes.append(f"{path} was not copied to the evaluation: {error}")
            continue
        except (SandboxError, archives.ArchiveError) as error:
            raise EvaluationError(f"{path} cannot be copied to the evaluation: {error}") from error
        if left_out:
            more = f" and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
            notes.append(f"left out of {path}: {', '.join(left_out[:_NAMED])}{more}")
    return EvalInputs(archives=taken, notes=notes)


async def place_inputs(sandbox: Sandbox, inputs: EvalInputs) -> None:
    """Put the inputs into a clean sandbox; each path replaces what is there."""
    for path, archive in inputs.archives.items():
        await replace_path(sandbox, path, archive)


async def replace_path(sandbox: Sandbox, path: str, archive: bytes) -> None:
    """Replace `path` with an archive of it; what the agent deleted is deleted here too."""
    # The folder itself may be a mount or the working folder: its contents are removed, the folder stays.
    script = (
        f'path="$1"; path="{INSIDE_PATH}"; if [ -d "$path" ] && [ ! -L "$path" ]; '
        'then cd "$path" && find . -mindepth 1 -maxdepth 1 -exec rm -rf {} +; else rm -f "$path"; fi'
    )
    done = await execute(sandbox, ("sh", "-c", script, "sh", path_argument(path)), cwd="/")
    if not done.ok:
        raise SandboxError(f"{path} cannot be cleared for the evaluation's inputs: {done.text.strip()[-500:]}")
    await sandbox.put(archive, posixpath.dirname(path.rstrip("/")) or "/")


def sanitize_archive(archive: bytes, path: str, keep: KeepName | None = None) -> tuple[bytes, list[str]]:
    """The archive of `path` rewritten, and what was left out. `keep` selects by name relative to the path.

    Symbolic links that lead out of `path` are refused here (`_is_safe_link`), as are devices and pipes.
    """
    base = posixpath.normpath(path)
    own = posixpath.basename(base)
    left_out: list[str] = []
    regular: set[str] = set()
    written = io.BytesIO()
    # `archives.member_names` checks the names; only then is the archive read.
    archives.member_names(archive)
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
            elif member.issym() and inside and _is_safe_link(member.linkname, posixpath.join(base, inside), base):
                info.linkname = member.linkname
                target.addfile(info)
            elif member.islnk() and posixpath.normpath(member.linkname) in regular:
                info.linkname = posixpath.normpath(member.linkname)
                target.addfile(info)
                regular.add(name)
            else:
                left_out.append(f"{inside or own}{f' -> {member.linkname}' if member.issym() else ''}")
    return written.getvalue(), left_out


def _is_safe_link(target: str, link: str, base: str) -> bool:
    """Whether a link stays in the collected folder, or leads to the system.

    `..` is allowed only at the beginning: after the name of another link it would start from wherever that link leads.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    first = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    if not target or ".." in parts[first:]:
        return False
    place = posixpath.normpath(posixpath.join(posixpath.dirname(link), target))
    if target.startswith("/") and ".." in parts:
        return False
    return any(place == root or place.startswith(f"{root}/") for root in (base, *_SYSTEM))


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """A regular file or a symbolic link."""

    data: bytes
    """The content, or the target of the link."""
    mode: int
    link: bool = False


def tree_entries(archive: bytes) -> dict[str, TreeEntry]:
    """Files and links of an archive, by name relative to its one folder; the name is empty for a single file."""
    found: dict[str, TreeEntry] = {}
    archives.member_names(archive)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        for member in tar:
            name = posixpath.normpath(member.name).partition("/")[2]
            if member.isreg() or member.islnk():
                source = tar.extractfile(member)
                assert source is not None  # a regular file has content, a hard link has that of its file
                found[name] = TreeEntry(source.read(), member.mode & 0o777)
            elif member.issym():
                found[name] = TreeEntry(member.linkname.encode("utf-8", "surrogateescape"), 0o777, link=True)
    return found


def regular_files(archive: bytes, path: str) -> dict[str, bytes]:
    """The regular files of the archive of `path`, by absolute path."""
    return {
        posixpath.join(path, name) if name else path: entry.data
        for name, entry in tree_entries(archive).items()
        if not entry.link
    }


def tree_changes(before: dict[str, TreeEntry], after: dict[str, TreeEntry]) -> dict[str, TreeEntry | None]:
    """What `after` adds or changes; `None` for deleted names."""
    made: dict[str, TreeEntry | None] = {name: entry for name, entry in after.items() if before.get(name) != entry}
    return made | {name: None for name in before if name not in after}
