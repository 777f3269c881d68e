"""Pi, the real program from npm, in a sandbox with the gateway as its only network: all four dialects, two user turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.gateway.gateway_rig import assert_one_chain
from support.harnesses.harness_rig import INSTALLS, assert_exact, assert_journey, bench
from support.harnesses.harness_scripts import ANSWER
from support.sandboxes.bare_root import make_bare_root
from towline.harnesses.registry import find_harness

ODD = "-p is no option; \"$HOME\" & `id` is $(text).\n\n- 'one'\n- two é日 {x}"
"""An instruction that must reach the model as it is, whatever it passes through."""


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages", "google"])
async def test_two_user_turns_are_one_exact_chain(tmp_path: Path, dialect: str) -> None:
    async with bench("pi", tmp_path, options={"dialect": dialect}) as pi:
        assert ANSWER in await pi.say(ODD)
        assert ANSWER in await pi.say("And now once more, please.")
        await assert_journey(pi, 2)
        trajectory = await pi.seal()
    assert_exact(pi, trajectory)
    assert_one_chain(trajectory, 6)
    assert {turn.dialect for turn in trajectory.turns} == {dialect}
    assert trajectory.turns[0].messages[-1]["text"] == ODD


async def test_it_runs_in_a_root_without_node(tmp_path: Path) -> None:
    node = INSTALLS.path(find_harness("pi")) / "bin" / "node"
    async with bench("pi", tmp_path, root=str(make_bare_root(tmp_path / "root", node))) as pi:
        assert ANSWER in await pi.say(ODD)
        await assert_journey(pi, 1)
        trajectory = await pi.seal()
    assert_exact(pi, trajectory)
    assert_one_chain(trajectory, 3)
