"""The control routes: their own key, sessions from making to sealing, and the policy between and within turns."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from support.gateway.gateway_rig import Opened, Rig, Start, Wire, assert_one_chain, chat, eventually, message_of, user
from towline.conversation import Finish, Request
from towline.engines.scripted import Say
from towline.errors import EngineError
from towline.schema import FailureReason, SessionState, Trajectory
from towline.tokens.codec import ModelCodec

ARROW = "application/vnd.apache.arrow.stream"


async def test_two_kinds_of_keys(start: Start) -> None:
    """A session's key opens no control route, the control key no provider route, and a key is shown once."""
    async with start(lambda _: Say("fine")) as rig:
        session = await rig.open()
        control, provider = rig.running.control_url, rig.running.base_url
        routes = [
            ("POST", "/v1/sessions"),
            ("GET", "/v1/sessions"),
            ("GET", f"/v1/sessions/{session.id}"),
            ("DELETE", f"/v1/sessions/{session.id}"),
            ("GET", f"/v1/sessions/{session.id}/trajectory"),
            ("GET", "/v1/policy"),
            ("POST", "/v1/policy/pause"),
            ("POST", "/v1/policy/resume"),
            ("POST", "/v1/policy/weights"),
            ("GET", "/no/such/route"),
        ]
        wrong = ["", f"Bearer {session.key}", "Bearer ", "Bearer nobody", rig.running.control_key, "Bearer \xff\xfe"]
        for method, path in routes:
            for value in wrong:
                async with rig.web.request(method, control + path, headers={"authorization": value}) as response:
                    assert response.status == 401, (method, path, value)
                    assert session.id not in await response.text()
        async with rig.web.get(control + "/healthz") as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})
        for key in (rig.running.control_key, session.key + "x", "", session.id):
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}, {"x-goog-api-key": key}):
                body = chat(user("hi"))
                async with rig.web.post(session.chat, json=body, headers=headers) as response:
                    assert response.status == 401
            async with rig.web.get(f"{provider}/s/{key}/v1/models") as response:
                assert response.status in (401, 404)
        async with rig.web.get(f"{provider}/v1/sessions", headers=session.headers) as response:
            assert response.status == 404
        shown = json.dumps(
            [(await rig.call("GET", path))[1] for path in ("/v1/sessions", f"/v1/sessions/{session.id}")]
        )
        assert session.key not in shown
        assert (await rig.trajectory(session)).turns == []


NO_SESSIONS: list[tuple[bytes, int, str]] = [
    (b"{", 400, "JSON"),
    (b"[]", 400, "object"),
    (b'"x"', 400, "object"),
    (b"\xff", 400, "JSON"),
    (b'{"nobody": 1}', 422, "nobody"),
    (b'{"id": 5}', 422, "id"),
    (b'{"id": "a/b"}', 422, "id"),
    (b'{"id": ".."}', 422, "id"),
    (b'{"id": "' + b"a" * 129 + b'"}', 422, "id"),
    (b'{"group": "a\\nb"}', 422, "group"),
    (b'{"group": "' + b"a" * 513 + b'"}', 422, "group"),
    (b'{"instruction": null}', 422, "instruction"),
    (b'{"metadata": []}', 422, "metadata"),
    (b'{"metadata": {"a": ' + b"[" * 400 + b"]" * 400 + b"}}", 422, "metadata"),
    (b'{"settings": 1}', 422, "settings"),
    (b'{"settings": {"polcy": "retain"}}', 422, "settings.polcy"),
    (b'{"settings": {"policy": "maybe"}}', 422, "settings.policy"),
    (b'{"settings": {"limits": {"turns": 0}}}', 422, "settings.limits.turns"),
    (b'{"settings": {"limits": {"turn": 1}}}', 422, "settings.limits.turn"),
    (b'{"settings": {"limits": 3}}', 422, "settings.limits"),
    (b'{"settings": {"noise": ["("]}}', 422, "settings.noise"),
    (b'{"settings": {"trained_roles": ["main", "discarded"]}}', 422, "settings.trained_roles"),
    (b'{"settings": {"trained_roles": ["main", "main"]}}', 422, "settings.trained_roles"),
    (b'{"settings": {"template_args": {"messages": []}}}', 422, "settings.template_args"),
    (b'{"settings": {"sampling": {"temperature": -1}}}', 422, "settings.sampling.temperature"),
]


async def test_what_cannot_be_a_session(start: Start) -> None:
    async with start() as rig:
        for body, expected, names in NO_SESSIONS:
            async with rig.control.post(rig.running.control_url + "/v1/sessions", data=body) as response:
                answer = await response.json()
            assert (response.status, names in answer["error"]) == (expected, True), (body, answer)
        assert rig.gateway.sessions == rig.gateway._by_key == {}


async def test_the_life_of_a_session(start: Start, codec: ModelCodec) -> None:
    """Made, shown, read as JSON and as Arrow, sealed once however often it is asked, and then no more."""
    async with start(lambda _: Say("fine", "hm", delay=0.05)) as rig:
        for method, path, body, expected in [
            ("GET", "/v1/sessions/nobody", None, 404),
            ("GET", "/v1/sessions/nobody/trajectory", None, 404),
            ("GET", "/v1/sessions/..%2f..%2fetc/trajectory", None, 404),
            ("DELETE", "/v1/sessions/nobody", None, 404),
            ("PUT", "/v1/sessions", {}, 405),
            ("GET", "/v1/nothing", None, 404),
        ]:
            status, answer = await rig.call(method, path, body)
            assert (status, list(answer)) == (expected, ["error"]), (method, path)
        session = await rig.open(
            id="one", group="g", instruction="hi", metadata={"seed": 3}, settings={"limits": {"turns": 9}}
        )
        assert (await rig.call("POST", "/v1/sessions", {"id": "one"}))[0] == 409
        assert (await rig.call("POST", "/v1/sessions", {"id": "one", "settings": {}}))[0] == 409
        await rig.post(session, chat(user("hi")))
        status, shown = await rig.call("GET", "/v1/sessions/one")
        assert (status, shown["turns"], shown["in_flight"], shown["group"]) == (200, 1, 0, "g")
        assert (await rig.call("GET", "/v1/sessions"))[1]["sessions"] == [shown]

        running = await rig.trajectory(session)
        url = f"{rig.running.control_url}/v1/sessions/one/trajectory"
        async with rig.control.get(url, headers={"accept": ARROW}) as response:
            assert response.content_type == ARROW
            table = pa.ipc.open_stream(io.BytesIO(await response.read())).read_all()
        assert Trajectory.from_arrow(table) == running
        assert (await rig.call("DELETE", "/v1/sessions/one?end_reason=bored"))[0] == 422

        pending = asyncio.create_task(rig.post(session, chat(user("more"))))
        await eventually(lambda: len(rig.engine.requests) == 2)
        sealed = await asyncio.gather(
            *(rig.call("DELETE", "/v1/sessions/one?end_reason=limit") for _ in range(5)),
        )
        assert {json.dumps(answer) for answer in sealed} == {json.dumps(sealed[0])}
        assert (await pending)[0] == 401
        done = await rig.trajectory(session)
        assert (done.end_reason, done.group_id, done.metadata) == ("limit", "g", {"seed": 3})
        async with rig.control.get(url, headers={"accept": ARROW}) as response:
            table = pa.ipc.open_stream(io.BytesIO(await response.read())).read_all()
        assert Trajectory.from_arrow(table) == done
        # Sealing is once and for all, under the first reason.
        assert (await rig.call("DELETE", "/v1/sessions/one?end_reason=timeout"))[1] == sealed[0][1]
        assert await rig.trajectory(session) == done
        assert (await rig.call("POST", "/v1/sessions", {"id": "one"}))[0] == 409
        assert (await rig.call("GET", "/v1/sessions/one"))[0] == 404
        assert (await rig.post(session, chat(user("hi"))))[0] == 401
        empty = await rig.open()
        assert (await rig.seal(empty)).error == "no model call was captured"


async def test_sealing_that_fails_can_be_tried_again(start: Start) -> None:
    """A full disk is no reason to lose a session."""
    async with start(lambda _: Say("fine")) as rig:
        session = await rig.open(id="one")
        await rig.post(session, chat(user("hi")))
        folder = rig.gateway.trajectories
        folder.rename(folder.with_suffix(".away"))
        status, answer = await rig.call("DELETE", "/v1/sessions/one")
        assert (status, "cannot be written" in answer["error"]) == (500, True)
        assert len(rig.errors) == 1
        rig.errors.clear()
        assert (await rig.post(session, chat(user("hi"))))[0] == 401
        folder.with_suffix(".away").rename(folder)
        assert_one_chain(await rig.seal(session), 1)


async def test_what_cannot_be_asked_of_the_policy(start: Start) -> None:
    async with start() as rig:
        for path, body in [
            ("pause", {"mode": "later"}),
            ("pause", {"mode": 5}),
            ("pause", {"deadline": "soon"}),
            ("pause", {"deadline": -1}),
            ("pause", {"deadline": 1e300}),
            ("pause", {"deadline": True}),
            ("resume", {"version": -1}),
            ("resume", {"version": "2"}),
            ("resume", {"version": 2**31}),
            ("resume", {"version": 1.5}),
            ("resume", {"version": True}),
            ("weights", {"folder": "/nowhere"}),
            ("weights", {"version": 1}),
            ("weights", {"folder": 5, "version": 1}),
        ]:
            status, answer = await rig.call("POST", f"/v1/policy/{path}", body)
            assert (status, list(answer)) == (422, ["error"]), (path, body)
        for path in ("pause", "resume", "weights"):
            url = f"{rig.running.control_url}/v1/policy/{path}"
            async with rig.control.post(url, data=b"nonsense") as response:
                assert response.status == 400
        assert (await rig.call("GET", "/v1/policy"))[1] == {"version": 0, "engine": "scripted", "context": 131072}
        assert rig.engine._gate.is_set()


def slow(request: Request) -> Say:
    return Say("a long answer that takes its time", f"to {request.messages[-1].text}", delay=0.4)


async def in_flight(rig: Rig, session: Opened, text: str, **fields: Any) -> Wire:
    before = len(rig.engine.requests)
    wire = await Wire.send(session, chat(user(text), **fields))
    await eventually(lambda: len(rig.engine.requests) > before)
    return wire


async def test_drain_lets_turns_finish_and_holds_new_ones(start: Start) -> None:
    async with start(slow, ping_seconds=0.05) as rig:
        session = await rig.open()
        first = await in_flight(rig, session, "one")
        pausing = asyncio.create_task(rig.call("POST", "/v1/policy/pause", {"mode": "drain"}))
        await eventually(lambda: not rig.engine._gate.is_set())
        second = await Wire.send(session, chat(user("two"), stream=True))
        await second.until(b": ping")
        assert not pausing.done()
        assert (await first.answer())["status"] == 200
        assert (await pausing)[1]["version"] == 0
        assert len(rig.engine.requests) == 1
        await second.until(b": ping")
        assert (await rig.call("POST", "/v1/policy/resume", {"version": 7}))[1]["version"] == 7
        await second.until(b"[DONE]")
        trajectory = await rig.seal(session)
        for wire in (first, second):
            wire.cut()
    assert [sorted(set(turn.versions.tolist())) for turn in trajectory.turns] == [[0], [7]]
    assert all("resumed" not in turn.flags for turn in trajectory.turns)


@pytest.mark.parametrize("how", ["abort", "deadline", "weights"])
async def test_an_abort_is_gone_through_with_the_connection_open(start: Start, codec: ModelCodec, how: str) -> None:
    """The turn continues from its tokens so far; each token has the policy version it was sampled under."""
    async with start(slow, ping_seconds=0.05) as rig:
        session = await rig.open()
        whole = await in_flight(rig, session, "one")
        streamed = await in_flight(rig, session, "two", stream=True)
        if how == "weights":
            body = {"folder": "anywhere", "version": 5}
            assert (await rig.call("POST", "/v1/policy/weights", body))[1]["version"] == 5
        else:
            body = {"mode": "abort"} if how == "abort" else {"mode": "drain", "deadline": 0.01}
            assert (await rig.call("POST", "/v1/policy/pause", body))[0] == 200
            assert not rig.engine._active
            await streamed.until(b": ping")  # still there, though nothing is sampled
            assert len(rig.engine.requests) == 2
            assert (await rig.call("GET", f"/v1/sessions/{session.id}"))[1]["in_flight"] == 2
            await rig.call("POST", "/v1/policy/resume", {"version": 5})
        answer = await whole.answer()
        message = message_of(answer)
        assert (message["content"], message["reasoning_content"]) == ("a long answer that takes its time", "to one")
        await streamed.until(b"[DONE]")
        trajectory = await rig.seal(session)
        for wire in (whole, streamed):
            wire.cut()
        requests = list(rig.engine.requests)
    assert len(trajectory.turns) == 2
    for turn in trajectory.turns:
        assert "resumed" in turn.flags
        assert (turn.finish, turn.delivered) == (Finish.STOP, True)
        half = len(turn.sampled) // 2
        assert turn.versions.tolist() == [0] * half + [5] * (len(turn.sampled) - half)
        prompts = [request.prompt for request in requests if request.id == turn.id]
        expected = np.concatenate([trajectory.prompt(turn.id), turn.sampled[:half]])
        assert np.array_equal(prompts[0], trajectory.prompt(turn.id))
        assert np.array_equal(prompts[1], expected)
        assert "takes its time" in codec.tokenizer.decode(turn.sampled.tolist())


async def test_a_client_may_leave_while_the_policy_is_paused(start: Start) -> None:
    """Its turn is picked up after the resume, or ends with its grace."""
    async with start(slow, orphan_seconds=0.2) as rig:
        session = await rig.open()
        await rig.call("POST", "/v1/policy/pause", {"mode": "abort"})
        for text in ("kept", "lost"):
            wire = await Wire.send(session, chat(user(text)))
            await eventually(lambda text=text: len(rig.gateway.sessions[session.id].turns.tasks) >= 1)
            await asyncio.sleep(0.02)
            wire.cut()
            if text == "kept":
                await eventually(lambda: rig.gateway.sessions[session.id].turns.inflight.abandoned)
                again = await Wire.send(session, chat(user(text)))
                await eventually(lambda: not rig.gateway.sessions[session.id].turns.inflight.abandoned)
        await eventually(lambda: len(rig.gateway.sessions[session.id].turns.tasks) == 1, "the lost turn ends")
        await rig.call("POST", "/v1/policy/resume", {"version": 1})
        assert message_of(await again.answer())["reasoning_content"] == "to kept"
        again.cut()
        trajectory = await rig.seal(session)
    assert [len(turn.sampled) > 0 for turn in trajectory.turns] == [True, False]
    assert len(trajectory.traces) == 1


async def test_a_sealed_session_says_that_the_engine_failed_it(start: Start) -> None:
    """For callers without a node: a session whose last call the engine failed is no result."""
    broken = True

    def script(_: Request) -> Say:
        if broken:
            raise EngineError("the GPU fell off the bus")
        return Say("fine")

    async with start(script) as rig:
        answered, failed = await rig.open(), await rig.open()
        for session in (answered, failed):
            assert (await rig.post(session, chat(user("hi"))))[0] == 503
        broken = False
        assert (await rig.post(answered, chat(user("hi"))))[0] == 200
        assert (await rig.call("GET", f"/v1/sessions/{failed.id}"))[1]["failed_calls"] == 1
        assert (await rig.seal(answered)).state is SessionState.DONE
        sealed = await rig.seal(failed)
    assert sealed.state is SessionState.FAILED
    assert sealed.failure is FailureReason.ENGINE
    assert "the GPU fell off the bus" in (sealed.error or "")
