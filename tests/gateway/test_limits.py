"""At a limit the harness gets its provider's own error, and the turns that are finished stay."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from support.gateway.gateway_rig import Opened, Rig, Start, assert_one_chain, chat, message_of, results, user
from towline.conversation import Request, ToolCall
from towline.engines.scripted import Say
from towline.schema import Trajectory
from towline.tokens.codec import ModelCodec


def busy(request: Request) -> Say:
    """Never done: one more call, always."""
    turn = sum(message.role == "assistant" for message in request.messages)
    return Say("", f"step {turn}", [ToolCall("", "bash", {"command": f"count to {turn}"})])


async def run_out(rig: Rig, session: Opened, most: int = 50, result: str = "") -> tuple[int, Any, list[Any]]:
    """Go on until there is an error: how many turns were answered, the error, and the messages."""
    messages = [user("begin")]
    for turn in range(most):
        status, body = await rig.post(session, chat(*messages))
        if status != 200:
            return turn, (status, body["error"]), messages
        message = message_of(body)
        messages += [message, *({**r, "content": r["content"] + result} for r in results(message))]
    raise AssertionError("no limit was reached")


def check(trajectory: Trajectory, turns: int) -> None:
    assert_one_chain(trajectory, turns)
    assert all(turn.delivered for turn in trajectory.turns)


async def test_turns(start: Start) -> None:
    async with start(busy) as rig:
        session = await rig.open(settings={"limits": {"turns": 4}})
        turns, (status, error), messages = await run_out(rig, session)
        assert (turns, status, error["code"]) == (4, 429, "insufficient_quota")
        assert "4 turns" in error["message"]
        # A retry of a turn that was answered is no further turn.
        headers = {"x-stainless-retry-count": "1"}
        status, again = await rig.post(session, chat(*messages[:-2]), headers=headers)
        assert (status, message_of(again)) == (200, messages[-2])
        # Several choices count as several turns, and either all of them fit or none is sampled.
        fresh = await rig.open(settings={"limits": {"turns": 4}})
        assert (await rig.post(fresh, chat(user("a"), n=3)))[0] == 200
        assert (await rig.post(fresh, chat(user("b"), n=2)))[0] == 429
        assert (await rig.post(fresh, chat(user("b"))))[0] == 200
        assert len((await rig.trajectory(fresh)).turns) == 4
        check(await rig.seal(session), 4)


async def test_sampled_tokens(start: Start) -> None:
    """The last turn is cut at the limit; the next is refused."""
    async with start(busy) as rig:
        session = await rig.open(settings={"limits": {"sampled_tokens": 100}})
        turns, (status, error), _ = await run_out(rig, session)
        assert (status, error["code"]) == (429, "insufficient_quota")
        trajectory = await rig.seal(session)
    assert sum(len(turn.sampled) for turn in trajectory.turns) == 100
    assert [turn.finish for turn in trajectory.turns] == ["stop"] * (turns - 1) + ["length"]
    check(trajectory, turns)


@pytest.mark.parametrize("limited", ["session", "engine"])
async def test_context(start: Start, limited: str) -> None:
    """A prompt that does not fit is refused as the provider would; one that leaves little room is answered within it."""
    async with start(busy, context=2000 if limited == "session" else 700) as rig:
        session = await rig.open(settings={"limits": {"context": 700 if limited == "session" else None}})
        turns, (status, error), _ = await run_out(rig, session)
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
        assert "700 tokens" in error["message"]
        assert turns > 2
        # The harness compacts and continues.
        status, _ = await rig.post(session, chat(user("what was done so far: nothing")))
        assert status == 200
        trajectory = await rig.seal(session)
    assert all(turn.prompt_length + len(turn.sampled) <= 700 for turn in trajectory.turns)
    assert len(trajectory.turns) == turns + 1
    assert len(trajectory.traces) == 2


async def test_seconds(start: Start) -> None:
    """Also for a request that was retried; the clock is that of the session, not of the process."""
    async with start(busy) as rig:
        session = await rig.open(settings={"limits": {"seconds": 60}})
        for _ in range(2):
            status, body = await rig.post(session, chat(user("begin")))
            assert status == 200
        rig.gateway.sessions[session.id].began -= 61
        for headers in ({}, {"x-stainless-retry-count": "1"}):
            status, body = await rig.post(session, chat(user("begin")), headers=headers)
            assert (status, body["error"]["code"]) == (429, "insufficient_quota")
            assert "60 s" in body["error"]["message"]
        trajectory = await rig.seal(session)
    assert len(trajectory.turns) == 2
    assert trajectory.report.trained_tokens > 0


@pytest.mark.parametrize("jump", [3600, -3600])
async def test_a_system_clock_that_jumps_ends_no_session(
    start: Start, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start(busy) as rig:
        session = await rig.open(settings={"limits": {"seconds": 60}})
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + jump)
        assert (await rig.post(session, chat(user("begin"))))[0] == 200


async def test_most_tokens_of_a_turn(start: Start, codec: ModelCodec) -> None:
    """The least of what the session, the harness and the context allow."""
    async with start(lambda _: Say("word " * 100)) as rig:
        session = await rig.open(settings={"sampling": {"max_tokens": 50}})
        for asked, expected in ((None, 50), (7, 7), (1, 1), (10**9, 50)):
            fields = {} if asked is None else {"max_completion_tokens": asked}
            status, body = await rig.post(session, chat(user(f"{asked}"), **fields))
            assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
            assert body["usage"]["completion_tokens"] == expected


async def test_most_sessions(start: Start) -> None:
    async with start(busy, sessions=2) as rig:
        one, _ = await rig.open(), await rig.open()
        assert (await rig.call("POST", "/v1/sessions", {}))[0] == 429
        await rig.seal(one)
        assert (await rig.call("POST", "/v1/sessions", {}))[0] == 201


async def test_text_without_end_is_refused_at_once(start: Start) -> None:
    """What is far beyond the context is not encoded as a whole: everybody else would wait for that."""
    async with start(busy, context=4096) as rig:
        session, other = await rig.open(), await rig.open()
        huge = "1" * 8_000_000
        bodies = [
            chat(user(huge)),
            chat(user("x"), {"role": "assistant", "content": "", "reasoning_content": huge}, user("y")),
            chat(user("x"), tools=[{"type": "function", "function": {"name": "f", "description": huge}}]),
            chat(
                user("x"),
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": [huge]}}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "y"},
            ),
        ]
        encoded = 0
        encode = rig.gateway.codec.tokenizer.encode

        def counted(text: str, **options: Any) -> list[int]:
            nonlocal encoded
            encoded += len(text)
            return encode(text, **options)

        rig.gateway.codec.tokenizer.encode = counted  # type: ignore[method-assign]
        try:
            for body in bodies:
                (status, refused), (fine, _) = await asyncio.gather(
                    rig.post(session, body), rig.post(other, chat(user("hello")))
                )
                assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")
                assert fine == 200
        finally:
            del rig.gateway.codec.tokenizer.encode  # type: ignore[method-assign]
        assert encoded < 1_000_000
        # What merely looks long is encoded and counted.
        assert (await rig.post(session, chat(user(" " * 100_000))))[0] == 200
