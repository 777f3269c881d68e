"""Behaviours that change a prompt or its sampling and leave the conversation one chain."""

from __future__ import annotations

from towline.audit import content
from towline.audit.behaviours.registry import behaviour
from towline.audit.clients import DIALECTS, WireJson
from towline.audit.simulation import ChatThread, Expected, SimulatedHarness


@behaviour("system")
async def thinking_switched_off(harness: SimulatedHarness) -> Expected:
    """Switches thinking off in its system prompt, which some templates read on every request."""
    thread = harness.thread(system=f"{content.SYSTEM} /no_think")
    await thread.work(3)
    await thread.finish()
    return Expected()


@behaviour()
async def thinking_switched_later(harness: SimulatedHarness) -> Expected:
    """Switches thinking off and on again during the conversation."""
    thread = harness.thread()
    await thread.finish()
    for switch in ("/no_think", "/think"):
        thread.user(f"{content.sentence(harness.random)} {switch}")
        await thread.work(2)
        await thread.finish()
    return Expected()


@behaviour(dialects=("chat", "responses", "google"), settings={"sampling": {"mode": "harness"}})
async def temperatures(harness: SimulatedHarness) -> Expected:
    """Requests other temperatures in some turns; they are honoured."""
    thread = harness.thread()
    for temperature in (0.3, 0.3, 1.0):
        thread.follow(await thread.reply(harness.step(), temperature=temperature))
    await thread.reply(harness.answer(), temperature=0.6)
    return Expected(temperatures=True)


@behaviour()
async def dialect_switched(harness: SimulatedHarness) -> Expected:
    """Uses another dialect in every request of one conversation."""
    own = harness.dialect_client.name

    def echo(message: WireJson) -> WireJson:
        # Fields that only one dialect has are dropped.
        calls = [
            {name: value for name, value in call.items() if name != "item"} for call in message.get("tool_calls") or ()
        ]
        kept = {name: value for name, value in message.items() if name in ("role", "content", "reasoning_content")}
        return {**kept, "tool_calls": calls} if calls else kept

    thread = harness.thread(echo=echo)
    for dialect in (*(name for name in DIALECTS if name != own), own):
        thread.follow(await thread.reply(harness.step()))
        harness.switch(dialect)
    await thread.finish()
    return Expected()


@behaviour(most=8)
async def long_context(harness: SimulatedHarness) -> Expected:
    """Reads long files: more than 10,000 tokens."""
    return await _read(harness, 12_000)


@behaviour(most=2, captures=("exact", "as_sent"))
async def longest_context(harness: SimulatedHarness) -> Expected:
    """Reads very long files: 40,000 tokens."""
    return await _read(harness, 40_000)


async def _read(harness: SimulatedHarness, tokens: int) -> Expected:
    thread, steps = harness.thread(), 3
    for _ in range(steps):
        thread.follow(await thread.reply(harness.step()))
        _lengthen(harness, thread, tokens // steps)
    await thread.finish()
    return Expected()


def _lengthen(harness: SimulatedHarness, thread: ChatThread, tokens: int) -> None:
    """Append about `tokens` tokens of file content to the newest message."""
    sample = "\n".join(content.output(harness.random) for _ in range(40))
    times = 1 + tokens // len(harness.target.oracle.encode(sample))
    lines = [f"{number}\t{sample}" for number in range(times)]
    newest = thread.history[-1]
    thread.history[-1] = {**newest, "content": f"{newest['content']}\n" + "\n".join(lines)}
