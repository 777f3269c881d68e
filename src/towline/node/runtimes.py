"""The sandbox runtimes of a node: each opened once, on first use, with its pool of warm sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from towline.config import NodeSettings
from towline.sandboxes.base import DEFAULT_RESOURCES, Runtime
from towline.sandboxes.dockerfile import build
from towline.sandboxes.folder_cache import Lease
from towline.sandboxes.pool import Pool
from towline.sandboxes.registry import make_runtime
from towline.sandboxes.roots import RootCache
from towline.schema import Environment, Network, SandboxKind


class Runtimes:
    def __init__(
        self,
        settings: NodeSettings,
        data: Path,
        cache: Path,
        made: Callable[[SandboxKind, Exception | None], None] = lambda kind, error: None,
    ):
        """`made` is told of every sandbox that was made (None) or could not be."""
        self._made = made
        self.settings = settings
        self.data = data
        self.cache = cache
        self._open: dict[SandboxKind, tuple[Runtime, Pool]] = {}
        self._opening = asyncio.Lock()
        self._roots = RootCache(cache / "roots", settings.cache_bytes)
        self._leases: list[Lease] = []
        """Of layers that sandboxes may be made from."""

    async def get(self, kind: SandboxKind) -> tuple[Runtime, Pool]:
        async with self._opening:
            if kind not in self._open:
                defaults = self.settings.resources.over(DEFAULT_RESOURCES)
                runtime = make_runtime(kind, self.data / kind.value, defaults=defaults, roots=self._roots)
                try:
                    await runtime.open()
                except BaseException:
                    await runtime.close()
                    raise
                pool = Pool(runtime, size=self.settings.warm, made=partial(self._made, kind))
                self._open[kind] = (runtime, pool)
            return self._open[kind]

    async def build(
        self, runtime: Runtime, environment: Environment, folder: Path
    ) -> tuple[Environment, tuple[Path, ...]]:
        """The environment's Dockerfile as layers over its root; what it decides (folder, variables, user) where the
        environment itself says nothing."""
        built = await build(
            runtime,
            environment.root,
            folder,
            cache=self._roots,
            bases=self.settings.bases,
            network=Network.OPEN if environment.network is Network.OPEN else Network.NONE,
            seconds=self.settings.seconds.prepare,
        )
        if built.lease is not None:
            self._leases.append(built.lease)
        said = environment.model_fields_set
        decided = {
            "root": built.root,
            "env": {**built.env, **environment.env},
            "workdir": environment.workdir if "workdir" in said else built.workdir or environment.workdir,
            "user": environment.user if "user" in said else built.user,
        }
        return Environment.model_validate(environment.__dict__ | decided), built.layers

    async def close(self) -> None:
        for runtime, pool in self._open.values():
            await pool.close()
            await runtime.close()
        self._open.clear()
        for lease in self._leases:
            lease.release()
