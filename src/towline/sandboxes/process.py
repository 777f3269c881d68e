"""Sandboxes without isolation: plain processes of whoever runs the node, in a folder of their own.

For trusted programs, and for machines that allow nothing better. Nothing is kept from the host: a command sees every
file and address that the node sees. What does hold: commands get none of the node's environment, each sandbox has its
own folder, and `kill` ends every descendant of every command.

There is no other root, so an inside path is mapped: `/work/a` is `<folder>/root/work/a`, whose `<folder>/root` is in
`TOWLINE_ROOT`. `put`, `get`, `diff` and `cwd` map their paths. In commands and variables, a whole word (between the
colons of a variable) that names something in the sandbox's folder means that, and so does one that names something new
in one of its folders and nothing on the host; other words stay as they are. So
`["cat", "/work/a"]` and `HOME=/home/agent` mean the sandbox's, `["/bin/sh", …]` is the host's, and a script says
`"$TOWLINE_ROOT/work/a"` or, since commands start in the working folder, `a`. `ProcessSandbox.outside` tells the mapped
path to whoever writes paths into configuration files.
"""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import shutil
import sys
from pathlib import Path

from towline.sandboxes import trees
from towline.sandboxes.base import (
    DEFAULT_RESOURCES,
    Facts,
    SandboxError,
    Spec,
    Unsupported,
)
from towline.sandboxes.process_sandbox import FOLDERS, ProcessSandbox, check_user
from towline.schema import Network, Resources

_NOTES = (
    "no isolation: what runs inside can read and change everything that the node's user can; use it for trusted "
    "programs only",
    "no limit but the time limit is enforced, and no network is cut off: with network `gateway` other addresses stay "
    "reachable",
    "kill ends all descendants; it cannot end what another service started for them (cron, at, systemd-run), nor, if "
    "a command kills its own keeper, daemons that had left their command",
)


class ProcessRuntime:
    """Sandboxes that are folders under `data` with plain processes in them."""

    name = "process"

    def __init__(self, data: Path, *, defaults: Resources = DEFAULT_RESOURCES):
        self._data = data
        self._defaults = defaults
        """Limits that the node gives to specs that ask for none: waived here, unlike any others."""
        self._sandboxes: dict[str, ProcessSandbox] = {}
        self._lock: int | None = None

    @property
    def facts(self) -> Facts:
        networks = frozenset({Network.OPEN, Network.GATEWAY})
        return Facts(
            platform.release(), isolated=False, enforced=frozenset({"seconds"}), networks=networks, notes=_NOTES
        )

    async def open(self) -> None:
        if sys.platform != "linux":
            raise SandboxError("process sandboxes need Linux: they stand on child subreapers and /proc")
        self._lock = await asyncio.to_thread(trees.hold, self._data)
        # Their keepers have ended since the node that had them did, and let go of the lock; only the folders are left.
        for left in self._data.glob("sandbox-*"):
            await asyncio.to_thread(trees.remove, left)

    async def prepare(self, spec: Spec) -> None:
        self._check(spec)

    async def create(self, spec: Spec) -> ProcessSandbox:
        self._check(spec)
        if self._lock is None:
            raise SandboxError("the process runtime is not open")
        name = "sandbox-" + secrets.token_hex(6)
        sandbox = ProcessSandbox(name, spec, self._data / name, self._lock)
        self._sandboxes = {name: left for name, left in self._sandboxes.items() if not left.gone}
        self._sandboxes[name] = sandbox
        try:
            await asyncio.to_thread(_furnish, sandbox)
            await sandbox.open()
        except BaseException:
            await asyncio.shield(sandbox.destroy())
            raise
        return sandbox

    async def close(self) -> None:
        left, self._sandboxes = list(self._sandboxes.values()), {}
        await asyncio.gather(*(sandbox.destroy() for sandbox in left))
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check(self, spec: Spec) -> None:
        if spec.root or spec.layers:
            raise Unsupported("process sandboxes have no root of their own: use bubblewrap, docker or apptainer")
        if spec.network is Network.NONE:
            raise Unsupported("process sandboxes cannot cut off the network: use bubblewrap, docker or apptainer")
        check_user(spec.user)
        for limit, value in spec.resources.__dict__.items():
            if value is not None and value != getattr(self._defaults, limit):
                raise Unsupported(
                    f"process sandboxes cannot enforce {limit}={value}: use bubblewrap or docker, or do not ask"
                )


def _furnish(sandbox: ProcessSandbox) -> None:
    """The folder as the spec has it: a read-only mount is a link to its source, a writable one a copy of it."""
    for path in (*FOLDERS, sandbox.spec.workdir):
        Path(sandbox.outside(path)).mkdir(parents=True, exist_ok=True)
    for mount in sandbox.spec.mounts:
        target = Path(sandbox.outside(mount.target))
        if not mount.source.exists():
            raise SandboxError(f"nothing to mount at {mount.source}")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not mount.writable:
            target.symlink_to(mount.source.resolve())
        elif mount.source.is_dir():
            shutil.copytree(mount.source, target, symlinks=True)
        else:
            shutil.copy2(mount.source, target)
