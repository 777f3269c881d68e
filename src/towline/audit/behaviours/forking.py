"""Behaviours that must start a new chain, with the recorded reason.

The first ones edit the history: the task continues, under the role that it had.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from towline.audit import content
from towline.audit.behaviours.continuing import without_reasoning
from towline.audit.behaviours.registry import behaviour
from towline.audit.clients import WireJson
from towline.audit.simulation import Expected, SimulatedHarness


@behaviour()
async def first_reply_edited(harness: SimulatedHarness) -> Expected:
    """Edits the model's first reply after the conversation has continued."""
    thread = harness.thread()
    await thread.finish()
    thread.user(content.sentence(harness.random))
    await thread.finish()
    thread.user(content.sentence(harness.random))
    first = next(place for place, message in enumerate(thread.history) if message["role"] == "assistant")
    thread.history[first] = {"role": "assistant", "content": f"(edited) {content.sentence(harness.random)}"}
    await thread.finish()
    thread.user(content.sentence(harness.random))
    await thread.finish()
    return Expected(chains=2, forks={"history_edited": 1}, roles={"main": 4})


@behaviour()
async def line_appended(harness: SimulatedHarness) -> Expected:
    """Stores every reply with a line appended."""

    def echo(message: WireJson) -> WireJson:
        return {"role": "assistant", "content": f"{message['content']}\n<end_code>"}

    thread = harness.thread(echo=echo, tools=[])
    for _ in range(3):
        await thread.finish(reasoning=False)
        thread.user(f"Output:\n{content.output(harness.random)}")
    await thread.finish(reasoning=False)
    return Expected(chains=4, forks={"history_edited": 3}, roles={"main": 4}, unended=3)


@behaviour("tools", "parallel", dialects=("chat", "messages", "google"))
async def turns_merged(harness: SimulatedHarness) -> Expected:
    """Merges two steps into one: a message with both calls, followed by both results."""
    thread = harness.thread()
    await thread.work(2, text=False, reasoning=False)
    start = next(place for place, message in enumerate(thread.history) if message["role"] == "assistant")
    first, one, second, two = thread.history[start : start + 4]
    thread.history[start:] = [{**first, "tool_calls": [*first["tool_calls"], *second["tool_calls"]]}, one, two]
    await thread.work(1)
    await thread.finish()
    return Expected(chains=2, forks={"history_edited": 1}, roles={"main": 4})


@behaviour()
async def interrupted(harness: SimulatedHarness) -> Expected:
    """Is interrupted by its user in the middle of a reply: only the part shown so far stays in the history."""
    thread = harness.thread()
    await thread.work(1)
    message = await thread.reply(harness.answer(reasoning=False))
    shown = message["content"][: len(message["content"]) // 2].strip()
    thread.history[-1] = {"role": "assistant", "content": f"{shown} [interrupted]"}
    thread.user(f"No, rather this: {content.sentence(harness.random)}")
    await thread.work(1)
    await thread.finish()
    return Expected(chains=2, forks={"history_edited": 1}, roles={"main": 4})


@behaviour("tools", "reasoning", settings={"policy": "as_sent"})
async def reasoning_dropped_as_sent(harness: SimulatedHarness) -> Expected:
    """Drops all reasoning under `as_sent`: every prompt differs from what was sampled."""
    thread = harness.thread(echo=without_reasoning)
    await thread.work(3, reasoning=True)
    return Expected(chains=3, forks={"reasoning_dropped": 2}, forced_closes=0)


@behaviour("tools", "keeps_reasoning", settings={"policy": "as_sent"})
async def reasoning_dropped_once(harness: SimulatedHarness) -> Expected:
    """Drops only the reasoning of its first turn, under `as_sent`: one fork, which then continues."""
    thread = harness.thread(echo=without_reasoning)
    await thread.work(1, reasoning=True)
    thread.echo = dict
    await thread.work(3, reasoning=True)
    return Expected(chains=2, forks={"reasoning_dropped": 1})


@behaviour("tools", "keeps_reasoning", settings={"policy": "template"})
async def template_rewrites(harness: SimulatedHarness) -> Expected:
    """Continues with a new user message under `template`: a fork if the template removes reasoning there."""
    thread = harness.thread()
    await thread.work(2, reasoning=True)
    await thread.finish(reasoning=True)
    thread.user(content.sentence(harness.random))
    await thread.work(2, reasoning=True)
    rewritten = harness.can("strips_reasoning")
    return Expected(chains=1 + rewritten, forks={"template_rewrite": 1} if rewritten else {})


@behaviour()
async def history_edited(harness: SimulatedHarness) -> Expected:
    """Edits the result of an early step; later replies stay in context."""
    thread = harness.thread()
    await thread.work(1)
    early = len(thread.history) - 1
    await thread.work(2)
    thread.history[early] = {**thread.history[early], "content": f"(edited) {content.output(harness.random)}"}
    await thread.work(1)
    await thread.finish()
    return Expected(chains=2, forks={"history_edited": 1})


@behaviour()
async def task_edited(harness: SimulatedHarness) -> Expected:
    """Edits its first message: no turn is intact, but the replies are still the model's."""
    thread = harness.thread()
    await thread.work(2)
    first = next(index for index, message in enumerate(thread.history) if message["role"] == "user")
    thread.history[first] = {"role": "user", "content": f"{harness.task} And mind the tests."}
    await thread.work(2)
    return Expected(chains=2, forks={"history_edited": 1})


@behaviour()
async def reply_edited(harness: SimulatedHarness) -> Expected:
    """Edits a reply of the model."""
    thread = harness.thread()
    await thread.work(1)
    await thread.finish()
    thread.user(content.sentence(harness.random))
    await thread.finish()
    edited = next(
        index for index in range(len(thread.history) - 2, 0, -1) if thread.history[index]["role"] == "assistant"
    )
    thread.history[edited] = {"role": "assistant", "content": f"(edited) {content.sentence(harness.random)}"}
    thread.user(content.sentence(harness.random))
    await thread.finish()
    return Expected(chains=2, forks={"history_edited": 1})


@behaviour()
async def results_cleared(harness: SimulatedHarness) -> Expected:
    """Clears old tool results to save context, one at a time."""
    thread = harness.thread()
    places = []
    for _ in range(3):
        await thread.work(1)
        places.append(len(thread.history) - 1)
    for place in places[:2]:
        thread.history[place] = {**thread.history[place], "content": "[old result cleared]"}
        await thread.work(1)
    return Expected(chains=3, forks={"history_edited": 2})


@behaviour("tools", "notes")
async def compaction(harness: SimulatedHarness) -> Expected:
    """Requests a summary in the conversation, and continues from the summary alone."""
    thread = harness.thread()
    await thread.work(3)
    thread.user("Summarise what was done and what is left to do.")
    await thread.finish()
    after = harness.thread(task=f"{harness.task}\n\nSo far: {content.sentence(harness.random)}")
    await after.work(2)
    return Expected(chains=2, forks={"compaction": 1}, roles={"compaction": 2})


@behaviour("tools", "notes")
async def compaction_without_tools(harness: SimulatedHarness) -> Expected:
    """Requests the summary without tools, and signals the new window by a header."""
    thread = harness.thread(headers={"x-codex-window-id": "window-1"})
    await thread.work(3)
    thread.user("Summarise what was done and what is left to do.")
    thread.tools = []
    await thread.finish()
    task = f"{harness.task}\n\nSo far: {content.sentence(harness.random)}"
    after = harness.thread(task=task, headers={"x-codex-window-id": "window-2"})
    await after.work(2)
    return Expected(chains=3, forks={"tools_changed": 1, "compaction": 1}, roles={"compaction": 3})


@behaviour("tools")
async def tools_changed(harness: SimulatedHarness) -> Expected:
    """Declares other tools from some request on."""
    thread = harness.thread()
    await thread.work(2)
    thread.tools = [*thread.tools, content.SEARCH]
    await thread.work(2)
    await thread.finish()
    return Expected(chains=2, forks={"tools_changed": 1})


@behaviour("system")
async def system_changed(harness: SimulatedHarness) -> Expected:
    """Changes its system prompt during the run."""
    thread = harness.thread()
    await thread.work(2)
    thread.history[0] = {"role": "system", "content": f"{content.SYSTEM} Be quick about it."}
    await thread.work(2)
    return Expected(chains=2, forks={"system_changed": 1})


@behaviour("system")
async def subagent(harness: SimulatedHarness) -> Expected:
    """Runs a sub-agent concurrently: the same session id, another agent id."""
    session = {"x-claude-code-session-id": "main"}
    main = harness.thread(headers=session)
    await main.work(1)
    headers = {**session, "x-claude-code-agent-id": "helper"}
    task = content.sentence(harness.random)
    helper = harness.concurrent().thread(system=content.REVIEWER, task=task, headers=headers)
    await asyncio.gather(main.work(3), helper.work(2))
    await main.finish()
    return Expected(chains=2, forks={"system_changed": 1}, roles={"subagent": 2, "main": 5})


@behaviour("tools")
async def subagent_session(harness: SimulatedHarness) -> Expected:
    """Runs a sub-agent with its own session id, a parent header, and other tools."""
    main = harness.thread(headers={"x-session-id": "main"})
    await main.work(1)
    headers = {"x-session-id": "child", "x-parent-session-id": "main"}
    helper = harness.concurrent().thread(task=content.sentence(harness.random), headers=headers, tools=[content.BASH])
    await asyncio.gather(main.work(2), helper.finish())
    helper.user(content.sentence(harness.random))
    await asyncio.gather(main.work(1), helper.finish())
    return Expected(chains=2, forks={"tools_changed": 1}, roles={"subagent": 2, "main": 4})


@behaviour("tools", "system")
async def side_call(harness: SimulatedHarness) -> Expected:
    """Requests a title between two steps."""
    main = harness.thread()
    await main.work(2)
    title = harness.thread(system="Write a title of three words.", task=content.sentence(harness.random), tools=[])
    await title.finish()
    await main.work(1)
    await main.finish()
    return Expected(chains=2, forks={"side": 1}, untrained=1, roles={"side": 1, "main": 4})


@behaviour("tools", "system")
async def title_first(harness: SimulatedHarness) -> Expected:
    """Requests a title before starting the task."""
    title = harness.thread(system="Write a title of three words.", task=f"Title for: {harness.task}", tools=[])
    await title.finish()
    main = harness.thread()
    await main.work(2)
    await main.finish()
    return Expected(chains=2, forks={"system_changed": 1}, untrained=1, roles={"side": 1, "main": 3})


@behaviour("tools")
async def second_model(harness: SimulatedHarness) -> Expected:
    """Requests a commit message from another model."""
    main = harness.thread()
    await main.work(2)
    commit = harness.thread(task=f"Write a commit message: {content.sentence(harness.random)}", tools=[])
    await commit.reply(harness.answer(), model="weak-model")
    await main.work(1)
    return Expected(chains=2, forks={"side": 1}, untrained=1, roles={"side": 1, "main": 3})


@behaviour("tools", "system", "notes")
async def memory_agent(harness: SimulatedHarness) -> Expected:
    """Runs a memory-extraction agent over the same history with another system prompt."""
    main = harness.thread()
    await main.work(2)
    memory = main.copy()
    memory.history[0] = {"role": "system", "content": "Extract what is worth remembering."}
    memory.user("What is worth remembering?")
    await memory.finish()
    await main.work(1)
    return Expected(chains=2, forks={"system_changed": 1})


@behaviour()
async def sibling(harness: SimulatedHarness) -> Expected:
    """Sends the same request twice, and continues from both answers."""
    thread = harness.thread()
    await thread.work(1)
    other = thread.copy()
    await thread.work(2)
    await other.work(2)
    return Expected(chains=2, forks={"sibling": 1})


@behaviour("tools")
async def twins(harness: SimulatedHarness) -> Expected:
    """Gets the same text twice in different tokens, and continues from both: only the call ids tell them apart."""
    thread = harness.thread()
    await thread.work(1)
    other = thread.copy()
    line = harness.step()
    first = await thread.reply(line)
    second = await other.reply(replace(line, seed=line.seed + 1, begun=asyncio.Event()))
    thread.follow(first)
    other.follow(second)
    await thread.work(1)
    await other.work(1)
    return Expected(chains=2, forks={"sibling": 1})


@behaviour(dialects=("chat", "google"))
async def several_samples(harness: SimulatedHarness) -> Expected:
    """Requests three samples at once, and continues from one."""
    thread = harness.thread()
    await thread.work(1)
    choices = await thread.ask(*(harness.step() for _ in range(3)), n=3)
    thread.follow(thread.take(choices[1]))
    await thread.work(1)
    return Expected(chains=3, forks={"sibling": 2})


@behaviour("notes")
async def vanishing(harness: SimulatedHarness) -> Expected:
    """Ends every prompt with a note that is missing from the next one: no turn is a prefix of another."""

    def shape(history: list[WireJson]) -> list[WireJson]:
        return [*history, {"role": "user", "content": f"(Note {harness.random.randint(1, 999)}: nothing is pending.)"}]

    thread = harness.thread(shape=shape)
    await thread.work(3)
    await thread.finish()
    return Expected(chains=4, forks={"vanished_message": 3})


@behaviour("prefill")
async def finished_reply_resumed(harness: SimulatedHarness) -> Expected:
    """Requests the continuation of a finished reply."""
    thread = harness.thread()
    await thread.finish(reasoning=False)
    rest = replace(harness.line(f" {content.sentence(harness.random)}"), split=0.0)
    await thread.ask(rest)
    return Expected(chains=2, forks={"prefill": 1})


@behaviour("opens", "other_ends")
async def end_opens_another(harness: SimulatedHarness) -> Expected:
    """Continues after a reply whose end token opens another kind of message than the one that follows."""
    thread = harness.thread()
    await thread.work(1)
    line = harness.answer()
    line.other_end = True
    await thread.reply(line)
    thread.user(content.sentence(harness.random))
    await thread.finish()
    return Expected(chains=2, forks={"stop_mismatch": 1})
