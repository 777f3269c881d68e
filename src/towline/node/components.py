"""The engines and sandbox runtimes of a node, each behind its circuit breaker.

What engines and runtimes do reaches the breakers from here; what the breakers say reaches the gateway, whose turns wait
while their engine cannot be used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from towline.config import NodeSettings
from towline.engines.base import ContextExceeded, EngineGone, Reachable
from towline.errors import EngineError
from towline.gateway.gateway import Gateway
from towline.gateway.lanes import Lane
from towline.node.breakers import ENGINE_FAILURES, SANDBOX_FAILURES, Backoff, Breaker, Breakers
from towline.node.probing import probe_engine, probe_sandbox
from towline.node.runtimes import Runtimes
from towline.sandboxes.base import SandboxError, Unsupported
from towline.schema import POLICY, SandboxKind, Task


class Components:
    """`runtimes` is set by whoever makes both."""

    def __init__(self, gateway: Gateway, settings: NodeSettings, backoff: Backoff | None = None):
        self.gateway = gateway
        self.settings = settings
        self.breakers = Breakers(backoff)
        self.runtimes: Runtimes | None = None
        self._engines = [_Engine(lane, self.breakers) for lane in gateway.lanes]

    def open(self, runtimes: Runtimes) -> None:
        self.runtimes = runtimes
        self.sandbox(self.settings.sandbox)

    def sandbox(self, kind: SandboxKind) -> Breaker:
        """The breaker of a sandbox runtime."""
        return self.breakers.add(sandbox_name(kind), partial(self._probe_sandbox, kind), SANDBOX_FAILURES)

    def sandbox_of(self, task: Task) -> Breaker:
        return self.sandbox(task.environment.sandbox or self.settings.sandbox)

    def engines_of(self, *settings: Mapping[str, Any]) -> tuple[str, ...]:
        """The components that the turns of a session with these settings need."""
        chosen = [self.gateway.defaults.models, *(each.get("models") or {} for each in settings)]
        names = dict.fromkeys([POLICY, *(name for models in chosen for name in models.values())])
        known = {lane.name for lane in self.gateway.lanes}
        return tuple(engine_name(name) for name in names if name in known)

    def sandbox_made(self, kind: SandboxKind, error: Exception | None) -> None:
        """A sandbox was made, or could not be."""
        if error is None:
            self.sandbox(kind).succeeded()
        elif not isinstance(error, Unsupported):
            self.sandbox(kind).failed(str(error) or repr(error))

    async def usable_runtime(self, task: Task) -> None:
        """Open the runtime of the task's sandbox; one that cannot work here opens its breaker."""
        assert self.runtimes is not None
        breaker = self.sandbox_of(task)
        try:
            await self.runtimes.get(task.environment.sandbox or self.settings.sandbox)
        except (SandboxError, OSError) as error:
            breaker.failed(str(error) or repr(error), unreachable=True)
            raise

    async def probe(self) -> list[str]:
        """Use every engine and the default sandbox once; one line per problem, with which its breaker opens."""
        breakers = [*(engine.breaker for engine in self._engines), self.sandbox(self.settings.sandbox)]
        found = await asyncio.gather(*(breaker.check() for breaker in breakers))
        return [f"{breaker.component}: {problem}" for breaker, problem in zip(breakers, found, strict=True) if problem]

    async def outage(self, component: str, at: float | None = None) -> bool:
        """Whether the component was in an outage at the moment, or is now."""
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

    def __init__(self, lane: Lane, breakers: Breakers):
        self.lane = lane
        probe = partial(probe_engine, lane)
        self.breaker = breakers.add(engine_name(lane.name), probe, ENGINE_FAILURES, lambda b: lane.block(b.open))
        lane.watchers.append(self._turn_ended)
        if isinstance(lane.engine, Reachable):
            lane.engine.watch_reach(self._reach)

    def _turn_ended(self, error: EngineError | None) -> None:
        if error is None:
            self.breaker.succeeded()
        elif not isinstance(error, ContextExceeded):
            self.breaker.failed(str(error), unreachable=isinstance(error, EngineGone))

    def _reach(self, trouble: str) -> None:
        if trouble:
            self.breaker.failed(trouble, unreachable=True)
        else:
            self.breaker.stir()

    def close(self) -> None:
        self.lane.watchers.remove(self._turn_ended)
        self.lane.block(False)


def engine_name(lane: str) -> str:
    return f"engine:{lane}"


def sandbox_name(kind: SandboxKind) -> str:
    return f"sandbox:{kind.value}"
