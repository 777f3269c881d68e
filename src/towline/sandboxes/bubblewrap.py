"""Sandboxes by bubblewrap and the kernel's overlay: no daemon, as root and rootless, a few milliseconds each.

The runtime starts one keeper process and asks it for sandboxes; each sandbox has a spawner that this process talks to
directly. What holds a sandbox is in the README beside this file. Everything here is the node's side: plans, sockets,
streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from towline.sandboxes import leftovers, plan, wire
from towline.sandboxes.base import (
    DEFAULT_RESOURCES,
    Facts,
    SandboxError,
    Spec,
    Unsupported,
)
from towline.sandboxes.bubblewrap_sandbox import BubblewrapSandbox
from towline.sandboxes.channel import Channel
from towline.sandboxes.helping import SECONDS, within
from towline.schema import Network, Resources

if TYPE_CHECKING:
    from towline.sandboxes.roots import RootCache

_PACKAGES = Path(__file__).parents[2]
_CACHE_BYTES = 20 * 1024**3
_PATIENCE = 30
_PROBE = Resources(disk_mb=64, memory_mb=64, pids=32)


class Roots(Protocol):
    """Where root file systems become folders: `towline.sandboxes.roots.RootCache`."""

    async def folder(self, root: str) -> Path: ...


class BubblewrapRuntime:
    """The default runtime.

    `relaxed` lets limits that are the node's own defaults go when this machine cannot enforce them, and says so in the
    facts; a limit that a task asks for is then still refused. With `relaxed=False` every limit is enforced or refused.
    """

    name = "bubblewrap"

    def __init__(
        self,
        data: Path,
        *,
        relaxed: bool = True,
        defaults: Resources = DEFAULT_RESOURCES,
        roots: Roots | None = None,
        use_cgroups: bool = True,
        _unguarded: Collection[str] = (),
    ):
        self._data = data
        self._relaxed, self._defaults = relaxed, defaults
        self._use_cgroups = use_cgroups
        self._unguarded = sorted(_unguarded)
        self._facts: Facts | None = None
        self._channel: Channel | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._instance: leftovers.Instance | None = None
        self._sandboxes: dict[str, BubblewrapSandbox] = {}
        self._roots = roots
        self._own_roots: RootCache | None = None
        self._reviving = asyncio.Lock()

    @property
    def facts(self) -> Facts:
        if self._facts is None:
            raise SandboxError("the runtime is not open yet")
        return self._facts

    async def open(self) -> None:
        if self._channel is not None:
            return
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError(
                "bubblewrap is not installed: install the package `bubblewrap`, or choose another sandbox"
            )
        version = (await asyncio.to_thread(_output, [bwrap, "--version"])).split()[-1]
        notes = await asyncio.to_thread(leftovers.reap, self._data)
        self._instance = await asyncio.to_thread(leftovers.Instance.make, self._data)
        try:
            facts = await self._start_keeper(await asyncio.to_thread(os.path.realpath, bwrap))
            self._instance.record(facts["folders"])
            folder = self._instance.folder
            await asyncio.to_thread(plan.make_skeleton, folder / "skeleton")
            for resolve in (False, True):
                await asyncio.to_thread(plan.make_names, folder / f"names-{resolve}", resolve=resolve)
            self._facts = self._found(version, facts, notes)
            await self._probe()
        except BaseException:
            await self.close()
            raise

    async def _start_keeper(self, bwrap: str) -> dict[str, object]:
        ours, theirs = wire.pair()
        assert self._instance is not None
        ready: asyncio.Future[wire.Message] = asyncio.get_running_loop().create_future()

        def event(message: wire.Message) -> None:
            if not ready.done():
                ready.set_result(message)
            elif "gone" in message:
                self._gone(message["gone"], message["memory_kills"])
            elif "closed" in message:
                for sandbox in list(self._sandboxes.values()):
                    self._gone(sandbox.id)

        command = [sys.executable, "-I", "-S", "-c", leftovers.START_KEEPER, str(_PACKAGES), str(theirs.fileno())]
        # A session of its own: Ctrl-C is for the node, which then ends the keeper in its own time.
        self._keeper = await asyncio.to_thread(
            subprocess.Popen,
            command,
            pass_fds=[theirs.fileno(), self._instance.lock],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
        )
        theirs.close()
        self._channel = Channel(ours, event, "the keeper of the sandboxes has ended")
        settings = {
            "name": self._instance.group,
            "bwrap": bwrap,
            "cgroups": self._use_cgroups,
            "unguarded": self._unguarded,
        }
        self._channel.tell(settings)
        message = await asyncio.wait_for(ready, 30)
        if "facts" not in message:
            raise SandboxError(f"the keeper of the sandboxes did not start: {message.get('error', 'it ended')}")
        facts: dict[str, object] = message["facts"]
        return facts

    def _found(self, version: str, facts: Mapping[str, object], notes: list[str]) -> Facts:
        controllers = facts["controllers"]
        assert isinstance(controllers, list)
        enforced = {*controllers, "disk_mb", "seconds", "pids"}
        said = facts["notes"]
        assert isinstance(said, list)
        notes = [*notes, *said]
        if "memory_mb" not in enforced:
            notes.append(
                "memory is watched, not held: each process by RLIMIT_DATA, all together twice a second; a task that asks "
                "for memory_mb is refused"
            )
        if "pids" not in controllers:
            notes.append("processes are counted by user (RLIMIT_NPROC); root inside cannot change its user")
        if facts["rootless"] and facts["mapped"] == 1:
            notes.append(
                "one user id only: chown and other users do not work inside; install `uidmap` and give this user a range in "
                "/etc/subuid and /etc/subgid"
            )
        return Facts(version, True, frozenset(enforced), frozenset(Network), tuple(notes))

    async def _probe(self) -> None:
        """Make a sandbox and end it: what does not work here is known before a session needs it."""
        limits = {name: value for name, value in _PROBE if name in self.facts.enforced}
        try:
            sandbox = await self._create(Spec(network=Network.GATEWAY, resources=Resources.model_validate(limits)))
        except SandboxError as error:
            raise SandboxError(
                f"bubblewrap does not work here: {error}. It needs user namespaces and a kernel of 5.11 or later; see "
                "/proc/sys/user/max_user_namespaces and, on Ubuntu, kernel.apparmor_restrict_unprivileged_userns"
            ) from error
        await sandbox.destroy()

    async def prepare(self, spec: Spec) -> None:
        await self._root(spec.root)

    async def _root(self, root: str) -> Path | None:
        """The folder that a spec's root names; None for the host's own."""
        if not root:
            return None
        if self._roots is None:
            from towline.sandboxes.roots import RootCache

            self._roots = self._own_roots = RootCache(self._data / "roots", _CACHE_BYTES)
        folder = await asyncio.to_thread((await self._roots.folder(root)).resolve)
        if folder == Path("/"):
            raise SandboxError(
                "the host's root cannot be a sandbox's: leave `root` empty for the parts of it that are safe"
            )
        return folder

    async def create(self, spec: Spec) -> BubblewrapSandbox:
        await self._revive()
        return await self._create(spec)

    async def _create(self, spec: Spec) -> BubblewrapSandbox:
        if self._channel is None or self._facts is None or self._instance is None:
            raise SandboxError("the runtime is not open")
        limits = self._limits(spec.resources)
        identifier = uuid.uuid4().hex[:16]
        names = self._instance.folder / f"names-{plan.needs_resolver(spec)}"
        skeleton = self._instance.folder / "skeleton"
        root = await self._root(spec.root)
        made = plan.make_plan(spec, identifier, root, skeleton, names)
        made["disk_mb"] = limits["disk_mb"]
        made["limits"] = {name: limits[name] for name in ("memory_mb", "pids", "cpus")}
        try:
            asking = self._channel.ask({"do": "create", "plan": made})
            answer, descriptors = await within(SECONDS, asking, f"sandbox {identifier} was not made")
        except (asyncio.CancelledError, SandboxError):
            self._channel.tell({"do": "destroy", "id": identifier})
            raise
        if "error" in answer:
            raise SandboxError(answer["error"])
        connection = socket.socket(fileno=descriptors[0])
        listener = socket.socket(fileno=descriptors[1]) if len(descriptors) > 1 else None
        sandbox = BubblewrapSandbox(identifier, spec, self._channel, connection, listener, answer["owner"], self._gone)
        self._sandboxes[identifier] = sandbox
        return sandbox

    async def _revive(self) -> None:
        """Start another keeper where one was lost. Its sandboxes are gone; those who used them have been told."""
        async with self._reviving:
            if self._channel is not None and self._channel.closed:
                await self.close()
                await self.open()

    def _lacking(self, resources: Resources) -> list[str]:
        return [name for name, value in resources if value is not None and name not in self.facts.enforced]

    def _limits(self, resources: Resources) -> dict[str, float | int | None]:
        """The limits to set; `Unsupported` if one of them cannot be enforced and is not the node's own default."""
        for name in self._lacking(resources):
            own = self._relaxed and getattr(resources, name) == getattr(self._defaults, name)
            if not own:
                raise Unsupported(
                    f"{name}={getattr(resources, name)} cannot be enforced here: {' '.join(self.facts.notes)}"
                )
        limits: dict[str, float | int | None] = dict(resources)
        # What is written is in memory: it always has a bound.
        limits["disk_mb"] = limits["disk_mb"] or self._defaults.disk_mb or DEFAULT_RESOURCES.disk_mb
        for guard in ("memory_mb", "pids", "disk_mb"):
            if guard.split("_")[0] in self._unguarded:
                limits[guard] = None
        return limits

    def _gone(self, identifier: str, memory_kills: int = 0) -> None:
        sandbox = self._sandboxes.pop(identifier, None)
        if sandbox is not None:
            sandbox.ended(memory_kills)

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.destroy() for sandbox in self._sandboxes.values()), return_exceptions=True)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            await asyncio.to_thread(_end, keeper)
        if self._own_roots is not None:
            self._own_roots.close()
            self._roots = self._own_roots = None
        if self._instance is not None:
            # Let go of first: a call that is cancelled here must not leave it to be removed twice.
            instance, self._instance = self._instance, None
            await asyncio.to_thread(instance.remove)


def _end(keeper: subprocess.Popen[bytes]) -> None:
    """The keeper ends everything and then itself; one that does not is killed, which ends everything too."""
    try:
        keeper.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        keeper.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            keeper.wait(_PATIENCE)  # in vain if it hangs in the kernel


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_PATIENCE).stdout
