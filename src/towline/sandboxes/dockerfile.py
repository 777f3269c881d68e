"""Environments from a Dockerfile, where no image registry can be reached: built over a root that is here.

For bubblewrap and apptainer the steps are run in a sandbox of that runtime, and what they change becomes a layer: a
folder for `Spec.layers`, with deletions in the kernel overlay's own form. For docker the engine builds, over an image
that it has or that is imported from the root. What a Dockerfile says and this cannot do is refused by name. A result is
kept under the hash of all that went into it, in the bounded cache of roots, and made by one process at a time.
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from towline.sandboxes.base import DEFAULT_RESOURCES, Runtime, SandboxError, Spec, Unsupported
from towline.sandboxes.build_context import Context
from towline.sandboxes.docker_build import build_by_engine
from towline.sandboxes.dockerfile_plan import read_plan
from towline.sandboxes.dockerfile_steps import run_steps
from towline.sandboxes.dockerfile_syntax import DockerfileError
from towline.sandboxes.folder_cache import Lease
from towline.sandboxes.roots import RootCache
from towline.schema import Network, Resources

__all__ = ["Built", "DockerfileError", "build"]

_GRACE = 60.0
"""Seconds that a build's sandbox lives on to hand over the layer."""
_FORMAT = "1"
"""Part of every key: a layer of another format is another layer."""


@dataclass(frozen=True, slots=True)
class Built:
    """An environment that is ready: what a spec takes from it."""

    root: str
    """For `Spec.root`: the root that was built over, or, for docker, the image."""
    layer: Path | None
    """For `Spec.layers`; None for docker, whose image holds everything."""
    env: Mapping[str, str]
    workdir: str
    """Empty if the Dockerfile names none."""
    user: str
    notes: tuple[str, ...]
    """What was read and left out, and what a person should know."""
    lease: Lease | None = field(default=None, compare=False)
    """Keeps the layer from eviction; release it when no sandbox will use it any more."""

    @property
    def layers(self) -> tuple[Path, ...]:
        return () if self.layer is None else (self.layer,)


async def build(
    runtime: Runtime,
    root: str,
    context: Path,
    *,
    cache: RootCache,
    dockerfile: Path | None = None,
    bases: Mapping[str, str] | None = None,
    args: Mapping[str, str] | None = None,
    network: Network = Network.NONE,
    resources: Resources = DEFAULT_RESOURCES,
    seconds: float = 600.0,
    say: Callable[[str], None] | None = None,
) -> Built:
    """Build the Dockerfile of a folder over a root.

    `bases` says which root stands for which image: the first pattern (`python:3.*`) that matches the image of FROM, else
    `root`. `network` is what RUN may reach. `say` is told about each step.
    """
    file = dockerfile or context / "Dockerfile"
    text, files = await asyncio.to_thread(_read, file, context)
    plan = read_plan(text, dict(args or {}))
    base = base_of(plan.base, bases or {}, root)
    if runtime.name == "process":
        raise Unsupported("process sandboxes have no root to build over: use bubblewrap, docker or apptainer")
    identity = await _identity(runtime, base, cache)
    content = await asyncio.to_thread(files.digest)
    key = hashlib.sha256(
        json.dumps([_FORMAT, runtime.name, identity, text, content, sorted((args or {}).items()), network]).encode()
    ).hexdigest()[:40]
    if runtime.name == "docker":
        given = dict(args or {})
        return _built(
            await build_by_engine(runtime, base, plan, files, text, given, key, network, seconds, say), None, None
        )

    async def make(folder: Path) -> None:
        layer = folder / "layer"
        await asyncio.to_thread(layer.mkdir)
        spec = Spec(root=base, network=network, resources=resources, workdir="/", seconds=seconds + _GRACE)
        made = await run_steps(runtime, spec, plan, files, layer, seconds, say)
        await asyncio.to_thread((folder / "built.json").write_text, json.dumps(made | {"root": base}))

    lease = await cache.built("layer-" + key, make)
    try:
        made = json.loads(await asyncio.to_thread((lease.path / "built.json").read_text))
    except BaseException:
        lease.release()
        raise
    return _built(made, lease.path / "layer", lease)


def _built(made: Mapping[str, Any], layer: Path | None, lease: Lease | None) -> Built:
    return Built(made["root"], layer, made["env"], made["workdir"], made["user"], tuple(made["notes"]), lease)


def base_of(image: str, bases: Mapping[str, str], root: str) -> str:
    """The root that stands for an image."""
    for pattern, base in bases.items():
        if fnmatch.fnmatchcase(image, pattern):
            return base
    if image == "scratch":
        raise DockerfileError("Dockerfile: FROM scratch is an empty root; name a folder for it in `bases`")
    return root


def _read(file: Path, context: Path) -> tuple[str, Context]:
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise SandboxError(f"cannot read the Dockerfile {file}: {error}") from error
    return text, Context.read(context, file)


async def _identity(runtime: Runtime, root: str, cache: RootCache) -> str:
    if runtime.name == "docker" and not os.path.exists(root):  # noqa: ASYNC240 - one look
        return root
    return await cache.identity(root) if root else await asyncio.to_thread(_host)


def _host() -> str:
    """This machine's own root: its system, and when its packages last changed."""
    seen = [platform.machine()]
    for name in ("/etc/os-release", "/var/lib/dpkg/status", "/var/lib/rpm", "/lib/apk/db/installed", "/usr/bin"):
        try:
            seen.append(f"{name}:{os.stat(name).st_mtime_ns}")
        except OSError:
            continue
    return "host " + " ".join(seen)
