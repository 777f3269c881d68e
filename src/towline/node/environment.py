"""From a task to a sandbox with its environment: the runtime, the harness's install, the root, the two specs, the set-up.

What all sessions of a task share is made once, ahead of them: a session never installs, downloads or unpacks anything.
Each sandbox runtime of the node is opened once, on first use, with its pool of warm sandboxes. The agent's sandbox and the
evaluator's are set up by the same function from the same environment, so that they differ only by what the agent did.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from towline.common.private_files import private_opener
from towline.common.redaction import redact
from towline.config import NodeSettings
from towline.config.images import ImageSettings
from towline.errors import TowlineError
from towline.evaluators.base import Evaluator
from towline.evaluators.registry import make_evaluator
from towline.harnesses.base import INSTALL_ROOT, Harness
from towline.harnesses.registry import find_harness
from towline.node.environment_root import EnvironmentRoots
from towline.sandboxes.base import DEFAULT_RESOURCES, Mount, Runtime, Sandbox, SandboxSpec, execute
from towline.sandboxes.cgroups import machine_share
from towline.sandboxes.egress import EgressRules
from towline.sandboxes.files import archives
from towline.sandboxes.images.root_cache import RootCache
from towline.sandboxes.pool import SandboxPool
from towline.sandboxes.registry import make_runtime
from towline.sandboxes.starts import LimitedRuntime, StartLimiter, default_start_limit
from towline.schema import Environment, Network, Resources, SandboxKind, Step, Task
from towline.schema.files import dump_json


class SandboxRuntimes:
    """The sandbox runtimes of a node by kind."""

    def __init__(
        self,
        settings: NodeSettings,
        data: Path,
        cache: Path,
        created: Callable[[SandboxKind, Exception | None], None] = lambda kind, error: None,
        images: ImageSettings | None = None,
    ):
        """`created` is called after every sandbox that was created (None) or could not be."""
        self._created = created
        self.settings = settings
        self.data = data
        self.cache = cache
        self._open: dict[SandboxKind, tuple[Runtime, SandboxPool]] = {}
        self._opening = asyncio.Lock()
        self._problems: dict[SandboxKind, tuple[float, str]] = {}
        """By kind, when it was checked, and why it does not work."""
        self.starts = StartLimiter(settings.start_limit or default_start_limit(), settings.seconds.start)
        self._roots = RootCache(cache / "roots", settings.cache_bytes)
        self.environments = EnvironmentRoots(settings, images or ImageSettings(), cache, self._roots, self.starts)

    async def get(self, kind: SandboxKind) -> tuple[Runtime, SandboxPool]:
        async with self._opening:
            if kind not in self._open:
                defaults = self.settings.resources.over(DEFAULT_RESOURCES)
                runtime = make_runtime(
                    kind,
                    self.data / kind.value,
                    defaults=defaults,
                    roots=self._roots,
                    egress=egress_rules(self.settings),
                    totals=total_resources(self.settings),
                )
                try:
                    await runtime.open()
                except BaseException:
                    await runtime.close()
                    raise
                limited = LimitedRuntime(runtime, self.starts)
                pool = SandboxPool(limited, size=self.settings.warm, on_created=partial(self._created, kind))
                self._open[kind] = (runtime, pool)
            return self._open[kind]

    async def problem(self, kind: SandboxKind) -> str:
        """Why a runtime does not work on this machine; empty if it does. A failure is checked again after a while; a
        runtime that worked once is expected to come back by itself."""
        at, problem = self._problems.get(kind, (0.0, ""))
        if not at or (problem and time.monotonic() - at > _RECHECK_SECONDS):
            try:
                await self.get(kind)
                problem = ""
            except (TowlineError, OSError) as error:
                problem = str(error)
            self._problems[kind] = (time.monotonic(), problem)
        return problem

    async def close(self) -> None:
        for runtime, pool in self._open.values():
            await pool.close()
            await runtime.close()
        self._open.clear()
        self.environments.close()


def egress_rules(settings: NodeSettings) -> EgressRules:
    """What sandboxes with network `open` may reach."""
    return EgressRules(**settings.egress.model_dump())


def total_resources(settings: NodeSettings) -> Resources:
    """What all sandboxes together may use: by default a share of the machine."""
    memory, processes = settings.total_memory_mb, settings.total_pids
    share = machine_share()
    return Resources.model_construct(
        memory_mb=share.memory_mb if memory is None else memory or None,
        pids=share.pids if processes is None else processes or None,
    )


class HarnessInstalls(Protocol):
    async def ensure(self, harness: Harness) -> Path: ...


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """What all sessions of a task start from."""

    harness: Harness
    install: str
    """Path of the harness's install inside the sandbox; empty without one."""
    environment: Environment
    """The task's environment, completed by the results of its build."""
    runtime: Runtime
    pool: SandboxPool
    run: SandboxSpec
    evaluate: SandboxSpec
    evaluator: Evaluator | None
    images: Mapping[str, str] = field(default_factory=dict)
    """The image names that its environment was made from, and their digests."""


class TaskPreparer:
    """Prepares tasks."""

    def __init__(self, settings: NodeSettings, runtimes: SandboxRuntimes, installs: HarnessInstalls):
        self.settings = settings
        self.runtimes = runtimes
        self.installs = installs
        self._prepared: dict[str, dict[bytes, asyncio.Future[PreparedTask]]] = {}
        """By task id and the digest of the task: two tenants may have different tasks with the same id."""

    async def prepare(self, task: Task) -> PreparedTask:
        """Prepare a task once for all its sessions; after a failure, the next session tries again."""
        digest = hashlib.sha256(dump_json(task)).digest()
        mine = self._prepared.setdefault(task.task_id, {})
        future = mine.get(digest)
        if future is None or (future.done() and (future.cancelled() or future.exception() is not None)):
            future = mine[digest] = asyncio.ensure_future(self._prepare(task))
        return await asyncio.shield(future)

    def forget(self, task_id: str) -> None:
        """No more sessions of this task will be prepared."""
        self._prepared.pop(task_id, None)

    async def _prepare(self, task: Task) -> PreparedTask:
        harness = find_harness(task.harness).configured(task.harness_options)
        evaluator = make_evaluator(task.evaluator)
        kind = task.environment.sandbox or self.settings.sandbox
        runtime, pool = await self.runtimes.get(kind)
        installing = asyncio.ensure_future(self._install(harness))
        try:
            root = await self.runtimes.environments.make(runtime, task.environment)
        finally:
            mounts, inside = await installing
        environment, layers = root.environment, root.layers
        run = _spec(environment, layers, self.settings, mounts, environment.network)
        evaluate = _spec(environment, layers, self.settings, (), _evaluation_network(environment, runtime))
        await runtime.prepare(run)
        return PreparedTask(harness, inside, environment, runtime, pool, run, evaluate, evaluator, root.images)

    async def _install(self, harness: Harness) -> tuple[tuple[Mount, ...], str]:
        mounts = [Mount(source, target) for target, source in harness.mounts.items()]
        if harness.install is None:
            return tuple(mounts), ""
        inside = f"{INSTALL_ROOT}/{harness.name}"
        mounts.append(Mount(await self.installs.ensure(harness), inside))
        return tuple(mounts), inside


def _evaluation_network(environment: Environment, runtime: Runtime) -> Network:
    """None: the gateway is for the agent. A runtime without network isolation uses the agent's network."""
    if environment.network is Network.OPEN or Network.NONE not in runtime.facts.networks:
        return environment.network
    return Network.NONE


def _spec(
    environment: Environment,
    layers: tuple[Path, ...],
    settings: NodeSettings,
    mounts: tuple[Mount, ...],
    network: Network,
) -> SandboxSpec:
    return SandboxSpec(
        root=environment.root,
        layers=layers,
        mounts=mounts,
        network=network,
        allowed_hosts=tuple(environment.allowed_hosts),
        resources=environment.resources.over(settings.resources.over(DEFAULT_RESOURCES)),
        env=tuple(sorted(environment.env.items())),
        workdir=environment.workdir,
        user=environment.user,
    )


_QUOTED = 2000
"""Characters of a failed command's output that are quoted in the error."""
_RECHECK_SECONDS = 30.0
"""After this long, a runtime that did not work is checked again."""


class SetupError(TowlineError):
    """The environment cannot be set up as the task says: the task's own fault, with the command's output."""

    failure = "setup"


async def setup_environment(sandbox: Sandbox, environment: Environment | Step, log: Path | None = None) -> None:
    """Put the files of an environment or a step into the sandbox and run its set-up commands."""
    given: dict[str, bytes] = {}
    modes: dict[str, int] = {}
    for file in environment.files:
        if file.source is not None:
            await _put_source(sandbox, Path(file.source), file.target)
        else:
            name = file.target.lstrip("/")
            given[name], modes[name] = file.data or b"", file.mode
    if given:
        await sandbox.put(archives.pack(given, modes=modes), "/")
    for command in environment.setup:
        done = await execute(sandbox, ("sh", "-c", command))
        if log is not None:
            await asyncio.to_thread(_append, log, f"$ {command}\n{done.text}\n")
        if not done.ok:
            raise SetupError(f"set-up command {command!r} exited with code {done.code}: {done.text[-_QUOTED:].strip()}")


async def write_files(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    """Write text files by absolute path, readable by the sandbox's user."""
    if files:
        packed = {path.lstrip("/"): text.encode() for path, text in files.items()}
        await sandbox.put(archives.pack(packed, modes=dict.fromkeys(packed, 0o600)), "/")


async def _put_source(sandbox: Sandbox, source: Path, target: str) -> None:
    try:
        archive, where = await asyncio.to_thread(_packed, source, target)
    except OSError as error:
        raise SetupError(f"{source} (for {target}) cannot be read: {error.strerror}") from error
    await sandbox.put(archive, where)


def _packed(source: Path, target: str) -> tuple[bytes, str]:
    if source.is_dir():
        return archives.pack_folder(source), target
    name = target.lstrip("/")
    return archives.pack({name: source}, modes={name: os.stat(source).st_mode & 0o777}), "/"


def _append(path: Path, text: str) -> None:
    with open(path, "a", encoding="utf-8", errors="replace", opener=private_opener) as file:
        file.write(redact(text))
