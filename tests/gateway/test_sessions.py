"""Sessions and conversations at the same time never mix, however alike their requests are."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from support.gateway.gateway_rig import (
    Opened,
    Rig,
    Start,
    assert_one_chain,
    chat,
    eventually,
    message_of,
    results,
    running_gateway,
    sampled,
    says,
    system,
    user,
)
from towline.conversation import Request, ToolCall
from towline.engines.base import SampleRequest
from towline.engines.scripted import Say, ScriptedEngine
from towline.schema import ForkReason, Trajectory, TurnRole
from towline.tokens.codec import ModelCodec


class Nonced(ScriptedEngine):
    """Every reply names the session that it is for, as the engine was told."""

    async def _say(self, request: SampleRequest) -> Say:
        assert request.request is not None
        turn = sum(message.role == "assistant" for message in request.request.messages)
        chance = random.Random(f"{request.id}")
        nonce = f"nonce-{request.group}-{turn}"
        calls = [ToolCall("", "bash", {"command": f"echo {nonce} {n}"}) for n in range(turn % 3)]
        return Say("" if calls else nonce, f"thinking of {nonce}", calls, delay=chance.random() * 0.02)


async def converse(rig: Rig, session: Opened, turns: int, *, stream: bool = False, first: str = "go") -> list[Any]:
    """A conversation whose requests depend on nothing but the replies; what was received."""
    messages = [system("You are one of many."), user(first)]
    received = []
    for _ in range(turns):
        status, completion = await rig.post(session, chat(*messages))
        assert status == 200, completion
        message = message_of(completion)
        received.append(says(message))
        messages += [message, *results(message)]
        if not message.get("tool_calls"):
            messages.append(user("go on"))
    return received


async def test_sixty_four_sessions_with_equal_prompts(start: Start, codec: ModelCodec) -> None:
    """Each trajectory holds its own turns, ids and versions only, though the policy changes while they run."""
    engine = Nonced(codec)
    async with start(engine=engine) as rig:
        sessions = [await rig.open(id=f"s{number:02}") for number in range(64)]

        async def update() -> None:
            for version in (1, 2, 3):
                await eventually(lambda: engine.requests and len(engine.requests) >= 64, "turns are under way")
                await rig.call("POST", "/v1/policy/pause", {"mode": "abort" if version % 2 else "drain"})
                await rig.call("POST", "/v1/policy/resume", {"version": version})
                await asyncio.sleep(0.05)

        updating = asyncio.create_task(update())
        talks = await asyncio.gather(*(converse(rig, session, 6) for session in sessions))
        await updating
        trajectories = await asyncio.gather(*(rig.seal(session) for session in sessions))
    for session, received, trajectory in zip(sessions, talks, trajectories, strict=True):
        assert_one_chain(trajectory, 6)
        assert [sampled(codec, trajectory, index) for index in range(6)] == received
        text = codec.tokenizer.decode(trajectory.traces[0].token_ids.tolist())
        assert set(re.findall(r"nonce-(\w+)-", text)) == {session.id}
        versions = np.concatenate([turn.versions for turn in trajectory.turns])
        assert (np.diff(versions) >= 0).all()
        assert set(versions.tolist()) <= {0, 1, 2, 3}
        assert all(turn.id.startswith(session.id + "-") for turn in trajectory.turns)
        for turn in trajectory.turns:
            assert len(set(turn.versions.tolist())) == 1 or "resumed" in turn.flags
    assert {int(v) for t in trajectories for turn in t.turns for v in turn.versions} == {0, 1, 2, 3}


def by_conversation(request: Request) -> Say:
    """Replies that carry the conversation's own first words."""
    name = request.messages[1].text
    turn = sum(message.role == "assistant" for message in request.messages)
    calls = [ToolCall("", "bash", {"command": f"{name} {turn} {n}"}) for n in range(1 + turn % 2)]
    return Say("", f"{name} thinks {turn}", calls, delay=random.Random(name + str(turn)).random() * 0.01)


async def test_sixteen_conversations_of_one_session(start: Start, codec: ModelCodec) -> None:
    """Sub-agents at the same time, under one system prompt and the same tools: a chain each."""
    async with start(by_conversation) as rig:
        session = await rig.open(instruction="task-0")
        talks = await asyncio.gather(*(converse(rig, session, 5, first=f"task-{n}") for n in range(16)))
        trajectory = await rig.seal(session)
    assert len(trajectory.turns) == 16 * 5
    assert len(trajectory.traces) == 16
    assert trajectory.report.conversations == 16
    by_index = {turn.index: turn for turn in trajectory.turns}
    seen = set()
    for trace in trajectory.traces:
        path = trajectory.path(by_index[int(trace.turn_ids[-1])].id)
        name = path[0].messages[1]["text"]
        seen.add(name)
        assert [sampled(codec, trajectory, turn.index) for turn in path] == talks[int(name.split("-")[1])]
        assert trace.trained_tokens == sum(len(turn.sampled) for turn in path)
        assert set(re.findall(r"task-\d+", codec.tokenizer.decode(trace.token_ids.tolist()))) == {name}
    assert len(seen) == 16
    main = {turn.role for turn in trajectory.turns if trajectory.path(turn.id)[0].messages[1]["text"] == "task-0"}
    assert main == {TurnRole.MAIN}


async def test_twins_in_one_session_go_on_from_their_own_turn(start: Start, codec: ModelCodec) -> None:
    """The same request four times at once, without evidence of a retry, is four samples. Their replies are the same
    words; the ids of their calls tell them apart, so each is continued exactly once."""

    def same(request: Request) -> Say:
        turn = sum(message.role == "assistant" for message in request.messages)
        return Say("", "hm", [ToolCall("", "bash", {"command": f"step {turn}"})], delay=0.005)

    async with start(same) as rig:
        session = await rig.open()
        await asyncio.gather(*(converse(rig, session, 4) for _ in range(4)))
        trajectory = await rig.seal(session)
    assert len(trajectory.turns) == 16
    assert len(trajectory.traces) == 4
    children = Counter(turn.parent for turn in trajectory.turns if turn.parent is not None)
    assert set(children.values()) == {1}
    assert trajectory.report.forks == {ForkReason.SIBLING.value: 3}
    assert trajectory.report.trained_tokens == sum(len(turn.sampled) for turn in trajectory.turns)
    for turn in trajectory.turns:
        if turn.parent is not None:
            asked = next(message for message in turn.messages if message["role"] == "tool")["tool_call_id"]
            parent = next(other for other in trajectory.turns if other.id == turn.parent)
            assert asked == parent.reply["tool_calls"][0]["id"]


async def test_a_session_keeps_nothing_of_finished_requests(start: Start, codec: ModelCodec) -> None:
    """After many turns there are no tasks, timers or requests left of those that are done, and memory of the last few
    conversations only."""
    async with start(by_conversation) as rig:
        session = await rig.open()
        tasks = len(asyncio.all_tasks())
        for round in range(3):
            await asyncio.gather(*(converse(rig, session, 2, first=f"task-{round}-{n}") for n in range(12)))
        inside = rig.gateway.sessions[session.id]
        await eventually(lambda: not inside.turns.tasks)
        assert not inside.turns.inflight.abandoned
        assert not inside.turns.inflight._clients
        assert not inside.turns.inflight._graces
        assert len(inside.reader.conversations) <= 8
        idle = len(rig.web.connector._conns) if rig.web.connector else 0  # type: ignore[attr-defined]
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks + idle, "the tasks of answered requests end")
        await rig.seal(session)
        assert rig.gateway.sessions == {}
        assert rig.gateway._by_key == {}
        assert rig.gateway._work == rig.gateway._ended == {}


async def test_a_restart_with_many_sessions(codec: ModelCodec, tmp_path: Path) -> None:
    """A graceful stop and a new start on the same folder: sessions continue under their keys, sealed ones stay as they are,
    and their records leave the journal."""
    engine = Nonced(codec)
    sealed: dict[str, Trajectory] = {}
    async with running_gateway(codec, tmp_path, engine=engine) as rig:
        sessions = [await rig.open(id=f"s{number}", metadata={"n": number}) for number in range(6)]
        talks = await asyncio.gather(*(converse(rig, session, 3) for session in sessions))
        for session in sessions[:3]:
            sealed[session.id] = await rig.seal(session)
        # An id may be used again once its trajectory was moved away; then it is a session like any other.
        old = await rig.open(id="old")
        await converse(rig, old, 1)
        await rig.seal(old)
        (tmp_path / "trajectories" / "old.arrow").rename(tmp_path / "moved.arrow")
        again = await rig.open(id="old")
        await converse(rig, again, 2)
    async with running_gateway(codec, tmp_path, engine=Nonced(codec)) as rig:
        assert set(rig.gateway.sessions) == {"s3", "s4", "s5", "old"}
        for session in sessions:
            session.base_url = rig.running.base_url + "/v1"
        for session, received in zip(sessions, talks, strict=True):
            status, completion = await rig.post(session, chat(system("You are one of many."), user("anything else")))
            if session.id in sealed:
                assert status == 401
                assert await rig.trajectory(session) == sealed[session.id]
            else:
                assert status == 200, completion
                trajectory = await rig.trajectory(session)
                assert [sampled(codec, trajectory, index) for index in range(3)] == received
                assert trajectory.metadata == {"n": int(session.id[1:])}
        assert {record.fields["session"] for record in rig.gateway.journal.records()} == {"s3", "s4", "s5", "old"}
    async with running_gateway(codec, tmp_path, engine=Nonced(codec)) as rig:
        assert_one_chain(await rig.trajectory(again), 2)
