"""The Apptainer runtime, for machines that allow nothing else: clusters without root, docker or bubblewrap.

Each sandbox is an instance over a root folder: an overlay folder receives what is written, commands are `apptainer
exec`s, and files go in and out by a helper that enters the instance's namespaces. A guard process ends the instance
when the node dies. What Apptainer cannot enforce on this machine is probed when the runtime opens, reported in its
facts, and refused.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import shutil
from pathlib import Path

from towline.sandboxes import stub_programs
from towline.sandboxes.apptainer.sandbox import START, ApptainerCli, ApptainerSandbox, InstancePaths, check_user
from towline.sandboxes.base import (
    DEFAULT_RESOURCES,
    GATEWAY_PORT,
    RuntimeFacts,
    SandboxError,
    SandboxSpec,
    Unsupported,
    unenforced_limits,
)
from towline.sandboxes.egress import EgressRules, is_proxied, proxy_of
from towline.sandboxes.files import folders
from towline.sandboxes.images.root_cache import RootCache
from towline.sandboxes.netns_listener import open_listener
from towline.schema import Network, Resources

_CACHE_BYTES = 20 << 30
_PROBES = {
    "memory_mb": Resources(memory_mb=64),
    "pids": Resources(pids=32),
    "cpus": Resources(cpus=0.5),
}
_CGROUP_FILES = {
    "memory_mb": ("memory.max", str(64 << 20)),
    "pids": ("pids.max", "32"),
    "cpus": ("cpu.max", "50000 100000"),
}


class ApptainerRuntime:
    """Instances of one installed Apptainer, for an ordinary user."""

    name = "apptainer"

    def __init__(
        self,
        data: Path,
        *,
        program: str = "",
        defaults: Resources = DEFAULT_RESOURCES,
        roots: RootCache | None = None,
        egress: EgressRules | None = None,
    ):
        """`defaults` are the node's default limits: those that cannot be enforced here are waived, and named in the facts;
        a limit that a task sets is refused."""
        self._data = data
        self._configured_program = program
        self._program = ApptainerCli(program, data)
        self._defaults = defaults
        self._egress = egress or EgressRules()
        self._roots = roots or RootCache(data / "roots", _CACHE_BYTES)
        self._sandboxes: dict[str, ApptainerSandbox] = {}
        self._lock: int | None = None
        self._facts = RuntimeFacts("", True, frozenset(), frozenset())

    @property
    def facts(self) -> RuntimeFacts:
        return self._facts

    async def open(self) -> None:
        program = self._configured_program or shutil.which("apptainer")
        if not program:
            raise SandboxError(
                "Apptainer is not installed: install Apptainer 1.4 or later, or configure another sandbox runtime"
            )
        if not _is_ordinary_user():
            raise SandboxError(
                "the apptainer runtime cannot run as root: root inside would be the host's root; use bubblewrap instead"
            )
        self._program = ApptainerCli(program, self._data)
        version = (await self._program.run(["version"])).strip()
        self._lock = await asyncio.to_thread(folders.lock_data_folder, self._data)
        try:
            # Guards ended the instances of a crashed node; only its folders are left.
            for left in (*self._data.glob("towline-*"), *self._data.glob("config")):
                await asyncio.to_thread(folders.remove, left)
            self._facts = await self._probe(version)
        except BaseException:
            await self.close()
            raise

    async def ping(self) -> None:
        await self._program.run(["version"])

    async def prepare(self, spec: SandboxSpec) -> None:
        self._check(spec)
        (await self._roots.lease(spec.root)).release()

    async def create(self, spec: SandboxSpec) -> ApptainerSandbox:
        self._check(spec)
        if self._lock is None:
            raise SandboxError("the apptainer runtime is not open: call `open` first")
        limits = {name: value for name, value in spec.resources if name in self._facts.enforced}
        self._sandboxes = {name: left for name, left in self._sandboxes.items() if not left.gone}
        sandbox = await self._make(dataclasses.replace(spec, resources=Resources.model_validate(limits)))
        sandbox.spec = spec
        self._sandboxes[sandbox.id] = sandbox
        return sandbox

    async def close(self) -> None:
        left, self._sandboxes = list(self._sandboxes.values()), {}
        await asyncio.gather(*(sandbox.destroy() for sandbox in left))
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check(self, spec: SandboxSpec) -> None:
        if not spec.root:
            raise Unsupported("apptainer sandboxes need a root file system: set `root` to a folder or a tar file")
        if not os.path.exists(spec.root):
            raise SandboxError(
                f"no root file system at {spec.root!r}: use a folder or a tar file; "
                "`apptainer build --sandbox FOLDER IMAGE` makes a folder of an image"
            )
        check_user(spec.user)
        for name, value in unenforced_limits(spec.resources, self._facts.enforced, self._defaults).items():
            raise Unsupported(f"{name}={value} cannot be enforced on this machine: {' '.join(self._facts.notes)}")
        if spec.network not in self._facts.networks:
            raise Unsupported(f"network {spec.network} does not work on this machine: {' '.join(self._facts.notes)}")

    async def _make(self, spec: SandboxSpec) -> ApptainerSandbox:
        name = "towline-" + secrets.token_hex(6)
        folder = self._data / name
        lease = await self._roots.lease(spec.root)
        try:
            paths = await asyncio.to_thread(_make_folders, name, folder, lease.path, spec)
        except BaseException:
            lease.release()
            await asyncio.to_thread(folders.remove, folder)
            raise
        sandbox = ApptainerSandbox(self._program, spec, folder, paths, lease, self._egress)
        try:
            await sandbox.open()
            if spec.network is Network.GATEWAY or is_proxied(spec, self._egress):
                sandbox.listener = await open_listener(sandbox.pid, GATEWAY_PORT)
            if is_proxied(spec, self._egress):
                sandbox.proxy = await proxy_of(sandbox.pid, spec, self._egress)
        except BaseException:
            await asyncio.shield(sandbox.destroy())
            raise
        return sandbox

    async def _probe(self, version: str) -> RuntimeFacts:
        """Start instances and inspect them: one with network `gateway`, then one per limit."""
        root = self._data / "towline-probe"
        await asyncio.to_thread(_empty_root, root)
        spec = SandboxSpec(root=str(root), network=Network.GATEWAY, resources=Resources(), workdir="/")
        try:
            await (await self._make(spec)).destroy()
        except SandboxError as error:
            raise SandboxError(
                f"apptainer does not work here: {error}. It needs unprivileged user namespaces and overlays (Linux 5.13 or "
                "later); check /proc/sys/user/max_user_namespaces"
            ) from error
        enforced = {"seconds"}
        for name, limits in _PROBES.items():
            if await self._is_enforced(dataclasses.replace(spec, resources=limits, network=Network.NONE), name):
                enforced.add(name)
        await asyncio.to_thread(folders.remove, root)
        notes = []
        missing = sorted({*_PROBES} - enforced)
        if missing:
            notes.append(
                f"{', '.join(missing)} not enforced: Apptainer needs cgroups v2 and a systemd session for them."
            )
        notes.append("disk_mb not enforced: an overlay folder has no size limit; put the data folder on a quota.")
        notes.append("Only root inside, without capabilities: chown and other users do not work.")
        return RuntimeFacts(version, True, frozenset(enforced), frozenset(Network), tuple(notes))

    async def _is_enforced(self, spec: SandboxSpec, limit: str) -> bool:
        """Whether a limit is really set in the control group of an instance that was started with it."""
        try:
            sandbox = await self._make(spec)
        except SandboxError:
            return False
        try:
            return await asyncio.to_thread(_cgroup_has, sandbox.pid, *_CGROUP_FILES[limit])
        finally:
            await sandbox.destroy()


def _is_ordinary_user() -> bool:
    return os.geteuid() != 0


def _cgroup_has(pid: int, file: str, value: str) -> bool:
    try:
        group = next(line for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.startswith("0::"))
        return Path("/sys/fs/cgroup" + group[3:], file).read_text().strip() == value
    except (OSError, StopIteration):
        return False


def _empty_root(folder: Path) -> None:
    folders.remove(folder)
    for name in ("dev", "proc", "etc", "tmp", "opt"):
        (folder / name).mkdir(parents=True)


def _make_folders(name: str, folder: Path, root: Path, spec: SandboxSpec) -> InstancePaths:
    """Create the instance's folder: its overlay with its init program, its layers, and copies for writable mounts."""
    overlay = folder / "overlay"
    start = overlay / "upper" / START
    start.parent.mkdir(parents=True)
    (overlay / "work").mkdir()
    start.write_bytes(stub_programs.elf_program("init"))
    start.chmod(0o755)
    layers = []
    for number, layer in enumerate(spec.layers):
        if not layer.is_dir():
            raise SandboxError(f"the layer {layer} is not a folder")
        # Apptainer expects an `upper` in an overlay folder; a layer is such an `upper`.
        holder = folder / f"layer-{number}"
        holder.mkdir()
        (holder / "upper").symlink_to(layer.resolve())
        layers.append(holder)
    copies = []
    for number, mount in enumerate(spec.mounts):
        source = mount.existing_source()
        if mount.writable:
            copies.append(folder / f"copy-{number}")
            shutil.copytree(source, copies[-1], symlinks=True)
    return InstancePaths(name, root, overlay, tuple(layers), tuple(copies), folder / "pid")
