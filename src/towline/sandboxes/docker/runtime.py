"""Sandboxes that are containers of docker or podman, by the Engine API.

The image needs nothing in it: the container's first process is a program of a few dozen bytes that is uploaded before
the start, and commands are `exec`s beside it. It lives as long as its standard input, which this process holds: when
the node dies, the engine closes that, and the container ends with everything in it. Leftovers of a crash are found by
their label when the runtime opens.

What an engine enforces on this machine is probed with a container, never taken from what the engine says it can do.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from towline.sandboxes import stub_programs
from towline.sandboxes.base import (
    DEFAULT_RESOURCES,
    GATEWAY_PORT,
    RuntimeFacts,
    SandboxError,
    SandboxSpec,
    Unsupported,
    unenforced_limits,
)
from towline.sandboxes.docker.client import DockerClient, DockerError, quote_segment
from towline.sandboxes.docker.images import REPOSITORY, DockerImages, OnProgress
from towline.sandboxes.docker.sandbox import INIT, DockerSandbox
from towline.sandboxes.egress import EgressRules, environment, is_proxied, proxy_of
from towline.sandboxes.files import folders
from towline.sandboxes.linux import CAPABILITIES
from towline.sandboxes.netns_listener import open_listener
from towline.schema import Network, Resources

PROBE_LIMITS = Resources(memory_mb=32, pids=16, cpus=0.5)
"""Limits of the container that probes the engine."""
_WHY_NOT = {
    "memory_mb": "its control groups do not accept a memory limit; use cgroup v2 with delegation, a rootful engine, or omit "
    "the limit",
    "pids": "its control groups do not accept a limit of processes; use cgroup v2 with delegation, or omit the limit",
    "cpus": "its kernel has no CPU quota for containers",
    "disk_mb": "its storage driver has no quota (overlay2 on xfs with pquota, btrfs and zfs have); move its data folder to "
    "one, or omit the limit",
    "seconds": "",
    Network.GATEWAY: "to listen inside, Towline must run as root on the engine's machine, or as a rootless engine's user",
    Network.OPEN: "its egress proxy listens inside, for which Towline must run as root on the engine's machine, or as a "
    "rootless engine's user; or set node.egress.unfiltered for the engine's own network, which also reaches private ones",
}
_NO_BRIDGE = "it has no network `bridge` (it was started with --bridge=none)"


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine enforces here. The default is what the probe itself needs."""

    enforced: frozenset[str] = frozenset()
    networks: frozenset[Network] = frozenset({Network.NONE})
    local: bool = False
    """Whether its containers' processes can be seen and entered from this process."""
    notes: tuple[str, ...] = ()

    def with_disk(self) -> EngineCapabilities:
        notes = tuple(note for note in self.notes if not note.startswith("disk_mb"))
        return replace(self, enforced=self.enforced | {"disk_mb"}, notes=notes)


async def probe_engine(engine: DockerClient, sandbox: DockerSandbox, *, unfiltered: bool = False) -> EngineCapabilities:
    """Inspect a running container that was created with `PROBE_LIMITS`. `unfiltered`: network `open` is the engine's own."""
    stats = await engine.json(
        "GET", f"/containers/{sandbox.container}/stats", query={"stream": "false", "one-shot": "true"}
    )
    info = await engine.json("GET", "/info")
    enforced = {"seconds"}
    assert PROBE_LIMITS.memory_mb is not None
    memory = (stats.get("memory_stats") or {}).get("limit")
    if PROBE_LIMITS.memory_mb << 20 in (
        memory,
        _cgroup_limit(sandbox, "memory", "memory.limit_in_bytes", "memory.max"),
    ):
        enforced.add("memory_mb")
    # podman does not report this one, so the control group is read as well.
    if PROBE_LIMITS.pids in (
        (stats.get("pids_stats") or {}).get("limit"),
        _cgroup_limit(sandbox, "pids", "pids.max", "pids.max"),
    ):
        enforced.add("pids")
    if info.get("CpuCfsQuota"):
        enforced.add("cpus")
    networks = {Network.NONE}
    local = sandbox.sees_inside()
    if local:
        networks |= {Network.GATEWAY} if unfiltered else {Network.GATEWAY, Network.OPEN}
    if unfiltered:
        known = await engine.json("GET", "/networks", query={"filters": '{"name":["^bridge$"]}'})
        if any(network.get("Name") == "bridge" and network.get("Driver") == "bridge" for network in known):
            networks.add(Network.OPEN)
    notes = [
        f"{limit} is not enforced: {_WHY_NOT[limit]}"
        for limit in ("memory_mb", "pids", "cpus", "disk_mb")
        if limit not in enforced
    ]
    notes += [
        f"no network {network}: {_NO_BRIDGE if unfiltered and network is Network.OPEN else _WHY_NOT[network]}"
        for network in (Network.GATEWAY, Network.OPEN)
        if network not in networks
    ]
    if not any("seccomp" in str(option) for option in info.get("SecurityOptions") or []):
        notes.append("the engine has no seccomp filter: start it with its default seccomp profile")
    if not (local and os.geteuid() == 0):
        notes.append(
            "killing a command restarts the container: files stay, but the gateway is not reachable afterwards"
        )
    return EngineCapabilities(frozenset(enforced), frozenset(networks), local, tuple(notes))


def _cgroup_limit(sandbox: DockerSandbox, controller: str, first: str, second: str) -> int | None:
    """The limit in the control group (v1 or v2) of a container's first process; None if it cannot be read."""
    try:
        groups = Path(f"/proc/{sandbox.pid}/cgroup").read_text() if sandbox.owns(sandbox.pid) else ""
        for line in groups.splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return int(Path(f"/sys/fs/cgroup/{controllers}{path}/{first}").read_text())
            file = Path(f"/sys/fs/cgroup{path}/{second}")
            if not controllers and file.exists():
                return int(file.read_text())
    except (OSError, ValueError):
        return None
    return None


DEFAULT_URL = "unix:///var/run/docker.sock"
NODE_LABEL = "towline.node"
_MAX_OPEN_FILES = 65_536
_MAX_PROCESSES = 32_768
_MACHINES = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}


class DockerRuntime:
    """Containers of one engine."""

    name = "docker"

    def __init__(
        self,
        data: Path,
        *,
        url: str = "",
        capabilities: Sequence[str] = tuple(CAPABILITIES),
        defaults: Resources = DEFAULT_RESOURCES,
        on_progress: OnProgress | None = None,
        egress: EgressRules | None = None,
    ):
        """`capabilities` are those of root inside: by default only those over its own files and processes, as in every other
        runtime. `defaults` are the node's default limits: of these, a disk limit that the engine cannot enforce is waived.
        `on_progress` receives the messages of image pulls."""
        self._data = data
        self._client = DockerClient(url or os.environ.get("DOCKER_HOST", "") or DEFAULT_URL)
        self._capabilities = list(capabilities)
        self._defaults = defaults
        self.egress = egress or EgressRules()
        self._on_progress = on_progress
        self.images = DockerImages(self._client)
        self._sandboxes: dict[str, DockerSandbox] = {}
        self._lock: int | None = None
        self._node = ""
        self._machine = platform.machine()
        self._engine_capabilities = EngineCapabilities()
        self._version = ""

    @property
    def facts(self) -> RuntimeFacts:
        engine = self._engine_capabilities
        return RuntimeFacts(self._version, True, engine.enforced, engine.networks, engine.notes)

    async def open(self) -> None:
        version = await self._client.open()
        try:
            self._version = f"{version.get('Version', '?')} (API {version['ApiVersion']})"
            machine = str(version.get("Arch", platform.machine()))
            if machine not in _MACHINES:
                raise Unsupported(f"docker sandboxes need x86_64 or aarch64, not {machine}")
            self._machine = _MACHINES[machine]
            self._lock = await asyncio.to_thread(folders.lock_data_folder, self._data)
            self._node = await asyncio.to_thread(_identity, self._data)
            await self._reap()
            await self._probe()
        except BaseException:
            await self.close()
            raise

    async def ping(self) -> None:
        await self._client.json("GET", "/version")

    async def prepare(self, spec: SandboxSpec) -> None:
        self._check(spec)
        await self.images.ready(spec.root, spec.layers, self._on_progress)

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        self._check(spec)
        image = await self.images.ready(spec.root, spec.layers, self._on_progress)
        self._sandboxes = {name: left for name, left in self._sandboxes.items() if not left.gone}
        sandbox = await self._start(spec, image)
        self._sandboxes[sandbox.id] = sandbox
        return sandbox

    async def close(self) -> None:
        left, self._sandboxes = list(self._sandboxes.values()), {}
        try:
            await asyncio.gather(*(sandbox.destroy() for sandbox in left))
        finally:
            await self._client.close()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    async def build(self, context: AsyncIterator[bytes], query: dict[str, str]) -> AsyncIterator[dict[str, Any]]:
        """Let the engine build a context, given as a tar stream; yields its messages."""
        async for message in self._client.stream("/build", query=query, data=context):
            yield message

    def _check(self, spec: SandboxSpec) -> None:
        if self._lock is None:
            raise SandboxError("the docker runtime is not open: call `open` first")
        engine = self._engine_capabilities
        waived = Resources(disk_mb=self._defaults.disk_mb)
        for limit, value in unenforced_limits(spec.resources, engine.enforced, waived).items():
            raise Unsupported(f"this engine does not enforce {limit}={value}: {_WHY_NOT[limit]}")
        if spec.network not in engine.networks:
            raise Unsupported(f"this engine does not support network {spec.network}: {_WHY_NOT[spec.network]}")
        if any(mount.writable for mount in spec.mounts) and not engine.local:
            raise Unsupported("a writable mount needs an engine on this machine, and Towline running as root")

    async def _start(self, spec: SandboxSpec, image: str) -> DockerSandbox:
        name = "towline-" + secrets.token_hex(6)
        volumes = [f"{name}-{number}" for number, mount in enumerate(spec.mounts) if mount.writable]
        sandbox = DockerSandbox(
            self._client, name, spec, local=self._engine_capabilities.local, scratch=self._data / name, volumes=volumes
        )
        try:
            await self._make_volumes(spec, name)
            created = await self._client.json(
                "POST", "/containers/create", self._config(spec, image, name), query={"name": name}
            )
            sandbox.container = str(created["Id"])
            await sandbox.put_init(stub_programs.elf_program("init", self._machine))
            await sandbox.make_workdir()
            await sandbox.run()
            if spec.network is Network.GATEWAY or is_proxied(spec, self.egress):
                sandbox.listener = await open_listener(sandbox.pid, GATEWAY_PORT)
            if is_proxied(spec, self.egress):
                sandbox.proxy = await proxy_of(sandbox.pid, spec, self.egress)
        except BaseException:
            await asyncio.shield(sandbox.destroy())
            raise
        return sandbox

    def _config(self, spec: SandboxSpec, image: str, name: str) -> dict[str, Any]:
        limits = spec.resources
        host: dict[str, Any] = {
            "NetworkMode": "bridge" if spec.network is Network.OPEN and self.egress.unfiltered else "none",
            "CapDrop": ["ALL"],
            "CapAdd": self._capabilities,
            "SecurityOpt": ["no-new-privileges"],
            "IpcMode": "private",
            # Explicit, or podman requests more than an engine without every capability may grant.
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
        if limits.disk_mb is not None and "disk_mb" in self._engine_capabilities.enforced:
            host["StorageOpt"] = {"size": f"{limits.disk_mb}m"}
        return {
            "Image": image,
            "Entrypoint": [INIT],
            "Cmd": [],
            "User": "0:0",
            "WorkingDir": "/",
            "Env": [f"{name}={value}" for name, value in environment(spec, self.egress).items()],
            "OpenStdin": True,
            "StdinOnce": True,
            "AttachStdin": True,
            "AttachStdout": True,
            "Healthcheck": {"Test": ["NONE"]},
            "Labels": {NODE_LABEL: self._node},
            "HostConfig": host,
        }

    async def _make_volumes(self, spec: SandboxSpec, name: str) -> None:
        """A writable mount is an overlay over its source, mounted by the engine; its upper folder ends with the sandbox."""
        for number, mount in enumerate(spec.mounts):
            if not mount.source.is_dir():
                raise SandboxError(f"cannot mount {mount.source} at {mount.target}: no such folder")
            if mount.writable:
                upper, work = (self._data / name / f"{kind}-{number}" for kind in ("upper", "work"))
                for folder in (upper, work):
                    await asyncio.to_thread(folder.mkdir, parents=True)
                options = f"lowerdir={mount.source.resolve()},upperdir={upper.resolve()},workdir={work.resolve()}"
                await self._client.json(
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
        """Remove the leftovers of a crash of this node."""
        query = {"filters": f'{{"label":["{NODE_LABEL}={self._node}"]}}'}
        for container in await self._client.json("GET", "/containers/json", query=query | {"all": "1"}):
            await self._client.json("DELETE", f"/containers/{container['Id']}", query={"force": "1", "v": "1"})
        for volume in (await self._client.json("GET", "/volumes", query=query)).get("Volumes") or []:
            await self._client.json("DELETE", f"/volumes/{quote_segment(volume['Name'])}", query={"force": "1"})
        for left in self._data.glob("towline-*"):
            await asyncio.to_thread(folders.remove, left)

    async def _probe(self) -> None:
        async def empty() -> AsyncIterator[bytes]:
            created = io.BytesIO()
            with tarfile.open(fileobj=created, mode="w") as tar:
                folder = tarfile.TarInfo("etc")
                folder.type, folder.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(folder)
            yield created.getvalue()

        image = await self.images.load(f"{REPOSITORY}:probe", empty)
        # Not `create`: it would refuse limits that are not probed yet.
        spec = SandboxSpec(root=image, network=Network.NONE, resources=PROBE_LIMITS, workdir="/")
        sandbox = await self._start(spec, image)
        try:
            self._engine_capabilities = await probe_engine(self._client, sandbox, unfiltered=self.egress.unfiltered)
        finally:
            await sandbox.destroy()
        with contextlib.suppress(DockerError):
            config = self._config(spec, image, "probe")
            config["HostConfig"]["StorageOpt"] = {"size": "64m"}
            created = await self._client.json("POST", "/containers/create", config)
            await self._client.json("DELETE", f"/containers/{created['Id']}", query={"force": "1", "v": "1"})
            self._engine_capabilities = self._engine_capabilities.with_disk()


def _ulimits() -> list[tuple[str, int]]:
    """Limits of open files and processes: this process's own, up to a sensible maximum."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    limits = {"nofile": (files, _MAX_OPEN_FILES), "nproc": (processes, _MAX_PROCESSES)}
    return [(name, limit if 0 < limit < top else top) for name, (limit, top) in limits.items()]


def _identity(data: Path) -> str:
    """The node's label value for its containers, stored in its data folder."""
    file = data / "node-id"
    if not file.exists():
        file.write_text(secrets.token_hex(12))
    return file.read_text().strip()
