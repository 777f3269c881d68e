"""The fleet over real WebSockets: placement, lost and returning nodes, one policy, storing through the node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.cluster.fleet_rig import FakeHost, FakeProvider, FleetRig, fleet_rig
from support.server.server_rig import task
from towline.errors import ConfigError


async def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(6000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to hold")


def sessions_on(r: FleetRig) -> dict[str, int]:
    return {name: len(host.runner._active) for name, host in r.provider.hosts.items()}


async def hanging(r: FleetRig, count: int, **fields: Any) -> None:
    """Submit sessions that run until they are cancelled, or for one attempt only with `hang=1`."""
    await r.caller.submit(task("hang", count, harness_options={"hang": fields.pop("hang", True)}, **fields))
    await eventually(lambda: sum(sessions_on(r).values()) == count)


async def test_sessions_spread_over_the_nodes_and_their_trajectories_are_stored_there(tmp_path: Path) -> None:
    async with fleet_rig(tmp_path) as r:
        await r.caller.submit(task("t", 6, harness_options={"seconds": 0.05}))
        results = await r.caller.take(6)
        names = [one.sessions[0].session_id for one in results]
        found = [await r.caller.ok("GET", f"/v1/sessions/{name}") for name in names]
        assert {one["node"] for one in found} == {"a", "b"}
        for name in names:
            assert (await r.caller.ok("GET", f"/v1/sessions/{name}/trajectory"))["session_id"] == name
        await r.caller.ack(*results)
        files = await asyncio.to_thread(lambda: list(tmp_path.rglob("*.arrow")))
        writers = {path.relative_to(tmp_path / "segments").parts[2][:2] for path in files}
        assert writers == {"a-", "b-"}
        listed = await r.caller.ok("GET", "/v1/nodes")
        assert [(one["name"], one["connected"], one["capacity"]) for one in listed] == [("a", True, 4), ("b", True, 4)]


async def test_the_death_of_a_node_loses_its_own_sessions_only(tmp_path: Path) -> None:
    async with fleet_rig(tmp_path, capacity=8) as r:
        await hanging(r, 6, hang=1)
        on_b = set(r.provider.hosts["b"].runner._active)
        await r.provider.kill("a")
        results = await r.caller.take(6 - len(on_b))
        # The lost samples ran again, as a second attempt, on the node that is left.
        assert {one.sessions[0].attempt for one in results} == {2}
        assert set(r.provider.hosts["b"].runner._active) == on_b
        health = await r.caller.call("GET", "/healthz")
        assert (health.status, health.body["status"]) == (200, "ok")


async def test_without_nodes_the_queue_is_held_and_the_api_answers(tmp_path: Path) -> None:
    async with fleet_rig(tmp_path, nodes=1) as r:
        await r.provider.kill("a")
        await r.caller.submit(task("t", 2))
        health = await r.caller.call("GET", "/healthz")
        assert (health.status, health.body["status"], health.body["reasons"]) == (
            503,
            "held",
            ["nodes: no node is connected"],
        )
        await r.provider.add("a", 4)
        assert len(await r.caller.take(2)) == 2
        assert (await r.caller.call("GET", "/healthz")).status == 200


async def test_a_broken_connection_is_not_a_dead_node(tmp_path: Path) -> None:
    async with fleet_rig(tmp_path, nodes=1) as r:
        host = r.provider.hosts["a"]
        host.runner.hold = True
        await r.caller.submit(task("t", 2))
        await eventually(lambda: len(host.runner._active) == 2)
        await host.disconnect()
        await eventually(lambda: not r.fleet.remote["a"].connected)
        host.runner.release()  # they end while the server cannot hear of it
        await eventually(lambda: not host.runner._active)
        await host.listen_again()
        results = await r.caller.take(2)
        assert {one.sessions[0].attempt for one in results} == {1}
        assert len(host.runner.started) == 2


async def test_a_node_that_returns_after_it_was_given_up_drops_its_sessions(tmp_path: Path) -> None:
    async with fleet_rig(tmp_path, lost_seconds=0.3) as r:
        await hanging(r, 4, hang=1)
        host = r.provider.hosts["a"]
        stale = set(host.runner._active)
        assert stale
        await host.disconnect()
        results = await r.caller.take(len(stale))
        assert {one.sessions[0].attempt for one in results} == {2}
        assert r.provider.replaced == ["a"]
        await host.listen_again()
        await eventually(lambda: r.fleet.remote["a"].connected)
        assert not stale & set(host.runner._active)
        assert not host.host._outcomes


async def test_a_drained_node_gets_no_sessions(tmp_path: Path) -> None:
    async with fleet_rig(tmp_path) as r:
        listed = await r.caller.ok("POST", "/v1/nodes/a/drain")
        assert [one["unusable"] for one in listed] == ["drained", ""]
        await r.caller.submit(task("t", 8))
        await r.caller.take(8)
        assert r.provider.hosts["a"].runner.started == []
        await r.caller.ok("POST", "/v1/nodes/a/undrain")
        await r.caller.submit(task("u", 8, harness_options={"seconds": 0.05}))
        await r.caller.take(8)
        assert r.provider.hosts["a"].runner.started
        assert (await r.caller.call("POST", "/v1/nodes/z/drain")).status == 404


async def test_a_node_with_an_open_breaker_gets_no_sessions_and_the_queue_goes_on(tmp_path: Path) -> None:
    async with fleet_rig(tmp_path) as r:
        r.provider.hosts["a"].runner.trip("engine:policy", "down")
        await eventually(lambda: bool(r.fleet.placement.unusable("a")))
        assert (await r.caller.call("GET", "/healthz")).body["status"] == "ok"
        await r.caller.submit(task("t", 4))
        await r.caller.take(4)
        assert r.provider.hosts["a"].runner.started == []
        r.provider.hosts["b"].runner.trip("engine:policy", "down too")
        await eventually(lambda: bool(r.fleet.placement.unusable("b")))
        assert (await r.caller.call("GET", "/healthz")).body["status"] == "held"
        for host in r.provider.hosts.values():
            host.runner.trip("engine:policy")
        await eventually(lambda: r.fleet.room == 8)


async def test_a_node_that_joins_gets_the_policy_first(tmp_path: Path) -> None:
    weights = tmp_path / "v3"
    weights.mkdir()
    (weights / "weights").touch()
    async with fleet_rig(tmp_path / "data", nodes=1) as r:
        await r.caller.ok("POST", "/v1/policy/weights", {"folder": str(weights), "version": 3})
        await r.caller.ok("POST", "/v1/policy/pause", {"mode": "abort"})
        late = await r.provider.add("b", 4)
        await eventually(lambda: r.fleet.remote["b"].connected)
        assert (late.runner.version, late.runner.paused) == (3, True)
        await r.caller.ok("POST", "/v1/policy/resume", {"version": 4})
        assert {host.runner.version for host in r.provider.hosts.values()} == {4}
        assert not any(host.runner.paused for host in r.provider.hosts.values())


async def test_a_shared_engine_is_updated_once_while_the_others_pause(tmp_path: Path) -> None:
    weights = tmp_path / "v2"
    weights.mkdir()
    (weights / "weights").touch()
    calls: list[str] = []
    async with fleet_rig(tmp_path / "data", shared_engine=True) as r:
        for name, host in r.provider.hosts.items():
            for method in ("pause", "resume", "update_weights"):
                inner = host.host._calls[method]

                async def recorded(inner: Any = inner, what: str = f"{name}.{method}", **args: Any) -> Any:
                    calls.append(what)
                    return await inner(**args)

                host.host._calls[method] = recorded
        await r.caller.ok("POST", "/v1/policy/weights", {"folder": str(weights), "version": 2})
        assert calls == ["b.pause", "a.update_weights", "b.resume"]
        assert {host.runner.version for host in r.provider.hosts.values()} == {2}


async def test_a_restarted_server_adopts_what_still_runs(tmp_path: Path) -> None:
    provider = FakeProvider({name: await FakeHost.start(name, 4) for name in "ab"})
    async with fleet_rig(tmp_path, provider=provider) as r:
        for host in provider.hosts.values():
            host.runner.hold = True
        await r.caller.submit(task("t", 4))
        await eventually(lambda: sum(sessions_on(r).values()) == 4)
        await eventually(lambda: all(one.connected for one in r.fleet.remote.values()))
        await abandon(r)
    async with fleet_rig(tmp_path, provider=provider) as r:
        assert sum(sessions_on(r).values()) == 4
        for host in provider.hosts.values():
            host.runner.release()
        results = await r.caller.take(4)
        assert {one.sessions[0].attempt for one in results} == {1}
        assert sum(len(host.runner.started) for host in provider.hosts.values()) == 4
        for one in results:
            await r.caller.ok("GET", f"/v1/sessions/{one.sessions[0].session_id}/trajectory")
    await provider.close_hosts()


async def abandon(r: FleetRig) -> None:
    """Let the server go without a word to its nodes, as a crash does."""
    for loop in r.service.scheduler._loops:
        loop.cancel()
    for active in list(r.service.scheduler.active.values()):
        active.cancel()
    r.service.scheduler.active.clear()
    for node in r.fleet.remote.values():
        node._sessions.clear()


async def test_an_earlier_server_cannot_drive_a_host_that_a_later_one_has(tmp_path: Path) -> None:
    async with fleet_rig(tmp_path, nodes=1) as r:
        host = r.provider.hosts["a"]
        url = f"http://127.0.0.1:{host.port}/host"
        async with aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await http.ws_connect(url, headers={"Authorization": "Bearer wrong"})
            async with http.ws_connect(url, headers={"Authorization": "Bearer secret"}) as stale:
                await stale.send_bytes(b'{"epoch": 0, "store": "s", "run": "r", "segments": "/nowhere"}')
                assert b"refused" in await stale.receive_bytes()
        assert r.fleet.remote["a"].connected
        await r.caller.submit(task("t", 1))
        await r.caller.take(1)


async def test_a_session_that_ended_while_no_server_ran_is_adopted(tmp_path: Path) -> None:
    provider = FakeProvider({"a": await FakeHost.start("a", 4)})
    async with fleet_rig(tmp_path, provider=provider) as r:
        host = provider.hosts["a"]
        host.runner.hold = True
        await r.caller.submit(task("t", 2))
        await eventually(lambda: sum(sessions_on(r).values()) == 2)
        await abandon(r)
    host.runner.release()
    await eventually(lambda: len(host.host._outcomes) == 2)
    async with fleet_rig(tmp_path, provider=provider) as r:
        results = await r.caller.take(2)
        assert {one.sessions[0].attempt for one in results} == {1}
        assert len(host.runner.started) == 2
        await eventually(lambda: not host.host._outcomes)
    await provider.close_hosts()


async def test_a_connection_that_is_made_again_overwrites_no_segment(tmp_path: Path) -> None:
    async with fleet_rig(tmp_path, nodes=1) as r:
        names = []
        for number in range(3):
            await r.caller.submit(task(f"t{number}", 1))
            (result,) = await r.caller.take(1)
            names.append(result.sessions[0].session_id)
            await r.caller.ack(result)
            host = r.provider.hosts["a"]
            await host.disconnect()
            await eventually(lambda: not r.fleet.remote["a"].connected)
            await host.listen_again()
            await eventually(lambda: r.fleet.remote["a"].connected)
        for name in names:
            assert (await r.caller.ok("GET", f"/v1/sessions/{name}/trajectory"))["session_id"] == name


async def test_a_host_that_does_not_see_the_stored_trajectories_refuses(tmp_path: Path) -> None:
    provider = FakeProvider({"a": await FakeHost.start("a", 4)})

    async def unseen(store: str) -> bool:
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("towline.cluster.node_host.Segments.marked", lambda self, store: unseen(store))
        with pytest.raises(ConfigError, match=r"server\.segments"):
            async with fleet_rig(tmp_path / "unseen", provider=provider):
                pass
    await provider.close_hosts()


async def test_a_node_that_joins_prepares_the_tasks_that_run(tmp_path: Path) -> None:
    async with fleet_rig(tmp_path, nodes=1) as r:
        await hanging(r, 2)
        joined = await r.provider.add("z", 4)
        await eventually(lambda: r.fleet.remote["z"].connected)
        assert joined.runner.prefetched == ["hang"]
        await joined.disconnect()
        await eventually(lambda: not r.fleet.remote["z"].connected)
        await joined.listen_again()
        await eventually(lambda: r.fleet.remote["z"].connected)
        assert joined.runner.prefetched == ["hang"], "once per process"


async def test_waiting_sessions_are_reported_as_demand(tmp_path: Path) -> None:
    async with fleet_rig(tmp_path, nodes=1, capacity=2) as r:
        await hanging_at_most(r, 5, running=2)
        r.fleet._reported_demand = 0.0
        r.fleet.report_demand(3)
        assert r.provider.demand[-1] == 3
        r.fleet.report_demand(9)
        assert r.provider.demand[-1] == 3, "at most once in a few seconds"


async def hanging_at_most(r: FleetRig, count: int, *, running: int) -> None:
    await r.caller.submit(task("hang", count, harness_options={"hang": True}))
    await eventually(lambda: sum(sessions_on(r).values()) == running)
