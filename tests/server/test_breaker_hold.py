"""Circuit breakers: while the engine or the default sandbox is down, the queue is held and nothing is lost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from support.server.server_rig import Rig, rig, task
from towline.benchmarks.fake_runner import FakeRunner
from towline.client import AsyncClient


async def events(r: Rig, kind: str) -> list[dict[str, Any]]:
    text = (await r.caller.call("GET", "/v1/events", headers={"last-event-id": "0"}, idle=0)).body.decode()
    found = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    return [one["body"] for one in found if one["kind"] == kind]


async def test_an_outage_loses_no_task(database: str, tmp_path: Path) -> None:
    """Sixty tasks, six outages, default attempts: running sessions fail at no cost, waiting ones keep waiting."""
    async with rig(tmp_path, database, FakeRunner(capacity=8)) as r:
        r.runner.hold = True
        await r.caller.submit(*(task(f"t{number}") for number in range(60)))
        for outage in range(6):
            await r.caller.until("/healthz", active=8)
            started = len(r.runner.started)
            r.runner.trip("engine:policy", f"502 Bad Gateway\nfrom outage {outage}")
            r.runner.release()
            for _ in range(2000):
                health = await r.caller.call("GET", "/healthz")
                if not health.body["active"]:
                    break
                await asyncio.sleep(0.01)
            assert (health.status, health.body["status"]) == (503, "held")
            assert health.body["reasons"] == [f"engine:policy: 502 Bad Gateway from outage {outage}"]
            assert (await r.caller.call("GET", "/livez")).status == 200  # a restart would not help
            assert len(r.runner.started) == started  # nothing is claimed from the queue
            figures = (await r.caller.ok("GET", "/metrics")).decode()
            assert 'towline_breaker_open{component="engine:policy"} 1.0' in figures
            assert "towline_queue_held 1.0" in figures
            async with AsyncClient(r.url) as client:
                assert (await client.health())["status"] == "held"  # told at once, not after the client's patience
            r.runner.hold = outage < 5
            r.runner.trip("engine:policy")
            if outage < 5:
                await r.caller.until("/healthz", status="ok")
        results = [one.sessions[0] for one in await r.caller.take(60)]
        assert {one.state.value for one in results} == {"done"}
        assert max(one.attempt for one in results) > 3
        assert (await r.caller.call("GET", "/healthz")).status == 200
        figures = (await r.caller.ok("GET", "/metrics")).decode()
        assert 'towline_sessions_failed_total{reason="engine",stage="running"} 48.0' in figures
        assert 'towline_sessions_retried_total{reason="engine"} 48.0' in figures
        assert 'towline_breaker_openings{component="engine:policy"} 6.0' in figures
        assert [one["open"] for one in await events(r, "breaker")] == [True, False] * 6
        failed = await r.caller.ok("GET", "/v1/sessions", state="failed", reason="engine", limit=1000)
        assert len(failed) == 48


async def test_breaker_of_a_rare_component_holds_only_its_sessions(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.runner.trip("sandbox:docker", "the daemon does not answer")
        health = await r.caller.call("GET", "/healthz")
        assert (health.status, health.body["status"]) == (200, "degraded")
        assert health.body["reasons"] == ["sandbox:docker: the daemon does not answer"]
        await r.caller.submit(task("a"))
        await r.caller.take(1)


async def test_outage_caused_by_a_session_ends(tmp_path: Path) -> None:
    """A session that causes an outage whenever it runs is not retried forever."""
    async with rig(tmp_path) as r:
        await r.caller.submit(task("bad", harness_options={"outage": True}))
        (result,) = await r.caller.take(1)
        session = result.sessions[0]
        assert (session.state.value, session.failure, session.attempt) == ("failed", "engine", 53)
