"""The door of a sandbox: it leads to the model of its own session, and to nothing else of the gateway.

Each attempt is shown to succeed where the guard is missing: from a place with an open network, at the gateway's ordinary
listeners.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.node.node_rig import running_node
from towline.gateway.gateway import OpenedSession
from towline.gateway.server import RunningGateway
from towline.sandboxes.base import GATEWAY_PORT, Sandbox, SandboxSpec, execute
from towline.schema import Network, SandboxKind
from towline.tokens.loading import load_codec

PROBE = """
import json, sys, urllib.error, urllib.request
url, key, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode() or None, {"Authorization": "Bearer " + key})
try:
    print(urllib.request.urlopen(request, timeout=20).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError as error:
    print("unreachable")
"""
CHAT = json.dumps({"model": "any", "messages": [{"role": "user", "content": "hello"}]})


@dataclass
class House:
    running: RunningGateway
    mine: OpenedSession
    other: OpenedSession
    inside: Sandbox
    """With a door to the session `mine`."""
    outside: Sandbox
    """With an open network."""

    async def ask(self, sandbox: Sandbox, url: str, key: str, body: str = "") -> str:
        done = await execute(sandbox, ["python3", "-c", PROBE, url, key, body], seconds=60)
        assert done.ok, done.text
        return done.stdout.decode().strip()


@pytest.fixture
async def house(assets: Path, tmp_path: Path) -> AsyncIterator[House]:
    codec = load_codec(assets / "tokenizers" / "qwen3")
    async with running_node(codec, tmp_path) as rig:
        running = rig.node._pipeline._stages._runner.running
        runtime, _ = await rig.node._runtimes.get(SandboxKind.BUBBLEWRAP)
        mine, other = await rig.gateway.create({}), await rig.gateway.create({})
        inside = await runtime.create(SandboxSpec(network=Network.GATEWAY))
        outside = await runtime.create(SandboxSpec(network=Network.OPEN))
        assert inside.listener is not None
        door = await running.serve_session(inside.listener, mine.session.id)
        try:
            yield House(running, mine, other, inside, outside)
        finally:
            await door.close()
            await inside.destroy()
            await outside.destroy()


async def test_a_session_reaches_its_model_and_no_other_session(house: House) -> None:
    door = f"http://127.0.0.1:{GATEWAY_PORT}/v1/chat/completions"
    assert await house.ask(house.inside, door, house.mine.key, CHAT) == "200"
    assert await house.ask(house.inside, door, house.other.key, CHAT) == "401"
    # The same key at the common listener, without the door's guard.
    common = f"{house.running.base_url}/v1/chat/completions"
    assert await house.ask(house.outside, common, house.other.key, CHAT) == "200"
    assert await house.ask(house.inside, common, house.other.key, CHAT) == "unreachable"


async def test_control_routes_are_not_behind_the_door(house: House) -> None:
    for path in ("/v1/sessions", "/v1/policy", f"/v1/sessions/{house.other.session.id}/trajectory"):
        assert await house.ask(house.outside, house.running.control_url + path, house.running.control_key) == "200"
        assert (
            await house.ask(house.inside, house.running.control_url + path, house.running.control_key) == "unreachable"
        )
        door = f"http://127.0.0.1:{GATEWAY_PORT}{path}"
        assert await house.ask(house.inside, door, house.running.control_key) in ("401", "404")
        assert await house.ask(house.inside, door, house.mine.key) == "404"
