"""Pi and Codex, the real programs, over the real vLLM: two user turns, tool calls in both, one exact chain.

Every token's logprob is compared with a forward pass of the same weights over the row that a trainer gets.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.engines.driven_engine import THOUGHT, DrivenEngine
from support.engines.torch_rows import BOUND, differences
from support.engines.vllm_server import CONTEXT
from support.gateway.gateway_rig import assert_one_chain
from support.harnesses.harness_rig import assert_exact, assert_journey, bench, qwen3
from support.harnesses.harness_scripts import ANSWER, journey
from towline.engines.vllm import VllmEngine


@pytest.mark.parametrize("name", ["pi", "codex"])
async def test_two_user_turns_are_one_exact_chain(
    engine: VllmEngine, sets: list[Path], tmp_path: Path, measured: Callable[..., None], name: str
) -> None:
    driven = DrivenEngine(engine, qwen3(), journey)
    async with bench(name, tmp_path, context=CONTEXT, engine=driven) as harness:
        assert ANSWER in await harness.say("Please leave your marks.")
        assert ANSWER in await harness.say("And now once more, please.")
        await assert_journey(harness, 2)
        trajectory = await harness.seal()
    assert_exact(harness, trajectory)
    assert_one_chain(trajectory, 6)
    (trace,) = trajectory.traces
    assert trace.trained_tokens > 6 * THOUGHT
    largest = float(differences(trace, {0: sets[0]}).max())
    measured(row_tokens=len(trace.token_ids), trained=trace.trained_tokens, largest_dlogp=largest)
    assert largest < BOUND
    # From the second turn on the prompt was in the server's cache.
    assert all(turn.cached_tokens > 0 for turn in trajectory.turns[1:])
