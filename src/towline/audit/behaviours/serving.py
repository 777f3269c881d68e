"""What happens around a conversation: retries, lost connections, and weight updates in the middle of it."""

from __future__ import annotations

import asyncio

from towline.audit.behaviours.registry import behaviour
from towline.audit.clients import WireJson
from towline.audit.clients.transport import ClientDisconnected
from towline.audit.engine import ScriptedReply
from towline.audit.simulation import ChatThread, Expected, SimulatedHarness, wait_until

RETRY_HEADER = {"x-stainless-retry-count": "1"}
_TEAR_TOKENS = 96


@behaviour(free=True)
async def retry(harness: SimulatedHarness) -> Expected:
    """Repeats a request with a retry header, or with the same idempotency key: it is sampled once."""
    thread = harness.thread()
    await thread.work(1)
    for headers in (RETRY_HEADER, {"idempotency-key": f"key-{harness.random.getrandbits(64):x}"}):
        first = {} if headers is RETRY_HEADER else headers
        (choice,) = await thread.ask(harness.step(), headers=first)
        (again,) = await harness.resend(headers)
        harness.check(again["message"] == choice["message"], "the retry got another answer")
        thread.follow(thread.take(again))
    await thread.finish()
    return Expected(flags=("retry",))


@behaviour()
async def retry_in_flight(harness: SimulatedHarness) -> Expected:
    """Repeats a request while it is in flight: both get the same answer."""
    thread = harness.thread()
    await thread.work(1)
    line = harness.step()
    line.hold = asyncio.Event()
    first = asyncio.create_task(thread.ask(line))
    await line.begun.wait()
    second = asyncio.create_task(harness.resend(RETRY_HEADER))
    await asyncio.sleep(0.02)
    line.hold.set()
    (choice,), (again,) = await asyncio.gather(first, second)
    harness.check(again["message"] == choice["message"], "the retry got another answer")
    thread.follow(thread.take(choice))
    await thread.finish()
    return Expected(flags=("retry",))


@behaviour()
async def connection_lost(harness: SimulatedHarness) -> Expected:
    """Loses the connection while waiting, and retries: it gets the answer in flight."""
    thread = harness.thread()
    await thread.work(1)
    hold = await _ask_and_disconnect(harness, thread)
    asking = asyncio.create_task(harness.resend({}))
    await asyncio.sleep(0.02)
    hold.set()
    (choice,) = await asking
    thread.follow(thread.take(choice))
    await thread.finish()
    return Expected(flags=("retry",))


@behaviour()
async def never_delivered(harness: SimulatedHarness) -> Expected:
    """Disconnects before the answer and sends another request: the undelivered reply is not trained."""
    thread = harness.thread()
    await thread.work(1)
    hold = await _ask_and_disconnect(harness, thread)
    hold.set()
    await wait_until(lambda: not harness.session.turns.tasks)
    thread.history[-1] = {**thread.history[-1], "content": "(interrupted)"}
    await thread.work(2)
    return Expected(untrained=1, roles={"discarded": 1})


async def _ask_and_disconnect(harness: SimulatedHarness, thread: ChatThread) -> asyncio.Event:
    """Send the history and disconnect once the engine has started; the reply waits for the returned event."""
    line, leave = harness.step(), asyncio.Event()
    line.hold = asyncio.Event()
    asking = asyncio.create_task(thread.ask(line, leave=leave))
    await line.begun.wait()
    leave.set()
    try:
        await asking
        harness.check(False, "a reply arrived on a closed connection")
    except ClientDisconnected:
        await wait_until(lambda: bool(harness.session.turns.inflight.abandoned))
    return line.hold


@behaviour(updates=True)
async def weights_updated(harness: SimulatedHarness) -> Expected:
    """Continues while the weights change between its turns."""
    thread = harness.thread()
    await thread.work(1)
    for _ in range(2):
        await harness.weights.update()
        await thread.work(1)
    await thread.finish()
    return Expected(versions=3)


@behaviour(updates=True)
async def weights_updated_in_flight(harness: SimulatedHarness) -> Expected:
    """Continues while the weights change during a turn, with and without a pause: the turn has two versions."""
    thread = harness.thread()
    await thread.work(1)
    for pause in (False, True):
        thread.follow(await _reply_across_update(harness, thread, pause))
    await thread.finish()
    return Expected(versions=3, torn=True)


async def _reply_across_update(harness: SimulatedHarness, thread: ChatThread, pause: bool) -> WireJson:
    """A freely sampled turn with a weight update once it has started."""
    engine = harness.weights.engine
    line = ScriptedReply(free=True)
    before = engine.stats.decoded_tokens
    asking = asyncio.create_task(thread.reply(line, max_tokens=_TEAR_TOKENS))
    await wait_until(lambda: engine.stats.decoded_tokens >= before + 3 or asking.done())
    await harness.weights.update(pause=pause)
    return await asking
