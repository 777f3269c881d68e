"""Several agents in one session that no header identifies: which continue the task, and which are sub-agents."""

from __future__ import annotations

import asyncio

from towline.audit import content
from towline.audit.behaviours.registry import behaviour
from towline.audit.simulation import ChatThread, Expected, SimulatedHarness


@behaviour("tools")
async def last_answer_without_tools(harness: SimulatedHarness) -> Expected:
    """Requests the final answer without declaring tools; it is still the task's answer."""
    thread = harness.thread()
    await thread.work(2)
    thread.tools = []
    await thread.finish()
    return Expected(chains=2, forks={"tools_changed": 1}, roles={"main": 3})


@behaviour("system", "tools")
async def handed_off(harness: SimulatedHarness) -> Expected:
    """Hands the conversation, with its history, to an agent with another system prompt, which gives the answer."""
    thread = harness.thread()
    await thread.work(2)
    after = thread.copy()
    after.history[0] = {"role": "system", "content": "You finish what others began."}
    await after.work(1)
    await after.finish()
    return Expected(chains=2, forks={"system_changed": 1}, roles={"main": 4})


@behaviour("system", "tools")
async def handed_off_to_another_name(harness: SimulatedHarness) -> Expected:
    """The same, but the second agent uses another model name, which also routes to the policy."""
    thread = harness.thread()
    await thread.work(2)
    after = thread.copy()
    after.history[0] = {"role": "system", "content": "You finish what others began."}
    after.follow(await after.reply(harness.step(), model="finisher"))
    await after.reply(harness.answer(), model="finisher")
    return Expected(chains=2, forks={"system_changed": 1}, roles={"main": 4})


@behaviour()
async def other_names(harness: SimulatedHarness) -> Expected:
    """Uses another model name in every request."""
    thread = harness.thread()
    for name in ("first", "second", "first"):
        thread.follow(await thread.reply(harness.step(), model=name))
    await thread.reply(harness.answer(), model="third")
    return Expected(roles={"main": 4})


@behaviour("system", "tools")
async def subagent_without_headers(harness: SimulatedHarness) -> Expected:
    """Runs a sub-agent as a tool: it starts while the call is pending, and its answer is the result."""
    main = harness.thread()
    await main.work(1)
    called = await main.reply(harness.step())
    caller = main.last
    helper = _subagent(harness)
    numbers = await _work_and_answer(helper)
    main.follow(called)
    await main.finish()
    return Expected(
        chains=2,
        forks={"system_changed": 1},
        roles={"main": 3, "subagent": 3},
        origins={numbers[0]: caller} if caller is not None else {},
    )


@behaviour("system", "tools", "parallel")
async def subagents_in_parallel(harness: SimulatedHarness) -> Expected:
    """Runs two sub-agents concurrently, each for a call of the same turn."""
    main = harness.thread()
    called = await main.reply(harness.step(calls=2))
    caller = main.last
    first, second = await asyncio.gather(
        _work_and_answer(_subagent(harness.concurrent())), _work_and_answer(_subagent(harness.concurrent()))
    )
    main.follow(called)
    await main.finish()
    return Expected(
        chains=3,
        forks={"system_changed": 2},
        roles={"main": 2, "subagent": 6},
        origins={first[0]: caller, second[0]: caller} if caller is not None else {},
    )


def _subagent(harness: SimulatedHarness) -> ChatThread:
    return harness.thread(system=content.REVIEWER, task=content.sentence(harness.random, 4, 8))


async def _work_and_answer(thread: ChatThread) -> list[int]:
    """Let an agent work and answer; returns its request numbers."""
    numbers = []
    for line in (thread.harness.step(), thread.harness.step(), thread.harness.answer()):
        message = await thread.reply(line)
        if thread.last is not None:
            numbers.append(thread.last)
        if line.calls or not thread.tools:
            thread.follow(message)
    return numbers
