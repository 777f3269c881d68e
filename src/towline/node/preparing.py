"""What all sessions of a task share, made once and ahead of them: the harness's install, the root, the two specs.

A session never installs, fetches or unpacks anything: by the time its INIT starts, this is done.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from towline.config import NodeSettings
from towline.evaluators.base import Evaluator
from towline.evaluators.registry import make_evaluator
from towline.harnesses.base import INSTALLS, Harness
from towline.harnesses.registry import find_harness
from towline.node.runtimes import Runtimes
from towline.sandboxes.base import DEFAULT_RESOURCES, Mount, Runtime, Spec
from towline.sandboxes.pool import Pool
from towline.schema import Environment, Network, Task


class InstallsLike(Protocol):
    async def ensure(self, harness: Harness) -> Path: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a session of a task starts from."""

    harness: Harness
    install: str
    """Where the harness's install is inside; empty without one."""
    environment: Environment
    """The task's, with what its build decided filled in."""
    runtime: Runtime
    pool: Pool
    run: Spec
    evaluate: Spec
    evaluator: Evaluator | None


class Preparer:
    def __init__(self, settings: NodeSettings, runtimes: Runtimes, installs: InstallsLike):
        self.settings = settings
        self.runtimes = runtimes
        self.installs = installs
        self._under_way: dict[str, asyncio.Future[Prepared]] = {}

    async def prepare(self, task: Task) -> Prepared:
        """Sessions of one task wait for the same work; when it failed, the next that asks tries again."""
        future = self._under_way.get(task.task_id)
        if future is None or (future.done() and (future.cancelled() or future.exception() is not None)):
            future = asyncio.ensure_future(self._prepare(task))
            self._under_way[task.task_id] = future
        return await asyncio.shield(future)

    def forget(self, task: Task) -> None:
        """No more sessions of this task will come."""
        self._under_way.pop(task.task_id, None)

    async def _prepare(self, task: Task) -> Prepared:
        harness = find_harness(task.harness).configured(task.harness_options)
        evaluator = make_evaluator(task.evaluator)
        kind = task.environment.sandbox or self.settings.sandbox
        runtime, pool = await self.runtimes.get(kind)
        installing = asyncio.ensure_future(self._install(harness))
        try:
            environment, layers = await self._built(task.environment, runtime)
        finally:
            mounts, inside = await installing
        run = _spec(environment, layers, self.settings, mounts, environment.network)
        evaluate = _spec(environment, layers, self.settings, (), _network_of_evaluation(environment, runtime))
        await runtime.prepare(run)
        return Prepared(harness, inside, environment, runtime, pool, run, evaluate, evaluator)

    async def _install(self, harness: Harness) -> tuple[tuple[Mount, ...], str]:
        mounts = [Mount(source, target) for target, source in harness.mounts.items()]
        if harness.install is None:
            return tuple(mounts), ""
        inside = f"{INSTALLS}/{harness.name}"
        mounts.append(Mount(await self.installs.ensure(harness), inside))
        return tuple(mounts), inside

    async def _built(self, environment: Environment, runtime: Runtime) -> tuple[Environment, tuple[Path, ...]]:
        """The environment with its Dockerfile built, if it has one."""
        if not environment.build:
            return environment, ()
        return await self.runtimes.build(runtime, environment, Path(environment.build))


def _network_of_evaluation(environment: Environment, runtime: Runtime) -> Network:
    """The gateway is for the agent; whoever judges it needs no model of the session's. A runtime that cuts nothing off
    judges where it ran the agent."""
    if environment.network is Network.OPEN or Network.NONE not in runtime.facts.networks:
        return environment.network
    return Network.NONE


def _spec(
    environment: Environment,
    layers: tuple[Path, ...],
    settings: NodeSettings,
    mounts: tuple[Mount, ...],
    network: Network,
) -> Spec:
    return Spec(
        root=environment.root,
        layers=layers,
        mounts=mounts,
        network=network,
        resources=environment.resources.over(settings.resources.over(DEFAULT_RESOURCES)),
        env=tuple(sorted(environment.env.items())),
        workdir=environment.workdir,
        user=environment.user,
    )
