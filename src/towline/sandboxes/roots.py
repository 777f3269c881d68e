"""Root file systems as folders: what a spec's `root` names, unpacked once and kept in a cache of bounded size.

A folder is used as it is. A tar file is unpacked under the hash of its content, so that the same file under another
name, or in another process, costs nothing; a file that changed is another root.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from towline.sandboxes import root_tar
from towline.sandboxes.base import SandboxError
from towline.sandboxes.folder_cache import FolderCache, Lease
from towline.sandboxes.root_tar import Owners, Progress

__all__ = ["Lease", "Owners", "Progress", "RootCache"]


class RootCache:
    """Roots, and what was built over them, ready to be used. Any number of processes may share the folder."""

    def __init__(self, folder: Path, most_bytes: int, *, owners: Owners | None = None):
        self._cache = FolderCache(folder, most_bytes)
        self._owners = owners if owners or os.geteuid() else Owners()
        """Root keeps the owners that the tar names, anyone else owns all of it; a user namespace shifts them."""
        self._known: dict[tuple[str, int, int, int], str] = {}
        """Hashes of files by path, inode, size and time of change."""
        self._held: dict[Path, Lease] = {}

    async def folder(self, root: str, *, progress: Progress | None = None) -> Path:
        """The root as a folder, kept from eviction until `close`. Progress is told from a thread."""
        lease = await self.lease(root, progress=progress)
        if lease.path in self._held:
            lease.release()
        else:
            self._held[lease.path] = lease
        return lease.path

    async def lease(self, root: str, *, progress: Progress | None = None) -> Lease:
        """The root as a folder, kept from eviction until the lease is released."""
        path, is_folder, key = await asyncio.to_thread(self._look, root)
        if is_folder:
            return Lease(path, None)

        async def unpack(folder: Path) -> None:
            most = self._cache.most_bytes
            await _to_its_end(
                asyncio.to_thread(root_tar.unpack, path, folder, most=most, owners=self._owners, progress=progress)
            )
            if await self.identity(root) != key:
                raise SandboxError(f"{path} changed while it was being unpacked; try again when it is complete")

        return await self._cache.lease("root-" + key, unpack)

    async def identity(self, root: str) -> str:
        """What tells this root from every other: the content of a tar file, the place of a folder.

        Whoever changes a folder in place gives it a new name, or clears what was built over it.
        """
        return (await asyncio.to_thread(self._look, root))[2]

    async def built(self, key: str, make: Callable[[Path], Awaitable[None]]) -> Lease:
        """A folder that is not a root but belongs to one: a layer built over it."""
        return await self._cache.lease(key, make)

    async def shrink(self) -> None:
        """Evict down to the bound; what a crash left half made goes too."""
        await self._cache.shrink()

    def used(self) -> int:
        return self._cache.used()

    def close(self) -> None:
        """Let go of what `folder` holds."""
        held, self._held = self._held, {}
        for lease in held.values():
            lease.release()

    def _look(self, root: str) -> tuple[Path, bool, str]:
        """Where a root is, whether it is a folder, and its identity."""
        path = Path(root).resolve()
        try:
            about = path.stat()
        except OSError as error:
            raise SandboxError(
                f"there is no root file system at {root!r} ({error.strerror}); give a folder or a tar file, "
                "made by `mmdebstrap bookworm root.tar` or `docker export`"
            ) from error
        if path.is_dir():
            place = f"{path}:{about.st_dev}:{about.st_ino}"
            return path, True, hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()[:40]
        seen = (str(path), about.st_ino, about.st_size, about.st_mtime_ns)
        if seen not in self._known:
            with open(path, "rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
            self._known[seen] = hashlib.sha256(content + str(self._owners).encode()).hexdigest()[:40]
        return path, False, self._known[seen]


async def _to_its_end(work: Awaitable[object]) -> None:
    """Wait for a thread even when cancelled: what it still writes must not outlive the folder it writes to."""
    running = asyncio.ensure_future(work)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
