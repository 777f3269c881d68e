"""Two real vLLM servers as one pool, one of them killed under load: no session notices, and every token stays exact."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np

from support.engines.conversation_driver import converse, sampled
from support.engines.torch_rows import BOUND, differences
from support.engines.vllm_server import STEERABLE, Server, served
from support.gateway.gateway_rig import CONTROL_KEY, logged_errors
from support.harnesses.harness_rig import qwen3
from towline.config import GatewaySettings
from towline.engines.base import MOVED
from towline.engines.pool import EnginePool
from towline.engines.vllm import VllmEngine
from towline.gateway.gateway import Gateway
from towline.gateway.server import serve_gateway
from towline.schema import EndReason

SESSIONS, TURNS, TOKENS = 6, 3, 96


async def test_a_replica_that_is_killed_under_load_fails_no_session(
    engine: VllmEngine, server: Server, sets: list[Path], tmp_path: Path, measured: Callable[..., None]
) -> None:
    async with served(sets[0], tmp_path / "vllm.log", *STEERABLE) as mortal:
        lasting, dying = VllmEngine(server.url), VllmEngine(mortal.url)
        pool = EnginePool({"lasting": lasting, "dying": dying}, interval=0.5)
        gateway = Gateway(pool, qwen3(), GatewaySettings(port=0, control_port=0, data=tmp_path / "gateway"))
        names = [f"s{n}" for n in range(SESSIONS)]
        with logged_errors() as errors:
            async with serve_gateway(gateway, CONTROL_KEY) as running:
                sessions = asyncio.gather(*(converse(running, gateway, name, TURNS, TOKENS) for name in names))
                await sampled(dying, TOKENS, sessions)
                assert not sessions.done()
                mortal.kill()
                await sessions
                trajectories = [await gateway.seal(name, EndReason.EXITED) for name in names]
        assert not errors, "\n".join(errors)
        assert dying.stats.decoded_tokens >= TOKENS
        assert lasting.stats.decoded_tokens > dying.stats.decoded_tokens
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    assert len(turns) == SESSIONS * TURNS
    assert all(turn.delivered and len(turn.sampled) == TOKENS for turn in turns)
    assert any(MOVED in turn.flags for turn in turns), "no turn was in flight on the replica that died"
    traces = [trace for trajectory in trajectories for trace in trajectory.traces]
    largest = max(float(np.max(differences(trace, {0: sets[0]}))) for trace in traces)
    measured(turns=len(turns), moved=sum(MOVED in turn.flags for turn in turns), largest_dlogp=largest)
    assert largest < BOUND
