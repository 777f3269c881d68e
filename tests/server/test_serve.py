"""`towline serve` as a user starts it: real gateway, node, sandboxes and harness; only the model is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.server.server_rig import Caller, admin_key
from towline.schema import Trajectory

PROGRAM = Path(__file__).parents[1] / "support" / "node" / "program"
_PATIENCE = 120


class Served:
    """A `towline serve` process."""

    def __init__(self, data: Path, model: Path, **env: str):
        self.log = data.with_suffix(f".{secrets.token_hex(3)}.log")
        command = [sys.executable, "-c", "from towline.cli.serve.command import app; app()"]
        options = ["--port", "0", "--data", str(data), "--engine", "scripted", "--model", str(model), "--json"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen([*command, *options], stdout=log, stderr=log, env=os.environ | env)

    async def listening(self) -> str:
        """The URL; empty if the server died first."""
        for _ in range(_PATIENCE * 20):
            for line in self.log.read_text().splitlines():
                if line.startswith('{"url"'):
                    return str(json.loads(line)["url"])
            if self._process.poll() is not None:
                return ""
            await asyncio.sleep(0.05)
        raise AssertionError(self.log.read_text())

    async def ended(self, how: signal.Signals | None = None) -> int:
        """Wait for its end, after sending a signal if one is given; returns the exit code."""
        if how is not None:
            self._process.send_signal(how)
        return await asyncio.to_thread(self._process.wait, _PATIENCE)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(_PATIENCE)


@contextlib.asynccontextmanager
async def served(data: Path, model: Path, **env: str) -> AsyncIterator[tuple[Served, Caller]]:
    process = Served(data, model, **env)
    try:
        url = await process.listening()
        assert url, process.log.read_text()
        async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=_PATIENCE)) as web:
            yield process, Caller(web, admin_key(data))
    finally:
        process.close()


@pytest.fixture(scope="module")
def model(assets: Path) -> Path:
    return assets / "tokenizers" / "qwen3"


def work(task_id: str, behaviour: str, mark: str = "", **fields: Any) -> dict[str, Any]:
    command = f"python3 {{program}}/agent.py {behaviour} {mark}"
    options = {"command": command, "folder": str(PROGRAM)}
    return {
        "task_id": task_id,
        "instruction": "Say hello.",
        "harness": "shell",
        "harness_options": options,
        "evaluator": {"kind": "completed"},
        **fields,
    }


def processes(mark: str) -> list[int]:
    """Processes whose command line contains the mark."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in Path("/proc", entry, "cmdline").read_bytes():
                    found.append(int(entry))
    return found


async def test_a_service_from_start_to_stop(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with served(data, model) as (process, caller):
        await caller.submit(work("org/first", "work", num_samples=3))
        (group,) = await caller.take(1, unit="group")
        assert [(one.reward, one.lowest_version) for one in group.sessions] == [(1.0, 0)] * 3
        await caller.ok("POST", "/v1/policy/pause", {"mode": "drain", "deadline": 5})
        await caller.submit(work("second", "work"))
        assert await caller.ok("POST", "/v1/policy/resume", {"version": 3}) == {"version": 3, "paused": False}
        (second,) = await caller.take(1, unit="group")
        found = Trajectory.model_validate(
            await caller.ok("GET", f"/v1/sessions/{second.sessions[0].session_id}/trajectory")
        )
        assert found.turns
        assert {int(version) for turn in found.turns for version in turn.versions} == {3}
        assert found.reward is not None
        assert found.reward.score == 1.0
        for wrong, field in (
            ({"harness": "nobody"}, "harness"),
            ({"harness_options": {"comand": "true"}}, "harness_options"),
            ({"evaluator": {"kind": "magic"}}, "evaluator.kind"),
            ({"settings": {"sampling": {"temperature": -1}}}, "settings.sampling.temperature"),
            ({"environment": {"files": [{"target": "/x", "source": "/nowhere"}]}}, "environment.files[0].source"),
        ):
            answer = await caller.call("POST", "/v1/tasks", work("wrong", "work") | wrong)
            assert (answer.status, answer.body["field"]) == (422, field), answer
        (node,) = await caller.ok("GET", "/v1/nodes")
        assert (node["active"], node["engine"], node["version"]) == (0, "scripted", 3)
        assert list((data / "trajectories").iterdir()) == []  # they are segments now
        made = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", "from towline.cli.serve.command import app; app()", "keys", "create", "--role", "admin", "--data", data],
            capture_output=True, text=True, check=True, timeout=_PATIENCE,
        )  # fmt: skip
        key = made.stdout.strip()
        assert key.startswith("tlk-")
        assert (await Caller(caller.web).call("GET", "/v1/tasks")).status == 401
        keyed = Caller(caller.web, key)
        assert len(await keyed.ok("GET", "/v1/tasks")) == 2
        hung = work("hung", "hang", max_attempts=1)
        await keyed.submit(hung)
        await keyed.until("/v1/tasks/hung", state="running")
        assert await process.ended(signal.SIGTERM) == 0
        assert key not in process.log.read_text()


async def test_missing_sandbox_holds_the_queue_until_it_is_installed(model: Path, tmp_path: Path) -> None:
    """`serve` reports what is missing; waiting tasks are kept; tasks that name the missing runtime are rejected."""
    programs = tmp_path / "bin"
    programs.mkdir()
    logs = {"TOWLINE_LOG__FORMAT": "json"}
    async with served(tmp_path / "data", model, PATH=str(programs), DOCKER_HOST="unix:///nowhere", **logs) as (
        process,
        caller,
    ):
        (said,) = [line for line in process.log.read_text().splitlines() if line.startswith('{"url"')]
        (problem,) = json.loads(said)["problems"]
        assert problem.startswith("sandbox:bubblewrap: bubblewrap is not installed: install the package `bubblewrap`")
        await caller.submit(work("waits", "work", max_attempts=1))
        health = await caller.call("GET", "/healthz")
        assert (health.status, health.body["status"], health.body["reasons"]) == (503, "held", [problem])
        assert (health.body["waiting"], health.body["active"]) == (1, 0)
        for environment, field, reason in (
            (
                {"sandbox": "docker", "root": "debian"},
                "environment.sandbox",
                "docker sandboxes do not work on this node",
            ),
            ({"sandbox": "bubblewrap"}, "environment.sandbox", "bubblewrap is not installed"),
            ({"root": str(tmp_path / "none")}, "environment.root", "no root file system"),
            ({"sandbox": "process", "root": "/"}, "environment.root", "have no root of their own"),
        ):
            answer = await caller.call("POST", "/v1/tasks", work("wrong", "work", environment=environment))
            assert (answer.status, answer.body["field"]) == (422, field), answer
            assert reason in answer.body["error"]
        bwrap = shutil.which("bwrap")
        assert bwrap is not None
        (programs / "bwrap").symlink_to(bwrap)
        (result,) = await caller.take(1)  # nothing is submitted again
        assert (result.sessions[0].state.value, result.sessions[0].attempt) == ("done", 1)
        assert (await caller.call("GET", "/healthz")).body["status"] == "ok"
        name = result.sessions[0].session_id
        assert (await caller.call("GET", f"/v1/sessions/{name}/log")).status == 200
        lines = process.log.read_text().splitlines()
        assert all(isinstance(json.loads(line), dict) for line in lines)  # the log, too
        assert sum("the queue is held" in line for line in lines) == 1


async def test_a_crash_leaves_no_process_and_loses_no_turn(model: Path, tmp_path: Path) -> None:
    """kill -9 while harnesses run: the next server ends them, keeps their turns, and retries."""
    data, mark = tmp_path / "data", f"mark-{secrets.token_hex(6)}"
    async with served(data, model) as (process, caller):
        await caller.submit(work("hang", "hang", mark, num_samples=2, timeouts={"run": 500}))
        status = await caller.until("/v1/tasks/hang", state="running")
        first = [one["session_id"] for one in status["sessions"]]
        for _ in range(_PATIENCE * 20):
            (node,) = await caller.ok("GET", "/v1/nodes")
            if len(node["sessions"]) == 2 and all(one["turns"] for one in node["sessions"]):
                break
            await asyncio.sleep(0.05)
        assert processes(mark)
        await process.ended(signal.SIGKILL)
    before = set(processes(mark))
    async with served(data, model) as (process, caller):
        assert before.isdisjoint(processes(mark))
        for name in first:
            assert (await caller.ok("GET", f"/v1/sessions/{name}"))["state"] == "lost"
            archived = Trajectory.model_validate(await caller.ok("GET", f"/v1/sessions/{name}/trajectory"))
            assert archived.turns
            assert archived.state.value == "lost"
        status = await caller.ok("GET", "/v1/tasks/hang")
        assert [(one["attempt"], one["session_id"] in first) for one in status["sessions"]] == [(2, False)] * 2
        await caller.ok("DELETE", "/v1/tasks/hang")
        results = await caller.take(2)
        assert {one.sessions[0].state.value for one in results} == {"cancelled"}
        assert await process.ended(signal.SIGTERM) == 0
    assert processes(mark) == []
