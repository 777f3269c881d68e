"""Sub-agents of the real programs: two at once beside the main conversation, each a root of its own, none mixed up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.harnesses.harness_rig import assert_exact, assert_main_chain, bench, reasons
from support.harnesses.harness_scripts import ANSWER, DELEGATE, STEPS, delegating
from towline.schema import ForkReason, TurnRole

CASES = {
    "claude_code": ("Agent", {"subagent_type": "general-purpose", "run_in_background": False}),
    "opencode": ("task", {"subagent_type": "general"}),
}


@pytest.mark.parametrize("name", CASES)
async def test_two_subagents_are_roots_of_their_own(tmp_path: Path, name: str) -> None:
    tool, arguments = CASES[name]
    script = delegating(tool, 2, **arguments)
    async with bench(name, tmp_path, script, instruction=DELEGATE) as harness:
        assert ANSWER in await harness.say(DELEGATE)
        assert sorted((await harness.file(STEPS)).split()) == ["helper-0", "helper-1"]
        trajectory = await harness.seal()
    assert_exact(harness, trajectory)
    main = assert_main_chain(trajectory, 2)
    assert "The mark is left." in str(main[1].messages), "what the helpers said came back to the main conversation"

    helpers: dict[str, list[Any]] = {}
    for turn in trajectory.turns:
        if turn.role is TurnRole.SUBAGENT:
            root = trajectory.path(turn.id)[0]
            helpers.setdefault(root.id, []).append(turn)
            assert root.reason in (ForkReason.SYSTEM_CHANGED, ForkReason.TOOLS_CHANGED, ForkReason.SUBAGENT)
            assert root.origin == main[0].id, "both come from the turn that called them"
    assert sorted(len(turns) for turns in helpers.values()) == [2, 2]
    for turns in helpers.values():
        (call,) = turns[0].reply["tool_calls"]
        number = call["arguments"]["command"].split("helper-")[1][0]
        assert f"({number})" in str(turns[0].messages), "each helper has its own task"
        assert f"helper-{number}" in turns[1].messages[0]["text"], "and its own result"
    rows = sorted(trace.role for trace in trajectory.traces)
    assert rows == [TurnRole.MAIN, TurnRole.SUBAGENT, TurnRole.SUBAGENT]
    assert sum(reasons(trajectory).values()) == len({trajectory.path(t.id)[0].id for t in trajectory.turns}) - 1


async def test_an_agent_in_the_background_runs_beside_the_main_conversation(tmp_path: Path) -> None:
    """Claude Code's default: the main conversation goes on, and is told when the agent has ended."""
    script = delegating("Agent", subagent_type="general-purpose")
    async with bench("claude_code", tmp_path, script, instruction=DELEGATE) as claude:
        assert ANSWER in await claude.say(DELEGATE)
        assert (await claude.file(STEPS)).split() == ["helper-0"]
        trajectory = await claude.seal()
    assert_exact(claude, trajectory)
    main = assert_main_chain(trajectory, 3)
    assert "launched" in main[1].messages[0]["text"]
    assert "The mark is left." in str(main[2].messages)
    assert [turn.role for turn in trajectory.turns].count(TurnRole.SUBAGENT) == 2
    assert reasons(trajectory) == {ForkReason.SYSTEM_CHANGED: 1}
