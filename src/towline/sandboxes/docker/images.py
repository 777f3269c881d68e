"""Images for docker sandboxes: an image by name, or one imported from a folder or tar file, with layers over it.

An imported image is named after what it was made from, so a second call finds it, in another process too. The engine
stores the images; the label `towline.made` marks those that were made here, so that they can be pruned.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from towline.common.image_references import is_complete
from towline.sandboxes.base import SandboxError, Unsupported
from towline.sandboxes.docker.client import DockerClient, DockerError, file_chunks, folder_tar, quote_segment

REPOSITORY = "localhost/towline"
"""With a registry that is never contacted: podman takes a name without one for an image of the public registry."""
OnProgress = Callable[[str], None]


class DockerImages:
    """The images of one engine."""

    def __init__(self, client: DockerClient):
        self._client = client
        self._making: dict[str, asyncio.Lock] = {}
        self._known: dict[tuple[str, int, int, int], str] = {}

    async def ready(self, root: str, layers: Sequence[Path] = (), on_progress: OnProgress | None = None) -> str:
        """The image of a spec's root and layers, pulled or built if the engine does not have it."""
        if not root:
            raise Unsupported(
                "docker sandboxes cannot use the host's own root: set `root` to an image, a folder or a tar file"
            )
        image = await self._imported(root) if is_path(root) else await self._named(root, on_progress)
        return await self._layered(image, layers) if layers else image

    async def find(self, name: str) -> dict[str, Any] | None:
        """What the engine knows about an image; None if it does not have it."""
        try:
            about: dict[str, Any] = await self._client.json("GET", f"/images/{quote_segment(name)}/json")
        except DockerError as failure:
            if failure.status == 404:
                return None
            raise
        return about

    async def load(self, name: str, tar: Callable[[], AsyncIterator[bytes]]) -> str:
        """Import a tar stream as an image of this name, unless it exists."""
        async with self._making.setdefault(name, asyncio.Lock()):
            if await self.find(name) is None:
                query = {"fromSrc": "-", "changes": "LABEL towline.made=1"}
                made = ""
                async for message in self._client.stream("/images/create", query=query, data=tar()):
                    made = str(message.get("status", made))
                # Tagged afterwards: podman does not accept the tag with the import.
                repository, _, tag = name.rpartition(":")
                await self._client.json(
                    "POST", f"/images/{quote_segment(made)}/tag", query={"repo": repository, "tag": tag}
                )
        return name

    async def _named(self, name: str, on_progress: OnProgress | None) -> str:
        async with self._making.setdefault(name, asyncio.Lock()):
            if await self.find(name) is not None:
                return name
            image, colon, tag = name.rpartition(":")
            if not colon or "/" in tag:
                image, tag = name, "latest"
            query = {"fromImage": name if "@" in name else image, "tag": "" if "@" in name else tag}
            try:
                async for message in self._client.stream("/images/create", query=query):
                    if on_progress is not None and "status" in message:
                        on_progress(f"{name}: {message['status']}")
            except DockerError as failure:
                raise SandboxError(
                    f"image {name!r} is not on the engine and cannot be pulled ({failure}); load it with `docker load`, "
                    "or set `root` to a folder or tar file"
                ) from failure
        return name

    async def _imported(self, root: str) -> str:
        path, key = await asyncio.to_thread(self._identity, root)
        is_folder = await asyncio.to_thread(path.is_dir)
        return await self.load(f"{REPOSITORY}:{key}", lambda: folder_tar(path) if is_folder else file_chunks(path))

    def _identity(self, root: str) -> tuple[Path, str]:
        """A tar file is identified by its content, a folder by its path and its own modification time."""
        path = Path(root).resolve()
        try:
            about = path.stat()
        except OSError as error:
            raise SandboxError(f"no root file system at {root!r}: {error.strerror}") from error
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
        seen = [about["Id"], *(repr(_fingerprint(layer)) for layer in layers)]
        name = f"{REPOSITORY}:layers-{hashlib.sha256(repr(seen).encode()).hexdigest()[:40]}"
        async with self._making.setdefault(name, asyncio.Lock()):
            if await self.find(name) is not None:
                return name
            for layer in layers:
                await asyncio.to_thread(_refuse_deletions, layer)
            made = await self._client.json("POST", "/containers/create", {"Image": image, "Cmd": ["-"]})
            path = f"/containers/{made['Id']}"
            try:
                for layer in layers:
                    await self._client.json("PUT", f"{path}/archive", query={"path": "/"}, data=folder_tar(layer))
                repository, _, tag = name.rpartition(":")
                config = about.get("Config") or {}
                query = {"container": made["Id"], "repo": repository, "tag": tag, "changes": "LABEL towline.made=1"}
                await self._client.json("POST", "/commit", {"Env": config.get("Env") or []}, query=query)
            finally:
                await self._client.json("DELETE", path, query={"force": "1", "v": "1"})
        return name


def is_path(root: str) -> bool:
    """Whether a root is a path of this machine rather than an image; a complete name is always an image."""
    return not is_complete(root) and (root.startswith(("/", "./", "../")) or os.path.exists(root))


def _fingerprint(path: Path) -> tuple[str, int, int]:
    about = path.stat()
    return str(path.resolve()), about.st_ino, about.st_mtime_ns


def _refuse_deletions(layer: Path) -> None:
    for at, _, files in os.walk(layer):
        for name in files:
            about = os.lstat(os.path.join(at, name))
            if stat.S_ISCHR(about.st_mode) and about.st_rdev == 0:
                raise Unsupported(
                    f"layer {layer} deletes {os.path.relpath(os.path.join(at, name), layer)}, which docker cannot "
                    "import from a folder; build the environment with the docker runtime itself"
                )
