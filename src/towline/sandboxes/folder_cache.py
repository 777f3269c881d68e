"""A cache of folders that are costly to make, bounded in size, shared by any number of processes.

`<folder>/<key>` is there completely or not at all: it is made beside its place and renamed. Each key has a lock file.
Whoever uses an entry holds a shared lock on it, whoever makes or removes one an exclusive lock, so the kernel itself
releases what a crashed process held. An entry in use is never evicted; among the others the least recently used goes
first.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import TracebackType

from towline.sandboxes import trees
from towline.sandboxes.base import SandboxError

Maker = Callable[[Path], Awaitable[None]]
"""Fills a new, empty folder."""
_POLL = 0.05
"""Seconds between looks at a lock that another process holds."""


class Lease:
    """An entry that stays until it is released. Usable as a context manager."""

    def __init__(self, path: Path, lock: int | None):
        self.path = path
        self._lock = lock

    def release(self) -> None:
        """Give it back. May be called twice."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class FolderCache:
    """Folders by key, together no larger than `most_bytes`."""

    def __init__(self, folder: Path, most_bytes: int):
        self.folder = folder
        self.most_bytes = most_bytes
        self._making: dict[str, asyncio.Lock] = {}

    async def lease(self, key: str, make: Maker) -> Lease:
        """The entry of a key, made if it is not there. One maker works at a time, here and in other processes."""
        if not key or not key.replace("-", "").isalnum():
            raise SandboxError(f"{key!r} cannot be the key of a cached folder")
        lock = self._lock_file(key)
        try:
            async with self._making.setdefault(key, asyncio.Lock()):
                # A lock changes its kind by being let go for a moment, so what was seen under one is looked at again.
                await _take(lock, fcntl.LOCK_SH)
                while not self._about(key).exists():
                    await _take(lock, fcntl.LOCK_EX)
                    if not self._about(key).exists():
                        await self._make(key, make)
                    await _take(lock, fcntl.LOCK_SH)
                os.utime(self._about(key))
        except BaseException:
            os.close(lock)
            raise
        return Lease(self.folder / key / "content", lock)

    def used(self) -> int:
        """Bytes of all entries."""
        return sum(size for _, size, _ in self._entries())

    async def shrink(self) -> None:
        """Evict what is least recently used and not in use until the rest fits; what a crash left goes too."""
        await asyncio.to_thread(self._shrink)

    async def _make(self, key: str, make: Maker) -> None:
        new = self.folder / f"new-{key}-{secrets.token_hex(4)}"
        content = new / "content"
        await asyncio.to_thread(content.mkdir, parents=True)
        try:
            await make(content)
            taken = await asyncio.to_thread(trees.size, content)
            left = await asyncio.to_thread(self._shrink, taken)
            if left + taken > self.most_bytes:
                raise SandboxError(
                    f"{taken:,} bytes do not fit the cache in {self.folder}: it may hold {self.most_bytes:,}, and "
                    f"{left:,} are in use; give it more room"
                )
            (new / "about.json").write_text(json.dumps({"size": taken}))
            os.rename(new, self.folder / key)
        except BaseException:
            await asyncio.to_thread(trees.remove, new)
            raise

    def _shrink(self, wanted: int = 0) -> int:
        """Make room for so many bytes more; how many are left in the cache."""
        for left in (*self.folder.glob("new-*"), *self.folder.glob("old-*")):
            key = left.name.split("-", 1)[1].rpartition("-")[0]
            with self._alone(key) as alone:
                if alone:
                    trees.remove(left)
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        for _, size, key in entries:
            if total + wanted <= self.most_bytes:
                break
            with self._alone(key) as alone:
                if alone:
                    old = self.folder / f"old-{key}-{secrets.token_hex(4)}"
                    os.rename(self.folder / key, old)
                    trees.remove(old)
                    total -= size
        return total

    def _entries(self) -> list[tuple[int, int, str]]:
        """When each was last used, its size and its key."""
        found = []
        for about in self.folder.glob("*/about.json"):
            if not about.parent.name.startswith(("new-", "old-")):
                with contextlib.suppress(FileNotFoundError):
                    found.append(
                        (about.stat().st_mtime_ns, int(json.loads(about.read_text())["size"]), about.parent.name)
                    )
        return found

    @contextlib.contextmanager
    def _alone(self, key: str) -> Iterator[bool]:
        """Whether nobody uses or makes an entry, and nobody can while this is held."""
        lock = self._lock_file(key)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield True
            except BlockingIOError:
                yield False
        finally:
            os.close(lock)

    def _lock_file(self, key: str) -> int:
        locks = self.folder / "locks"
        locks.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.open(locks / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _about(self, key: str) -> Path:
        return self.folder / key / "about.json"


async def _take(lock: int, how: int) -> None:
    """Lock, whoever holds it now."""
    while True:
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            await asyncio.sleep(_POLL)
