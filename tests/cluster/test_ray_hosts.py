"""The Ray provider without Ray: which nodes suit, the demand, the actor's process, and a bridge that dies."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from towline.cluster.child_hosts import HostSettings, node_settings
from towline.cluster.ray.actor import HostActor
from towline.cluster.ray.bridge import RayNode, wanted_hosts
from towline.cluster.ray.hosts import RayHosts, bridge_input
from towline.cluster.remote_node import HostAddress
from towline.config import Settings
from towline.config.cluster import RaySettings
from towline.demo import tokenizer
from towline.errors import ConfigError

BRIDGE = """
import json, os, sys
given = json.loads(sys.stdin.readline())
assert given["cluster"] == "towline"
for line in open(sys.argv[1]):
    print(line, end="", flush=True)
if os.path.exists(sys.argv[1] + ".once"):
    os.unlink(sys.argv[1] + ".once")
    os._exit(1)
for line in sys.stdin:
    with open(sys.argv[1] + ".heard", "a") as heard:
        heard.write(line)
    if "close" in line:
        break
"""


def node(**fields: Any) -> RayNode:
    return RayNode.of(
        {
            "NodeID": "0123456789abcdef",
            "NodeName": "10.0.0.1",
            "NodeManagerAddress": "10.0.0.1",
            "Resources": {"CPU": 4.0},
        }
        | fields
    )


def test_nodes_are_chosen_by_resources_labels_and_role() -> None:
    assert node().suits(RaySettings())
    assert node().name == "10.0.0.1-01234567"
    assert not node(Resources={"memory": 1.0}).suits(RaySettings()), "a head with --num-cpus=0"
    assert not node().suits(RaySettings(resources={"sandboxes": 1}))
    assert node(Resources={"sandboxes": 1}).suits(RaySettings(resources={"sandboxes": 1}))
    head = node(Resources={"CPU": 4.0, "node:__internal_head__": 1.0})
    assert head.suits(RaySettings())
    assert not head.suits(RaySettings(head=False))
    labelled = node(Labels={"pool": "cpu", "ray.io/node-id": "x"})
    assert labelled.labels == {"pool": "cpu"}
    assert labelled.suits(RaySettings(labels={"pool": "cpu"}))
    assert not node().suits(RaySettings(labels={"pool": "cpu"}))
    assert "/" not in node(NodeName="rack 1/a").name


def test_the_demand_is_for_hosts_that_there_are_and_those_that_waiting_sessions_fill() -> None:
    assert wanted_hosts(0, 4, 16) == 0
    assert wanted_hosts(1, 4, 16) == 5
    assert wanted_hosts(33, 4, 16) == 7


def test_hosts_get_absolute_paths_and_the_engines_key_and_nothing_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOWLINE_UPSTREAM_KEY", "secret")
    settings = Settings.model_validate({"model": {"folder": "model"}, "server": {"database": "postgresql://u:p@h/d"}})
    given = bridge_input(settings, Path("replies.py"))
    assert given.environment == {"TOWLINE_UPSTREAM_KEY": "secret"}
    assert "postgresql" not in given.given
    fields = json.loads(given.given)
    assert Path(fields["settings"]["model"]["folder"]).is_absolute()
    assert Path(fields["script"]).is_absolute()


def test_an_actor_starts_one_host_and_reports_its_end(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tokenizer.write(tmp_path / "model")
    settings = Settings.model_validate(
        {"engine": {"kind": "scripted"}, "model": {"folder": tmp_path / "model"}, "node": {"sandbox": "process"}}
    )
    given = HostSettings("n", node_settings(settings, Path("data")), "", None, "127.0.0.1:0").dump().decode()
    actor, other = HostActor(3600), HostActor(3600)
    try:
        status = actor.start(given, str(tmp_path / "data"), {})
        assert status["running"]
        assert status["url"].startswith("http://127.0.0.1:")
        assert actor.start(given, str(tmp_path / "data"), {}) == status
        with pytest.raises(RuntimeError, match="another node host uses"):
            other.start(given, str(tmp_path / "data"), {})
    finally:
        actor.stop(30)
    assert actor.status()["running"] is False
    assert actor.status()["code"] is not None


class Fleet:
    """Records what a provider reports."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.changed = asyncio.Event()

    def up(self, address: HostAddress) -> None:
        self.found.append(f"up {address.name} {address.url}")
        self.changed.set()

    def down(self, name: str, reason: str) -> None:
        self.found.append(f"down {name} {reason}")
        self.changed.set()


def provider(tmp_path: Path, *lines: dict[str, Any]) -> RayHosts:
    (tmp_path / "bridge.py").write_text(BRIDGE)
    (tmp_path / "lines").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RayHosts(Settings(), command=[sys.executable, str(tmp_path / "bridge.py"), str(tmp_path / "lines")])


async def test_a_bridge_that_dies_is_started_again_and_no_node_is_lost(tmp_path: Path) -> None:
    hosts, fleet = provider(tmp_path, {"up": {"name": "a", "url": "u", "token": "t", "labels": {}}}, READY), Fleet()
    (tmp_path / "lines.once").touch()
    await hosts.start(fleet.up, fleet.down)
    while len(fleet.found) < 2:
        fleet.changed.clear()
        await fleet.changed.wait()
    assert fleet.found == ["up a u", "up a u"]
    hosts.report_demand(7)
    hosts.report_demand(7)
    hosts.replace("a", "it hangs")
    await hosts.close()
    heard = [json.loads(line) for line in (tmp_path / "lines.heard").read_text().splitlines()]
    assert heard == [{"demand": 7}, {"replace": "a"}, {"close": True}]


READY = {"ready": 1, "errors": []}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"error": "no cluster there"}, "no cluster there"),
        ({"ready": 1, "errors": ["n: no model"]}, "no node host could be started: n: no model"),
    ],
)
async def test_a_cluster_that_cannot_be_used_stops_the_start(tmp_path: Path, line: dict[str, Any], reason: str) -> None:
    hosts, fleet = provider(tmp_path, line), Fleet()
    (tmp_path / "lines.once").touch()
    with pytest.raises(ConfigError, match=reason):
        await hosts.start(fleet.up, fleet.down)
    assert fleet.found == []


async def test_a_cluster_without_nodes_is_asked_for_one(tmp_path: Path) -> None:
    hosts, fleet = provider(tmp_path, {"ready": 0, "errors": []}), Fleet()
    await hosts.start(fleet.up, fleet.down)
    await hosts.close()
    heard = [json.loads(line) for line in (tmp_path / "lines.heard").read_text().splitlines()]
    assert heard == [{"demand": 1}, {"close": True}]
