"""Sandboxes that are containers of docker or podman, by the Engine API.

The image needs nothing in it: the container's first process is a program of a few dozen bytes that is put in before the
start, and commands are `exec`s beside it. It lives as long as its standard input, which this process holds: when the
node dies, the engine closes that, and the container ends with all that is in it. What a crash left is found by its
label when the runtime opens.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import platform
import resource
import secrets
import tarfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from towline.sandboxes import docker_probe, stubs, trees
from towline.sandboxes.base import DEFAULT_RESOURCES, Facts, SandboxError, Spec, Unsupported
from towline.sandboxes.docker_api import Engine, EngineFailure, segment
from towline.sandboxes.docker_container import INIT, DockerSandbox
from towline.sandboxes.docker_images import REPOSITORY, Images, Say
from towline.sandboxes.linux import CAPABILITIES
from towline.sandboxes.network_door import listener
from towline.schema import Network, Resources

DEFAULT_URL = "unix:///var/run/docker.sock"
NODE_LABEL = "towline.node"
_MOST_FILES = 65_536
_MOST_PROCESSES = 32_768
_MACHINES = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}


class DockerRuntime:
    """Containers of one engine."""

    name = "docker"

    def __init__(
        self,
        data: Path,
        *,
        url: str = "",
        powers: Sequence[str] = tuple(CAPABILITIES),
        defaults: Resources = DEFAULT_RESOURCES,
        say: Say | None = None,
    ):
        """`powers` are the capabilities of root inside: by default those it has over its own files and processes only,
        as in every other runtime. `defaults` are the limits that the node gives to specs that ask for none: of these,
        a disk limit that the engine cannot enforce is waived. `say` is told about pulls."""
        self._data = data
        self._engine = Engine(url or os.environ.get("DOCKER_HOST", "") or DEFAULT_URL)
        self._powers = list(powers)
        self._defaults = defaults
        self._say = say
        self.images = Images(self._engine)
        self._sandboxes: dict[str, DockerSandbox] = {}
        self._lock: int | None = None
        self._node = ""
        self._machine = platform.machine()
        self._found = docker_probe.Found()
        self._version = ""

    @property
    def facts(self) -> Facts:
        found = self._found
        return Facts(self._version, True, found.enforced, found.networks, found.notes)

    async def open(self) -> None:
        version = await self._engine.open()
        try:
            self._version = f"{version.get('Version', '?')} (API {version['ApiVersion']})"
            machine = str(version.get("Arch", platform.machine()))
            if machine not in _MACHINES:
                raise Unsupported(f"docker sandboxes run on x86_64 and aarch64, not on {machine}")
            self._machine = _MACHINES[machine]
            self._lock = await asyncio.to_thread(trees.hold, self._data)
            self._node = await asyncio.to_thread(_identity, self._data)
            await self._reap()
            await self._probe()
        except BaseException:
            await self.close()
            raise

    async def ping(self) -> None:
        await self._engine.json("GET", "/version")

    async def prepare(self, spec: Spec) -> None:
        self._check(spec)
        await self.images.ready(spec.root, spec.layers, self._say)

    async def create(self, spec: Spec) -> DockerSandbox:
        self._check(spec)
        image = await self.images.ready(spec.root, spec.layers, self._say)
        self._sandboxes = {name: left for name, left in self._sandboxes.items() if not left.gone}
        sandbox = await self._start(spec, image)
        self._sandboxes[sandbox.id] = sandbox
        return sandbox

    async def close(self) -> None:
        left, self._sandboxes = list(self._sandboxes.values()), {}
        try:
            await asyncio.gather(*(sandbox.destroy() for sandbox in left))
        finally:
            await self._engine.close()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    async def build(self, context: AsyncIterator[bytes], query: dict[str, str]) -> AsyncIterator[dict[str, Any]]:
        """The engine's own build of a context as a tar stream; its messages as they come."""
        async for message in self._engine.stream("/build", query=query, data=context):
            yield message

    def _check(self, spec: Spec) -> None:
        if self._lock is None:
            raise SandboxError("the docker runtime is not open")
        found = self._found
        for limit, value in spec.resources.__dict__.items():
            waived = limit == "disk_mb" and value == self._defaults.disk_mb
            if value is not None and limit not in found.enforced and not waived:
                raise Unsupported(f"this engine does not enforce {limit}={value}: {found.why(limit)}")
        if spec.network not in found.networks:
            raise Unsupported(f"this engine cannot do network {spec.network}: {found.why(spec.network)}")
        if any(mount.writable for mount in spec.mounts) and not found.local:
            raise Unsupported(
                "a writable mount needs an engine on this machine that Towline may look into: run as root"
            )

    async def _start(self, spec: Spec, image: str) -> DockerSandbox:
        name = "towline-" + secrets.token_hex(6)
        volumes = [f"{name}-{number}" for number, mount in enumerate(spec.mounts) if mount.writable]
        sandbox = DockerSandbox(
            self._engine, name, spec, local=self._found.local, scratch=self._data / name, volumes=volumes
        )
        try:
            await self._make_volumes(spec, name)
            made = await self._engine.json(
                "POST", "/containers/create", self._config(spec, image, name), query={"name": name}
            )
            sandbox.container = str(made["Id"])
            await sandbox.put_init(stubs.program("init", self._machine))
            await sandbox.furnish()
            await sandbox.run()
            if spec.network is Network.GATEWAY:
                sandbox.listener = await listener(sandbox.pid)
        except BaseException:
            await asyncio.shield(sandbox.destroy())
            raise
        return sandbox

    def _config(self, spec: Spec, image: str, name: str) -> dict[str, Any]:
        limits = spec.resources
        host: dict[str, Any] = {
            "NetworkMode": "bridge" if spec.network is Network.OPEN else "none",
            "CapDrop": ["ALL"],
            "CapAdd": self._powers,
            "SecurityOpt": ["no-new-privileges"],
            "IpcMode": "private",
            # Said here, or podman asks for more than an engine without every capability may give.
            "Ulimits": [{"Name": name, "Soft": limit, "Hard": limit} for name, limit in _ulimits()],
            "LogConfig": {"Type": "none"},
            "Mounts": [
                {"Type": "volume", "Source": f"{name}-{number}", "Target": mount.target}
                if mount.writable
                else {
                    "Type": "bind",
                    "Source": str(mount.source.resolve()),
                    "Target": mount.target,
                    "ReadOnly": True,
                    "BindOptions": {"Propagation": "rprivate"},
                }
                for number, mount in enumerate(spec.mounts)
            ],
        }
        if limits.memory_mb is not None:
            host["Memory"] = host["MemorySwap"] = limits.memory_mb << 20
        if limits.pids is not None:
            host["PidsLimit"] = limits.pids
        if limits.cpus is not None:
            host["NanoCpus"] = int(limits.cpus * 1e9)
        if limits.disk_mb is not None and "disk_mb" in self._found.enforced:
            host["StorageOpt"] = {"size": f"{limits.disk_mb}m"}
        return {
            "Image": image,
            "Entrypoint": [INIT],
            "Cmd": [],
            "User": "0:0",
            "WorkingDir": "/",
            "Env": [f"{name}={value}" for name, value in spec.env],
            "OpenStdin": True,
            "StdinOnce": True,
            "AttachStdin": True,
            "AttachStdout": True,
            "Healthcheck": {"Test": ["NONE"]},
            "Labels": {NODE_LABEL: self._node},
            "HostConfig": host,
        }

    async def _make_volumes(self, spec: Spec, name: str) -> None:
        """A writable mount is an overlay over its source, mounted by the engine; its upper folder goes with the sandbox."""
        for number, mount in enumerate(spec.mounts):
            if not mount.source.is_dir():
                raise SandboxError(f"nothing to mount at {mount.source}: there is no such folder")
            if mount.writable:
                upper, work = (self._data / name / f"{kind}-{number}" for kind in ("upper", "work"))
                for folder in (upper, work):
                    await asyncio.to_thread(folder.mkdir, parents=True)
                options = f"lowerdir={mount.source.resolve()},upperdir={upper.resolve()},workdir={work.resolve()}"
                await self._engine.json(
                    "POST",
                    "/volumes/create",
                    {
                        "Name": f"{name}-{number}",
                        "Driver": "local",
                        "DriverOpts": {"type": "overlay", "device": "overlay", "o": options},
                        "Labels": {NODE_LABEL: self._node},
                    },
                )

    async def _reap(self) -> None:
        """Remove what a crash of this node left."""
        query = {"filters": f'{{"label":["{NODE_LABEL}={self._node}"]}}'}
        for container in await self._engine.json("GET", "/containers/json", query=query | {"all": "1"}):
            await self._engine.json("DELETE", f"/containers/{container['Id']}", query={"force": "1", "v": "1"})
        for volume in (await self._engine.json("GET", "/volumes", query=query)).get("Volumes") or []:
            await self._engine.json("DELETE", f"/volumes/{segment(volume['Name'])}", query={"force": "1"})
        for left in self._data.glob("towline-*"):
            await asyncio.to_thread(trees.remove, left)

    async def _probe(self) -> None:
        async def empty() -> AsyncIterator[bytes]:
            made = io.BytesIO()
            with tarfile.open(fileobj=made, mode="w") as tar:
                folder = tarfile.TarInfo("etc")
                folder.type, folder.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(folder)
            yield made.getvalue()

        image = await self.images.load(f"{REPOSITORY}:probe", empty)
        # What the probe itself asks for must not be refused for not having been probed.
        spec = Spec(root=image, network=Network.NONE, resources=docker_probe.LIMITS, workdir="/")
        sandbox = await self._start(spec, image)
        try:
            self._found = await docker_probe.look(self._engine, sandbox)
        finally:
            await sandbox.destroy()
        with contextlib.suppress(EngineFailure):
            config = self._config(spec, image, "probe")
            config["HostConfig"]["StorageOpt"] = {"size": "64m"}
            made = await self._engine.json("POST", "/containers/create", config)
            await self._engine.json("DELETE", f"/containers/{made['Id']}", query={"force": "1", "v": "1"})
            self._found = self._found.with_disk()


def _ulimits() -> list[tuple[str, int]]:
    """Open files and processes: as many as this process may have, and no more than anyone needs."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    most = {"nofile": (files, _MOST_FILES), "nproc": (processes, _MOST_PROCESSES)}
    return [(name, limit if 0 < limit < top else top) for name, (limit, top) in most.items()]


def _identity(data: Path) -> str:
    """The node's name for its containers, kept in its data folder."""
    file = data / "node-id"
    if not file.exists():
        file.write_text(secrets.token_hex(12))
    return file.read_text().strip()
