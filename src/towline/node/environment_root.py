"""The root file system of an environment: what its image or Dockerfile becomes on this node.

A docker engine resolves images itself. For every other runtime, the name of an image is the local root that `node.bases`
maps it to; else, with `images.base = "host"`, the host's own root; else that image from its registry, or the session fails.
A Dockerfile over a local root is built step by step in a sandbox; all others are built by buildah. Nothing falls back to
another root than the settings say.
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from towline.config import NodeSettings
from towline.config.images import ImageSettings
from towline.sandboxes.base import Runtime
from towline.sandboxes.images.build import BuiltEnvironment, build
from towline.sandboxes.images.oci.buildah import Buildah, Registries
from towline.sandboxes.images.oci.operation import OnLine
from towline.sandboxes.images.oci.references import names_image, spellings
from towline.sandboxes.images.oci.stages import Stages
from towline.sandboxes.images.oci.store import OciImages
from towline.sandboxes.images.root_cache import FolderLease, RootCache
from towline.sandboxes.starts import LimitedRuntime, StartLimiter
from towline.schema import Environment, ImageBase, Network

log = logging.getLogger("towline.node")
_ENGINES = ("docker", "process")
"""Runtimes to which an image name means something else, or nothing."""


@dataclass(frozen=True, slots=True)
class EnvironmentRoot:
    """An environment with its root in place."""

    environment: Environment
    """Completed by what the image says about running in it."""
    layers: tuple[Path, ...] = ()
    images: Mapping[str, str] = field(default_factory=dict)
    """The image names that were resolved, and their digests."""


class EnvironmentRoots:
    """Makes the roots of environments, and holds them until `close`."""

    def __init__(
        self, settings: NodeSettings, images: ImageSettings, cache: Path, roots: RootCache, starts: StartLimiter
    ):
        self._settings = settings
        self._images = images
        self._roots = roots
        self._starts = starts
        self._leases: list[FolderLease] = []
        self.oci = oci_images(settings, images, cache, roots)

    async def make(self, runtime: Runtime, environment: Environment) -> EnvironmentRoot:
        """Pull or build what the environment names; it says what a spec needs afterwards."""
        digests: dict[str, str] = {}
        if runtime.name not in _ENGINES and await asyncio.to_thread(names_image, environment.root):
            environment, digests = await self._named(environment)
        if not environment.build:
            return EnvironmentRoot(environment, (), digests)
        context, open_network = Path(environment.build), environment.network is Network.OPEN
        if runtime.name in _ENGINES or environment.root or await self._is_local(environment, context):
            built = await build(
                # Docker builds by its own engine, and creates no sandbox for it.
                runtime if runtime.name == "docker" else LimitedRuntime(runtime, self._starts),
                environment.root,
                context,
                cache=self._roots,
                bases=self._settings.bases,
                network=Network.OPEN if open_network else Network.NONE,
                seconds=self._settings.seconds.prepare,
            )
        else:
            made = await self.oci.build(context, network=open_network)
            built, digests = made.built, {**digests, **made.images}
        return EnvironmentRoot(self._completed(environment, built), built.layers, digests)

    async def prefetch(self, environment: Environment, on_line: OnLine | None = None) -> EnvironmentRoot | None:
        """Pull the images of an environment, also those that are known by tag, and build its Dockerfile.

        None if it needs no image, or if the engine of its sandbox or a root of this machine provides it.
        """
        if (environment.sandbox or self._settings.sandbox).value in _ENGINES:
            return None
        if await asyncio.to_thread(names_image, environment.root):
            name, local = environment.root, _local_root(environment.root, self._settings.bases) is not None
            if local or self._base(environment) is ImageBase.HOST:
                return None
            await self.oci.resolve(name, on_line, fresh=True)
            made = await self.oci.root(name, on_line)
        elif not environment.build or environment.root or await self._is_local(environment, Path(environment.build)):
            return None
        else:
            context, open_network = Path(environment.build), environment.network is Network.OPEN
            made = await self.oci.build(context, network=open_network, on_line=on_line, fresh=True)
        return EnvironmentRoot(self._completed(environment, made.built), made.built.layers, made.images)

    async def _named(self, environment: Environment) -> tuple[Environment, dict[str, str]]:
        """The environment with a local root instead of the name of an image, and the image's digest."""
        if (local := _local_root(environment.root, self._settings.bases)) is not None:
            return environment.model_copy(update={"root": local}), {}
        if self._base(environment) is ImageBase.HOST:
            return environment.model_copy(update={"root": ""}), {}
        made = await self.oci.root(environment.root)
        return self._completed(environment, made.built), dict(made.images)

    async def _is_local(self, environment: Environment, context: Path) -> bool:
        """Whether a Dockerfile is built over a root of this machine rather than the images it names."""
        if self._base(environment) is ImageBase.HOST:
            return True
        text = await asyncio.to_thread((context / "Dockerfile").read_text, "utf-8", "replace")
        stages = Stages(text)
        return stages.count == 1 and any(
            _local_root(image, self._settings.bases) is not None for image in (*stages.images, *stages.scratch)
        )

    def _base(self, environment: Environment) -> ImageBase:
        return environment.base or self._images.base

    def _completed(self, environment: Environment, built: BuiltEnvironment) -> Environment:
        """The image's working folder, variables and user apply where the environment sets none."""
        if built.lease is not None:
            self._leases.append(built.lease)
        for note in built.notes:
            log.info("%s: %s", environment.build or environment.root, note)
        given = environment.model_fields_set
        changes = {
            "root": built.root,
            "env": {**built.env, **environment.env},
            "workdir": environment.workdir if "workdir" in given else built.workdir or environment.workdir,
            "user": environment.user if "user" in given else built.user,
        }
        return Environment.model_validate(environment.__dict__ | changes)

    def close(self) -> None:
        """Allow the eviction of every root that was made."""
        for lease in self._leases:
            lease.release()
        self._leases.clear()


def oci_images(settings: NodeSettings, images: ImageSettings, cache: Path, roots: RootCache) -> OciImages:
    """The image store of these settings, below the cache folder."""
    registries = Registries(images.insecure_registries, images.mirrors)
    buildah = Buildah(cache / "images", max_bytes=images.store_bytes, registries=registries)
    network = images.network == "open"
    return OciImages(buildah, roots, pull=images.pull, network=network, seconds=settings.seconds.prepare)


def _local_root(image: str, bases: Mapping[str, str]) -> str | None:
    names = spellings(image)
    matching = (root for pattern, root in bases.items() if any(fnmatch.fnmatchcase(name, pattern) for name in names))
    return next(matching, None)
