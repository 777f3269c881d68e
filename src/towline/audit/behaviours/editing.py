"""Histories that a harness keeps in other words than the model's: the task goes on, under the role that it had."""

from __future__ import annotations

from towline.audit import content
from towline.audit.behaviours.registry import behaviour
from towline.audit.play import Expected, Play
from towline.audit.tongues import Wired


@behaviour()
async def first_reply_edited(play: Play) -> Expected:
    """Puts other words into the model's very first reply, when more has been said behind it."""
    thread = play.thread()
    await thread.finish()
    thread.user(content.sentence(play.random))
    await thread.finish()
    thread.user(content.sentence(play.random))
    first = next(place for place, message in enumerate(thread.history) if message["role"] == "assistant")
    thread.history[first] = {"role": "assistant", "content": f"(edited) {content.sentence(play.random)}"}
    await thread.finish()
    thread.user(content.sentence(play.random))
    await thread.finish()
    return Expected(chains=2, forks={"history_edited": 1}, roles={"main": 4})


@behaviour()
async def line_appended(play: Play) -> Expected:
    """Keeps every reply with a line of its own behind it."""

    def echo(message: Wired) -> Wired:
        return {"role": "assistant", "content": f"{message['content']}\n<end_code>"}

    thread = play.thread(echo=echo, tools=[])
    for _ in range(3):
        await thread.finish(reasoning=False)
        thread.user(f"Output:\n{content.output(play.random)}")
    await thread.finish(reasoning=False)
    return Expected(chains=4, forks={"history_edited": 3}, roles={"main": 4}, unended=3)


@behaviour("tools", "parallel", dialects=("chat", "messages", "google"))
async def turns_merged(play: Play) -> Expected:
    """Keeps two steps as one: a message with both calls, and both results behind it."""
    thread = play.thread()
    await thread.work(2, text=False, reasoning=False)
    start = next(place for place, message in enumerate(thread.history) if message["role"] == "assistant")
    first, one, second, two = thread.history[start : start + 4]
    thread.history[start:] = [{**first, "tool_calls": [*first["tool_calls"], *second["tool_calls"]]}, one, two]
    await thread.work(1)
    await thread.finish()
    return Expected(chains=2, forks={"history_edited": 1}, roles={"main": 4})


@behaviour()
async def interrupted(play: Play) -> Expected:
    """Is interrupted by its user in the middle of a reply: only what was shown so far stays in the history."""
    thread = play.thread()
    await thread.work(1)
    message = await thread.reply(play.answer(reasoning=False))
    shown = message["content"][: len(message["content"]) // 2].strip()
    thread.history[-1] = {"role": "assistant", "content": f"{shown} [interrupted]"}
    thread.user(f"No, rather this: {content.sentence(play.random)}")
    await thread.work(1)
    await thread.finish()
    return Expected(chains=2, forks={"history_edited": 1}, roles={"main": 4})
