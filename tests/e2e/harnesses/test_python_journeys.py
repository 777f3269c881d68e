"""The agent programs of PyPI, each for real: reasoning, a call, two calls at once, the end of its own kind, then a second
user turn where the program can go on.

They run in a sandbox whose only network is the gateway, so nothing that they look for outside may be needed or waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.gateway.gateway_rig import assert_one_chain
from support.harnesses.harness_rig import assert_exact, assert_journey, bench, reasons
from support.harnesses.harness_scripts import ANSWER, command_tool, journey
from towline.conversation import Request, ToolCall
from towline.engines.scripted import Say, Script, example_arguments
from towline.schema import ForkReason

FINAL = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""What mini-swe-agent takes as the end of its work."""
ODD = "Please leave your marks; \"$HOME\" & `id` is $(text), as in {{ x }}, and so is 'this'.\n- one\n- two é日"
"""An instruction that must reach the model as it is, whatever it passes through."""

SMALL = 40_000
"""Tokens of the model's context: less than some of them think they need."""


def ending_on(is_end: Callable[[ToolCall], bool], end: Callable[[Request], ToolCall]) -> Script:
    """The journey, for programs that end on a call instead of an answer."""

    def script(request: Request) -> Say:
        messages = [
            replace(message, tool_calls=(), fingerprint=None) if any(map(is_end, message.tool_calls)) else message
            for message in request.messages
        ]
        said = journey(replace(request, messages=messages))
        return said if said.calls else Say("", said.reasoning, [end(request)])

    return script


def submit(request: Request) -> ToolCall:
    tool = command_tool(request)
    assert tool is not None
    return ToolCall("", tool.name, example_arguments(tool, FINAL))


finishing = ending_on(lambda call: call.name == "finish", lambda request: ToolCall("", "finish", {"message": ANSWER}))
submitting = ending_on(lambda call: call.arguments == {"command": FINAL}, submit)


@pytest.mark.parametrize(
    ("name", "script", "options"),
    [
        ("hermes", journey, {}),
        ("openhands_sdk", finishing, {"dialect": "chat"}),
        ("openhands_sdk", finishing, {"dialect": "responses"}),
    ],
    ids=["hermes", "openhands_sdk-chat", "openhands_sdk-responses"],
)
async def test_two_user_turns_are_one_exact_chain(
    tmp_path: Path, name: str, script: Script, options: dict[str, Any]
) -> None:
    async with bench(name, tmp_path, script, options=options, context=SMALL) as harness:
        assert ANSWER in await harness.say(ODD)
        assert ANSWER in await harness.say("And now once more, please.")
        await assert_journey(harness, 2)
        trajectory = await harness.seal()
    assert_exact(harness, trajectory)
    assert_one_chain(trajectory, 6)
    assert {turn.dialect for turn in trajectory.turns} == {options.get("dialect", "chat")}
    assert ODD in trajectory.turns[0].messages[-1]["text"]


async def test_mini_swe_agent_ends_on_a_command(tmp_path: Path) -> None:
    async with bench("mini_swe_agent", tmp_path, submitting) as mini:
        assert not mini.harness.resumes
        assert FINAL in await mini.say(ODD)
        await assert_journey(mini, 1)
        trajectory = await mini.seal()
    assert_exact(mini, trajectory)
    assert_one_chain(trajectory, 3)
    assert ODD in trajectory.turns[0].messages[-1]["text"]
    (end,) = trajectory.turns[-1].reply["tool_calls"]
    assert end["arguments"] == {"command": FINAL}


async def test_mini_swe_agent_forgets_a_reply_without_a_command(tmp_path: Path) -> None:
    """It complains, and drops the reply: the next turn forks at the last one that it kept, and both are trained."""

    def script(request: Request) -> Say:
        if "Tool call error" in request.messages[-1].text:
            return Say("", "I must use a tool.", [submit(request)])
        return journey(request) if request.messages[-1].role == "user" else Say("Hello.", "I greet.")

    async with bench("mini_swe_agent", tmp_path, script) as mini:
        await mini.say("Please greet me.")
        trajectory = await mini.seal()
    assert_exact(mini, trajectory)
    call, greeting, end = trajectory.turns
    assert (call.parent, greeting.parent, end.parent) == (None, call.id, call.id)
    assert greeting.reply["text"] == "Hello."
    assert reasons(trajectory) == {ForkReason.HISTORY_EDITED: 1}
    assert len(trajectory.traces) == 2
