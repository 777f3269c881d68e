"""Environments from a Dockerfile, where no image registry can be reached: built over a root that is on this machine.

For bubblewrap and apptainer the steps run in a sandbox of that runtime, and their changes become a layer: a folder
for `SandboxSpec.layers`, with deletions in the kernel overlay's own form. For docker the engine builds, over an image
that it has or that is imported from the root. Instructions that cannot be executed are refused by name. A result is
cached under the hash of all its inputs, in the bounded root cache, and built by one process at a time.
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import io
import json
import os
import platform
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from towline.sandboxes.base import DEFAULT_RESOURCES, Runtime, SandboxError, SandboxSpec, Unsupported
from towline.sandboxes.docker.client import DockerError, read_chunks
from towline.sandboxes.docker.images import REPOSITORY
from towline.sandboxes.docker.runtime import DockerRuntime
from towline.sandboxes.images.build_plan import BuildPlan, plan_build
from towline.sandboxes.images.build_steps import run_steps
from towline.sandboxes.images.dockerfile import BuildContext, DockerfileError
from towline.sandboxes.images.root_cache import FolderLease, RootCache
from towline.schema import Network, Resources

_DOCKERFILE = ".towline-dockerfile"
_NETWORKS = {Network.NONE: "none", Network.GATEWAY: "none", Network.OPEN: "bridge"}
_GRACE_SECONDS = 60.0
"""How much longer than the build its sandbox lives, to extract the layer."""
_FORMAT = "1"
"""Part of every cache key: layers of another format are not reused."""


@dataclass(frozen=True, slots=True)
class BuiltEnvironment:
    """A built environment: what a spec takes from it."""

    root: str
    """For `SandboxSpec.root`: the base root or, for docker, the built image."""
    layer: Path | None
    """For `SandboxSpec.layers`; None for docker, whose image contains everything."""
    env: Mapping[str, str]
    workdir: str
    """Empty if the Dockerfile sets none."""
    user: str
    notes: tuple[str, ...]
    """Which instructions were ignored, and what the operator should know."""
    lease: FolderLease | None = field(default=None, compare=False)
    """Protects the layer from eviction; release it when no sandbox uses it."""

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
    on_progress: Callable[[str], None] | None = None,
) -> BuiltEnvironment:
    """Build the Dockerfile of a folder over a root.

    `bases` maps images to roots: the first pattern (`python:3.*`) that matches the image of FROM, else `root`. `network` is
    what RUN may reach. `on_progress` receives a line per step.
    """
    file = dockerfile or context / "Dockerfile"
    text, files = await asyncio.to_thread(_read, file, context)
    plan = plan_build(text, dict(args or {}))
    base = resolve_base(plan.base, bases or {}, root)
    if runtime.name == "process":
        raise Unsupported("process sandboxes have no root file system to build on: use bubblewrap, docker or apptainer")
    identity = await _identity(runtime, base, cache)
    content = await asyncio.to_thread(files.digest)
    key = hashlib.sha256(
        json.dumps([_FORMAT, runtime.name, identity, text, content, sorted((args or {}).items()), network]).encode()
    ).hexdigest()[:40]
    if runtime.name == "docker":
        given = dict(args or {})
        return _environment(
            await build_by_engine(runtime, base, plan, files, text, given, key, network, seconds, on_progress),
            None,
            None,
        )

    async def make(folder: Path) -> None:
        layer = folder / "layer"
        await asyncio.to_thread(layer.mkdir)
        spec = SandboxSpec(
            root=base, network=network, resources=resources, workdir="/", seconds=seconds + _GRACE_SECONDS
        )
        built = await run_steps(runtime, spec, plan, files, layer, seconds, on_progress)
        await asyncio.to_thread((folder / "built.json").write_text, json.dumps(built | {"root": base}))

    lease = await cache.built("layer-" + key, make)
    try:
        built = json.loads(await asyncio.to_thread((lease.path / "built.json").read_text))
    except BaseException:
        lease.release()
        raise
    return _environment(built, lease.path / "layer", lease)


def _environment(built: Mapping[str, Any], layer: Path | None, lease: FolderLease | None) -> BuiltEnvironment:
    return BuiltEnvironment(
        built["root"], layer, built["env"], built["workdir"], built["user"], tuple(built["notes"]), lease
    )


def resolve_base(image: str, bases: Mapping[str, str], root: str) -> str:
    """The root that replaces an image."""
    for pattern, base in bases.items():
        if fnmatch.fnmatchcase(image, pattern):
            return base
    if image == "scratch":
        raise DockerfileError("Dockerfile: FROM scratch needs an empty folder as root: map it in `bases`")
    return root


def _read(file: Path, context: Path) -> tuple[str, BuildContext]:
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise SandboxError(f"cannot read the Dockerfile {file}: {error}") from error
    return text, BuildContext.read(context, file)


async def _identity(runtime: Runtime, root: str, cache: RootCache) -> str:
    if runtime.name == "docker" and not os.path.exists(root):  # noqa: ASYNC240 - one stat
        return root
    return await cache.identity(root) if root else await asyncio.to_thread(_host_identity)


def _host_identity() -> str:
    """Identifies this machine's own root: its system, and when its packages last changed."""
    seen = [platform.machine()]
    for name in ("/etc/os-release", "/var/lib/dpkg/status", "/var/lib/rpm", "/lib/apk/db/installed", "/usr/bin"):
        try:
            seen.append(f"{name}:{os.stat(name).st_mtime_ns}")
        except OSError:
            continue
    return "host " + " ".join(seen)


async def build_by_engine(
    runtime: Runtime,
    root: str,
    plan: BuildPlan,
    files: BuildContext,
    text: str,
    args: dict[str, str],
    key: str,
    network: Network,
    seconds: float,
    on_progress: Callable[[str], None] | None,
) -> dict[str, Any]:
    """The image of a Dockerfile, found by its key or built by the engine; the fields of a `BuiltEnvironment`."""
    if not isinstance(runtime, DockerRuntime):
        raise SandboxError(f"{runtime.name} is not the docker runtime")
    name = f"{REPOSITORY}:build-{key}"
    about = await runtime.images.find(name)
    if about is None:
        if network is Network.OPEN and not runtime.egress.unfiltered:
            raise Unsupported(
                "a Docker engine builds with its own network only, which also reaches private ones: build with network "
                "`none`, by another sandbox, or set node.egress.unfiltered"
            )
        base = await _base(runtime, root or plan.base)
        query = {"t": name, "dockerfile": _DOCKERFILE, "networkmode": _NETWORKS[network], "rm": "1", "forcerm": "1"}
        if args:
            query["buildargs"] = json.dumps(args)
        try:
            async with asyncio.timeout(seconds):
                with tempfile.TemporaryFile() as file:
                    await asyncio.to_thread(write_context, files, replace_base(text, plan, base), file)
                    await _follow(runtime.build(read_chunks(file), query), on_progress)
        except TimeoutError as error:
            raise DockerfileError(f"Dockerfile: the build took longer than {seconds:g} s") from error
        except DockerError as failure:
            raise DockerfileError(f"Dockerfile: the engine could not build it: {failure}") from failure
        about = await runtime.images.find(name)
        if about is None:
            raise DockerfileError("Dockerfile: the engine built the image but does not have it; check the engine's log")
    config: dict[str, Any] = about.get("Config") or {}
    env = dict(pair.partition("=")[::2] for pair in config.get("Env") or [])
    env = {name: value for name, value in env.items() if name in plan.env}
    user = str(config.get("User") or "").partition(":")[0]
    workdir = str(config.get("WorkingDir") or "")
    return {"root": name, "env": env, "workdir": workdir, "user": user, "notes": plan.notes}


async def _base(runtime: DockerRuntime, root: str) -> str:
    try:
        return await runtime.images.ready(root)
    except SandboxError as error:
        raise DockerfileError(
            f"Dockerfile: its base image is missing: {error}. Map it in `bases` to a folder, a tar file or an "
            "image that the engine has"
        ) from error


def replace_base(text: str, plan: BuildPlan, base: str) -> str:
    """The Dockerfile with another image in its FROM line. All other lines stay as they are."""
    lines = text.splitlines()
    start = next(instruction for instruction in plan.instructions if instruction.word == "FROM").line - 1
    end = start
    while lines[end].rstrip().endswith(("\\", "`")) and end + 1 < len(lines):
        end += 1
    # The syntax directive would make the engine fetch another frontend from a registry.
    head = ["#" if line.replace(" ", "").lower().startswith("#syntax=") else line for line in lines[:start]]
    return "\n".join([*head, f"FROM {base}", *lines[end + 1 :], ""])


async def _follow(messages: AsyncIterator[dict[str, Any]], on_progress: Callable[[str], None] | None) -> None:
    tail = ""
    try:
        async for message in messages:
            line = str(message.get("stream", ""))
            tail = (tail + line)[-2000:]
            if on_progress is not None and line.startswith("Step "):
                on_progress(line.strip())
    except DockerError as failure:
        raise DockerError(f"{failure}\n{tail.strip()}", failure.status) from failure


def write_context(files: BuildContext, dockerfile: str, out: IO[bytes], name: str = _DOCKERFILE) -> None:
    """Write a build context with its Dockerfile as a tar, and rewind it."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in files.paths:
            tar.add(files.folder / path, arcname=path, recursive=False)
        info = tarfile.TarInfo(name)
        data = dockerfile.encode()
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    out.seek(0)
