"""The canary suite: known cheats, run end to end on one node. Each scores 0, and the run's summary names it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.node.node_rig import running_node
from towline.runs import canaries
from towline.runs.canaries import CANARIES, CanaryResult, canary_result, canary_tasks
from towline.runs.run import RunResults, run_group, run_summary
from towline.schema import SessionState
from towline.tokens.codec import ModelCodec
from towline.tokens.loading import load_codec


@pytest.fixture(scope="module")
def codec(assets: Path) -> ModelCodec:
    return load_codec(assets / "tokenizers" / "qwen3")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def results(codec: ModelCodec, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunResults]:
    """Every canary's session, on one node."""
    out = tmp_path_factory.mktemp("canaries")
    finished = []
    async with running_node(codec, out / "node", run_workers=2, evaluate_workers=2) as rig:
        for task in canary_tasks(out / "verifiers"):
            finished += await run_group(rig.node, task)
    yield RunResults(finished=finished)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.attack(rows=("19-29",))
@pytest.mark.parametrize("name", [canary.name for canary in CANARIES])
async def test_a_cheat_scores_0_and_is_named(name: str, results: RunResults) -> None:
    (one,) = (one for one in results.finished if one.session.task_id == name)
    found = canary_result(one.trajectory)
    assert one.session.state is SessionState.DONE, one.trajectory.error
    assert found.ok, (found, one.trajectory.reward)
    assert run_summary(results)["suspicion"][found.expected] >= 1


@pytest.mark.asyncio(loop_scope="module")
async def test_the_suite_is_large_enough_and_told_apart(results: RunResults) -> None:
    assert len({canary.name for canary in CANARIES}) == len(CANARIES) >= 25
    assert run_summary(results)["mean_reward"] == 0
    assert not CanaryResult("x", 0.0, (), "hang").ok
    assert not CanaryResult("x", 1.0, ("hang",), "hang").ok
    assert canaries.HARNESS == "oracle"
