"""Child hosts: their place among the processes of the machine, and deaths during the first start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from towline.cli import terminal
from towline.cluster import child_hosts
from towline.cluster.child_hosts import ChildHosts, HostKilled, local_places
from towline.cluster.remote_node import HostAddress
from towline.config import Settings
from towline.errors import ConfigError

HOST = """
import json, os, pathlib, signal, sys

sys.stdin.readline()
left = pathlib.Path(sys.argv[1])
kills = int(left.read_text())
if kills > 0:
    left.write_text(str(kills - 1))
    os.kill(os.getpid(), signal.SIGKILL)
if kills < 0:
    print(json.dumps({"error": "no such model"}), flush=True)
    raise SystemExit(1)
print(json.dumps({"url": f"http://host/{os.getpid()}"}), flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=[0])
def kills(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many starts of the host end by SIGKILL; -1: it rejects its settings."""
    left = tmp_path / "kills"
    left.write_text(str(request.param))
    monkeypatch.setattr(child_hosts, "host_command", lambda: [sys.executable, "-c", HOST, str(left)])
    monkeypatch.setattr(child_hosts, "_FIRST_PAUSE", 0.01)


async def started(tmp_path: Path) -> tuple[ChildHosts, list[HostAddress]]:
    hosts, found = ChildHosts(Settings(), local_places(tmp_path / "data", 1)), list[HostAddress]()
    await hosts.start(found.append, lambda name, reason: None)
    return hosts, found


@pytest.mark.usefixtures("kills")
def test_a_host_has_the_session_of_its_server_and_a_group_of_its_own(tmp_path: Path) -> None:
    """In one session their nice values are compared; in one process group, Ctrl-C would reach the host."""

    async def check() -> None:
        hosts, (found,) = await started(tmp_path)
        pid = int(found.url.rpartition("/")[2])
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) == pid
        await hosts.close()

    terminal.run_async(check())  # the event loop of `towline serve`


@pytest.mark.usefixtures("kills")
@pytest.mark.parametrize("kills", [2], indirect=True)
async def test_a_host_that_is_killed_during_its_first_start_is_started_again(tmp_path: Path) -> None:
    hosts, found = await started(tmp_path)
    assert [one.name for one in found] == ["local"]
    await hosts.close()


@pytest.mark.usefixtures("kills")
@pytest.mark.parametrize("kills", [100], indirect=True)
async def test_a_host_that_never_survives_its_start_stops_the_server(tmp_path: Path) -> None:
    with pytest.raises(HostKilled, match="node host local was killed by SIGKILL while it started"):
        await started(tmp_path)


@pytest.mark.usefixtures("kills")
@pytest.mark.parametrize("kills", [-1], indirect=True)
async def test_a_host_that_rejects_its_settings_is_not_started_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such model"):
        await started(tmp_path)
