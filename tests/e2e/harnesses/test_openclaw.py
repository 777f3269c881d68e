"""OpenClaw for real. It ends every prompt with a note that is gone from the next request: kept, the session is one chain;
forked, it is a chain a call. Both are exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.gateway.gateway_rig import assert_one_chain
from support.harnesses.harness_rig import assert_exact, assert_journey, bench, reasons
from support.harnesses.harness_scripts import ANSWER, journey
from towline.conversation import Request
from towline.engines.scripted import Say
from towline.schema import ForkReason

NOTE = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"


def unmoved(request: Request) -> Say:
    """The journey, for a model that takes the note for what it is: no new user turn."""
    return journey(replace(request, messages=[m for m in request.messages if not m.text.startswith(NOTE)]))


async def test_two_user_turns_are_one_exact_chain_with_the_notes_kept(tmp_path: Path) -> None:
    async with bench("openclaw", tmp_path, unmoved) as openclaw:
        assert ANSWER in await openclaw.say("Please leave your \"marks\" & 'more'; $HOME `id`.\n- one é日")
        assert ANSWER in await openclaw.say("And now once more, please.")
        await assert_journey(openclaw, 2)
        trajectory = await openclaw.seal()
    assert_exact(openclaw, trajectory)
    assert_one_chain(trajectory, 6)
    assert [turn.flags for turn in trajectory.turns] == [[], *[["vanished_kept"]] * 5]
    assert "Please leave your \"marks\" & 'more'; $HOME `id`.\n- one é日" in str(
        trajectory.turns[0].messages[-2]["text"]
    )
    assert NOTE in trajectory.turns[0].messages[-1]["text"]


async def test_forked_notes_are_a_chain_a_call(tmp_path: Path) -> None:
    async with bench("openclaw", tmp_path, unmoved, settings={"vanishing": "fork"}) as openclaw:
        assert ANSWER in await openclaw.say("Please leave your marks.")
        await assert_journey(openclaw, 1)
        trajectory = await openclaw.seal()
    assert_exact(openclaw, trajectory)
    assert reasons(trajectory) == {ForkReason.VANISHED_MESSAGE: 2}
    assert len(trajectory.turns) == len(trajectory.traces) == 3
