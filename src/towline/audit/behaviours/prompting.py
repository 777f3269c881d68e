"""What changes a prompt or its sampling and leaves the conversation one chain."""

from __future__ import annotations

from towline.audit import content
from towline.audit.behaviours.registry import behaviour
from towline.audit.play import Expected, Play, Thread
from towline.audit.tongues import DIALECTS, Wired


@behaviour("system")
async def thinking_switched_off(play: Play) -> Expected:
    """Switches thinking off in its system prompt, which some templates look for on every call."""
    thread = play.thread(system=f"{content.SYSTEM} /no_think")
    await thread.work(3)
    await thread.finish()
    return Expected()


@behaviour()
async def thinking_switched_later(play: Play) -> Expected:
    """Switches thinking off in the middle of the conversation, and on again."""
    thread = play.thread()
    await thread.finish()
    for switch in ("/no_think", "/think"):
        thread.user(f"{content.sentence(play.random)} {switch}")
        await thread.work(2)
        await thread.finish()
    return Expected()


@behaviour(dialects=("chat", "responses", "google"), settings={"sampling": {"mode": "harness"}})
async def temperatures(play: Play) -> Expected:
    """Asks for another temperature in some turns, and is given it."""
    thread = play.thread()
    for temperature in (0.3, 0.3, 1.0):
        thread.follow(await thread.reply(play.step(), temperature=temperature))
    await thread.reply(play.answer(), temperature=0.6)
    return Expected(temperatures=True)


@behaviour()
async def dialect_switched(play: Play) -> Expected:
    """Speaks another dialect in every request of one conversation."""
    own = play.tongue.name

    def echo(message: Wired) -> Wired:
        # What only one dialect has a place for stays behind.
        calls = [
            {name: value for name, value in call.items() if name != "item"} for call in message.get("tool_calls") or ()
        ]
        kept = {name: value for name, value in message.items() if name in ("role", "content", "reasoning_content")}
        return {**kept, "tool_calls": calls} if calls else kept

    thread = play.thread(echo=echo)
    for dialect in (*(name for name in DIALECTS if name != own), own):
        thread.follow(await thread.reply(play.step()))
        play.switch(dialect)
    await thread.finish()
    return Expected()


@behaviour(most=8)
async def long_context(play: Play) -> Expected:
    """Reads long files: more than ten thousand tokens."""
    return await _read(play, 12_000)


@behaviour(most=2, captures=("exact", "as_sent"))
async def longest_context(play: Play) -> Expected:
    """Reads very long files: forty thousand tokens."""
    return await _read(play, 40_000)


async def _read(play: Play, tokens: int) -> Expected:
    thread, steps = play.thread(), 3
    for _ in range(steps):
        thread.follow(await thread.reply(play.step()))
        _lengthen(play, thread, tokens // steps)
    await thread.finish()
    return Expected()


def _lengthen(play: Play, thread: Thread, tokens: int) -> None:
    """Behind the newest message, so many tokens of a file."""
    sample = "\n".join(content.output(play.random) for _ in range(40))
    times = 1 + tokens // len(play.target.oracle.encode(sample))
    lines = [f"{number}\t{sample}" for number in range(times)]
    newest = thread.history[-1]
    thread.history[-1] = {**newest, "content": f"{newest['content']}\n" + "\n".join(lines)}
