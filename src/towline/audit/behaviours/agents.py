"""Several agents in one session that no header tells apart: who continues the task, and who works for it."""

from __future__ import annotations

import asyncio

from towline.audit import content
from towline.audit.behaviours.registry import behaviour
from towline.audit.play import Expected, Play, Thread


@behaviour("tools")
async def last_answer_without_tools(play: Play) -> Expected:
    """Asks for the last answer without offering tools; it is the task's answer all the same."""
    thread = play.thread()
    await thread.work(2)
    thread.tools = []
    await thread.finish()
    return Expected(chains=2, forks={"tools_changed": 1}, roles={"main": 3})


@behaviour("system", "tools")
async def handed_off(play: Play) -> Expected:
    """Hands the conversation to an agent with another system prompt, which has the history and gives the answer."""
    thread = play.thread()
    await thread.work(2)
    after = thread.copy()
    after.history[0] = {"role": "system", "content": "You finish what others began."}
    await after.work(1)
    await after.finish()
    return Expected(chains=2, forks={"system_changed": 1}, roles={"main": 4})


@behaviour("system", "tools")
async def handed_off_to_another_name(play: Play) -> Expected:
    """The same, and the second agent calls the model by another name, which the policy answers to."""
    thread = play.thread()
    await thread.work(2)
    after = thread.copy()
    after.history[0] = {"role": "system", "content": "You finish what others began."}
    after.follow(await after.reply(play.step(), model="finisher"))
    await after.reply(play.answer(), model="finisher")
    return Expected(chains=2, forks={"system_changed": 1}, roles={"main": 4})


@behaviour()
async def other_names(play: Play) -> Expected:
    """Calls the model by another name in every request."""
    thread = play.thread()
    for name in ("first", "second", "first"):
        thread.follow(await thread.reply(play.step(), model=name))
    await thread.reply(play.answer(), model="third")
    return Expected(roles={"main": 4})


@behaviour("system", "tools")
async def subagent_without_headers(play: Play) -> Expected:
    """Runs a sub-agent as a tool: it begins while the call is open, and its answer is the result."""
    main = play.thread()
    await main.work(1)
    called = await main.reply(play.step())
    caller = main.last
    helper = _helper(play)
    numbers = await _worked(helper)
    main.follow(called)
    await main.finish()
    return Expected(
        chains=2,
        forks={"system_changed": 1},
        roles={"main": 3, "subagent": 3},
        origins={numbers[0]: caller} if caller is not None else {},
    )


@behaviour("system", "tools", "parallel")
async def subagents_in_parallel(play: Play) -> Expected:
    """Runs two sub-agents at the same time, each for a call of the same turn."""
    main = play.thread()
    called = await main.reply(play.step(calls=2))
    caller = main.last
    first, second = await asyncio.gather(_worked(_helper(play.aside())), _worked(_helper(play.aside())))
    main.follow(called)
    await main.finish()
    return Expected(
        chains=3,
        forks={"system_changed": 2},
        roles={"main": 2, "subagent": 6},
        origins={first[0]: caller, second[0]: caller} if caller is not None else {},
    )


def _helper(play: Play) -> Thread:
    return play.thread(system=content.REVIEWER, task=content.sentence(play.random, 4, 8))


async def _worked(thread: Thread) -> list[int]:
    """The numbers of the requests of an agent that works and answers."""
    numbers = []
    for line in (thread.play.step(), thread.play.step(), thread.play.answer()):
        message = await thread.reply(line)
        if thread.last is not None:
            numbers.append(thread.last)
        if line.calls or not thread.tools:
            thread.follow(message)
    return numbers
