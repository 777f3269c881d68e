"""What happens around a conversation: retries, connections that die, and weights that change in the middle of it."""

from __future__ import annotations

import asyncio

from towline.audit.behaviours.registry import behaviour
from towline.audit.play import Expected, Play, Thread, until
from towline.audit.script import Line
from towline.audit.tongues import Wired
from towline.audit.wires import Left

RETRY = {"x-stainless-retry-count": "1"}
_TEAR_TOKENS = 96


@behaviour(free=True)
async def retry(play: Play) -> Expected:
    """Sends a request again with the header of a retry, or with the same idempotency key: it is answered once."""
    thread = play.thread()
    await thread.work(1)
    for headers in (RETRY, {"idempotency-key": f"key-{play.random.getrandbits(64):x}"}):
        first = {} if headers is RETRY else headers
        (choice,) = await thread.ask(play.step(), headers=first)
        (again,) = await play.again(headers)
        play.check(again["message"] == choice["message"], "the retry was answered differently")
        thread.follow(thread.take(again))
    await thread.finish()
    return Expected(flags=("retry",))


@behaviour()
async def retry_in_flight(play: Play) -> Expected:
    """Sends a request again while it is being answered: both get the one answer."""
    thread = play.thread()
    await thread.work(1)
    line = play.step()
    line.hold = asyncio.Event()
    first = asyncio.create_task(thread.ask(line))
    await line.begun.wait()
    second = asyncio.create_task(play.again(RETRY))
    await asyncio.sleep(0.02)
    line.hold.set()
    (choice,), (again,) = await asyncio.gather(first, second)
    play.check(again["message"] == choice["message"], "the retry was answered differently")
    thread.follow(thread.take(choice))
    await thread.finish()
    return Expected(flags=("retry",))


@behaviour()
async def connection_lost(play: Play) -> Expected:
    """Loses the connection while waiting, and asks again: the answer in flight is the answer."""
    thread = play.thread()
    await thread.work(1)
    hold = await _left(play, thread)
    asking = asyncio.create_task(play.again({}))
    await asyncio.sleep(0.02)
    hold.set()
    (choice,) = await asking
    thread.follow(thread.take(choice))
    await thread.finish()
    return Expected(flags=("retry",))


@behaviour()
async def never_delivered(play: Play) -> Expected:
    """Leaves before the answer, and asks for something else: what was sampled for nobody is not trained."""
    thread = play.thread()
    await thread.work(1)
    hold = await _left(play, thread)
    hold.set()
    await until(lambda: not play.session.work)
    thread.history[-1] = {**thread.history[-1], "content": "(interrupted)"}
    await thread.work(2)
    return Expected(untrained=1, roles={"discarded": 1})


async def _left(play: Play, thread: Thread) -> asyncio.Event:
    """Ask, and close the connection once the engine has begun; the reply waits for the event."""
    line, leave = play.step(), asyncio.Event()
    line.hold = asyncio.Event()
    asking = asyncio.create_task(thread.ask(line, leave=leave))
    await line.begun.wait()
    leave.set()
    try:
        await asking
        play.check(False, "a reply came over a connection that was closed")
    except Left:
        await until(lambda: bool(play.session.waiting.abandoned))
    return line.hold


@behaviour(updates=True)
async def weights_updated(play: Play) -> Expected:
    """Goes on while the weights change between its turns."""
    thread = play.thread()
    await thread.work(1)
    for _ in range(2):
        await play.weights.update()
        await thread.work(1)
    await thread.finish()
    return Expected(versions=3)


@behaviour(updates=True)
async def weights_updated_in_flight(play: Play) -> Expected:
    """Goes on while the weights change in the middle of a turn, with and without a pause: the turn is of two versions."""
    thread = play.thread()
    await thread.work(1)
    for pause in (False, True):
        thread.follow(await _torn(play, thread, pause))
    await thread.finish()
    return Expected(versions=3, torn=True)


async def _torn(play: Play, thread: Thread, pause: bool) -> Wired:
    """A turn that the model samples by itself, with an update once it has begun."""
    engine = play.weights.engine
    line = Line(free=True)
    before = engine.stats.decoded_tokens
    asking = asyncio.create_task(thread.reply(line, max_tokens=_TEAR_TOKENS))
    await until(lambda: engine.stats.decoded_tokens >= before + 3 or asking.done())
    await play.weights.update(pause=pause)
    return await asking
