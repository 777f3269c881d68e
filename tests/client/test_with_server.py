"""The client, the example trainer and the commands against the real service, which runs real sessions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from support.server.serve_process import ServeProcess
from towline.cli import service as commands
from towline.cli import service as export
from towline.client import Client, Conflict, InvalidRequest, NotFound
from towline.schema import SessionState, TaskState, Trajectory, traces_from_table

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/trainer/train.py"
AGENT = ROOT / "examples/first_agent"


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    made = ServeProcess(tmp_path_factory.mktemp("serve"))
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def client(serving: ServeProcess) -> Iterator[Client]:
    with Client(serving.url, patience=60) as made:
        yield made


def task(name: str, **fields: Any) -> dict[str, Any]:
    options = {"command": "{python} {program}/agent.py --questions 1", "folder": str(AGENT)}
    fixed = {"task_id": name, "instruction": "Answer.", "harness": "shell", "evaluator": {"kind": "completed"}}
    return {**fixed, "harness_options": options, **fields}


def test_results_have_tokens_until_acknowledged(client: Client) -> None:
    assert client.submit([task("plain/1", num_samples=2), task("plain/2")])[0].created
    assert not client.submit(task("plain/2")).created
    with pytest.raises(Conflict):
        client.submit(task("plain/2", instruction="Something else."))
    with pytest.raises(InvalidRequest) as invalid:
        client.submit(task("plain/3", harness="nobody"))
    assert invalid.value.field
    assert "harness" in invalid.value.field
    with pytest.raises(NotFound):
        client.task("plain/3")
    assert client.wait("plain/1", within=120).state is TaskState.DONE

    taken = list(client.results("reader", limit=3, lease=600, wait=30))
    assert {one.task_id for one in taken} == {"plain/1", "plain/2"}
    for one in taken:
        (row,) = one.rows()
        assert row["loss_mask"].sum() == one.sessions[0].trained_tokens > 0
        assert one.rewards == {row["rollout_id"]: 1.0}
        assert one.trajectories[0] == client.trajectory(row["rollout_id"])
    assert list(client.results("reader", idle=0.3, wait=0.1)) == []
    acked = client.ack("reader", [one.result_id for one in taken])
    assert sorted(acked.acked) == sorted(one.result_id for one in taken)
    groups = {one.task_id: one for one in client.results("grouper", "group", limit=2, auto_ack=True, prefix="plain/")}
    assert len(groups["plain/1"].traces) == 2
    assert client.pause("drain", deadline=5).paused
    assert client.resume(7).version == 7
    events = client.events(after=0)
    assert next(events).seq == 1
    events.close()


def test_kill_the_example_trainer_and_the_service(serving: ServeProcess, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.json"
    environment = os.environ | {"TOWLINE_URL": serving.url, "CHECKPOINT": str(checkpoint), "LEASE": "3"}

    def used() -> int:
        return len(json.loads(checkpoint.read_text())["used"]) if checkpoint.exists() else 0

    def trainer() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, str(SCRIPT)], env=environment)

    def until(running: subprocess.Popen[bytes], count: int) -> None:
        over = time.monotonic() + 240
        while used() < count:
            assert time.monotonic() < over, f"{used()} of {count} were used"
            assert running.poll() is None, "the trainer ended by itself"
            time.sleep(0.01)

    running = trainer()
    try:
        until(running, 16)
    finally:
        running.kill()
        running.wait(60)
    assert used() < 64
    running = trainer()
    try:
        until(running, used() + 8)
        serving.kill()
        serving.start()
        assert running.wait(300) == 0
    finally:
        running.kill()
        running.wait(60)

    state = json.loads(checkpoint.read_text())
    assert len(set(state["used"])) == len(state["used"]) == 64
    with Client(serving.url) as client:
        tasks = [client.task(one.task_id) for one in client.tasks() if one.task_id.startswith("task-")]
        sessions = [session for one in tasks for session in one.sessions]
        assert len(tasks) == 16
        assert {session.state for session in sessions} == {SessionState.DONE}
        found = client.trajectories([session.session_id for session in sessions])
        assert len(found) == 64
        assert state["trained_tokens"] == sum(trajectory.report.trained_tokens for trajectory in found)
        # Everything was acknowledged: nothing of it ever comes again.
        left = [one for one in client.results("trainer", idle=4, wait=1) if one.task_id.startswith("task-")]
        assert left == []


def test_commands_against_the_service(serving: ServeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)
    for command in (commands.submit, commands.status, commands.tail, commands.cancel, export.export):
        app.command()(command)
    monkeypatch.setenv("TOWLINE_URL", serving.url)

    def call(*words: str) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    lines = [task(f"by-hand/{n}", num_samples=2) for n in range(2)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    told = json.loads(call("submit", str(tmp_path / "tasks.jsonl"), "--priority", "3", "--wait", "--json"))
    assert [(one["task_id"], one["state"], one["usable"]) for one in told] == [
        ("by-hand/0", "done", 2),
        ("by-hand/1", "done", 2),
    ]
    assert "0 tasks submitted" in call("submit", str(tmp_path / "tasks.jsonl"), "--priority", "3")
    overview = json.loads(call("status", "--json"))
    assert overview["tasks"]["done"] >= 2
    assert "by-hand/0" in call("status", "--once")
    assert json.loads(call("status", "by-hand/1", "--json"))[0]["sessions"][0]["state"] == "done"
    events = [
        json.loads(line)
        for line in call("tail", "--after", "0", "--limit", "4", "--kind", "task", "--json").splitlines()
    ]
    assert [event["kind"] for event in events] == ["task"] * 4
    assert json.loads(call("cancel", "by-hand/1", "--json"))[0]["finished"] == 2

    tables = {}
    for name in ("rows.parquet", "rows.arrow", "rows.jsonl"):
        told = json.loads(call("export", "by-hand/0", "by-hand/1", "--out", str(tmp_path / name), "--json"))
        assert (told["tasks"], told["sessions"], told["rows"]) == (2, 4, 4)
    tables["parquet"] = pq.read_table(tmp_path / "rows.parquet")
    tables["arrow"] = pa.ipc.open_file(pa.py_buffer((tmp_path / "rows.arrow").read_bytes())).read_all()
    assert traces_from_table(tables["parquet"]) == traces_from_table(tables["arrow"])
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 4
    call("export", "by-hand/0", "--what", "trajectories", "--usable", "--out", str(tmp_path / "whole.jsonl"))
    first = (tmp_path / "whole.jsonl").read_text().splitlines()[0]
    assert Trajectory.from_json(first).group_id == "by-hand/0"
