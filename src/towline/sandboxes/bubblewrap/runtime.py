"""The bubblewrap runtime: sandboxes by `bwrap` and the kernel's overlay, without a daemon, as root and rootless.

The runtime starts one supervisor process and requests sandboxes from it; each sandbox has a spawner that this process
talks to directly. Everything here is the node's side: plans, sockets, streams.

Why our own runtime and not runc, crun or a container library: a rollout creates thousands of short sandboxes on
machines without a container engine and often without root. A sandbox here starts in tens of milliseconds from a plain
folder, a command costs one fork, the gateway's socket is opened inside the network namespace, and every sandbox ends
with the node, even if the node is killed. A container engine would add a daemon and an image store
and still need all of this beside it. `bwrap` itself makes the namespaces and the root.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from towline.sandboxes import wire
from towline.sandboxes.base import (
    DEFAULT_RESOURCES,
    RuntimeFacts,
    SandboxError,
    SandboxSpec,
    Unsupported,
    unenforced_limits,
)
from towline.sandboxes.bubblewrap import mount_plan, reaper
from towline.sandboxes.bubblewrap.sandbox import BubblewrapSandbox
from towline.sandboxes.egress import EgressProxy, EgressRules
from towline.sandboxes.subprocesses import STEP_TIMEOUT, Channel, isolated_python, with_timeout
from towline.schema import Network, Resources

if TYPE_CHECKING:
    from towline.sandboxes.images.root_cache import RootCache

_CACHE_BYTES = 20 * 1024**3
_EXIT_TIMEOUT = 30
_PROBE = Resources(disk_mb=64, memory_mb=64, pids=32)


class BubblewrapRuntime:
    """The default runtime.

    `relaxed` waives limits that are the node's own defaults when this machine cannot enforce them, and says so in the facts;
    a limit that a task sets is still refused. With `relaxed=False` every limit is enforced or refused.
    """

    name = "bubblewrap"

    def __init__(
        self,
        data: Path,
        *,
        relaxed: bool = True,
        defaults: Resources = DEFAULT_RESOURCES,
        roots: RootCache | None = None,
        egress: EgressRules | None = None,
        totals: Resources | None = None,
        use_cgroups: bool = True,
        _unguarded: Collection[str] = (),
    ):
        self._data = data
        self._relaxed, self._defaults = relaxed, defaults
        self._use_cgroups = use_cgroups
        self._egress = egress or EgressRules()
        self._totals = totals
        self._unguarded = sorted(_unguarded)
        self._facts: RuntimeFacts | None = None
        self._channel: Channel | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._folder: reaper.SupervisorFolder | None = None
        self._sandboxes: dict[str, BubblewrapSandbox] = {}
        self._roots = roots
        self._own_roots: RootCache | None = None
        self._restarting = asyncio.Lock()

    @property
    def facts(self) -> RuntimeFacts:
        if self._facts is None:
            raise SandboxError("the bubblewrap runtime is not open: call `open` first")
        return self._facts

    async def open(self) -> None:
        if self._channel is not None:
            return
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError(
                "bubblewrap is not installed: install the package `bubblewrap`, or configure another sandbox runtime"
            )
        version = (await asyncio.to_thread(_output, [bwrap, "--version"])).split()[-1]
        notes = await asyncio.to_thread(reaper.reap, self._data)
        self._folder = await asyncio.to_thread(reaper.SupervisorFolder.make, self._data)
        try:
            facts = await self._start_supervisor(await asyncio.to_thread(os.path.realpath, bwrap))
            self._folder.record(facts["folders"])
            folder = self._folder.folder
            await asyncio.to_thread(mount_plan.make_host_skeleton, folder / "skeleton")
            for resolve in (False, True):
                await asyncio.to_thread(mount_plan.make_hosts_layer, folder / f"names-{resolve}", resolve=resolve)
            self._facts = self._facts_of(version, facts, notes)
            await self._probe()
        except BaseException:
            await self.close()
            raise

    async def _start_supervisor(self, bwrap: str) -> dict[str, object]:
        ours, theirs = wire.pair()
        assert self._folder is not None
        ready: asyncio.Future[wire.WireMessage] = asyncio.get_running_loop().create_future()

        def on_event(message: wire.WireMessage) -> None:
            if not ready.done():
                ready.set_result(message)
            elif "gone" in message:
                self._on_gone(message["gone"], message["oom_kills"], message["other_kills"])
            elif "closed" in message:
                for sandbox in list(self._sandboxes.values()):
                    self._on_gone(sandbox.id)

        command = isolated_python(reaper.SUPERVISOR_PROGRAM, theirs.fileno())
        # Its own session: Ctrl-C is for the node, which then ends the supervisor in its own time.
        self._supervisor = await asyncio.to_thread(
            subprocess.Popen,
            command,
            pass_fds=[theirs.fileno(), self._folder.lock],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
        )
        theirs.close()
        self._channel = Channel(ours, on_event, "the sandbox supervisor has exited")
        settings = {
            "name": self._folder.group,
            "bwrap": bwrap,
            "cgroups": self._use_cgroups,
            "unguarded": self._unguarded,
            "totals": {name: value for name, value in self._totals if value is not None} if self._totals else {},
        }
        self._channel.notify(settings)
        message = await asyncio.wait_for(ready, 30)
        if "facts" not in message:
            raise SandboxError(f"the sandbox supervisor did not start: {message.get('error', 'it exited')}")
        facts: dict[str, object] = message["facts"]
        return facts

    def _facts_of(self, version: str, facts: Mapping[str, object], notes: list[str]) -> RuntimeFacts:
        controllers = facts["controllers"]
        assert isinstance(controllers, list)
        enforced = {*controllers, "disk_mb", "seconds", "pids"}
        reported = facts["notes"]
        assert isinstance(reported, list)
        notes = [*notes, *reported]
        if "memory_mb" not in enforced:
            notes.append(
                "memory is polled, not enforced: RLIMIT_DATA limits each process, the total is checked twice per second; "
                "tasks that set memory_mb are refused"
            )
        if "pids" not in controllers:
            notes.append("processes are counted per user (RLIMIT_NPROC); root inside cannot switch to another user")
        if facts["rootless"] and facts["mapped"] == 1:
            notes.append(
                "only one user id: chown and other users do not work inside; install `uidmap` and give this user a range in "
                "/etc/subuid and /etc/subgid"
            )
        return RuntimeFacts(version, True, frozenset(enforced), frozenset(Network), tuple(notes))

    async def _probe(self) -> None:
        """Create and destroy a sandbox, so that what does not work here is known before a session needs it."""
        limits = {name: value for name, value in _PROBE if name in self.facts.enforced}
        try:
            sandbox = await self._create(
                SandboxSpec(network=Network.GATEWAY, resources=Resources.model_validate(limits))
            )
        except SandboxError as error:
            raise SandboxError(
                f"bubblewrap does not work here: {error}. It needs user namespaces and Linux 5.11 or later; check "
                "/proc/sys/user/max_user_namespaces and, on Ubuntu, kernel.apparmor_restrict_unprivileged_userns"
            ) from error
        await sandbox.destroy()

    async def prepare(self, spec: SandboxSpec) -> None:
        await self._root(spec.root)

    async def _root(self, root: str) -> Path | None:
        """The folder of a spec's root; None for the host's own root."""
        if not root:
            return None
        if self._roots is None:
            from towline.sandboxes.images.root_cache import RootCache

            self._roots = self._own_roots = RootCache(self._data / "roots", _CACHE_BYTES)
        folder = await asyncio.to_thread((await self._roots.folder(root)).resolve)
        if folder == Path("/"):
            raise SandboxError(
                "`/` cannot be a sandbox's root: leave `root` empty for an allow-list of the host's root"
            )
        return folder

    async def create(self, spec: SandboxSpec) -> BubblewrapSandbox:
        await self._ensure_supervisor()
        return await self._create(spec)

    async def _create(self, spec: SandboxSpec) -> BubblewrapSandbox:
        if self._channel is None or self._facts is None or self._folder is None:
            raise SandboxError("the bubblewrap runtime is not open: call `open` first")
        channel = self._channel
        limits = self._limits(spec.resources)
        identifier = uuid.uuid4().hex[:16]
        names = self._folder.folder / f"names-{mount_plan.shares_network(spec, self._egress)}"
        skeleton = self._folder.folder / "skeleton"
        root = await self._root(spec.root)
        plan = mount_plan.make_plan(spec, identifier, root, skeleton, names, self._egress)
        plan["disk_mb"] = limits["disk_mb"]
        plan["limits"] = {name: limits[name] for name in ("memory_mb", "pids", "cpus")}
        try:
            reply = channel.request({"do": "create", "plan": plan})
            answer, descriptors = await with_timeout(STEP_TIMEOUT, reply, f"sandbox {identifier} was not created")
        except (asyncio.CancelledError, SandboxError):
            channel.notify({"do": "destroy", "id": identifier})
            raise
        if "error" in answer:
            raise SandboxError(answer["error"])
        connection = socket.socket(fileno=descriptors[0])
        listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors[1:]]
        proxy = None
        if len(listeners) > 1:
            proxy = EgressProxy(self._egress, spec.allowed_hosts)
            await proxy.serve(listeners[1])
        listener = listeners[0] if listeners else None
        sandbox = BubblewrapSandbox(
            identifier, spec, channel, connection, listener, answer["owner"], self._on_gone, proxy
        )
        if channel.closed:
            # The supervisor died after it had answered, and its sandbox with it.
            sandbox.ended()
            raise SandboxError("the sandbox supervisor has exited")
        self._sandboxes[identifier] = sandbox
        return sandbox

    async def _ensure_supervisor(self) -> None:
        """Replace a supervisor that died. Its sandboxes are gone, and their users have been notified."""
        async with self._restarting:
            if self._channel is not None and self._channel.closed:
                await self.close()
                await self.open()

    def _limits(self, resources: Resources) -> dict[str, float | int | None]:
        """The limits to set; `Unsupported` if one cannot be enforced and is not the node's own default."""
        waived = self._defaults if self._relaxed else None
        for name, value in unenforced_limits(resources, self.facts.enforced, waived).items():
            raise Unsupported(f"{name}={value} cannot be enforced on this machine: {'; '.join(self.facts.notes)}")
        limits: dict[str, float | int | None] = dict(resources)
        # Written files are in memory, so their size always has a limit.
        limits["disk_mb"] = limits["disk_mb"] or self._defaults.disk_mb or DEFAULT_RESOURCES.disk_mb
        for guard in ("memory_mb", "pids", "disk_mb"):
            if guard.split("_")[0] in self._unguarded:
                limits[guard] = None
        return limits

    def _on_gone(self, identifier: str, oom_kills: int = 0, other_kills: int = 0) -> None:
        sandbox = self._sandboxes.pop(identifier, None)
        if sandbox is not None:
            sandbox.ended(oom_kills, other_kills)

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.destroy() for sandbox in self._sandboxes.values()), return_exceptions=True)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._supervisor is not None:
            supervisor, self._supervisor = self._supervisor, None
            await asyncio.to_thread(_end, supervisor)
        if self._own_roots is not None:
            self._own_roots.close()
            self._roots = self._own_roots = None
        if self._folder is not None:
            # Cleared first: a cancelled call must not leave it to be removed twice.
            folder, self._folder = self._folder, None
            await asyncio.to_thread(folder.remove)


def _end(supervisor: subprocess.Popen[bytes]) -> None:
    """Wait for the supervisor to end its sandboxes and exit; kill it if it does not, which ends them too."""
    try:
        supervisor.wait(_EXIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            supervisor.wait(_EXIT_TIMEOUT)  # does not help if it hangs in the kernel


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_EXIT_TIMEOUT).stdout
