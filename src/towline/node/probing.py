"""Probes: one token of an engine, one command in a sandbox."""

from __future__ import annotations

import numpy as np

from towline.config import NodeSettings
from towline.conversation import Message, Request
from towline.engines.base import EngineGone, Probed, Reachable, SampleRequest
from towline.gateway.lanes import Lane
from towline.node.runtimes import Runtimes
from towline.sandboxes.base import DEFAULT_RESOURCES, NeedsRoot, SandboxError, Spec, execute
from towline.schema import Network, SandboxKind
from towline.tokens.codec import Frame

_SECONDS = 30.0
"""Longest that a command that does nothing may take."""


async def probe_engine(lane: Lane) -> None:
    """Have the engine sample one token; raises what it raises."""
    engine = lane.engine
    if isinstance(engine, Probed):
        await engine.probe()
        return
    if isinstance(engine, Reachable) and engine.trouble:
        raise EngineGone(engine.trouble)
    message = Message("user", "Hi")
    prompt = np.asarray(lane.codec.prompt([message], Frame()).ids, np.int32)
    request = Request("", lane.model, [message])
    await engine.sample(SampleRequest(prompt, 1, stop_ids=lane.codec.stop_ids, id="towline-probe", request=request))


async def probe_sandbox(runtimes: Runtimes, kind: SandboxKind, settings: NodeSettings) -> None:
    """Make a sandbox as for a task that asks for nothing, run `true` in it and destroy it; or see that the runtime answers,
    if it makes none without a root."""
    runtime, _ = await runtimes.get(kind)
    if isinstance(runtime, NeedsRoot):
        await runtime.ping()
        return
    network = Network.GATEWAY if Network.GATEWAY in runtime.facts.networks else Network.OPEN
    spec = Spec(network=network, resources=settings.resources.over(DEFAULT_RESOURCES), seconds=10 * _SECONDS)
    await runtime.prepare(spec)
    sandbox = await runtime.create(spec)
    try:
        done = await execute(sandbox, ("true",), seconds=_SECONDS)
    finally:
        await sandbox.destroy()
    if not done.ok:
        raise SandboxError(f"`true` in a {kind.value} sandbox ended with {done.code}: {done.text.strip()[-300:]}")
