"""Sandboxes by Apptainer, for machines where there is no other way: clusters without root, docker or bubblewrap.

Each sandbox is an instance over a root folder: an overlay folder takes what is written, commands are `apptainer exec`s,
files go in and out by a helper that enters the instance's namespaces. A guard process ends the instance when the node
dies. What Apptainer cannot enforce here is found out when the runtime opens, told in the facts and refused.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import shutil
from pathlib import Path

from towline.sandboxes import stubs, trees
from towline.sandboxes.apptainer_cli import START, Apptainer, Place
from towline.sandboxes.apptainer_instance import ApptainerSandbox, check_user
from towline.sandboxes.base import DEFAULT_RESOURCES, Facts, SandboxError, Spec, Unsupported
from towline.sandboxes.network_door import listener
from towline.sandboxes.roots import RootCache
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
    ):
        """`defaults` are the limits that the node gives to specs that ask for none: those that cannot be enforced here
        are waived, and said in the facts; a limit that a task asks for is refused."""
        self._data = data
        self._named = program
        self._program = Apptainer(program, data)
        self._defaults = defaults
        self._roots = roots or RootCache(data / "roots", _CACHE_BYTES)
        self._sandboxes: dict[str, ApptainerSandbox] = {}
        self._lock: int | None = None
        self._facts = Facts("", True, frozenset(), frozenset())

    @property
    def facts(self) -> Facts:
        return self._facts

    async def open(self) -> None:
        program = self._named or shutil.which("apptainer")
        if not program:
            raise SandboxError("there is no `apptainer`: install Apptainer 1.4 or later, or choose another sandbox")
        if not _is_ordinary_user():
            raise SandboxError(
                "apptainer sandboxes are for ordinary users: root inside would be the host's root. As root use bubblewrap"
            )
        self._program = Apptainer(program, self._data)
        version = (await self._program.run(["version"])).strip()
        self._lock = await asyncio.to_thread(trees.hold, self._data)
        try:
            # Guards ended the instances of a node that crashed; its folders are left.
            for left in (*self._data.glob("towline-*"), *self._data.glob("config")):
                await asyncio.to_thread(trees.remove, left)
            self._facts = await self._probe(version)
        except BaseException:
            await self.close()
            raise

    async def ping(self) -> None:
        await self._program.run(["version"])

    async def prepare(self, spec: Spec) -> None:
        self._check(spec)
        (await self._roots.lease(spec.root)).release()

    async def create(self, spec: Spec) -> ApptainerSandbox:
        self._check(spec)
        if self._lock is None:
            raise SandboxError("the apptainer runtime is not open")
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

    def _check(self, spec: Spec) -> None:
        if not spec.root:
            raise Unsupported("apptainer sandboxes need a root of their own: name a folder or a tar file as root")
        if not os.path.exists(spec.root):
            raise SandboxError(
                f"there is no root file system at {spec.root!r}: give a folder or a tar file; an image becomes one by "
                "`apptainer build --sandbox FOLDER IMAGE`"
            )
        check_user(spec.user)
        for name, value in spec.resources:
            if value is not None and name not in self._facts.enforced and value != getattr(self._defaults, name):
                raise Unsupported(f"{name}={value} cannot be enforced here: {' '.join(self._facts.notes)}")
        if spec.network not in self._facts.networks:
            raise Unsupported(f"network {spec.network} is not possible here: {' '.join(self._facts.notes)}")

    async def _make(self, spec: Spec) -> ApptainerSandbox:
        name = "towline-" + secrets.token_hex(6)
        folder = self._data / name
        lease = await self._roots.lease(spec.root)
        try:
            place = await asyncio.to_thread(_furnish, name, folder, lease.path, spec)
        except BaseException:
            lease.release()
            await asyncio.to_thread(trees.remove, folder)
            raise
        sandbox = ApptainerSandbox(self._program, spec, folder, place, lease)
        try:
            await sandbox.open()
            if spec.network is Network.GATEWAY:
                sandbox.listener = await listener(sandbox.pid)
        except BaseException:
            await asyncio.shield(sandbox.destroy())
            raise
        return sandbox

    async def _probe(self, version: str) -> Facts:
        """Make instances and look at them: one with the gateway's network, then one for each limit."""
        root = self._data / "towline-probe"
        await asyncio.to_thread(_empty_root, root)
        spec = Spec(root=str(root), network=Network.GATEWAY, resources=Resources(), workdir="/")
        try:
            await (await self._make(spec)).destroy()
        except SandboxError as error:
            raise SandboxError(
                f"apptainer does not work here: {error}. It needs unprivileged user namespaces and overlays (Linux 5.13 or "
                "later); see /proc/sys/user/max_user_namespaces"
            ) from error
        enforced = {"seconds"}
        for name, limits in _PROBES.items():
            if await self._holds(dataclasses.replace(spec, resources=limits, network=Network.NONE), name):
                enforced.add(name)
        await asyncio.to_thread(trees.remove, root)
        notes = []
        lacking = sorted({*_PROBES} - enforced)
        if lacking:
            notes.append(
                f"{', '.join(lacking)} not enforced: Apptainer needs cgroups v2 and a systemd session for that."
            )
        notes.append("disk_mb not enforced: an overlay folder has no size of its own; put the data folder on a quota.")
        notes.append("One user inside, root, without capabilities: chown and other users do not work.")
        return Facts(version, True, frozenset(enforced), frozenset(Network), tuple(notes))

    async def _holds(self, spec: Spec, limit: str) -> bool:
        """Whether a limit is really set on an instance that was started with it."""
        try:
            sandbox = await self._make(spec)
        except SandboxError:
            return False
        try:
            return await asyncio.to_thread(_cgroup_says, sandbox.pid, *_CGROUP_FILES[limit])
        finally:
            await sandbox.destroy()


def _is_ordinary_user() -> bool:
    return os.geteuid() != 0


def _cgroup_says(pid: int, file: str, value: str) -> bool:
    try:
        group = next(line for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.startswith("0::"))
        return Path("/sys/fs/cgroup" + group[3:], file).read_text().strip() == value
    except (OSError, StopIteration):
        return False


def _empty_root(folder: Path) -> None:
    trees.remove(folder)
    for name in ("dev", "proc", "etc", "tmp", "opt"):
        (folder / name).mkdir(parents=True)


def _furnish(name: str, folder: Path, root: Path, spec: Spec) -> Place:
    """The instance's folder: its overlay with the program that it starts with, and what its mounts need."""
    overlay = folder / "overlay"
    start = overlay / "upper" / START
    start.parent.mkdir(parents=True)
    (overlay / "work").mkdir()
    start.write_bytes(stubs.program("init"))
    start.chmod(0o755)
    layers = []
    for number, layer in enumerate(spec.layers):
        if not layer.is_dir():
            raise SandboxError(f"the layer {layer} is not a folder")
        # Apptainer looks for `upper` in an overlay folder; a layer is what would be in it.
        holder = folder / f"layer-{number}"
        holder.mkdir()
        (holder / "upper").symlink_to(layer.resolve())
        layers.append(holder)
    copies = []
    for number, mount in enumerate(spec.mounts):
        if not mount.source.exists():
            raise SandboxError(f"nothing to mount at {mount.source}")
        if mount.writable:
            copies.append(folder / f"copy-{number}")
            shutil.copytree(mount.source, copies[-1], symlinks=True)
    return Place(name, root, overlay, tuple(layers), tuple(copies), folder / "pid")
