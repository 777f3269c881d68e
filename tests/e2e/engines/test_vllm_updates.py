"""Weight updates while sessions run on the real vLLM: each token carries the version whose weights really gave it.

A version is proven, not believed: by the weights of its version a token's logprob is the recorded one, and by those of
every other version it is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np

from support.engines.conversation_driver import converse, sampled
from support.engines.torch_rows import BOUND, distances
from support.gateway.gateway_rig import CONTROL_KEY, logged_errors
from support.harnesses.harness_rig import qwen3
from towline.config import GatewaySettings
from towline.engines.vllm import VllmEngine
from towline.gateway.gateway import Gateway
from towline.gateway.server import serve_gateway
from towline.schema import EndReason

SESSIONS, TURNS, TOKENS = 4, 3, 96
FAR = 0.05


async def test_every_token_carries_the_version_that_gave_it(
    engine: VllmEngine, sets: list[Path], tmp_path: Path, measured: Callable[..., None]
) -> None:
    gateway = Gateway(engine, qwen3(), GatewaySettings(port=0, control_port=0, data=tmp_path))
    names = [f"s{n}" for n in range(SESSIONS)]
    with logged_errors() as errors:
        async with serve_gateway(gateway, CONTROL_KEY) as running:
            sessions = asyncio.gather(*(converse(running, gateway, name, TURNS, TOKENS) for name in names))
            each = SESSIONS * TURNS * TOKENS // 3
            for version in (1, 2):
                await sampled(engine, version * each - each // 2, sessions)
                await engine.update_weights(sets[version], version)
            await sessions
            trajectories = [await gateway.seal(name, EndReason.EXITED) for name in names]
    assert not errors, "\n".join(errors)
    found: set[int] = set()
    torn, largest = 0, 0.0
    for trajectory in trajectories:
        assert len(trajectory.turns) == TURNS
        torn += sum(len(np.unique(turn.versions)) > 1 for turn in trajectory.turns)
        for trace in trajectory.traces:
            versions = trace.policy_versions[trace.turn_ids >= 0]
            by_set = np.stack([distances(trace, folder) for folder in sets])
            mine = by_set[versions, np.arange(len(versions))]
            largest = max(largest, float(mine.max()))
            others = np.delete(by_set.T.ravel(), np.arange(len(versions)) * len(sets) + versions)
            # Two sets may agree on a token by chance, but not on many.
            assert np.mean(others < FAR) < 0.1
            found |= set(versions.tolist())
    measured(turns=SESSIONS * TURNS, torn=torn, largest_dlogp=largest)
    assert largest < BOUND
    assert found == {0, 1, 2}
    assert torn, "no turn was cut by an update"
