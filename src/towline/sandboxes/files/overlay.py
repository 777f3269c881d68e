"""Overlays: how a sandbox's files are mounted, and what changed in them.

The spawner mounts them in its own user and mount namespace. Every tree is an overlay: lower folders are never written
to, and all trees share one upper file system of the size that the spec allows, together with /dev/shm. Sources come as
detached mounts: as root the supervisor opens them (the sandbox's user need not be able to reach them by path) and maps
their owners through the sandbox's user namespace; rootless they are opened here.

Runs in the supervisor, so it imports nothing but the standard library.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import Any

from towline.sandboxes import linux

STAGE = "/tmp"
"""Where everything is assembled, in a mount namespace that nothing else sees."""
_INODES_PER_MB = 128


@dataclass(frozen=True, slots=True)
class OverlayTree:
    """One overlay as open folders, to list its changes."""

    target: str
    upper: int
    lowers: tuple[int, ...]


def open_sources(sources: list[dict[str, Any]], user_namespace: int | None) -> tuple[list[int], list[str]]:
    """Detached mounts of the sources, with mapped owners where requested and possible; and notes."""
    trees: list[int] = []
    notes: list[str] = []
    for source in sources:
        tree = linux.open_tree(source["path"])
        trees.append(tree)
        if source["map"] and user_namespace is not None:
            try:
                linux.map_owners(tree, user_namespace)
            except OSError as error:
                notes.append(
                    f"{source['path']}: owners cannot be mapped ({error.strerror}); inside, `nobody` owns its files"
                )
    return trees, notes


def open_sources_rootless(sources: list[dict[str, Any]]) -> list[int]:
    """The same without root: inside the new mount namespace, where a folder includes the mounts below it."""
    trees = []
    for source in sources:
        try:
            trees.append(linux.open_tree(source["path"]))
        except OSError:
            trees.append(linux.open_tree(source["path"], recursive=True))
    return trees


def stage(plan: dict[str, Any], sources: list[int]) -> tuple[list[str], list[OverlayTree]]:
    """Mount everything below `STAGE`; returns bubblewrap's arguments for it, and the trees."""
    size = plan["disk_mb"]
    limit = f"size={size}m,nr_inodes={max(16_384, size * _INODES_PER_MB)}," if size else ""
    linux.mount("tmpfs", STAGE, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, f"{limit}mode=755")
    for index, source in enumerate(sources):
        path = f"{STAGE}/s{index}"
        if stat.S_ISDIR(os.fstat(source).st_mode):
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        linux.move_mount(source, path)
    arguments: list[str] = []
    trees = []
    for index, tree in enumerate(plan["trees"]):
        lowers = [f"{STAGE}/s{number}" for number in tree["lowers"]]
        if "overlay" in plan["unguarded"] and not tree["diff"]:
            arguments += ["--bind", lowers[0], tree["target"]]
            continue
        upper, work, merged = (f"{STAGE}/{kind}{index}" for kind in "uwm")
        for folder in (upper, work, merged):
            os.mkdir(folder)
        os.chmod(upper, stat.S_IMODE(os.stat(lowers[-1]).st_mode))
        options = f"lowerdir={':'.join(reversed(lowers))},upperdir={upper},workdir={work},userxattr"
        linux.mount("overlay", merged, "overlay", linux.MS_NOSUID | linux.MS_NODEV, options)
        arguments += ["--bind", merged, tree["target"]]
        if tree["diff"]:
            kept = tuple(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for path in lowers)
            trees.append(OverlayTree(tree["target"], os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), kept))
    shared = f"{STAGE}/shm"
    os.mkdir(shared)
    os.chmod(shared, 0o1777)
    # /dev is a file system of bubblewrap's own without a size limit: only its shared memory may be written.
    arguments += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--bind", shared, "/dev/shm"]
    for name in ("kcore", "keys", "timer_list", "sched_debug", "latency_stats"):
        if os.path.exists(f"/proc/{name}"):
            arguments += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    for bind in plan["binds"]:
        arguments += ["--ro-bind", f"{STAGE}/s{bind['source']}", bind["target"]]
    return arguments, trees


def changes(tree: OverlayTree, known: frozenset[str]) -> list[tuple[str, str]]:
    """The changes in an upper folder, as (path inside, kind); `known` paths existed when the sandbox was made."""
    found: list[tuple[str, str]] = []
    _walk(tree.upper, list(tree.lowers), tree.target.rstrip("/"), known, found)
    return found


def _walk(
    upper: int,
    lowers: list[int],
    prefix: str,
    known: frozenset[str],
    found: list[tuple[str, str]],
    hidden: bool = False,
) -> None:
    """`hidden`: a folder above is opaque, and so is everything in it, with or without its own mark."""
    for name in sorted(os.listdir(upper)):
        path = f"{prefix}/{name}"
        status = os.lstat(name, dir_fd=upper)
        below = _lower(lowers, name)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:  # a whiteout: the path was deleted
            if below is not None:
                found.append((path, "deleted"))
            continue
        if not stat.S_ISDIR(status.st_mode):
            if path not in known or status.st_size:  # an empty file from the start is a mount point
                found.append((path, "added" if below is None else "changed"))
            continue
        merged = below is not None and stat.S_ISDIR(below.st_mode)
        if path not in known and (not merged or (below is not None and _differs(status, below))):
            found.append((path, "added" if below is None else "changed"))
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=upper)
        opaque = merged and (hidden or _opaque(inner))
        deeper = _open_lowers(lowers, name) if merged else []
        try:
            if opaque:
                found += [(f"{path}/{gone}", "deleted") for gone in _only_below(inner, deeper)]
            _walk(inner, deeper, path, known, found, opaque)
        finally:
            for descriptor in (inner, *deeper):
                os.close(descriptor)


def _differs(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_mode, one.st_uid, one.st_gid) != (other.st_mode, other.st_uid, other.st_gid)


def _opaque(folder: int) -> bool:
    try:
        return os.getxattr(folder, "user.overlay.opaque") == b"y"
    except OSError:
        return False


def _only_below(upper: int, lowers: list[int]) -> list[str]:
    below = {name for lower in lowers for name in os.listdir(lower)}
    return sorted(below - set(os.listdir(upper)))


def _lower(lowers: list[int], name: str) -> os.stat_result | None:
    for lower in reversed(lowers):
        try:
            return os.lstat(name, dir_fd=lower)
        except OSError:
            continue
    return None


def _open_lowers(lowers: list[int], name: str) -> list[int]:
    opened = []
    for lower in lowers:
        try:
            opened.append(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=lower))
        except OSError:
            continue
    return opened
