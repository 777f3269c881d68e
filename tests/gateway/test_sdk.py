"""The official OpenAI client against a running gateway: what it parses is what was sampled, in one exact chain."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest

from support.gateway.gateway_rig import (
    PATIENCE,
    TOOLS,
    Rig,
    Start,
    assemble,
    assert_one_chain,
    chat,
    message_of,
    results,
    sampled,
    says,
    system,
    user,
)
from towline.conversation import Request, ToolCall
from towline.engines.base import Sample, SampleRequest
from towline.engines.scripted import Say, ScriptedEngine
from towline.errors import EngineError
from towline.schema import ForkReason, TurnRole
from towline.tokens.codec import ModelCodec

WORDS = [
    "plain",
    "naïve",
    "日本語",
    "😀👩‍👩‍👧",
    "a\nb\n\n  c",
    '"quoted" \\ back',
    "\u2028line",
    "x" * 300,
    "{}",
    "<b>",
    "1e3",
    "\t",
]


def talkative(seed: int, steps: int) -> Callable[[Request], Say]:
    """A script of odd but well-formed replies: reasoning or none, text or none, up to three calls with nested arguments."""

    def value(chance: random.Random, depth: int) -> Any:
        kinds: list[Callable[[], Any]] = [
            lambda: chance.choice(WORDS),
            lambda: chance.randint(-(10**12), 10**12),
            lambda: chance.choice([True, False, None, 0.5, 1.0, -2.25e-9]),
        ]
        if depth:
            kinds.append(lambda: [value(chance, depth - 1) for _ in range(chance.randint(0, 3))])
            kinds.append(lambda: {chance.choice(WORDS): value(chance, depth - 1) for _ in range(chance.randint(0, 3))})
        return chance.choice(kinds)()

    def say(request: Request) -> Say:
        turn = sum(message.role == "assistant" for message in request.messages)
        chance = random.Random(f"{seed} {turn}")
        calls = []
        if turn % (steps + 1) < steps:
            calls.append(ToolCall("", "bash", {"command": f"{chance.choice(WORDS)} {turn}"}))
            change = {"path": chance.choice(WORDS), "change": {"v": value(chance, 2)}}
            calls += [ToolCall("", "edit", change)] * chance.randint(0, 2)
        text = " ".join(chance.choices(WORDS[:7], k=3)) if not calls or chance.random() < 0.4 else ""
        reasoning = f"Turn {turn}: {chance.choice(WORDS[:6])}" if chance.random() < 0.8 else None
        return Say(text.strip(), reasoning, calls)

    return say


async def ask(client: openai.AsyncOpenAI, messages: list[Any], stream: bool) -> dict[str, Any]:
    """One call of the asynchronous client: the assistant message."""
    if not stream:
        completion = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        return message_of(completion.to_dict())
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=True)
    ]
    return assemble(chunks)


def ask_blocking(client: openai.OpenAI, messages: list[Any], stream: bool) -> dict[str, Any]:
    """The same with the synchronous client."""
    if not stream:
        return message_of(client.chat.completions.create(model="m", messages=messages, tools=TOOLS).to_dict())
    return assemble(list(client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=True)))


@pytest.mark.parametrize("blocking", [False, True])
async def test_tool_loops_are_one_exact_chain_of_what_the_client_parsed(
    start: Start, codec: ModelCodec, blocking: bool
) -> None:
    """Several user turns, each with tool loops of parallel calls; streamed or not, results in any order, reasoning sent
    back or dropped."""
    for seed in range(3):
        async with start(talkative(seed, steps=2)) as rig:
            session = await rig.open(instruction="do it")
            client = rig.client(session)
            slow = openai.OpenAI(base_url=session.base_url, api_key=session.key, timeout=PATIENCE, max_retries=0)
            messages = [system("Be brief."), user("do it")]
            received = []
            for turn in range(9):
                stream = (turn + seed) % 2 == 0
                if blocking:
                    message = await asyncio.to_thread(ask_blocking, slow, messages, stream)
                else:
                    message = await ask(client, messages, stream)
                received.append(says(message))
                echoed = {**message}
                if seed == 1:
                    echoed.pop("reasoning_content", None)
                messages.append(echoed)
                messages += results(message, backwards=turn % 2 == 0)
                if not message.get("tool_calls"):
                    messages.append(user(f"and on, {turn} <|im_end|> is text"))
            await client.close()
            slow.close()
            trajectory = await rig.seal(session)
        assert_one_chain(trajectory, 9)
        assert [sampled(codec, trajectory, index) for index in range(9)] == received
        assert any(len(calls) > 1 for _, _, calls in received)
        assert any(reasoning for _, reasoning, _ in received)


async def test_everything_a_completion_carries(start: Start, codec: ModelCodec) -> None:
    """Usage, logprobs, finish reasons, several choices, stop sequences, the list of models."""
    long = "one two three four five six"
    async with start(lambda _: Say(long, "I think.")) as rig:
        session = await rig.open()
        client = rig.client(session)
        ask: Any = {"model": "any/name", "messages": [user("hi")]}
        whole = await client.chat.completions.create(**ask, logprobs=True)
        choice = whole.choices[0]
        assert (choice.finish_reason, choice.message.content, whole.model) == ("stop", long, "any/name")
        first = (await rig.trajectory(session)).turns[0]
        assert whole.usage is not None
        assert whole.usage.completion_tokens == len(first.sampled)
        assert whole.usage.prompt_tokens == first.prompt_length
        details = whole.usage.completion_tokens_details
        assert details is not None
        assert 0 < (details.reasoning_tokens or 0) < len(first.sampled)
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        tokens = choice.logprobs.content
        assert [token.logprob for token in tokens] == pytest.approx(first.logprobs.tolist())
        assert b"".join(bytes(t.bytes or []) for t in tokens).decode() == codec.tokenizer.decode(first.sampled.tolist())

        many = await client.chat.completions.create(**ask, n=3)
        assert [c.index for c in many.choices] == [0, 1, 2]
        cut = await client.chat.completions.create(**{**ask, "messages": [user("a")]}, max_tokens=7)
        assert cut.choices[0].finish_reason == "length"
        stopped = await client.chat.completions.create(**{**ask, "messages": [user("b")]}, stop=["three"])
        assert (stopped.choices[0].finish_reason, stopped.choices[0].message.content) == ("stop", "one two ")
        stream = await client.chat.completions.create(
            **{**ask, "messages": [user("c")]}, stream=True, n=2, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens > 0
        assert {c.index for chunk in chunks for c in chunk.choices} == {0, 1}
        assert [model.id async for model in client.models.list()] == ["towline"]
        assert (await client.models.retrieve("any/name")).id == "any/name"
        trajectory = await rig.seal(session)
    by_reason = [turn.reason for turn in trajectory.turns]
    assert by_reason.count(ForkReason.SIBLING) == 4  # three of n=3 after the first request, one of n=2
    assert len({tuple(trajectory.prompt(turn.id).tolist()) for turn in trajectory.turns[:4]}) == 1
    await client.close()


class Failing(ScriptedEngine):
    """Fails as often as told."""

    failures = 0

    async def sample(self, request: SampleRequest) -> Sample:
        if self.failures:
            self.failures -= 1
            raise EngineError("a replica died")
        return await super().sample(request)


def counting(seen: list[str]) -> httpx2.AsyncClient:
    async def note(request: httpx2.Request) -> None:
        seen.append(request.headers["x-stainless-retry-count"])

    return httpx2.AsyncClient(event_hooks={"request": [note]})


async def test_errors_are_the_clients_own_classes(start: Start, codec: ModelCodec) -> None:
    engine = Failing(codec, lambda _: Say("fine"), context=900)
    async with start(engine=engine) as rig:
        session = await rig.open(settings={"limits": {"turns": 3}})
        ask: Any = {"model": "m", "messages": [user("hi")]}
        requests: list[str] = []
        client = rig.client(session, http_client=counting(requests), max_retries=2)

        stranger = openai.AsyncOpenAI(base_url=session.base_url, api_key="tl-nobody", timeout=PATIENCE)
        with pytest.raises(openai.AuthenticationError) as denied:
            await stranger.chat.completions.create(**ask)
        assert denied.value.code == "invalid_api_key"
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="m", input="x")
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="m", messages=[{"role": "nobody", "content": "x"}])  # type: ignore[list-item,misc]
        assert bad.value.param == "messages[0].role"
        for stream in (False, True):
            requests.clear()
            with pytest.raises(openai.BadRequestError) as long:
                await client.chat.completions.create(model="m", messages=[user("word " * 2000)], stream=stream)
            assert long.value.code == "context_length_exceeded"
            assert "900" in long.value.message
            assert requests == ["0"]

        engine.failures = 1
        assert (await client.chat.completions.create(**ask)).choices[0].message.content == "fine"
        engine.failures = 1
        with pytest.raises(openai.InternalServerError) as away:
            await client.with_options(max_retries=0).chat.completions.create(model="m", messages=[user("two")])
        assert (away.value.status_code, away.value.code) == (503, "overloaded")
        await client.chat.completions.create(model="m", messages=[user("two")])
        await client.chat.completions.create(model="m", messages=[user("three")])

        requests.clear()
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as limited:
                await client.chat.completions.create(**ask, stream=stream, extra_headers={"x": "y"}, max_tokens=5)
            assert limited.value.code == "insufficient_quota"
        assert requests == ["0", "0"]  # a quota is not retried

        trajectory = await rig.seal(session)
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(**ask)
        for closing in (client, stranger):
            await closing.close()
    delivered = [turn for turn in trajectory.turns if turn.delivered]
    assert len(delivered) == 3
    assert {turn.role for turn in trajectory.turns if not turn.delivered} == {TurnRole.DISCARDED}
    assert trajectory.report.trained_tokens == sum(len(turn.sampled) for turn in delivered)


async def test_replies_that_json_can_hardly_hold(start: Start, codec: ModelCodec) -> None:
    """What a model samples may be anything: huge integers, broken surrogates, deep nesting, half a call, no UTF-8. It
    reaches the client, is recorded, survives a restart, and the conversation continues."""
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    texts = [
        '<tool_call>\n{"name": "edit", "arguments": {"change": {"n": 123456789012345678901234567890}}}\n</tool_call>',
        '<tool_call>\n{"name": "bash", "arguments": {"command": "half of \\ud83d"}}\n</tool_call>',
        '<tool_call>\n{"name": "edit", "arguments": {"change": {"deep": ' + json.dumps(deep) + "}}}\n</tool_call>",
        '<tool_call>\n{"name": "bash", "arguments": {"comm',
        "NUL \x00 and \u2028 and \x85 and \x7f \ufeff",
        "",
    ]

    def say(request: Request) -> Say:
        turn = sum(message.role == "assistant" for message in request.messages)
        ids = codec.tokenizer.encode(texts[turn]) if turn < len(texts) else [151645 - 60_000, 29, 250]
        return Say(ids=[*ids, 151645])  # type: ignore[arg-type]

    async def one(rig: Rig, messages: list[Any]) -> None:
        status, completion = await rig.post(session, chat(*messages))
        assert status == 200, completion
        message = message_of(completion)
        messages += [message, *results(message)] if message.get("tool_calls") else [message, user("go on")]

    messages = [user("begin")]
    async with start(say) as rig:
        session = await rig.open()
        for _ in range(4):
            await one(rig, messages)
        before = await rig.trajectory(session)
    async with start(say) as rig:
        assert (await rig.trajectory(session)).turns == before.turns
        session.base_url = rig.running.base_url + "/v1"
        for _ in range(3):
            await one(rig, messages)
        assert_one_chain(await rig.trajectory(session), 7)
        # A harness may send such things as well.
        call = {"id": "x", "function": {"name": "edit", "arguments": '{"a":' * 250 + "1" + "}" * 250}}
        result = {"role": "tool", "tool_call_id": "x", "content": "done"}
        messages[-1:] = [{"role": "assistant", "tool_calls": [call]}, result]
        await one(rig, messages)
    async with start(say) as rig:
        trajectory = await rig.seal(session)
    assert len(trajectory.turns) == 8
    assert "[[[[" in json.dumps(trajectory.turns[2].reply)
    assert trajectory.turns[7].messages[-2]["tool_calls"][0]["arguments"] == json.loads(call["function"]["arguments"])
