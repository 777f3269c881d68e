"""What users can see of failures: rejected parameters, lists, logs, metrics, log lines."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import signal
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from support.server.postgres import Postgres
from support.server.routes import ROUTES
from support.server.server_rig import Caller, rig, task
from towline.benchmarks.fake_runner import FakeRunner
from towline.cli import app as towline
from towline.cli.terminal import configure_logging as start_log
from towline.client import AsyncClient
from towline.schema import Role


async def test_unknown_query_parameters_are_rejected(tmp_path: Path) -> None:
    """On every route, naming the parameter and the allowed ones: `max_stalenes=1` must not return stale data."""
    async with rig(tmp_path) as r:
        await r.caller.submit(task("t"))
        await r.caller.take(1)
        for method, path, body, _ in ROUTES:
            filled = path.format(task_id="t", session_id="s", key_id="k", name="n")
            query = {"consumer": "c"} if path == "/v1/results" else {}
            answer = await r.caller.call(method, filled, body, max_stalenes=1, **query)
            assert (answer.status, answer.body["field"]) == (400, "max_stalenes"), (method, path, answer)
        assert (await r.caller.call("GET", "/v1/results", consumer="c", max_stalenes=1)).body["error"] == (
            "/v1/results has no query parameter 'max_stalenes'; allowed: consumer, groups_per_update, lease, max, "
            "max_staleness, prefix, stale, start, tenant, unit, wait"
        )
        assert "takes none" in (await r.caller.call("GET", "/healthz", verbose=1)).body["error"]
        assert len(await r.caller.lease("c2", max_staleness=1)) == 1  # what was refused took nothing


async def test_lists_of_sessions(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database) as r:
        await r.caller.submit(
            task("a", 2, harness_options={"fail": [1, 0], "reason": "engine"}),
            task("b", max_attempts=2, harness_options={"fail": 9, "reason": "sandbox"}),
            task("c/d"),
        )
        await r.caller.take(4)
        everything = await r.caller.ok("GET", "/v1/sessions")
        shown = [(one["task_id"], one["sample"], one["attempt"], one["state"], one["failure"]) for one in everything]
        assert shown == [
            ("a", 0, 1, "failed", "engine"),
            ("a", 0, 2, "done", None),
            ("a", 1, 1, "done", None),
            ("b", 0, 1, "failed", "sandbox"),
            ("b", 0, 2, "failed", "sandbox"),
            ("c/d", 0, 1, "done", None),
        ]
        for query, places in (
            ({"state": "failed"}, [0, 3, 4]),
            ({"reason": "sandbox"}, [3, 4]),
            ({"state": "done", "reason": "sandbox"}, []),
            ({"task": "a", "order": "newest"}, [2, 1, 0]),
            ({"task": "c/d"}, [5]),
            ({"after": everything[3]["session_id"]}, [4, 5]),
            ({"after": everything[3]["session_id"], "order": "newest"}, [2, 1, 0]),
        ):
            assert await r.caller.ok("GET", "/v1/sessions", **query) == [everything[place] for place in places], query
        page = await r.caller.call("GET", "/v1/sessions", state="failed", limit=2)
        rest = await r.caller.call("GET", page.headers["link"].partition(">")[0].removeprefix("<"))
        assert (page.body + rest.body, "link" in rest.headers) == ([everything[place] for place in (0, 3, 4)], False)
        for wrong, status in (({"after": "none"}, 404), ({"state": "broken"}, 422), ({"limit": 0}, 422)):
            assert (await r.caller.call("GET", "/v1/sessions", **wrong)).status == status
        async with AsyncClient(r.url) as client:
            found = await client.sessions("failed", limit=2, newest=True)
            assert [one.session_id for one in found] == [everything[place]["session_id"] for place in (4, 3)]
            assert (await client.task("b")).attempts == await client.sessions(task="b")


async def test_logs_of_sessions(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.caller.submit(task("a"))
        (result,) = await r.caller.take(1)
        name = result.sessions[0].session_id
        path = f"/v1/sessions/{name}/log"
        answer = await r.caller.call("GET", path)
        assert (answer.status, answer.body["field"]) == (404, "name")
        assert "it has none" in answer.body["error"]
        r.runner.logs[name] = {"harness.log": b"one\ntwo \xff\nthree\n", "setup.log": b"x" * (2 << 20)}
        answer = await r.caller.call("GET", path)
        assert answer.body.decode() == "one\ntwo \ufffd\nthree\n"
        assert answer.headers["content-type"].startswith("text/plain")
        assert (answer.headers["x-content-type-options"], answer.headers["x-towline-left-out"]) == ("nosniff", "0")
        answer = await r.caller.call("GET", path, tail=1)
        assert (answer.body, answer.headers["x-towline-left-out"]) == (b"three\n", "10")
        answer = await r.caller.call("GET", path, name="setup.log")
        assert (len(answer.body), answer.headers["x-towline-left-out"]) == (1 << 20, str(1 << 20))
        assert "there are: harness.log, setup.log" in (await r.caller.call("GET", path, name="x")).body["error"]
        for wrong in ("../setup.log", "/etc/passwd", ".."):
            assert (await r.caller.call("GET", path, name=wrong)).status in (404, 422)
        assert (await r.caller.call("GET", "/v1/sessions/none/log")).status == 404
        async with AsyncClient(r.url) as client:
            assert await client.log(name, tail=2) == "two \ufffd\nthree\n"
        await r.service.keys.create("", [Role.ADMIN])
        submitter = Caller(r.caller.web, (await r.service.keys.create("", [Role.SUBMIT])).key)
        assert (await submitter.call("GET", path)).status == 403  # what is in a log is as secret as a trajectory


async def test_each_failed_session_logs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with rig(tmp_path) as r:
        r.runner.error = "the engine said:\n\x1b[31m500\x00 " + "x" * 5000
        await r.caller.submit(task("a", 2, max_attempts=2, harness_options={"fail": [9, 0], "reason": "engine"}))
        await r.caller.take(2)
    lines = [record.getMessage() for record in caplog.records if " failed: " in record.getMessage()]
    assert len(lines) == 2
    for attempt, line in enumerate(lines, 1):
        assert line.startswith(f"session a-0-{attempt}-")
        then = "retried" if attempt == 1 else "not retried"
        assert f"task a, sample 0, attempt {attempt}, reason engine, stage running, {then}: the engine said: " in line
        assert len(line) < 700
        assert line.isprintable()


def test_lines_are_not_wrapped_off_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    out = io.StringIO()
    start_log(Console(file=out, width=40))
    logging.getLogger("towline.server").warning("word " * 60)
    (line,) = out.getvalue().splitlines()
    assert line.endswith("WARNING towline.server: " + "word " * 60)


def test_json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    out = io.StringIO()
    start_log(Console(file=out, width=40), "json")
    logging.getLogger("towline.server").warning("two\nlines %d", 7, extra={"session_id": "s", "reason": "engine"})
    try:
        raise ValueError("x")
    except ValueError:
        logging.getLogger("towline.node").exception("failed")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert {name: value for name, value in first.items() if name != "time"} == {
        "level": "warning",
        "logger": "towline.server",
        "message": "two\nlines 7",
        "session_id": "s",
        "reason": "engine",
    }
    assert "ValueError: x" in second["exception"]


async def test_metrics(database: str, tmp_path: Path) -> None:
    async with rig(tmp_path, database) as r:
        await r.caller.submit(task("a", 3, harness_options={"fail": [1, 0, 0], "reason": "stall"}), task("b/1"))
        await r.caller.take(2, "quick")
        await r.caller.lease("slow", max=1)
        await r.caller.until("/v1/tasks/a", state="done")
        await r.caller.until("/v1/tasks/b/1", state="done")
        await r.caller.lease("some", unit="group", prefix="b/", max=1)
        text = (await r.caller.ok("GET", "/metrics")).decode()
        for line in (
            'towline_sessions_failed_total{reason="stall",stage="running"} 1.0',
            'towline_sessions_retried_total{reason="stall"} 1.0',
            'towline_engine_errors_total{engine="policy",reason="stall"} 1.0',
            'towline_engine_errors_total{engine="policy",reason="engine"} 0.0',
            "towline_turns_total 4.0",
            "towline_sampled_tokens_total 64.0",
            'towline_stage_seconds_count{stage="run"} 5.0',
            'towline_consumer_lag{consumer="quick",tenant="default",unit="session"} 2.0',
            'towline_consumer_lag{consumer="slow",tenant="default",unit="session"} 3.0',
            'towline_consumer_lag{consumer="some",tenant="default",unit="group"} 0.0',
            'towline_leases_open{consumer="slow",tenant="default",unit="session"} 1.0',
            "towline_database_up 1.0",
            "towline_queue_held 0.0",
            "towline_broken 0.0",
        ):
            assert line in text.splitlines(), (line, text)
        assert "towline_disk_free_bytes" in text


async def test_database_outage_logs_a_few_lines(
    postgres: Postgres, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However many calls and sessions fail; health and metrics report it meanwhile."""
    caplog.set_level(logging.WARNING)
    async with rig(tmp_path, postgres.database(), FakeRunner(capacity=64)) as r:
        await r.caller.submit(task("a", 64, harness_options={"seconds": 0.3}))
        await r.caller.until("/healthz", active=64)
        caplog.clear()
        await asyncio.to_thread(postgres.stop, signal.SIGQUIT)
        try:
            for _ in range(20):
                answers = await asyncio.gather(*(r.caller.call("GET", "/v1/tasks") for _ in range(10)))
                assert {answer.status for answer in answers} == {503}
            health = await r.caller.call("GET", "/healthz")
            assert (health.status, health.body["status"]) == (503, "held")
            assert "database" in health.body["reasons"][0]
            figures = await r.caller.call("GET", "/metrics")
            assert figures.status in (200, 503)
        finally:
            await asyncio.to_thread(postgres.start)
        await r.caller.take(64)
        await r.caller.until("/healthz", status="ok")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) <= 6, lines
    assert sum("the database is down" in line for line in lines) >= 1
    assert "the database is back" in lines[-1]


async def test_the_command_line(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.runner.trip("sandbox:docker", "no daemon")
        await r.caller.submit(task("a", max_attempts=2, harness_options={"fail": 9, "reason": "engine"}))
        (result,) = await r.caller.take(1)
        name = result.sessions[0].session_id
        r.runner.logs[name] = {"harness.log": b"one\n\x1b[2Jtwo\n"}

        async def run(*arguments: str) -> str:
            command = [*arguments, "--url", r.url]
            done = await asyncio.to_thread(CliRunner().invoke, towline, command, catch_exceptions=False)
            assert done.exit_code == 0, done.output
            return str(done.output)

        (line, _) = (await run("sessions", "--state", "failed")).splitlines()
        assert line.startswith(name)
        assert "engine in running" in line
        assert [one["failure"] for one in json.loads(await run("sessions", "--json"))] == ["engine"] * 2
        assert (await run("log", name, "--tail", "1")).splitlines() == ["␛[2Jtwo"]
        assert "one" in json.loads(await run("log", name, "--json"))["text"]
        assert "degraded: sandbox:docker: no daemon" in await run("status", "--once")
        assert json.loads(await run("status", "--json"))["health"]["status"] == "degraded"
        assert (await run("status", "a")).count("engine") == 2  # every attempt
