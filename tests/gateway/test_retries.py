"""The same request again: a retry shares the turn that was sampled for it, anything else samples another."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import openai
import pytest

from support.gateway.gateway_rig import (
    Opened,
    Rig,
    Start,
    Wire,
    assert_one_chain,
    chat,
    eventually,
    message_of,
    results,
    user,
)
from towline.conversation import Request, ToolCall
from towline.engines.scripted import Say
from towline.schema import ForkReason, TurnRole
from towline.tokens.graph.graph import GraphNode

RETRY = {"x-stainless-retry-count": "1"}


def numbered(delay: float = 0.0) -> Callable[[Request], Say]:
    """No two samples are the same."""
    numbers = itertools.count()
    return lambda _: Say(f"sample {next(numbers)}", "hm", delay=delay)


async def ask(
    rig: Rig, session: Opened, text: str = "hi", *, headers: dict[str, str] | None = None, **fields: Any
) -> str:
    status, body = await rig.post(session, chat(user(text), **fields), headers=headers or {})
    assert status == 200, body
    return " | ".join(choice["message"]["content"] for choice in body["choices"])


def nodes(rig: Rig, session: Opened) -> list[GraphNode]:
    return rig.gateway.sessions[session.id].graph.nodes


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_left_finds_its_turn_again(start: Start, stream: bool) -> None:
    """While it is sampled, and after: one sample, delivered to the client that retries, trained once."""
    async with start(numbered(0.3), ping_seconds=0.05) as rig:
        session = await rig.open()
        abandoned = rig.gateway.sessions[session.id].turns.inflight.abandoned
        wire = await Wire.send(session, chat(user("hi"), stream=stream))
        await eventually(lambda: rig.engine.requests, "the turn is sampled")
        wire.cut()
        await eventually(lambda: abandoned, "the gateway notices")
        assert await ask(rig, session) == "sample 0"

        wire = await Wire.send(session, chat(user("later"), stream=stream))
        await eventually(lambda: len(rig.engine.requests) == 2)
        wire.cut()
        await eventually(lambda: nodes(rig, session)[1].finish is not None, "the turn ends without a client")
        assert not nodes(rig, session)[1].delivered
        assert await ask(rig, session, "later") == "sample 1"
        assert len(rig.engine.requests) == 2

        # It is delivered now: without a new reason to believe in a retry, the same request is another sample.
        assert await ask(rig, session, "later") == "sample 2"
        trajectory = await rig.seal(session)
    assert [("retry" in turn.flags, turn.delivered) for turn in trajectory.turns] == [(True, True)] * 2 + [
        (False, True)
    ]
    assert [turn.reason for turn in trajectory.turns][2] is ForkReason.SIBLING
    assert trajectory.report.trained_tokens == sum(len(turn.sampled) for turn in trajectory.turns)


async def test_what_the_client_says(start: Start) -> None:
    """A retry count, or an idempotency key; two keys that differ are two requests, whatever the count."""
    async with start(numbered()) as rig:
        session = await rig.open()
        assert await ask(rig, session) == "sample 0"
        assert await ask(rig, session, headers=RETRY) == "sample 0"
        assert await ask(rig, session, headers={"x-stainless-retry-count": "0"}) == "sample 1"
        assert await ask(rig, session) == "sample 2"
        assert await ask(rig, session, headers=RETRY) == "sample 2"
        for key in ("one", "two"):
            for _ in range(2):
                number = {"one": 3, "two": 4}[key]
                assert await ask(rig, session, headers={"idempotency-key": key}) == f"sample {number}"
        assert await ask(rig, session, headers={"idempotency-key": "one", **RETRY}) == "sample 3"
        assert await ask(rig, session, "other words", headers={"idempotency-key": "one", **RETRY}) == "sample 5"
        # Other sampling is another request.
        assert await ask(rig, session, headers=RETRY, max_tokens=3000) == "sample 6"
        assert await ask(rig, session, headers=RETRY, model="n") == "sample 7"
        assert await ask(rig, session, headers={"idempotency-key": "three", **RETRY}) == "sample 2"
        trajectory = await rig.seal(session)
    assert len(trajectory.turns) == 8
    assert trajectory.report.discarded_tokens == 0


async def test_several_choices_are_retried_together(start: Start) -> None:
    async with start(numbered(0.1)) as rig:
        session = await rig.open()
        both = asyncio.create_task(ask(rig, session, n=2))
        await eventually(lambda: len(rig.engine.requests) == 2)
        assert await ask(rig, session, headers=RETRY, n=2) == "sample 0 | sample 1" == await both
        assert await ask(rig, session, headers=RETRY, n=2) == "sample 0 | sample 1"
        assert await ask(rig, session, headers=RETRY, n=3) == "sample 2 | sample 3 | sample 4"
        assert await ask(rig, session, headers=RETRY) == "sample 5"
        wire = await Wire.send(session, chat(user("hi"), n=2))
        await eventually(lambda: len(rig.engine.requests) == 8)
        wire.cut()
        await eventually(lambda: len(rig.gateway.sessions[session.id].turns.inflight.abandoned) == 2)
        assert await ask(rig, session, n=2) == "sample 6 | sample 7"


async def test_choices_of_which_a_restart_left_one(start: Start) -> None:
    """Half an answer is none: all choices are sampled again."""
    delays = iter((0, 600, 0, 0))

    def say(_: Request) -> Say:
        delay = next(delays)
        return Say(f"after {delay}", delay=delay)

    async with start(say, drain_seconds=0) as rig:
        session = await rig.open()
        wire = await Wire.send(session, chat(user("hi"), n=2))
        await eventually(lambda: [node.finish is not None for node in nodes(rig, session)] == [True, False])
        await eventually(lambda: len(rig.gateway.sessions[session.id].turns.tasks) == 1)
    wire.cut()
    async with start(say) as rig:
        session.base_url = rig.running.base_url + "/v1"
        assert len(nodes(rig, session)) == 1
        assert await ask(rig, session, n=2) == "after 0 | after 0"
        trajectory = await rig.seal(session)
    assert [turn.role is TurnRole.DISCARDED for turn in trajectory.turns] == [True, False, False]


async def test_two_who_wait_for_one_turn(start: Start) -> None:
    """One of them leaving does not end it for the other."""
    async with start(numbered(0.4), orphan_seconds=0.05) as rig:
        session = await rig.open()
        first = await Wire.send(session, chat(user("hi")))
        await eventually(lambda: rig.engine.requests)
        second = await Wire.send(session, chat(user("hi")), **RETRY)
        third = await Wire.send(session, chat(user("hi")), **RETRY)
        waiting = rig.gateway.sessions[session.id].turns.inflight
        await eventually(lambda: waiting._clients == {f"{session.id}-0": 3})
        first.cut()
        third.cut()
        await eventually(lambda: waiting._clients == {f"{session.id}-0": 1})
        assert (await second.answer())["choices"][0]["message"]["content"] == "sample 0"
        second.cut()
        assert_one_chain(await rig.seal(session), 1)


async def test_what_was_never_delivered_is_discarded(start: Start) -> None:
    """And never trained. A turn that still samples when its grace is over is cancelled."""
    async with start(numbered(0.15), orphan_seconds=10) as rig:
        session = await rig.open()
        wire = await Wire.send(session, chat(user("hi")))
        await eventually(lambda: rig.engine.requests)
        wire.cut()
        await eventually(lambda: nodes(rig, session)[0].finish is not None)
        trajectory = await rig.seal(session)
        assert [turn.role for turn in trajectory.turns] == [TurnRole.DISCARDED]
        assert trajectory.traces == []
        assert trajectory.report.discarded_tokens == len(trajectory.turns[0].sampled) > 0
        assert trajectory.error is not None

    async with start(numbered(600), orphan_seconds=0.05) as rig:
        session = await rig.open()
        wire = await Wire.send(session, chat(user("hi")))
        await eventually(lambda: rig.engine.requests)
        wire.cut()
        await eventually(lambda: not rig.engine._active, "the orphan is cancelled")
        rig.engine.script = numbered()
        assert await ask(rig, session, headers=RETRY) == "sample 0"
        assert len(rig.engine.requests) == 2
        trajectory = await rig.seal(session)
    assert [turn.role for turn in trajectory.turns] == [TurnRole.DISCARDED, TurnRole.MAIN]
    assert len(trajectory.turns[0].sampled) == 0
    assert len(trajectory.traces) == 1


async def test_the_sdk_times_out_and_retries(start: Start) -> None:
    """The official client gives up on a slow turn and asks again, twice: one sample."""
    async with start(numbered(0.9)) as rig:
        session = await rig.open()
        client = rig.client(session, timeout=0.35, max_retries=5)
        completion = await client.chat.completions.create(model="m", messages=[user("hi")])  # type: ignore[list-item]
        assert completion.choices[0].message.content == "sample 0"
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(max_retries=0).chat.completions.create(model="m", messages=[user("b")])  # type: ignore[list-item]
        # A harness with its own retries sends it again, as if for the first time.
        completion = await client.chat.completions.create(model="m", messages=[user("b")])  # type: ignore[list-item]
        assert completion.choices[0].message.content == "sample 1"
        await client.close()
        trajectory = await rig.seal(session)
    assert len(trajectory.turns) == 2
    assert all(turn.delivered and "retry" in turn.flags for turn in trajectory.turns)


async def test_a_twins_lost_turn_is_not_given_to_another(start: Start) -> None:
    """Two conversations with the same text: each continues from its own calls, not with what the other lost."""

    def same(request: Request) -> Say:
        turn = sum(message.role == "assistant" for message in request.messages)
        return Say("", "hm", [ToolCall("", "bash", {"command": f"step {turn}"})])

    async with start(same) as rig:
        session = await rig.open()
        replies = [message_of((await rig.post(session, chat(user("hi"))))[1]) for _ in range(2)]
        one, two = (chat(user("hi"), reply, *results(reply)) for reply in replies)
        rig.engine.script = lambda _: Say("first of one", delay=0.1)
        wire = await Wire.send(session, one)
        await eventually(lambda: len(rig.engine.requests) == 3)
        wire.cut()
        await eventually(lambda: nodes(rig, session)[2].finish is not None)
        rig.engine.script = lambda _: Say("first of two")
        for headers in ({}, RETRY):
            answered = message_of((await rig.post(session, two, headers=headers))[1])
            assert answered["content"] == "first of two"
        assert message_of((await rig.post(session, one))[1])["content"] == "first of one"
