"""`towline nodes` and the client's own calls, against a server with two node hosts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from support.cluster.fleet_rig import fleet_rig
from towline.cli import app
from towline.client import AsyncClient


async def towline(*words: str) -> Any:
    return await asyncio.to_thread(CliRunner().invoke, app, list(words))


def states(nodes: list[dict[str, Any]]) -> dict[str, str]:
    return {one["name"]: one["unusable"] for one in nodes}


async def test_nodes_are_listed_drained_and_undrained(tmp_path: Path) -> None:
    async with fleet_rig(tmp_path) as r:
        url = str(r.caller.web._base_url).rstrip("/")
        listed = (await towline("nodes", "--url", url)).stdout
        assert [line.split()[0] for line in listed.splitlines()] == ["node", "a", "b"]
        drained = await towline("nodes", "drain", "a", "--url", url, "--json")
        assert states(json.loads(drained.stdout)) == {"a": "drained", "b": ""}
        assert "drained" in (await towline("nodes", "--url", url)).stdout
        async with AsyncClient(url) as client:
            assert states(await client.undrain_node("a")) == {"a": "", "b": ""}
            assert states(await client.drain_node("b")) == {"a": "", "b": "drained"}
        undrained = await towline("nodes", "undrain", "b", "--url", url, "--json")
        assert states(json.loads(undrained.stdout)) == {"a": "", "b": ""}
        missing = await towline("nodes", "drain", "nowhere", "--url", url)
        assert missing.exit_code != 0
        assert "nowhere" in str(missing.exception)
