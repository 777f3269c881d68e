"""Streams: kept alive while a turn is sampled, honest about failures, and known to be received or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import openai
import pytest

from support.gateway.gateway_rig import (
    Start,
    Wire,
    assemble,
    assert_one_chain,
    chat,
    eventually,
    message_of,
    results,
    user,
)
from towline.conversation import Request
from towline.engines.base import Sample, SampleRequest
from towline.engines.scripted import Say, ScriptedEngine
from towline.errors import EngineError
from towline.gateway.journal import JournalError
from towline.schema import TurnRole
from towline.tokens.codec import ModelCodec

STREAM = {"stream": True}


async def test_pings_until_the_turn_is_in_the_journal(start: Start) -> None:
    async with start(lambda _: Say("hello", "hm", delay=0.4), ping_seconds=0.05) as rig:
        session = await rig.open()
        async with rig.web.post(session.chat, json=chat(user("hi"), **STREAM), headers=session.headers) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            events: list[str] = []
            async for line in response.content:
                if line.strip():
                    events.append(line.decode().strip())
                if "hello" in events[-1]:
                    recorded = [record.kind for record in rig.gateway.journal.records()]
                    assert recorded.count("turn") == 1
        kinds = ["ping" if event.startswith(":") else event.removeprefix("data: ") for event in events]
        assert kinds.count("ping") >= 3
        assert kinds[-1] == "[DONE]"
        last_ping = len(kinds) - 1 - kinds[::-1].index("ping")
        assert json.loads(kinds[0])["choices"][0]["delta"] == {"role": "assistant", "content": None}
        assert kinds[1 : last_ping + 1] == ["ping"] * last_ping  # nothing of the reply before it is recorded
        message = assemble([json.loads(kind) for kind in kinds if kind not in ("ping", "[DONE]")])
        assert (message["content"], message["reasoning_content"]) == ("hello", "hm")
        assert_one_chain(await rig.seal(session), 1)


class Breaking(ScriptedEngine):
    """Raises its `error`, after a while."""

    error: Exception | None = None

    async def sample(self, request: SampleRequest) -> Sample:
        if self.error is None:
            return await super().sample(request)
        await asyncio.sleep(0.1)
        raise self.error


async def test_an_error_after_the_stream_began(start: Start, codec: ModelCodec) -> None:
    """It is sent as an event that the client raises; the session continues."""
    engine = Breaking(codec, lambda _: Say("fine"))
    async with start(engine=engine, ping_seconds=0.02) as rig:
        session = await rig.open()
        client = rig.client(session, max_retries=0)
        ask: Any = {"model": "m", "messages": [user("hi")]}

        async def stream(**fields: Any) -> list[Any]:
            return [chunk async for chunk in await client.chat.completions.create(**ask, **fields, stream=True)]

        for error, code in ((EngineError("replica 7 is gone"), "overloaded"), (RuntimeError("surprise"), None)):
            for fields in ({}, {"n": 2}):
                engine.error = error
                with pytest.raises(openai.APIError) as raised:
                    await stream(**fields)
                assert raised.value.code == code
                assert ("replica 7" in raised.value.message) == (code is not None)
                with pytest.raises(openai.InternalServerError):
                    await client.chat.completions.create(**ask, **fields)
        # An unexpected error is in the log for the operator; the client gets no details.
        assert len(rig.errors) == 4
        assert all("surprise" in error for error in rig.errors)
        rig.errors.clear()

        # Nobody waits for these: their failure is no surprise to anybody either.
        engine.error = EngineError("gone")
        for fields in ({}, {"n": 2}):
            wire = await Wire.send(session, chat(user("left"), **STREAM, **fields))
            await eventually(lambda: rig.gateway.sessions[session.id].turns.tasks)
            wire.cut()
        await eventually(lambda: not rig.gateway.sessions[session.id].turns.tasks)
        engine.error = None
        assert assemble(await stream())["content"] == "fine"
        await client.close()
        trajectory = await rig.seal(session)
    assert [len(turn.sampled) > 0 for turn in trajectory.turns].count(True) == 1
    assert len(trajectory.traces) == 1


async def test_a_turn_that_cannot_be_journaled_is_no_answer(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to the client nor to its retry."""
    said = iter(range(100))
    async with start(lambda _: Say(f"sample {next(said)}")) as rig:
        session = await rig.open()
        status, _ = await rig.post(session, chat(user("before")))
        assert status == 200
        journal = rig.gateway.journal

        async def full(payload: bytes, *, sync: bool = True) -> None:
            raise JournalError("no space left")

        with monkeypatch.context() as patch:
            patch.setattr(journal, "append", full)
            for stream in (False, True):
                status, body = await rig.post(session, chat(user("hi"), stream=stream))
                assert (status, body["error"]["type"]) == (500, "server_error")
        assert len(rig.errors) == 2
        rig.errors.clear()
        status, body = await rig.post(session, chat(user("hi")), headers={"x-stainless-retry-count": "1"})
        assert (status, message_of(body)["content"]) == (200, "sample 3")
        trajectory = await rig.seal(session)
    assert [turn.role is TurnRole.DISCARDED for turn in trajectory.turns] == [False, True, True, False]


def heavy(codec: ModelCodec, letters: int) -> Say:
    """A reply of many letters in few tokens."""
    dashes = max(
        (id for text, id in codec.tokenizer.backend.get_vocab().items() if set(text) == {"-"}),
        key=lambda id: len(codec.tokenizer.decode([id])),
    )
    count = letters // len(codec.tokenizer.decode([dashes]))
    return Say(ids=np.asarray([*[dashes] * count, min(codec.stop_ids)], np.int32))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_in_the_middle_of_a_long_answer(
    start: Start, codec: ModelCodec, stream: bool
) -> None:
    """The turn is not delivered, though most of it was sent; a client that reads to the end gets it."""
    say = heavy(codec, 16_000_000)
    async with start(lambda _: say, context=2**24) as rig:
        session = await rig.open(settings={"sampling": {"max_tokens": 2**24}})
        inside = rig.gateway.sessions[session.id]
        wire = await Wire.send(session, chat(user("hi"), stream=stream), buffer=4096)
        await wire.reader.readexactly(3000)
        wire.cut()
        await eventually(lambda: inside.turns.inflight.abandoned, "the gateway notices the disconnect")
        assert not inside.graph.nodes[0].delivered
        async with rig.web.post(
            session.chat, json=chat(user("hi"), stream=stream), headers=session.headers
        ) as response:
            data = await response.read()
        assert len(data) > 16_000_000
        if stream:
            assert data.endswith(b"data: [DONE]\n\n")
        await eventually(lambda: inside.graph.nodes[0].delivered)
        assert len(rig.engine.requests) == 1


async def test_shutting_down_while_turns_are_in_flight(start: Start) -> None:
    """Those that end soon are answered; the others get a retryable error in their provider's format, and after
    the restart they can."""
    slow: dict[str, float] = {"quick": 0.3, "slow": 600, "paused": 0}

    def script(request: Request) -> Say:
        return Say(f"answer to {request.messages[-1].text}", delay=slow[request.messages[-1].text])

    answers: list[asyncio.Task[Any]] = []
    async with start(script, drain_seconds=1.0, ping_seconds=0.1) as rig:
        session = await rig.open()
        bodies = [chat(user("quick")), chat(user("slow")), chat(user("slow"), **STREAM), chat(user("slow"), n=2)]
        wires = [await Wire.send(session, body) for body in bodies]
        await eventually(lambda: len(rig.engine.requests) == 5)
        answers = [asyncio.create_task(wires[n].answer()) for n in (0, 1, 3)]
        streamed = asyncio.create_task(wires[2].reader.read())
    quick, waiting, several = await asyncio.gather(*answers)
    assert quick["choices"][0]["message"]["content"] == "answer to quick"
    for refused in (waiting, several):
        assert (refused["status"], refused["error"]["code"]) == (503, "overloaded")
    events = (await streamed).decode()
    assert '"code":"overloaded"' in events
    for wire in wires:
        wire.cut()
    slow["slow"] = 0
    async with start(script) as rig:
        session.base_url = rig.running.base_url + "/v1"
        status, body = await rig.post(session, chat(user("slow")))
        assert (status, message_of(body)["content"]) == (200, "answer to slow")
        trajectory = await rig.seal(session)
    assert [turn.reply["text"] for turn in trajectory.turns] == ["answer to quick", "answer to slow"]


async def test_sealing_ends_the_turns_in_flight(start: Start) -> None:
    """The harness gets an error; finished turns stay."""
    async with start(
        lambda request: Say("done", delay=600 if len(request.messages) > 1 else 0), ping_seconds=0.05
    ) as rig:
        session = await rig.open()
        message = message_of((await rig.post(session, chat(user("hi"))))[1])
        more = [user("hi"), message, *results(message), user("more")]
        wires = [await Wire.send(session, chat(*more)), await Wire.send(session, chat(*more, stream=True))]
        await eventually(lambda: len(rig.engine.requests) == 3)
        await wires[1].until(b": ping")
        sealed = await rig.seal(session)
        assert (await wires[0].answer())["error"]["code"] == "invalid_api_key"
        assert b"invalid_api_key" in await wires[1].until(b"\r\n0\r\n\r\n")
        for wire in wires:
            wire.cut()
        assert (await rig.post(session, chat(user("hi"))))[0] == 401
        assert not rig.engine._active
    assert [len(turn.sampled) > 0 for turn in sealed.turns] == [True, False, False]
    assert sealed.report.trained_tokens == len(sealed.turns[0].sampled)
