"""Runs in an environment with `openai-agents`: a hand-off, or two agents as tools."""

import asyncio
import os
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def handoff() -> Agent:
    tutor = Agent(name="Math tutor", instructions="You help with mathematics.", tools=[add], model="m")
    return Agent(name="Triage", instructions="Triage: decide who answers.", handoffs=[tutor], model="m")


def tools() -> Agent:
    spanish = Agent(name="Spanish", instructions="Translate into Spanish.", model="m")
    french = Agent(name="French", instructions="Translate into French.", model="m")
    return Agent(
        name="Orchestrator",
        instructions="You use the tools that you have.",
        model="m",
        tools=[
            spanish.as_tool("to_spanish", "Translate to Spanish"),
            french.as_tool("to_french", "Translate to French"),
        ],
    )


agent = {"handoff": handoff, "tools": tools}[sys.argv[1]]()
result = asyncio.run(Runner.run(agent, os.environ["INSTRUCTION"]))
print(result.final_output)
