"""The service over HTTP, on both databases, with the fake runner."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pytest
from aiohttp import web

from support.server.server_rig import rig, task, until_idle, until_waiting
from towline.benchmarks.fake_runner import FakeRunner
from towline.schema import SessionState, Trajectory
from towline.server.delivery import leases as delivering
from towline.server.store import tables as names


async def test_from_task_to_rows(database: str, tmp_path: Path) -> None:
    """Submit, poll, lease, read the tokens, acknowledge; a task id may contain slashes."""
    async with rig(tmp_path, database) as r:
        caller = r.caller
        body = task("org/repo/issue 7", 3, metadata={"level": "hard", "ünïcode": "\ud800"})
        assert await caller.ok("POST", "/v1/tasks", body) == {
            "task_id": body["task_id"],
            "created": True,
            "sessions": 3,
        }
        assert await caller.submit(body) == [{"task_id": body["task_id"], "created": False, "sessions": 3}]
        results = await caller.lease(unit="group")
        assert [one.sample for one in results[0].sessions] == [0, 1, 2]
        assert [one.reward for one in results[0].sessions] == [0.0, 1.0, 0.0]
        assert all(one.usable and one.trained_tokens == 16 and one.attempt == 1 for one in results[0].sessions)
        assert results[0].sessions[0].metadata == {"level": "hard", "ünïcode": "\ud800"}
        status = await caller.ok("GET", "/v1/tasks/org%2Frepo%2Fissue%207")
        assert (status["state"], status["finished"], status["usable"]) == ("done", 3, 3)
        assert status == await caller.ok("GET", "/v1/tasks/org/repo/issue%207")
        ids = [one["session_id"] for one in status["sessions"]]
        assert [one.session_id for one in results[0].sessions] == ids
        for session_id in ids:
            session = await caller.ok("GET", f"/v1/sessions/{session_id}")
            assert (session["state"], session["end_reason"]) == ("done", "exited")
        as_json = Trajectory.model_validate(await caller.ok("GET", f"/v1/sessions/{ids[0]}/trajectory"))
        arrow = await caller.call(
            "GET", f"/v1/sessions/{ids[0]}/trajectory", headers={"accept": "application/vnd.apache.arrow.stream"}
        )
        assert arrow.headers["content-type"] == "application/vnd.apache.arrow.stream"
        assert Trajectory.from_arrow(ipc.open_stream(arrow.body).read_all()) == as_json
        many = await caller.call("POST", "/v1/trajectories", {"session_ids": [ids[2], "nobody", ids[0]]})
        with ipc.open_stream(many.body) as stream:
            found = [Trajectory.from_arrow(pa.Table.from_batches([batch])) for batch in stream]
        assert [one.session_id for one in found] == [ids[2], ids[0]]
        assert found[1] == as_json
        none = await caller.call("POST", "/v1/trajectories", {"session_ids": []})
        assert ipc.open_stream(none.body).read_all().num_rows == 0
        assert (await caller.ack(*results))["acked"] == [results[0].result_id]
        assert await caller.lease(unit="group", wait=0) == []
        assert r.runner.forgotten == [body["task_id"]]


async def test_rejected_tasks_name_field_and_reason(tmp_path: Path) -> None:
    async with rig(tmp_path, queue=10) as r:
        await r.caller.submit(task("a"))
        cases: list[tuple[Any, int, str | None, str]] = [
            (task("a", 2), 409, "task_id", "another task has the id 'a'"),
            ([task("b"), task("b", 2)], 409, "[1].task_id", "another task has the id 'b'"),
            (task("b", harness="other"), 422, "harness", "available: fake"),
            ([task("b"), task("c", harness_options={"x": 1})], 422, "[1].harness_options", "no option 'x'"),
            (task("b", 0), 422, "num_samples", "greater than or equal to 1"),
            (task("b", 2, min_samples=3), 422, None, "min_samples 3 exceeds num_samples 2"),
            (task("b", nonsense=1), 422, "nonsense", "Extra inputs"),
            (task("b", environment={"files": [{"target": "x", "text": ""}]}), 422, "environment.files[0].target", "match"),
            (task("b", 11), 422, "num_samples", "exceeds the queue limit"),
            (task("b", priority=2**40), 422, "priority", "at most"),
            (task("b", callback="http://10.0.0.1/"), 422, "callback", "callback_hosts"),
            (task("b", callback="ftp://localhost/"), 422, "callback", "http or https"),
            (task("b", callback="http://me:secret@localhost/"), 422, "callback", "password"),
            (task(" b"), 422, "task_id", "space"),
            (task("b\n"), 422, "task_id", "match"),
            (7, 422, None, ""),
            (None, 422, None, ""),
        ]  # fmt: skip
        for body, status, field, reason in cases:
            answer = await r.caller.call("POST", "/v1/tasks", body)
            assert (answer.status, answer.body["field"]) == (status, field), (body, answer)
            assert reason in answer.body["error"]
        assert [one["task_id"] for one in await r.caller.ok("GET", "/v1/tasks")] == [
            "a"
        ]  # a list is taken whole or not
        for path in (
            "/v1/tasks/none",
            "/v1/sessions/none",
            "/v1/sessions/none/trajectory",
            "/v1/none",
            "/v1/sessions/%00",
        ):
            answer = await r.caller.call("GET", path)
            assert answer.status in (404, 422)
            assert set(answer.body) == {"error", "field"}
        assert (await r.caller.call("DELETE", "/v1/tasks/none")).status == 404
        assert (await r.caller.call("PUT", "/v1/tasks")).status == 405
        assert (
            await r.caller.call("POST", "/v1/tasks", [task("x" * 50, metadata={"a": "b" * 70_000_000})])
        ).status == 413


async def test_full_queue_answers_429_with_retry_after(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database, FakeRunner(capacity=2), queue=5) as r:
        await r.caller.submit(task("running", 2, harness_options={"hang": True}))
        await r.caller.until("/healthz", waiting=0, active=2)
        await r.caller.submit(task("waiting", 5))
        answer = await r.caller.call("POST", "/v1/tasks", task("more"))
        assert (answer.status, answer.headers["retry-after"]) == (429, "5")
        assert (await r.caller.submit(task("waiting", 5)))[0]["created"] is False  # what is there needs no room
        await r.caller.ok("DELETE", "/v1/tasks/running")
        await r.caller.take(7)
        assert (await r.caller.submit(task("more")))[0]["created"]


async def test_priority_and_order(database: str, tmp_path: Path) -> None:
    """By priority, then by submission, whole groups before later ones; never more than the capacity."""
    async with rig(tmp_path, database, FakeRunner(capacity=1)) as r:
        await r.caller.submit(task("first", harness_options={"hang": True}))
        await r.caller.until("/healthz", active=1)
        await r.caller.submit(task("low", 2, priority=-1), task("middle", 2), task("high", priority=9), task("last"))
        await r.caller.ok("DELETE", "/v1/tasks/first")
        await r.caller.take(7)
        assert [name.split("-")[0] for name in r.runner.started] == [
            "first",
            "high",
            "middle",
            "middle",
            "last",
            "low",
            "low",
        ]
        assert r.runner.most == 1


async def test_pages_of_tasks(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.caller.submit(*(task(f"täsk/{n}") for n in range(5)))
        await r.caller.take(5)
        first = await r.caller.call("GET", "/v1/tasks", limit=3)
        assert [one["task_id"] for one in first.body] == ["täsk/0", "täsk/1", "täsk/2"]
        assert not first.body[0]["sessions"]
        link, _, relation = first.headers["link"].partition(">; ")
        assert relation == 'rel="next"'
        rest = await r.caller.call("GET", link.removeprefix("<"))
        assert [one["task_id"] for one in rest.body] == ["täsk/3", "täsk/4"]
        assert "link" not in rest.headers
        assert await r.caller.ok("GET", "/v1/tasks", state="queued") == []
        assert len(await r.caller.ok("GET", "/v1/tasks", state="done")) == 5


async def test_attempts(database: str, tmp_path: Path) -> None:
    """Failed and lost attempts are archived and retried as new sessions; each sample has one result."""
    async with rig(tmp_path, database) as r:
        await r.caller.submit(
            task("fails", 2, harness_options={"fail": [2, 0]}),
            task("lost", harness_options={"lose": 1}),
            task("never", 2, max_attempts=2, harness_options={"fail": [9, 0], "reason": "engine"}),
            task("gone", max_attempts=2, harness_options={"lose": 9}),
            task("hopeless", harness_options={"fail": 9, "hopeless": True}),
        )
        sessions = {(one.task_id, one.sessions[0].sample): one.sessions[0] for one in await r.caller.take(7)}
        assert len(sessions) == 7
        assert [(s.state.value, s.attempt, s.usable) for s in (sessions["fails", 0], sessions["fails", 1], sessions["lost", 0])] == [
            ("done", 3, True), ("done", 1, True), ("done", 2, True),
        ]  # fmt: skip
        assert [(sessions[name, 0].state.value, sessions[name, 0].attempt, sessions[name, 0].usable, sessions[name, 0].failure) for name in ("never", "gone", "hopeless")] == [
            ("failed", 2, False, "engine"),
            ("failed", 3, False, "quarantined"),  # lost with its node, alone, three times
            ("failed", 1, False, "internal"),
        ]  # fmt: skip
        assert sessions["never", 0].error == "the fake failed"
        assert sessions["never", 0].notes == ["the engine answered: 500"]
        assert "3 node deaths" in (sessions["gone", 0].error or "")
        found = await r.caller.take(5, unit="group")
        groups = {one.task_id: [s.sample for s in one.sessions] for one in found}
        # An infrastructure failure is no reward 0: a group that is not complete is dropped whole.
        assert groups == {"fails": [0, 1], "lost": [0], "never": [], "gone": [], "hopeless": []}
        assert {one.task_id: one.reasons for one in found} == {
            "fails": {},
            "lost": {},
            "never": {"engine": 1},
            "gone": {"quarantined": 1},
            "hopeless": {"internal": 1},
        }
        tried = [name for name in r.runner.started if name.startswith("fails-0-")]
        assert [name.split("-")[2] for name in tried] == ["1", "2", "3"]
        for name in tried[:2]:
            archived = await r.caller.ok("GET", f"/v1/sessions/{name}")
            assert (archived["state"], archived["error"]) == ("failed", "the fake failed")
        status = await r.caller.ok("GET", "/v1/tasks/gone")
        assert [(one["state"], one["attempt"]) for one in status["sessions"]] == [("failed", 3)]
        assert [(one["state"], one["attempt"], one["failure"], one["stage"]) for one in status["attempts"]] == [
            ("lost", 1, "node", "running"),
            ("lost", 2, "node", "running"),
            ("failed", 3, "quarantined", "running"),
        ]


async def test_min_samples_cancel_the_remaining_sessions(database: str, tmp_path: Path) -> None:
    options = {"hang": [False, False, True, True, True, True], "empty": [False, False, False]}
    async with rig(tmp_path, database, FakeRunner(capacity=4)) as r:
        await r.caller.submit(task("early", 6, min_samples=2, harness_options=options))
        (group,) = await r.caller.take(1, unit="group")
        assert [one.sample for one in group.sessions] == [0, 1]
        results = await r.caller.take(6)
        assert [one.sessions[0].state.value for one in results].count("cancelled") == 4
        status = await r.caller.ok("GET", "/v1/tasks/early")
        assert (status["state"], status["finished"], status["usable"]) == ("done", 6, 2)
        assert len(r.runner.started) <= 6
        assert await r.caller.lease(unit="group", wait=0) == []


async def test_cancelling(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database, FakeRunner(capacity=2)) as r:
        await r.caller.submit(task("off", 4, harness_options={"hang": True}))
        await r.caller.until("/healthz", active=2)
        for _ in range(2):
            assert (await r.caller.ok("DELETE", "/v1/tasks/off"))["state"] == "cancelled"
        results = await r.caller.take(4)
        assert {one.sessions[0].state for one in results} == {SessionState.CANCELLED}
        assert {one.sessions[0].usable for one in results} == {False}
        (group,) = await r.caller.take(1, unit="group")
        assert group.sessions == []
        status = await r.caller.ok("GET", "/v1/tasks/off")
        assert (status["state"], status["finished"]) == ("cancelled", 4)
        running = [one for one in status["sessions"] if one["session_id"] in r.runner.started]
        assert len(running) == 2
        assert (await r.caller.ok("GET", f"/v1/sessions/{running[0]['session_id']}/trajectory"))["state"] == "cancelled"
        waiting = next(one for one in status["sessions"] if one["session_id"] not in r.runner.started)
        assert (await r.caller.call("GET", f"/v1/sessions/{waiting['session_id']}/trajectory")).status == 404
        assert (await r.caller.submit(task("off", 4, harness_options={"hang": True})))[0]["created"] is False


async def test_consumers_are_independent(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database) as r:
        await r.caller.submit(task("a", 3))
        assert len(await r.caller.take(3, "one")) == 3
        assert await r.caller.lease("late", start="now", wait=0) == []
        await r.caller.submit(task("b", 2))
        assert {one.task_id for one in await r.caller.take(2, "late")} == {"b"}
        assert len(await r.caller.take(5, "two")) == 5
        first = await r.caller.lease("three", max=2, lease=0.05)
        assert [one.delivery for one in first] == [1, 1]
        again: dict[str, int] = {}
        while len(again) < 2:  # the end of a lease wakes who waits for it
            again |= {
                one.result_id: one.delivery
                for one in await r.caller.lease("three", max=9, lease=60)
                if one.delivery > 1
            }
        assert set(again) == {one.result_id for one in first}
        assert set(again.values()) == {2}
        answer = await r.caller.ok(
            "POST",
            "/v1/results/ack",
            {"consumer": "three", "result_ids": [first[0].result_id] * 2 + ["x", "group-1-" + r.service.store.token]},
        )
        assert answer == {"acked": [first[0].result_id], "unknown": ["x", "group-1-" + r.service.store.token]}
        assert (await r.caller.ack(*first, consumer="nobody"))["acked"] == []
        other = names.result_id("session", 1, "00000000")
        assert (await r.caller.ok("POST", "/v1/results/ack", {"consumer": "one", "result_ids": [other]}))[
            "unknown"
        ] == [other]


async def test_waiting_for_results(tmp_path: Path) -> None:
    """Waiting consumers get results at once, an empty answer at the timeout, and an answer when the service stops."""
    async with rig(tmp_path) as r:
        results = r.service.signals.results
        waiting = [asyncio.create_task(r.caller.lease(f"c{n}", wait=50)) for n in range(20)]
        await until_waiting(results)
        assert await r.caller.lease(wait=0.05) == []
        await r.caller.submit(task("a"))
        assert [len(await one) for one in waiting] == [1] * 20
        left = asyncio.create_task(r.caller.lease("killed", start="now", wait=50))
        await until_waiting(results)
        left.cancel()  # the client disconnects while the service waits on its behalf
        await asyncio.gather(left, return_exceptions=True)
        await until_waiting(results, False)
        await r.caller.submit(task("b"))
        assert [one.delivery for one in await r.caller.lease("killed", lease=50)] == [1]
        assert await r.caller.ok("POST", "/v1/results/release", {"consumer": "killed"}) == {"released": 1}
        assert [one.delivery for one in await r.caller.take(1, "killed")] == [2]
        await r.caller.take(1, "c0")
        stopped = asyncio.create_task(r.caller.lease("c0", wait=50))
        await until_waiting(results)
        r.service.stop()
        assert await stopped == []


async def test_a_trainer_announces_weights_that_it_pushed_itself(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database) as r:
        assert await r.caller.ok("POST", "/v1/policy/version", {"version": 4}) == {"version": 4, "paused": False}
        assert r.runner.version == 4
        assert not r.runner.paused
        # Announced again, and as the engines report it.
        assert await r.caller.ok("POST", "/v1/policy/version", {"version": 4}) == {"version": 4, "paused": False}
        r.runner.version = 6
        assert await r.caller.ok("POST", "/v1/policy/version") == {"version": 6, "paused": False}
        await r.caller.submit(task("v6", 2))
        await r.caller.until("/v1/tasks/v6", state="done")
        found = await r.caller.ok("GET", "/v1/results", consumer="c", max_staleness=0, max=9)
        assert len(found["results"]) == 2
        await r.caller.ok("POST", "/v1/policy/pause")
        assert await r.caller.ok("POST", "/v1/policy/version", {"version": 7}) == {"version": 7, "paused": True}
    async with rig(tmp_path, database) as r:
        assert r.service.policy.now.version == 7
        assert r.runner.version == 7


async def test_policy_and_staleness(database: str, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "weights").touch()
    async with rig(tmp_path, database) as r:
        caller = r.caller
        await caller.submit(task("v0", 2), task("strict", max_staleness=1))
        await caller.until("/v1/tasks/strict", state="done")
        await caller.until("/v1/tasks/v0", state="done")
        assert await caller.ok("POST", "/v1/policy/pause", {"mode": "drain", "deadline": 1}) == {
            "version": 0,
            "paused": True,
        }
        assert r.runner.paused
        await caller.submit(task("v2", 2))
        await until_idle(r.service)
        assert (await caller.ok("GET", "/v1/tasks/v2"))["state"] == "queued"  # nothing starts while paused
        folder = {"folder": str(tmp_path / "new"), "version": 1}
        assert await caller.ok("POST", "/v1/policy/weights", folder) == {"version": 1, "paused": True}
        assert await caller.ok("POST", "/v1/policy/resume", {"version": 2}) == {"version": 2, "paused": False}
        for path, body, status, field in (
            ("resume", {"version": 1}, 409, "version"),
            ("weights", {"folder": str(tmp_path / "new"), "version": 1}, 409, "version"),
            ("version", {"version": 1}, 409, "version"),
            ("version", {"version": -1}, 422, "version"),
            ("weights", {"folder": str(tmp_path / "none"), "version": 3}, 422, "folder"),
            ("weights", {"folder": str(tmp_path), "version": 3}, 422, "folder"),
            ("pause", {"mode": "maybe"}, 422, "mode"),
        ):
            answer = await caller.call("POST", f"/v1/policy/{path}", body)
            assert (answer.status, answer.body["field"]) == (status, field), answer
        await caller.until("/v1/tasks/v2", state="done")
        found = await caller.ok("GET", "/v1/results", consumer="fresh", max_staleness=1, max=99)
        assert ({one["task_id"] for one in found["results"]}, found["dropped"], found["version"]) == ({"v2"}, 3, 2)
        found = await caller.ok("GET", "/v1/results", consumer="lenient", max=99)
        assert ({one["task_id"] for one in found["results"]}, found["dropped"]) == (
            {"v0", "v2"},
            1,
        )  # the task's own limit
        found = await caller.ok("GET", "/v1/results", consumer="flags", max=99, max_staleness=0, stale="flag")
        assert {(one["task_id"], one["sessions"][0]["stale"]) for one in found["results"]} == {
            ("v0", True), ("strict", True), ("v2", False),
        }  # fmt: skip
        found = await caller.ok("GET", "/v1/results", consumer="groups", unit="group", max_staleness=1, max=1)
        assert [one["task_id"] for one in found["results"]] == ["v2"]
        figures = (await caller.ok("GET", "/metrics")).decode()
        assert 'towline_results_dropped_total{unit="session"} 4.0' in figures
        assert 'towline_results_flagged_total{unit="session"} 3.0' in figures
        assert "towline_policy_version 2.0" in figures
        await caller.ok("POST", "/v1/policy/pause")
    async with rig(tmp_path, database) as r:
        assert await r.caller.ok("GET", "/v1/policy") == {"version": 2, "paused": True}
        assert (r.runner.version, r.runner.paused) == (2, True)
        folder = {"folder": str(tmp_path / "new"), "version": 5}
        await r.caller.ok("POST", "/v1/policy/weights", folder)
    (tmp_path / "new" / "weights").unlink()
    async with rig(
        tmp_path, database
    ) as r:  # weights that are gone: rather nothing than another policy under their name
        assert await r.caller.ok("GET", "/v1/policy") == {"version": 5, "paused": True}


async def test_weights_that_are_gone_pause_sampling_until_there_are_others(database: str, tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("w")
    async with rig(tmp_path, database) as r:
        await r.caller.ok("POST", "/v1/policy/weights", {"folder": str(tmp_path / "old"), "version": 3})
    (tmp_path / "old").rename(tmp_path / "moved")
    async with rig(tmp_path, database) as r:
        assert await r.caller.ok("GET", "/v1/policy") == {"version": 3, "paused": True}
        assert r.runner.paused
        moved = {"folder": str(tmp_path / "moved"), "version": 3}
        assert await r.caller.ok("POST", "/v1/policy/weights", moved) == {"version": 3, "paused": False}
        assert not r.runner.paused
        # A pause that was asked for stays.
        await r.caller.ok("POST", "/v1/policy/pause")
    (tmp_path / "moved").rename(tmp_path / "old")
    async with rig(tmp_path, database) as r:
        old = {"folder": str(tmp_path / "old"), "version": 3}
        assert await r.caller.ok("POST", "/v1/policy/weights", old) == {"version": 3, "paused": True}
        assert r.runner.paused


async def test_events(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database) as r:
        await r.caller.submit(task("a", 2, harness_options={"fail": [1, 0]}))
        await r.caller.take(2)
        text = (await r.caller.call("GET", "/v1/events", headers={"last-event-id": "0"}, idle=0.2)).body.decode()
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        assert [one["seq"] for one in events] == list(range(1, len(events) + 1))
        assert [one["body"]["state"] for one in events if one["kind"] == "task"] == ["queued", "running", "done"]
        lives: dict[str, list[str]] = {}
        for one in events:
            if one["kind"] == "session":
                lives.setdefault(one["body"]["session_id"], []).append(one["body"]["state"])
        assert sorted(life[-1] for life in lives.values()) == ["done", "done", "failed"]
        assert all(life[-1] != "done" or life[-4:-1] == ["init", "ready", "running"] for life in lives.values())
        assert [one["body"]["unit"] for one in events if one["kind"] == "result"] == ["session", "session", "group"]
        middle = events[len(events) // 2]["seq"]
        text = (await r.caller.call("GET", "/v1/events", headers={"last-event-id": str(middle)}, limit=2)).body.decode()
        assert f"id: {middle + 1}\n" in text
        r.service.events.keep = 3
        await r.service.events.prune()
        text = (await r.caller.call("GET", "/v1/events", headers={"last-event-id": "1"}, idle=0.05)).body.decode()
        kinds = [json.loads(line[6:])["kind"] for line in text.splitlines() if line.startswith("data: ")]
        assert kinds[0] == "missed"
        assert len(kinds) == 4
        live = asyncio.create_task(r.caller.call("GET", "/v1/events", limit=1))
        await until_waiting(r.service.signals.events)
        await r.caller.submit(task("b"))
        assert '"task_id":"b"' in (await live).body.decode()


async def test_callbacks(database: str, tmp_path: Path) -> None:
    """Sent when the group is complete, retried on errors and after a restart; redirects are not followed."""
    told: list[dict[str, Any]] = []
    answers = [503, 302, 200]
    twice, thrice = asyncio.Event(), asyncio.Event()

    async def hear(request: web.Request) -> web.Response:
        told.append(await request.json())
        (twice if len(told) == 2 else thrice if len(told) == 3 else asyncio.Event()).set()
        return web.Response(status=answers.pop(0), headers={"location": "/elsewhere"})

    site = web.Application()
    site.router.add_post("/hook", hear)
    runner = web.AppRunner(site)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0)
    await listener.start()
    port = runner.addresses[0][1]
    try:
        hosts = [f"127.0.0.1:{port}"]
        async with rig(tmp_path, database, callback_hosts=hosts) as r:
            await r.caller.submit(task("a", 2, callback=f"http://127.0.0.1:{port}/hook"))
            (group,) = await r.caller.take(1, unit="group")
            await asyncio.wait_for(twice.wait(), 30)
        async with rig(tmp_path, database, callback_hosts=hosts) as r:
            await asyncio.wait_for(thrice.wait(), 30)
        assert told == [told[0]] * 3
        assert (told[0]["result_id"], told[0]["task_id"], told[0]["usable"]) == (group.result_id, "a", True)
    finally:
        await runner.cleanup()


async def test_retention(database: str, tmp_path: Path) -> None:
    """Tasks that all live consumers have acknowledged are removed with their files; silent consumers keep nothing."""
    async with rig(tmp_path, database, keep_seconds=100, silent_seconds=1000) as r:
        await r.caller.submit(task("a", 2), task("b"))
        used = await r.caller.take(3)
        segments = tmp_path / "segments"
        assert list(segments.rglob("*.arrow"))
        now = r.service.started
        assert await r.service.retention.sweep(now + 50) == 0  # too young
        held = await r.caller.lease("slow", max=1, lease=1e5)
        assert held[0].task_id == used[0].task_id
        assert (
            await r.service.retention.sweep(now + 500) == 0
        )  # `slow` has not acknowledged its first, nor seen the rest
        await r.caller.ack(*held, consumer="slow")
        await r.caller.take(2, "slow")
        assert await r.service.retention.sweep(now + 500) == 2
        assert list(segments.rglob("*.arrow")) == []
        assert await r.caller.ok("GET", "/v1/tasks") == []
        assert len(r.runner.erased) == 3
        await r.caller.submit(task("c"))
        await r.caller.take(1)
        assert await r.service.retention.sweep(now + 500) == 0
        assert await r.service.retention.sweep(now + 5000) == 1  # `slow` was not seen for long
        assert await r.caller.lease("slow", wait=0) == []
        assert (await r.caller.submit(task("a", 2)))[0]["created"]


async def test_consumer_with_a_prefix(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trainers on one service: neither sees, or keeps, the other's results."""
    monkeypatch.setattr(delivering, "_SCANNED", 4)  # so that one look is not enough to get past the others' results
    async with rig(tmp_path, database, keep_seconds=100, silent_seconds=1000) as r:
        await r.caller.submit(*(task(f"ours/{number}", 3) for number in range(4)), task("mine/a", 2), task("mine_/b"))
        await r.caller.take(15, "all")
        for unit, count in (("session", 2), ("group", 1)):
            found = await r.caller.lease("me", unit, prefix="mine/", max=9, lease=0.01)
            assert [one.task_id for one in found] == ["mine/a"] * count
            again = await r.caller.lease("me", unit, max=9)  # what was said is known
            assert [(one.result_id, one.delivery) for one in again] == [(one.result_id, 2) for one in found]
            await r.caller.ack(*again, consumer="me")
            assert await r.caller.lease("me", unit, prefix="mine/", wait=0) == []
        other = await r.caller.call("GET", "/v1/results", consumer="me", prefix="ours/")
        assert (other.status, other.body["field"]) == (409, "prefix")
        await r.caller.submit(task("ours/late"), task("mine/late"))
        assert [one.task_id for one in await r.caller.take(1, "me")] == ["mine/late"]
        await r.caller.take(2, "all")
        held = await r.caller.lease("they", "group", prefix="ours/", max=1)
        assert [one.task_id for one in held] == ["ours/0"]
        now = r.service.started
        assert await r.service.retention.sweep(now + 500) == 2  # `me` has not used the group mine/late, `they` theirs
        left = {one["task_id"] for one in await r.caller.ok("GET", "/v1/tasks")}
        assert left == {"mine/late", "ours/late", *(f"ours/{number}" for number in range(4))}


async def test_graceful_shutdown_loses_nothing(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database, FakeRunner(capacity=2)) as r:
        await r.caller.submit(task("a", 4, max_attempts=1, harness_options={"seconds": 0.3}))
        await r.caller.until("/healthz", active=2)
    assert r.runner.closed
    async with rig(tmp_path, database) as r:
        results = await r.caller.take(4)
        assert {one.sessions[0].state.value for one in results} == {"done"}  # a stop uses up no attempt
        assert sorted(one.sessions[0].attempt for one in results) == [1, 1, 2, 2]


async def test_broken_runner_costs_no_attempt(database: str, tmp_path: Path) -> None:
    """If the journal stops, for example on a full disk, the queue waits for a server that can run it."""
    async with rig(tmp_path, database, FakeRunner(capacity=2)) as r:
        await r.caller.submit(task("a", 4, max_attempts=1, harness_options={"seconds": 0.2, "fail": 1}))
        await r.caller.until("/healthz", active=2)
        r.runner.trouble = "the disk is full"
        for _ in range(1000):
            health = await r.caller.call("GET", "/healthz")
            if health.status == 503 and not health.body["active"]:
                break
            await asyncio.sleep(0.01)
        assert (health.body["status"], health.body["error"]) == ("broken", "the disk is full")
        assert (health.body["waiting"], len(r.runner.started)) == (4, 2)
        assert await r.caller.lease(wait=0) == []
        await r.caller.submit(task("b"))
    async with rig(tmp_path, database) as r:
        results = await r.caller.take(5)
        assert sorted(one.sessions[0].state.value for one in results) == ["done"] * 3 + ["failed"] * 2
        assert sorted(one.sessions[0].attempt for one in results) == [1, 1, 1, 2, 2]


async def test_damaged_segment_is_not_delivered(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.caller.submit(task("a"))
        (result,) = await r.caller.take(1)
        session_id = result.sessions[0].session_id
        (segment,) = (tmp_path / "segments").rglob("*.arrow")
        data = bytearray(segment.read_bytes())
        data[len(data) // 2] ^= 1
        segment.write_bytes(data)
        answer = await r.caller.call("GET", f"/v1/sessions/{session_id}/trajectory")
        assert (answer.status, "hash differs" in answer.body["error"]) == (500, True)


async def test_segments_on_fsspec(tmp_path: Path) -> None:
    """An fsspec URL instead of a folder; orphans are found there too."""
    async with rig(tmp_path, segments="memory://towline-test/segments") as r:
        await r.caller.submit(task("a", 2))
        results = await r.caller.take(2)
        orphan = await r.service.segments.write(
            [
                Trajectory.model_validate(
                    await r.caller.ok("GET", f"/v1/sessions/{results[0].sessions[0].session_id}/trajectory")
                )
            ]
        )
        run = orphan[0].segment.rsplit("/", 2)[0]
        assert len(await r.service.segments.names(run)) >= 2
    async with rig(tmp_path, segments="memory://towline-test/segments") as r:
        left = await r.service.segments.names(run)
        assert left
        assert orphan[0].segment not in left
        for one in results:
            await r.caller.ok("GET", f"/v1/sessions/{one.sessions[0].session_id}/trajectory")
