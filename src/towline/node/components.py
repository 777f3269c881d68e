"""The engines and sandbox runtimes of a node, each behind its circuit breaker, and the probes of the breakers.

Successes and failures of engines and runtimes are reported to the breakers here. The state of an engine's breaker is passed
on to the gateway, whose turns wait while the engine is unavailable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from towline.config import NodeSettings
from towline.conversation import Message, Request
from towline.engines.base import ContextExceeded, EngineUnreachable, HasProbe, ReportsOutages, SampleRequest
from towline.errors import EngineError
from towline.gateway.gateway import Gateway
from towline.gateway.model_routes import ModelRoute
from towline.node.breakers import ENGINE_FAILURES, SANDBOX_FAILURES, CircuitBreaker, CircuitBreakers, ProbeBackoff
from towline.node.environment import SandboxRuntimes
from towline.sandboxes.base import DEFAULT_RESOURCES, NeedsRoot, SandboxError, SandboxSpec, Unsupported, execute
from towline.schema import POLICY, Network, SandboxKind, Task
from towline.tokens.codec import RenderContext

_SECONDS = 30.0
"""Time limit of a command that does nothing."""


async def probe_engine(route: ModelRoute) -> None:
    """Sample one token from the engine; raises what the engine raises."""
    engine = route.engine
    if isinstance(engine, HasProbe):
        await engine.probe()
        return
    if isinstance(engine, ReportsOutages) and engine.outage:
        raise EngineUnreachable(engine.outage)
    message = Message("user", "Hi")
    prompt = np.asarray(route.codec.prompt([message], RenderContext()).ids, np.int32)
    request = Request("", route.model, [message])
    await engine.sample(SampleRequest(prompt, 1, stop_ids=route.codec.stop_ids, id="towline-probe", request=request))


async def probe_sandbox(runtimes: SandboxRuntimes, kind: SandboxKind, settings: NodeSettings) -> None:
    """Create a sandbox as for a task without requirements, run `true` in it and destroy it; or ping the runtime, if it
    creates no sandbox without a root."""
    runtime, _ = await runtimes.get(kind)
    if isinstance(runtime, NeedsRoot):
        await runtime.ping()
        return
    network = Network.GATEWAY if Network.GATEWAY in runtime.facts.networks else Network.OPEN
    spec = SandboxSpec(network=network, resources=settings.resources.over(DEFAULT_RESOURCES), seconds=10 * _SECONDS)
    await runtime.prepare(spec)
    sandbox = await runtimes.starts.create(runtime, spec)
    try:
        done = await execute(sandbox, ("true",), seconds=_SECONDS)
    finally:
        await sandbox.destroy()
    if not done.ok:
        raise SandboxError(f"`true` in a {kind.value} sandbox exited with code {done.code}: {done.text.strip()[-300:]}")


class NodeComponents:
    """The components of one node. `open` completes it with the runtimes, which report to it."""

    def __init__(self, gateway: Gateway, settings: NodeSettings, backoff: ProbeBackoff | None = None):
        self.gateway = gateway
        self.settings = settings
        self.breakers = CircuitBreakers(backoff)
        self.runtimes: SandboxRuntimes | None = None
        self._engines = [_Engine(route, self.breakers) for route in gateway.routes]

    def open(self, runtimes: SandboxRuntimes) -> None:
        self.runtimes = runtimes
        self.sandbox(self.settings.sandbox)

    def sandbox(self, kind: SandboxKind) -> CircuitBreaker:
        """The breaker of a sandbox runtime."""
        return self.breakers.add(sandbox_name(kind), partial(self._probe_sandbox, kind), SANDBOX_FAILURES)

    def sandbox_of(self, task: Task) -> CircuitBreaker:
        return self.sandbox(task.environment.sandbox or self.settings.sandbox)

    def engines_of(self, *settings: Mapping[str, Any]) -> tuple[str, ...]:
        """The engine components that a session with these settings needs."""
        chosen = [self.gateway.defaults.models, *(each.get("models") or {} for each in settings)]
        names = dict.fromkeys([POLICY, *(name for models in chosen for name in models.values())])
        known = {route.name for route in self.gateway.routes}
        return tuple(engine_name(name) for name in names if name in known)

    def sandbox_created(self, kind: SandboxKind, error: Exception | None) -> None:
        """A sandbox was created, or could not be."""
        if error is None:
            self.sandbox(kind).succeeded()
        elif not isinstance(error, Unsupported):
            self.sandbox(kind).failed(str(error) or repr(error))

    async def open_runtime(self, task: Task) -> None:
        """Open the runtime of the task's sandbox; a runtime that cannot work here opens its breaker."""
        assert self.runtimes is not None
        breaker = self.sandbox_of(task)
        try:
            await self.runtimes.get(task.environment.sandbox or self.settings.sandbox)
        except (SandboxError, OSError) as error:
            breaker.failed(str(error) or repr(error), unreachable=True)
            raise

    async def probe(self) -> list[str]:
        """Use every engine and the default sandbox once; one line per problem, which also opens its breaker."""
        breakers = [*(engine.breaker for engine in self._engines), self.sandbox(self.settings.sandbox)]
        found = await asyncio.gather(*(breaker.check() for breaker in breakers))
        return [f"{breaker.component}: {problem}" for breaker, problem in zip(breakers, found, strict=True) if problem]

    async def outage(self, component: str, at: float | None = None) -> bool:
        """Whether the component was in an outage at the (monotonic) time; by default, now."""
        return await self.breakers[component].outage_at(time.monotonic() if at is None else at)

    async def close(self) -> None:
        await self.breakers.close()
        for engine in self._engines:
            engine.close()

    async def _probe_sandbox(self, kind: SandboxKind) -> None:
        assert self.runtimes is not None
        await probe_sandbox(self.runtimes, kind, self.settings)


class _Engine:
    """One engine of the gateway and its breaker."""

    def __init__(self, route: ModelRoute, breakers: CircuitBreakers):
        self.route = route
        probe = partial(probe_engine, route)
        self.breaker = breakers.add(engine_name(route.name), probe, ENGINE_FAILURES, lambda b: route.block(b.open))
        route.watchers.append(self._turn_ended)
        if isinstance(route.engine, ReportsOutages):
            route.engine.on_outage(self._reachability_changed)

    def _turn_ended(self, error: EngineError | None, began: float) -> None:
        if error is None:
            self.breaker.succeeded(began)
        elif not isinstance(error, ContextExceeded):
            self.breaker.failed(str(error), unreachable=isinstance(error, EngineUnreachable))

    def _reachability_changed(self, trouble: str) -> None:
        if trouble:
            self.breaker.failed(trouble, unreachable=True)
        else:
            self.breaker.probe_now()

    def close(self) -> None:
        self.route.watchers.remove(self._turn_ended)
        self.route.block(False)


def engine_name(route: str) -> str:
    return f"engine:{route}"


def sandbox_name(kind: SandboxKind) -> str:
    return f"sandbox:{kind.value}"
