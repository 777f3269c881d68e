"""What storms found in the fleet, each as a test of its own: hosts that stop, die and return at the wrong moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from support.cluster.fleet_rig import FakeHost, FakeProvider, fleet_rig
from support.server.server_rig import task
from towline.cluster.remote_node import HostAddress, NodeReports, RemoteNode
from towline.cluster.runner import NodeLost
from towline.cluster.segments import Segments
from towline.schema import EndReason, Session


async def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(6000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to hold")


async def test_a_host_that_connects_again_overwrites_no_segment(tmp_path: Path) -> None:
    async with fleet_rig(tmp_path, nodes=1) as r:
        await r.caller.submit(task("first", 2))
        results = await r.caller.take(2)
        host, before = r.provider.hosts["a"], r.fleet.remote["a"].hello
        await host.disconnect()
        await host.listen_again()
        await eventually(lambda: r.fleet.remote["a"].hello is not before and r.fleet.remote["a"].connected)
        await r.caller.submit(task("second", 4))
        results += await r.caller.take(4)
        for one in results:
            name = one.sessions[0].session_id
            assert (await r.caller.ok("GET", f"/v1/sessions/{name}/trajectory"))["session_id"] == name


@contextlib.asynccontextmanager
async def silent_listener() -> AsyncIterator[int]:
    """Accepts connections and answers nothing, as the kernel does for a stopped process."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_a_stopped_host_is_lost_in_time(tmp_path: Path) -> None:
    lost = asyncio.Event()

    async def up(node: RemoteNode) -> None:
        raise AssertionError("it cannot come up")

    reports = NodeReports(up, lambda node: None, lambda node: lost.set(), lambda *_: None, lambda *_: None)
    async with silent_listener() as port:
        address = HostAddress("a", f"http://127.0.0.1:{port}", "secret")
        node = RemoteNode(address, Segments(tmp_path), 1, reports, lost_seconds=0.2)
        calling = asyncio.create_task(node.call("status"))
        node.start()
        try:
            async with asyncio.timeout(60):
                await lost.wait()
                with pytest.raises(NodeLost, match="not reachable"):
                    await calling
        finally:
            await node.close()


async def test_a_session_that_waits_for_a_node_can_be_cancelled(tmp_path: Path) -> None:
    async with fleet_rig(tmp_path, nodes=1, capacity=1) as r:
        await r.caller.submit(task("first", 1, harness_options={"hang": True}))
        await eventually(lambda: bool(r.provider.hosts["a"].runner._active))
        (first,) = r.provider.hosts["a"].runner._active
        row = r.service.scheduler._tasks["first"]
        session = Session(session_id="late", task_id="first", created=0.0)
        waiting = asyncio.ensure_future(r.fleet.submit(row, session))
        await asyncio.sleep(0)
        r.fleet.cancel("late", EndReason.EARLY_STOP)
        r.fleet.cancel(first)
        outcome = await asyncio.wait_for(waiting, 60)
        assert outcome.session.end_reason is EndReason.EARLY_STOP


async def test_a_session_that_ended_before_its_node_died_is_no_suspect(tmp_path: Path) -> None:
    """Its end cannot be stored with the node; however often that happens, it is retried and not quarantined."""
    async with fleet_rig(tmp_path, nodes=1, quarantine_deaths=1) as r:
        for death in range(3):
            host = r.provider.hosts["a"]
            never, stored = asyncio.Event(), asyncio.Event()

            async def store(requests: Any, never: asyncio.Event = never, stored: asyncio.Event = stored) -> Any:
                stored.set()
                await never.wait()

            host.host._calls["store"] = store
            if not death:
                await r.caller.submit(task("t", 1))
            await asyncio.wait_for(stored.wait(), 60)
            await r.provider.kill("a")
            await r.provider.add("a", 4)
            if death < 2:
                # The next attempt must not be stored before it is blocked as well.
                r.provider.hosts["a"].host._calls["store"] = store
        (result,) = await r.caller.take(1)
        assert (result.sessions[0].state.value, result.sessions[0].failure) == ("done", None)


async def test_sessions_on_a_drained_node_take_no_room_from_the_others(tmp_path: Path) -> None:
    async with fleet_rig(tmp_path) as r:
        await r.caller.submit(task("hang", 8, harness_options={"hang": True}))
        await eventually(lambda: len(r.service.scheduler.active) == 8)
        await r.caller.ok("POST", "/v1/nodes/a/drain")
        for session_id in list(r.provider.hosts["b"].runner._active):
            r.fleet.cancel(session_id)
        await r.caller.submit(task("t", 2))
        done = [one for one in await r.caller.take(6) if one.task_id == "t"]
        assert len(done) == 2


async def test_a_host_answers_a_call_over_the_connection_it_came_by(tmp_path: Path) -> None:
    """A new server numbers its calls from one again: a late answer to the old one must not be taken for its own."""
    provider = FakeProvider({"a": await FakeHost.start("a", 4)})
    host, gate, called = provider.hosts["a"], asyncio.Event(), asyncio.Event()
    probe = host.host._calls["probe"]

    async def slow(**args: Any) -> Any:
        called.set()
        await gate.wait()
        return ["late"]

    async with fleet_rig(tmp_path, provider=provider) as r:
        host.host._calls["probe"] = slow
        node = r.fleet.remote["a"]
        asking = asyncio.create_task(node.call("probe"))
        await asyncio.wait_for(called.wait(), 60)
        host.host._calls["probe"] = probe
        answered: list[Any] = []
        node._received = answered.append  # type: ignore[method-assign]
        before = node.hello
        assert host.host._socket is not None
        await host.host._socket.close()
        await eventually(lambda: node.hello is not before)
        gate.set()
        await asyncio.sleep(0.05)
        assert not [one for one in answered if one.get("result") == ["late"]]
        asking.cancel()
        del node._received
    await provider.close_hosts()


async def test_a_node_that_dies_during_the_start_does_not_stop_the_server(tmp_path: Path) -> None:
    provider = FakeProvider({name: await FakeHost.start(name, 4) for name in "ab"})
    for method in ("probe", "recover"):
        host = provider.hosts.get("a") or await provider.add("a", 4)

        async def die(host: FakeHost = host, **args: Any) -> Any:
            asyncio.get_running_loop().create_task(provider.kill("a"))
            await asyncio.Event().wait()

        host.host._calls[method] = die
        async with fleet_rig(tmp_path / method, provider=provider) as r:
            await r.caller.submit(task("t", 2))
            assert len(await r.caller.take(2)) == 2
    await provider.close_hosts()


async def test_a_session_that_kills_its_host_three_times_is_quarantined_and_named(tmp_path: Path) -> None:
    async with fleet_rig(tmp_path, nodes=1) as r:
        await r.caller.submit(task("killer", 1, harness_options={"hang": True}))
        for _ in range(3):
            await eventually(lambda: len(r.provider.hosts["a"].runner._active) == 1)
            await r.provider.kill("a")
            await r.provider.add("a", 4)
        (result,) = await r.caller.take(1)
        (session,) = result.sessions
        assert (session.state.value, session.failure, session.attempt) == ("failed", "quarantined", 3)
        assert "running at 3 node deaths" in (session.error or "")
        # The node works for the others.
        await r.caller.submit(task("good", 2))
        assert [one.sessions[0].state.value for one in await r.caller.take(2)] == ["done", "done"]
