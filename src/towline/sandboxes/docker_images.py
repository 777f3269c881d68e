"""Images for docker sandboxes: an image by name, or one imported from a folder or tar file, with layers over it.

What is imported is named by what it was made from, so a second call finds it, in another process too. The engine keeps
images; `towline.made` labels those that were made here, for whoever wants them gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import stat
import tarfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from towline.sandboxes.base import SandboxError, Unsupported
from towline.sandboxes.docker_api import Engine, EngineFailure, segment

REPOSITORY = "localhost/towline"
"""With a registry, which nobody asks: podman takes a name without one for an image of the public registry."""
Say = Callable[[str], None]


class Images:
    """The images of one engine."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._making: dict[str, asyncio.Lock] = {}
        self._known: dict[tuple[str, int, int, int], str] = {}

    async def ready(self, root: str, layers: Sequence[Path] = (), say: Say | None = None) -> str:
        """The image that a spec's root and layers come to, fetched or made if it is not there."""
        if not root:
            raise Unsupported(
                "docker sandboxes cannot use the host's own root: name an image, a folder or a tar file as root"
            )
        image = await self._imported(root) if is_path(root) else await self._named(root, say)
        return await self._layered(image, layers) if layers else image

    async def find(self, name: str) -> dict[str, Any] | None:
        """What the engine knows of an image."""
        try:
            about: dict[str, Any] = await self._engine.json("GET", f"/images/{segment(name)}/json")
        except EngineFailure as failure:
            if failure.status == 404:
                return None
            raise
        return about

    async def load(self, name: str, tar: Callable[[], AsyncIterator[bytes]]) -> str:
        """An image of a tar stream under a name, unless there is one."""
        async with self._making.setdefault(name, asyncio.Lock()):
            if await self.find(name) is None:
                query = {"fromSrc": "-", "changes": "LABEL towline.made=1"}
                made = ""
                async for message in self._engine.stream("/images/create", query=query, data=tar()):
                    made = str(message.get("status", made))
                # Named afterwards: podman does not take the tag with the import.
                repository, _, tag = name.rpartition(":")
                await self._engine.json("POST", f"/images/{segment(made)}/tag", query={"repo": repository, "tag": tag})
        return name

    async def _named(self, name: str, say: Say | None) -> str:
        async with self._making.setdefault(name, asyncio.Lock()):
            if await self.find(name) is not None:
                return name
            image, colon, tag = name.rpartition(":")
            if not colon or "/" in tag:
                image, tag = name, "latest"
            query = {"fromImage": name if "@" in name else image, "tag": "" if "@" in name else tag}
            try:
                async for message in self._engine.stream("/images/create", query=query):
                    if say is not None and "status" in message:
                        say(f"{name}: {message['status']}")
            except EngineFailure as failure:
                raise SandboxError(
                    f"image {name!r} is not on the engine and cannot be pulled ({failure}); load it with `docker load`, "
                    "or give a folder or tar file as root"
                ) from failure
        return name

    async def _imported(self, root: str) -> str:
        path, key = await asyncio.to_thread(self._identity, root)
        is_folder = await asyncio.to_thread(path.is_dir)
        return await self.load(f"{REPOSITORY}:{key}", lambda: _folder_tar(path) if is_folder else _chunks(path))

    def _identity(self, root: str) -> tuple[Path, str]:
        """A tar file is told by its content, a folder by its place and when it was last changed at the top."""
        path = Path(root).resolve()
        try:
            about = path.stat()
        except OSError as error:
            raise SandboxError(f"there is no root file system at {root!r}: {error.strerror}") from error
        seen = (str(path), about.st_ino, about.st_size, about.st_mtime_ns)
        if path.is_dir():
            return path, "folder-" + hashlib.sha256(repr(seen).encode()).hexdigest()[:40]
        if seen not in self._known:
            with open(path, "rb") as file:
                self._known[seen] = "tar-" + hashlib.file_digest(file, "sha256").hexdigest()[:40]
        return path, self._known[seen]

    async def _layered(self, image: str, layers: Sequence[Path]) -> str:
        about = await self.find(image)
        assert about is not None
        seen = [about["Id"], *(repr(_seen(layer)) for layer in layers)]
        name = f"{REPOSITORY}:layers-{hashlib.sha256(repr(seen).encode()).hexdigest()[:40]}"
        async with self._making.setdefault(name, asyncio.Lock()):
            if await self.find(name) is not None:
                return name
            for layer in layers:
                await asyncio.to_thread(_refuse_deletions, layer)
            made = await self._engine.json("POST", "/containers/create", {"Image": image, "Cmd": ["-"]})
            path = f"/containers/{made['Id']}"
            try:
                for layer in layers:
                    await self._engine.json("PUT", f"{path}/archive", query={"path": "/"}, data=_folder_tar(layer))
                repository, _, tag = name.rpartition(":")
                config = about.get("Config") or {}
                query = {"container": made["Id"], "repo": repository, "tag": tag, "changes": "LABEL towline.made=1"}
                await self._engine.json("POST", "/commit", {"Env": config.get("Env") or []}, query=query)
            finally:
                await self._engine.json("DELETE", path, query={"force": "1", "v": "1"})
        return name


def is_path(root: str) -> bool:
    """Whether a root names something of this machine rather than an image."""
    return root.startswith(("/", "./", "../")) or os.path.exists(root)


def _seen(path: Path) -> tuple[str, int, int]:
    about = path.stat()
    return str(path.resolve()), about.st_ino, about.st_mtime_ns


def _refuse_deletions(layer: Path) -> None:
    for at, _, files in os.walk(layer):
        for name in files:
            about = os.lstat(os.path.join(at, name))
            if stat.S_ISCHR(about.st_mode) and about.st_rdev == 0:
                raise Unsupported(
                    f"layer {layer} deletes {os.path.relpath(os.path.join(at, name), layer)}, which docker cannot take "
                    "over from a folder; build the environment with the docker runtime itself"
                )


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with contextlib.closing(await asyncio.to_thread(open, path, "rb")) as file:
        while chunk := await asyncio.to_thread(file.read, 1 << 20):
            yield chunk


async def _folder_tar(folder: Path) -> AsyncIterator[bytes]:
    """A folder as a tar stream with its owners, packed by a thread while it is sent. Devices are left out."""
    reading, writing = os.pipe()
    failed: list[BaseException] = []

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if member.ischr() or member.isblk() or member.isfifo() else member

    def pack() -> None:
        try:
            with (
                os.fdopen(writing, "wb") as out,
                tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar,
            ):
                for name in sorted(os.listdir(folder)):
                    tar.add(folder / name, arcname=name, filter=plain)
        except (OSError, tarfile.TarError) as error:
            failed.append(error)

    packing = threading.Thread(target=pack, daemon=True)
    packing.start()
    with contextlib.closing(os.fdopen(reading, "rb", 0)) as file:
        while chunk := await asyncio.to_thread(file.read, 1 << 20):
            yield chunk
    await asyncio.to_thread(packing.join)
    if failed:
        raise SandboxError(f"cannot read all of {folder}: {failed[0]}") from failed[0]
