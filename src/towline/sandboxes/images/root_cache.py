"""Root file systems as folders: what a spec's `root` names, unpacked once and kept in a cache of bounded size.

A folder is used as it is. A tar file is unpacked under the hash of its content, so that the same file under another
name, or in another process, costs nothing; a file that changed is another root.

Any number of processes may share the cache. `<folder>/<key>` is complete or absent: it is made beside its place and
renamed. Each key has a lock file; users of an entry hold a shared lock on it, makers and removers an exclusive lock,
so the kernel releases what a crashed process held. An entry in use is never evicted; among the others the least
recently used goes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

from towline.sandboxes.base import SandboxError
from towline.sandboxes.files import folders
from towline.sandboxes.images import root_tar
from towline.sandboxes.images.root_tar import OnBytesRead, Owners

Maker = Callable[[Path], Awaitable[None]]
"""Fills a new, empty folder."""
_POLL_SECONDS = 0.05
"""Seconds between attempts to take a lock that another process holds."""


class FolderLease:
    """An entry that is not evicted until released. Usable as a context manager."""

    def __init__(self, path: Path, lock: int | None):
        self.path = path
        self._lock = lock

    def release(self) -> None:
        """Allow eviction. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class FolderCache:
    """Folders by key, together no larger than `max_bytes`."""

    def __init__(self, folder: Path, max_bytes: int):
        self.folder = folder
        self.max_bytes = max_bytes
        self._making: dict[str, asyncio.Lock] = {}

    async def lease(self, key: str, make: Maker) -> FolderLease:
        """The entry of a key, made if it does not exist. One maker works at a time, across processes."""
        if not key or not key.replace("-", "").isalnum():
            raise SandboxError(f"{key!r} is not a valid cache key")
        lock = self._lock_file(key)
        try:
            async with self._making.setdefault(key, asyncio.Lock()):
                # Converting a lock releases it for a moment, so the entry is checked again after each conversion. Another
                # maker keeps its lock as a lease: whoever waits to make the entry must look whether it exists.
                await _take_shared(lock)
                while not self._about(key).exists():
                    if not _try_lock(lock, fcntl.LOCK_EX):
                        await asyncio.sleep(_POLL_SECONDS)
                    elif not self._about(key).exists():
                        await self._make(key, make)
                    await _take_shared(lock)
                os.utime(self._about(key))
        except BaseException:
            os.close(lock)
            raise
        return FolderLease(self.folder / key / "content", lock)

    def used(self) -> int:
        """Bytes of all entries."""
        return sum(size for _, size, _ in self._entries())

    async def shrink(self) -> None:
        """Evict least recently used entries that are not in use until the rest fits, and leftovers of crashes."""
        await asyncio.to_thread(self._shrink)

    async def _make(self, key: str, make: Maker) -> None:
        new = self.folder / f"new-{key}-{secrets.token_hex(4)}"
        content = new / "content"
        await asyncio.to_thread(content.mkdir, parents=True)
        try:
            await make(content)
            taken = await asyncio.to_thread(folders.size, content)
            left = await asyncio.to_thread(self._shrink, taken)
            if left + taken > self.max_bytes:
                raise SandboxError(
                    f"{taken:,} bytes do not fit into the cache in {self.folder}: its limit is {self.max_bytes:,}, and "
                    f"{left:,} are in use; raise `node.cache_bytes`"
                )
            (new / "about.json").write_text(json.dumps({"size": taken}))
            os.rename(new, self.folder / key)
        except BaseException:
            await asyncio.to_thread(folders.remove, new)
            raise

    def _shrink(self, wanted: int = 0) -> int:
        """Make room for `wanted` more bytes; returns how many are left in the cache."""
        for left in (*self.folder.glob("new-*"), *self.folder.glob("old-*")):
            key = left.name.split("-", 1)[1].rpartition("-")[0]
            with self._exclusive(key) as exclusive:
                if exclusive:
                    folders.remove(left)
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        for _, size, key in entries:
            if total + wanted <= self.max_bytes:
                break
            with self._exclusive(key) as exclusive:
                if exclusive:
                    old = self.folder / f"old-{key}-{secrets.token_hex(4)}"
                    os.rename(self.folder / key, old)
                    folders.remove(old)
                    total -= size
        return total

    def _entries(self) -> list[tuple[int, int, str]]:
        """Last use, size and key of each entry."""
        found = []
        for about in self.folder.glob("*/about.json"):
            if not about.parent.name.startswith(("new-", "old-")):
                with contextlib.suppress(FileNotFoundError):
                    found.append(
                        (about.stat().st_mtime_ns, int(json.loads(about.read_text())["size"]), about.parent.name)
                    )
        return found

    @contextlib.contextmanager
    def _exclusive(self, key: str) -> Iterator[bool]:
        """Whether an entry is unused; while held, no process can use or make it."""
        lock = self._lock_file(key)
        try:
            yield _try_lock(lock, fcntl.LOCK_EX)
        finally:
            os.close(lock)

    def _lock_file(self, key: str) -> int:
        locks = self.folder / "locks"
        locks.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.open(locks / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _about(self, key: str) -> Path:
        return self.folder / key / "about.json"


def _try_lock(lock: int, how: int) -> bool:
    """Take a lock if no other holder conflicts; a failed conversion releases the lock that was held."""
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _take_shared(lock: int) -> None:
    """Take a shared lock once nobody makes or evicts the entry."""
    while True:
        if _try_lock(lock, fcntl.LOCK_SH):
            return
        await asyncio.sleep(_POLL_SECONDS)


class RootCache:
    """Roots, and layers built over them. Any number of processes may share the folder."""

    def __init__(self, folder: Path, max_bytes: int, *, owners: Owners | None = None):
        self._cache = FolderCache(folder, max_bytes)
        self._owners = owners if owners or os.geteuid() else Owners()
        """Root keeps the owners in the tar, other users own everything; a user namespace maps them."""
        self._known: dict[tuple[str, int, int, int], str] = {}
        """Content hashes by path, inode, size and modification time."""
        self._held: dict[Path, FolderLease] = {}

    async def folder(self, root: str, *, progress: OnBytesRead | None = None) -> Path:
        """The root as a folder, protected from eviction until `close`. `progress` is called from a thread."""
        lease = await self.lease(root, progress=progress)
        if lease.path in self._held:
            lease.release()
        else:
            self._held[lease.path] = lease
        return lease.path

    async def lease(self, root: str, *, progress: OnBytesRead | None = None) -> FolderLease:
        """The root as a folder, protected from eviction until the lease is released."""
        path, is_folder, key = await asyncio.to_thread(self._inspect, root)
        if is_folder:
            return FolderLease(path, None)

        async def unpack(folder: Path) -> None:
            await _uncancelled(
                asyncio.to_thread(
                    root_tar.unpack,
                    path,
                    folder,
                    max_bytes=self._cache.max_bytes,
                    owners=self._owners,
                    progress=progress,
                )
            )
            if await self.identity(root) != key:
                raise SandboxError(f"{path} changed while it was being unpacked: retry when it is complete")

        return await self._cache.lease("root-" + key, unpack)

    async def identity(self, root: str) -> str:
        """Identifies a root: a tar file by its content, a folder by its path.

        A folder that is changed in place needs a new name, or the layers built over it are stale.
        """
        return (await asyncio.to_thread(self._inspect, root))[2]

    async def built(self, key: str, make: Callable[[Path], Awaitable[None]]) -> FolderLease:
        """A folder that belongs to a root: a layer built over it."""
        return await self._cache.lease(key, make)

    @property
    def path(self) -> Path:
        return self._cache.folder

    @property
    def ownership(self) -> str:
        """How roots are owned here: part of the key of a root that `unpack_stream` fills."""
        return str(self._owners)

    def unpack_stream(self, stream: IO[bytes], folder: Path) -> root_tar.UnpackResult:
        """Unpack the tar of a root that is being made, with this cache's owners and bound."""
        return root_tar.unpack(stream, folder, max_bytes=self._cache.max_bytes, owners=self._owners)

    async def shrink(self) -> None:
        """Evict down to the size limit, and remove leftovers of crashes."""
        await self._cache.shrink()

    def used(self) -> int:
        return self._cache.used()

    def close(self) -> None:
        """Release what `folder` has leased."""
        held, self._held = self._held, {}
        for lease in held.values():
            lease.release()

    def _inspect(self, root: str) -> tuple[Path, bool, str]:
        """A root's path, whether it is a folder, and its identity."""
        path = Path(root).resolve()
        try:
            about = path.stat()
        except OSError as error:
            raise SandboxError(
                f"no root file system at {root!r} ({error.strerror}): use a folder or a tar file, "
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


async def _uncancelled(work: Awaitable[object]) -> None:
    """Wait for a thread even when cancelled: its writes must not outlive the folder it writes to."""
    running = asyncio.ensure_future(work)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
