"""What the scripted model says in the harness tests: a journey of tool calls that leave marks, and delegation.

A script sees only what the harness sends, as a model does: where it stands is read off the conversation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from towline.conversation import Request, Tool, ToolCall
from towline.engines.scripted import Say, Script, example_arguments

STEPS = "/work/steps.txt"
"""Where commands leave their marks."""
DELEGATE = "DELEGATE the work to your helpers."
SUBTASK = "SUBTASK: leave a mark and tell about it."
ANSWER = "All marks are there."
SIDE = "A short title"
SUMMARY = "Summary of what was done: two steps, three marks."


def marks(rounds: int) -> list[str]:
    """The marks that so many user turns of the journey leave, sorted."""
    return sorted(f"towline-{turn}-{mark}" for turn in range(rounds) for mark in ("0-0", "1-0", "1-1"))


def journey(request: Request) -> Say:
    """After each user message one tool call, then two at once, then an answer; all with reasoning, but for side calls."""
    tool = command_tool(request)
    if tool is None:
        return Say(SIDE)
    step, rounds = position(request)
    if step >= 2:
        return Say(ANSWER, f"Round {rounds} is over; I can answer.")
    calls = [_mark(tool, f"towline-{rounds}-{step}-{n}") for n in range(step + 1)]
    return Say("" if step else "I will look.", f"Round {rounds}, step {step}: I need {tool.name}.", calls)


def delegating(name: str, times: int = 1, **arguments: Any) -> Script:
    """The main agent calls the tool `name` so many times at once; each sub-agent leaves a mark; then both answer."""

    def script(request: Request) -> Say:
        tool = command_tool(request)
        if tool is None:
            return Say(SIDE)
        step, _ = position(request)
        if any(DELEGATE in message.text for message in request.messages if message.role == "user"):
            if any(call.name == name for message in request.messages for call in message.tool_calls):
                return Say(ANSWER, "The helpers are at work, or back.")
            calls = [
                ToolCall("", name, {"description": f"helper {n}", "prompt": f"{SUBTASK} ({n})", **arguments})
                for n in range(times)
            ]
            return Say("I delegate.", "Others can do this.", calls)
        if step:
            return Say("The mark is left.", "Done.")
        asked = next(m.text for m in reversed(request.messages) if m.role == "user" and SUBTASK in m.text)
        number = asked.split(f"{SUBTASK} (")[1][0]
        return Say("", "A helper's thought.", [_mark(tool, f"helper-{number}")])

    return script


def position(request: Request) -> tuple[int, int]:
    """How many model turns there are since the last user message, and how many answers without a call in all."""
    step = 0
    for message in reversed(request.messages):
        if message.role == "user":
            break
        step += message.role == "assistant"
    rounds = sum(message.role == "assistant" and not message.tool_calls for message in request.messages)
    return step, rounds


def command_tool(request: Request) -> Tool | None:
    """The tool that runs commands, if the call has one."""
    for name in ("bash", "shell", "exec_command", "run_shell_command", "terminal", "execute_bash", "exec"):
        for tool in request.tools:
            if tool.name.lower() == name:
                return tool
    return None


def _mark(tool: Tool, mark: str) -> ToolCall:
    # A command that ends at once may have ended before Qwen Code reads what it printed.
    return ToolCall("", tool.name, example_arguments(tool, f"echo {mark} | tee -a {STEPS}; sleep 0.1"))


Choose = Callable[[Request], bool]


def summarising(asks: Choose, otherwise: Script = journey) -> Script:
    """Whenever `asks` says that the harness wants its history summed up, a summary; else what the other script says."""
    return lambda request: Say(f"<summary>{SUMMARY}</summary>", "I sum up.") if asks(request) else otherwise(request)
