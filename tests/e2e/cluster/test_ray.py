"""`towline serve` on a real Ray cluster of four nodes: sessions on all of them, and faults of nodes, links and the server."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from support.cluster.ray_rig import RayRig, ray_rig, task
from towline import Client
from towline.schema import SessionState

pytestmark = pytest.mark.timeout(900)

NODES = 4


@pytest.fixture(scope="module")
def rig() -> Iterator[RayRig]:
    with ray_rig(NODES) as cluster:
        yield cluster


@pytest.fixture
def client(rig: RayRig) -> Iterator[Client]:
    """A running server with all nodes; it is ended as Ctrl-C does."""
    for node in range(1, NODES):
        if node not in rig.nodes:
            rig.start_node(node)
    rig.serve()
    client = Client(rig.url)
    rig.until("all nodes are connected", lambda: len(connected(client)) == NODES)
    try:
        yield client
    finally:
        if rig.serving:
            rig.stop_server()


def connected(client: Client) -> dict[str, dict[str, Any]]:
    """The nodes by their names in the rig."""
    return {one["name"].partition("-")[0]: one for one in client.nodes() if one["connected"]}


def running(client: Client) -> Counter[str]:
    """How many sessions each node runs."""
    return Counter({name: len(one["sessions"]) for name, one in connected(client).items()})


def sessions(client: Client, task_id: str) -> list[Any]:
    return list(client.task(task_id).attempts or client.task(task_id).sessions)


def finish(rig: RayRig, client: Client, task_id: str, count: int) -> None:
    """Wait for a task; every sample has one result, and its trajectory is in the store."""
    rig.until(f"{task_id} is done", lambda: client.task(task_id).finished == count)
    status = rig.call(lambda: client.task(task_id))
    assert status.usable == count
    done = [one for one in rig.call(lambda: sessions(client, task_id)) if one.state is SessionState.DONE]
    assert sorted(one.sample for one in done) == list(range(count))
    for one in done:
        assert len(rig.call(partial(client.trajectory, one.session_id)).turns) >= 1


def spread(rig: RayRig, client: Client, task_id: str, *, seconds: float, count: int = 16) -> Counter[str]:
    """Submit sessions that wait, one task each, and return how many run on which node."""
    rig.call(lambda: client.submit([task(task_id, seconds=seconds, samples=count)]))
    return rig.until("all run", lambda: (found := running(client)) and sum(found.values()) == count and found)


def test_sessions_run_on_every_node_and_their_results_arrive(rig: RayRig, client: Client) -> None:
    where = spread(rig, client, "all", seconds=3, count=24)
    assert set(where) == {f"node{number}" for number in range(NODES)}
    finish(rig, client, "all", 24)


def test_sessions_of_a_node_that_dies_finish_elsewhere(rig: RayRig, client: Client) -> None:
    where = spread(rig, client, "death", seconds=6, count=24)
    assert where["node3"]
    rig.kill_node(3)
    finish(rig, client, "death", 24)
    states = Counter(one.state for one in rig.call(lambda: sessions(client, "death")))
    assert states[SessionState.LOST] == where["node3"]
    # A machine that comes back gets a host, and sessions.
    rig.start_node(3)
    rig.until("the node is back", lambda: "node3" in connected(client))


def test_a_killed_server_finds_its_hosts_again_and_adopts_their_sessions(rig: RayRig, client: Client) -> None:
    spread(rig, client, "adopted", seconds=45)
    before = rig.call(lambda: {name: one["pid"] for name, one in connected(client).items()})
    rig.kill_server()
    rig.serve()
    rig.until("all nodes are connected", lambda: len(connected(client)) == NODES)
    assert rig.call(lambda: {name: one["pid"] for name, one in connected(client).items()}) == before
    finish(rig, client, "adopted", 16)
    assert {one.state for one in rig.call(lambda: sessions(client, "adopted"))} == {SessionState.DONE}


def test_a_cut_link_gives_up_sessions_and_a_healed_one_drops_them(rig: RayRig, client: Client) -> None:
    where = spread(rig, client, "cut", seconds=20, count=24)
    pid = rig.call(lambda: connected(client)["node2"]["pid"])
    rig.cut(2)
    try:
        rig.until("the node is given up", lambda: "node2" not in connected(client) and lost(client, "cut"))
    finally:
        rig.heal(2)
    rig.until("the node is back", lambda: "node2" in connected(client))
    finish(rig, client, "cut", 24)
    found = rig.call(lambda: sessions(client, "cut"))
    assert sum(one.state is SessionState.LOST for one in found) == where["node2"]
    if rig.call(lambda: connected(client)["node2"]["pid"]) == pid:
        rig.until("what was given up is dropped", lambda: running(client)["node2"] == 0)


def lost(client: Client, task_id: str) -> int:
    return sum(one.state is SessionState.LOST for one in sessions(client, task_id))


ENGINE = """
import ray

@ray.remote(num_cpus=0)
class Engine:
    def urls(self):
        return ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]

ray.init(address="auto", namespace="towline")
engine = Engine.options(name="replicas", lifetime="detached").remote()
print(ray.get(engine.urls.remote()))
"""


def test_engine_replicas_are_found_by_the_name_of_their_actor(rig: RayRig) -> None:
    rig.run_on_head("-c", ENGINE)
    found = rig.run_on_head("-m", "towline.cluster.ray.bridge", "auto", "towline", "replicas")
    assert json.loads(found) == {"urls": {"replicas": ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]}}
    missing = rig.run_on_head("-m", "towline.cluster.ray.bridge", "auto", "towline", "nobody")
    assert "nobody" in json.loads(missing)["error"]


def test_a_server_can_be_a_client_of_the_cluster_and_choose_its_nodes(rig: RayRig) -> None:
    for node in range(1, NODES):
        if node not in rig.nodes:
            rig.start_node(node)
    address = f"ray://{rig.address(0)}:10001"
    rig.serve(cluster=address, TOWLINE_CLUSTER__RAY__LABELS='{"number": "n1"}')
    try:
        client = Client(rig.url)
        assert set(rig.call(lambda: connected(client))) == {"node1"}
        rig.call(lambda: client.submit([task("client", samples=4)]))
        finish(rig, client, "client", 4)
    finally:
        assert rig.stop_server() == 0


@pytest.mark.parametrize("grouped", [True, False], ids=["samples of one task", "a task per session"])
def test_throughput_of_four_nodes(rig: RayRig, client: Client, grouped: bool) -> None:
    """Sessions that mostly wait for the engine, as many per node: printed, and far more than one node does."""
    others = [one["name"] for name, one in rig.call(lambda: connected(client)).items() if name != "node0"]
    for name in others:
        rig.call(partial(client.drain_node, name))
    single = rate(rig, client, 16, grouped=grouped)
    for name in others:
        rig.call(partial(client.undrain_node, name))
    all_nodes = rate(rig, client, 16 * NODES, grouped=grouped)
    print(f"\nsessions per second: 1 node {single:.3f}, {NODES} nodes {all_nodes:.3f}, ratio {all_nodes / single:.2f}")
    assert all_nodes > 3 * single


def rate(rig: RayRig, client: Client, count: int, *, grouped: bool) -> float:
    """Sessions per second, of sessions that wait a minute for four replies: nodes share the cores of one machine."""
    name = f"rate{count}-{'group' if grouped else 'single'}"
    tasks = 1 if grouped else count
    submitted = [task(f"{name}-{one}", seconds=15, turns=4, samples=count // tasks) for one in range(tasks)]
    began = time.monotonic()
    rig.call(lambda: client.submit(submitted))
    rig.until(
        "all are done",
        lambda: sum(one.finished for one in client.tasks() if one.task_id.startswith(f"{name}-")) == count,
        seconds=600,
    )
    return count / (time.monotonic() - began)
