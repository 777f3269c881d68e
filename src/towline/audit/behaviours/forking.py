"""What makes a new chain, and the reason that is recorded for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from towline.audit import content
from towline.audit.behaviours.continuing import without_reasoning
from towline.audit.behaviours.registry import behaviour
from towline.audit.play import Expected, Play
from towline.audit.tongues import Wired


@behaviour("tools", "reasoning", settings={"policy": "as_sent"})
async def reasoning_dropped_as_sent(play: Play) -> Expected:
    """Drops all reasoning under `as_sent`: every call is shown something else than was sampled."""
    thread = play.thread(echo=without_reasoning)
    await thread.work(3, reasoning=True)
    return Expected(chains=3, forks={"reasoning_dropped": 2}, forced_closes=0)


@behaviour("tools", "keeps_reasoning", settings={"policy": "as_sent"})
async def reasoning_dropped_once(play: Play) -> Expected:
    """Drops the reasoning of its first turn only, under `as_sent`: one branch, which then goes on."""
    thread = play.thread(echo=without_reasoning)
    await thread.work(1, reasoning=True)
    thread.echo = dict
    await thread.work(3, reasoning=True)
    return Expected(chains=2, forks={"reasoning_dropped": 1})


@behaviour("tools", "keeps_reasoning", settings={"policy": "template"})
async def template_rewrites(play: Play) -> Expected:
    """Goes on with a new user turn under `template`: a branch if the template takes reasoning out there."""
    thread = play.thread()
    await thread.work(2, reasoning=True)
    await thread.finish(reasoning=True)
    thread.user(content.sentence(play.random))
    await thread.work(2, reasoning=True)
    rewritten = play.can("strips_reasoning")
    return Expected(chains=1 + rewritten, forks={"template_rewrite": 1} if rewritten else {})


@behaviour()
async def history_edited(play: Play) -> Expected:
    """Edits the result of an early step; later replies stay in context."""
    thread = play.thread()
    await thread.work(1)
    early = len(thread.history) - 1
    await thread.work(2)
    thread.history[early] = {**thread.history[early], "content": f"(edited) {content.output(play.random)}"}
    await thread.work(1)
    await thread.finish()
    return Expected(chains=2, forks={"history_edited": 1})


@behaviour()
async def task_edited(play: Play) -> Expected:
    """Edits its very first message: no turn is intact, but the replies are still ours."""
    thread = play.thread()
    await thread.work(2)
    first = next(index for index, message in enumerate(thread.history) if message["role"] == "user")
    thread.history[first] = {"role": "user", "content": f"{play.task} And mind the tests."}
    await thread.work(2)
    return Expected(chains=2, forks={"history_edited": 1})


@behaviour()
async def reply_edited(play: Play) -> Expected:
    """Puts other words into the model's mouth."""
    thread = play.thread()
    await thread.work(1)
    await thread.finish()
    thread.user(content.sentence(play.random))
    await thread.finish()
    edited = next(
        index for index in range(len(thread.history) - 2, 0, -1) if thread.history[index]["role"] == "assistant"
    )
    thread.history[edited] = {"role": "assistant", "content": f"(edited) {content.sentence(play.random)}"}
    thread.user(content.sentence(play.random))
    await thread.finish()
    return Expected(chains=2, forks={"history_edited": 1})


@behaviour()
async def results_cleared(play: Play) -> Expected:
    """Clears old results to save room, one more at a time."""
    thread = play.thread()
    places = []
    for _ in range(3):
        await thread.work(1)
        places.append(len(thread.history) - 1)
    for place in places[:2]:
        thread.history[place] = {**thread.history[place], "content": "[old result cleared]"}
        await thread.work(1)
    return Expected(chains=3, forks={"history_edited": 2})


@behaviour("tools", "notes")
async def compaction(play: Play) -> Expected:
    """Asks for a summary in place, and goes on from the summary alone."""
    thread = play.thread()
    await thread.work(3)
    thread.user("Summarise what was done and what is left to do.")
    await thread.finish()
    after = play.thread(task=f"{play.task}\n\nSo far: {content.sentence(play.random)}")
    await after.work(2)
    return Expected(chains=2, forks={"compaction": 1}, roles={"compaction": 2})


@behaviour("tools", "notes")
async def compaction_without_tools(play: Play) -> Expected:
    """Asks for the summary without tools, and says by a header that its window moved."""
    thread = play.thread(headers={"x-codex-window-id": "window-1"})
    await thread.work(3)
    thread.user("Summarise what was done and what is left to do.")
    thread.tools = []
    await thread.finish()
    task = f"{play.task}\n\nSo far: {content.sentence(play.random)}"
    after = play.thread(task=task, headers={"x-codex-window-id": "window-2"})
    await after.work(2)
    return Expected(chains=3, forks={"tools_changed": 1, "compaction": 1}, roles={"compaction": 3})


@behaviour("tools")
async def tools_changed(play: Play) -> Expected:
    """Offers other tools from some call on."""
    thread = play.thread()
    await thread.work(2)
    thread.tools = [*thread.tools, content.SEARCH]
    await thread.work(2)
    await thread.finish()
    return Expected(chains=2, forks={"tools_changed": 1})


@behaviour("system")
async def system_changed(play: Play) -> Expected:
    """Changes its system prompt in mid-run."""
    thread = play.thread()
    await thread.work(2)
    thread.history[0] = {"role": "system", "content": f"{content.SYSTEM} Be quick about it."}
    await thread.work(2)
    return Expected(chains=2, forks={"system_changed": 1})


@behaviour("system")
async def subagent(play: Play) -> Expected:
    """Runs a sub-agent beside the main thread: the same session, another agent."""
    session = {"x-claude-code-session-id": "main"}
    main = play.thread(headers=session)
    await main.work(1)
    headers = {**session, "x-claude-code-agent-id": "helper"}
    task = content.sentence(play.random)
    helper = play.aside().thread(system=content.REVIEWER, task=task, headers=headers)
    await asyncio.gather(main.work(3), helper.work(2))
    await main.finish()
    return Expected(chains=2, forks={"system_changed": 1}, roles={"subagent": 2, "main": 5})


@behaviour("tools")
async def subagent_session(play: Play) -> Expected:
    """Runs a sub-agent with a session of its own that names its parent, and with other tools."""
    main = play.thread(headers={"x-session-id": "main"})
    await main.work(1)
    headers = {"x-session-id": "child", "x-parent-session-id": "main"}
    helper = play.aside().thread(task=content.sentence(play.random), headers=headers, tools=[content.BASH])
    await asyncio.gather(main.work(2), helper.finish())
    helper.user(content.sentence(play.random))
    await asyncio.gather(main.work(1), helper.finish())
    return Expected(chains=2, forks={"tools_changed": 1}, roles={"subagent": 2, "main": 4})


@behaviour("tools", "system")
async def side_call(play: Play) -> Expected:
    """Asks for a title between two steps of work."""
    main = play.thread()
    await main.work(2)
    title = play.thread(system="Write a title of three words.", task=content.sentence(play.random), tools=[])
    await title.finish()
    await main.work(1)
    await main.finish()
    return Expected(chains=2, forks={"side": 1}, untrained=1, roles={"side": 1, "main": 4})


@behaviour("tools", "system")
async def title_first(play: Play) -> Expected:
    """Asks for a title of the task before it begins with the task."""
    title = play.thread(system="Write a title of three words.", task=f"Title for: {play.task}", tools=[])
    await title.finish()
    main = play.thread()
    await main.work(2)
    await main.finish()
    return Expected(chains=2, forks={"system_changed": 1}, untrained=1, roles={"side": 1, "main": 3})


@behaviour("tools")
async def second_model(play: Play) -> Expected:
    """Asks another model for the text of a commit."""
    main = play.thread()
    await main.work(2)
    commit = play.thread(task=f"Write a commit message: {content.sentence(play.random)}", tools=[])
    await commit.reply(play.answer(), model="weak-model")
    await main.work(1)
    return Expected(chains=2, forks={"side": 1}, untrained=1, roles={"side": 1, "main": 3})


@behaviour("tools", "system", "notes")
async def memory_agent(play: Play) -> Expected:
    """Runs an agent over the same history under another system prompt, to extract what to remember."""
    main = play.thread()
    await main.work(2)
    memory = main.copy()
    memory.history[0] = {"role": "system", "content": "Extract what is worth remembering."}
    memory.user("What is worth remembering?")
    await memory.finish()
    await main.work(1)
    return Expected(chains=2, forks={"system_changed": 1})


@behaviour()
async def sibling(play: Play) -> Expected:
    """Sends the same request twice, wants both answers, and goes on from both."""
    thread = play.thread()
    await thread.work(1)
    other = thread.copy()
    await thread.work(2)
    await other.work(2)
    return Expected(chains=2, forks={"sibling": 1})


@behaviour("tools")
async def twins(play: Play) -> Expected:
    """Gets the same words twice, in other tokens, and goes on from both: only the ids of the calls tell them apart."""
    thread = play.thread()
    await thread.work(1)
    other = thread.copy()
    line = play.step()
    first = await thread.reply(line)
    second = await other.reply(replace(line, seed=line.seed + 1, begun=asyncio.Event()))
    thread.follow(first)
    other.follow(second)
    await thread.work(1)
    await other.work(1)
    return Expected(chains=2, forks={"sibling": 1})


@behaviour(dialects=("chat", "google"))
async def several_samples(play: Play) -> Expected:
    """Asks for three samples at once, and goes on from one."""
    thread = play.thread()
    await thread.work(1)
    choices = await thread.ask(*(play.step() for _ in range(3)), n=3)
    thread.follow(thread.take(choices[1]))
    await thread.work(1)
    return Expected(chains=3, forks={"sibling": 2})


@behaviour("notes")
async def vanishing(play: Play) -> Expected:
    """Ends every prompt with a note that is gone from the next: no turn is a prefix of another."""

    def shape(history: list[Wired]) -> list[Wired]:
        return [*history, {"role": "user", "content": f"(Note {play.random.randint(1, 999)}: nothing is pending.)"}]

    thread = play.thread(shape=shape)
    await thread.work(3)
    await thread.finish()
    return Expected(chains=4, forks={"vanished_message": 3})


@behaviour("prefill")
async def finished_reply_resumed(play: Play) -> Expected:
    """Wants a reply that had ended written on, as if it had not."""
    thread = play.thread()
    await thread.finish(reasoning=False)
    rest = replace(play.line(f" {content.sentence(play.random)}"), split=0.0)
    await thread.ask(rest)
    return Expected(chains=2, forks={"prefill": 1})


@behaviour("opens", "other_ends")
async def end_opens_another(play: Play) -> Expected:
    """Goes on after a reply whose end opens another kind of message than the one that follows."""
    thread = play.thread()
    await thread.work(1)
    line = play.answer()
    line.other_end = True
    await thread.reply(line)
    thread.user(content.sentence(play.random))
    await thread.finish()
    return Expected(chains=2, forks={"stop_mismatch": 1})
