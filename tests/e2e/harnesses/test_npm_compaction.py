"""Compaction of the real programs: the history is summed up, and a new root starts from the summary."""

from __future__ import annotations

from pathlib import Path

from support.harnesses.harness_rig import Bench, assert_exact, bench, reasons
from support.harnesses.harness_scripts import ANSWER, SUMMARY, command_tool, position, summarising
from towline.conversation import Request, ToolCall
from towline.engines.scripted import Say, example_arguments
from towline.schema import ForkReason, Trajectory, TurnRole

LONG = "seq 100000 100900"
"""A command whose output is some 6,000 tokens."""


def _last_user(request: Request) -> str:
    return next((m.text for m in reversed(request.messages) if m.role == "user"), "")


def long_then_answer(request: Request) -> Say:
    """A command with a long output, a short one, then an answer; after a summary an answer at once."""
    tool = command_tool(request)
    step, _ = position(request)
    if tool is None or step == 2 or any(SUMMARY in message.text for message in request.messages):
        return Say(ANSWER, "I have seen enough.")
    return Say("", "I need to look.", [ToolCall("", tool.name, example_arguments(tool, "pwd" if step else LONG))])


def assert_compacted(harness: Bench, trajectory: Trajectory, asked: int) -> None:
    """Turn `asked` wrote the summary, and the root after it starts from that; every token is trained once."""
    assert_exact(harness, trajectory)
    assert SUMMARY in trajectory.turns[asked].reply["text"]
    after = trajectory.turns[asked + 1]
    assert after.parent is None
    assert after.reason is ForkReason.COMPACTION
    assert after.role is TurnRole.COMPACTION
    assert after.origin is not None
    assert SUMMARY in str(after.messages)
    assert after.prompt_length < trajectory.turns[asked - 1].prompt_length + len(trajectory.turns[asked].suffix)


async def test_codex_compacts_when_its_limit_is_reached(tmp_path: Path) -> None:
    script = summarising(lambda request: command_tool(request) is None, long_then_answer)
    async with bench("codex", tmp_path, script, options={"compact_at": 12_000}) as codex:
        assert ANSWER in await codex.say("Look at the numbers.")
        trajectory = await codex.seal()
    roles = [TurnRole.MAIN, TurnRole.MAIN, TurnRole.COMPACTION, TurnRole.COMPACTION]
    assert [turn.role for turn in trajectory.turns] == roles
    assert_compacted(codex, trajectory, 2)
    # The request for a summary has no tools: a root of its own, whose history is the main conversation's.
    assert reasons(trajectory) == {ForkReason.TOOLS_CHANGED: 1, ForkReason.COMPACTION: 1}
    assert trajectory.turns[2].origin == trajectory.turns[1].id


async def test_claude_code_compacts_when_it_is_told_to(tmp_path: Path) -> None:
    script = summarising(lambda request: "TEXT ONLY" in _last_user(request), long_then_answer)
    async with bench("claude_code", tmp_path, script) as claude:
        assert ANSWER in await claude.say("Look at the numbers.")
        await claude.say("/compact")
        assert ANSWER in await claude.say("And what now?")
        trajectory = await claude.seal()
    assert [turn.role for turn in trajectory.turns] == [TurnRole.MAIN] * 4 + [TurnRole.COMPACTION]
    assert_compacted(claude, trajectory, 3)
    # The wish for a summary is put behind the last result, in the place of the answer that was there.
    assert reasons(trajectory) == {ForkReason.HISTORY_EDITED: 1, ForkReason.COMPACTION: 1}
    assert trajectory.turns[3].parent == trajectory.turns[1].id
