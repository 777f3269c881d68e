"""The agent programs of npm, each for real: reasoning, a call, two calls at once, an answer, then a second user turn.

They run in a sandbox whose only network is the gateway, so nothing that they look for outside may be needed or waited for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.gateway.gateway_rig import assert_one_chain
from support.harnesses.harness_rig import assert_exact, assert_journey, assert_main_chain, bench, reasons
from support.harnesses.harness_scripts import ANSWER
from towline.schema import ForkReason, TurnRole

ODD = "-p is no option here; \"$HOME\" & `id` is $(text), \\n is no newline.\n\n- 'one'\n- two é日 {x}"
"""An instruction that must reach the model as it is, whatever it passes through."""
LONG = ODD + "\n" + "All work and no play. " * 7_000
"""More than fits a word of a command."""


@pytest.mark.parametrize("name", ["codex", "claude_code", "qwen_code", "gemini_cli"])
async def test_two_user_turns_are_one_exact_chain(tmp_path: Path, name: str) -> None:
    async with bench(name, tmp_path) as harness:
        assert ANSWER in await harness.say(LONG)
        assert ANSWER in await harness.say("And now once more, please.")
        await assert_journey(harness, 2)
        trajectory = await harness.seal()
    assert_exact(harness, trajectory)
    assert_one_chain(trajectory, 6)
    assert {turn.dialect for turn in trajectory.turns} == {harness.harness.dialects[0]}
    assert any(LONG.strip() in message["text"] for message in trajectory.turns[0].messages)


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages", "google"])
async def test_opencode_asks_for_a_title_beside_its_one_chain(tmp_path: Path, dialect: str) -> None:
    async with bench("opencode", tmp_path, options={"dialect": dialect}, instruction=ODD) as opencode:
        assert ANSWER in await opencode.say(ODD)
        assert ANSWER in await opencode.say("And now once more, please.")
        await assert_journey(opencode, 2)
        trajectory = await opencode.seal()
    assert_exact(opencode, trajectory)
    main = assert_main_chain(trajectory, 6)
    (title,) = (turn for turn in trajectory.turns if turn.role is not TurnRole.MAIN)
    assert title.role is TurnRole.SIDE
    assert not trajectory.tools.get(title.tools_key)
    # Whichever of the two comes first is the first root; the other says what is different.
    assert reasons(trajectory) in ({ForkReason.SYSTEM_CHANGED: 1}, {ForkReason.SIDE: 1})
    assert len(trajectory.traces) == 1, "the title is not trained"
    assert ODD in main[0].messages[-1]["text"]
