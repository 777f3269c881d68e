"""The frozen surface: what users rely on stays, with the same meaning, and data of earlier versions opens.

`tests/surface/frozen/` has the tables. They change only by addition: `python tests/surface/update.py` adds new entries.
A change that removes one needs its `--remove`, and a line in the changelog.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from surface import scenario, snapshot
from surface.scenario import CONTROL_KEY, PATIENCE, Commands, call

pytestmark = pytest.mark.timeout(1200)
"""Starts about twenty processes, one after another."""


def test_nothing_that_users_rely_on_has_changed(tmp_path: Path) -> None:
    frozen, now = snapshot.read(), snapshot.everything(tmp_path)
    problems = snapshot.broken(frozen, now)
    assert not problems, "\n".join(problems)
    # The comparison covers every table: an entry that no version has is missing in each.
    for name, table in frozen.items():
        assert len(table) > 20
        doctored = {name: table | {"of another program": ""}}
        assert snapshot.broken(doctored, now) == [f"{name}: 'of another program' is gone"]


def test_a_missing_changed_or_newly_required_entry_is_named() -> None:
    frozen = {"cli": {"towline run": "", "towline run --out": "default null", "towline run --seed": "default 0"}}
    now = {"cli": {"towline run": "", "towline run --seed": "default 1", "towline run --new": "default 0"}}
    now["cli"] |= {"towline run task": "required", "towline more": "", "towline more task": "required"}
    assert snapshot.broken(frozen, now) == [
        "cli: 'towline run --out' is gone",
        "cli: 'towline run --seed' was 'default 0' and is 'default 1'",
        "cli: 'towline run task' is new and required",
    ]
    assert snapshot.broken({"http": {"GET /v1/x": ""}}, {}) == ["http: 'GET /v1/x' is gone"]
    # A value that was null in one run says nothing of its type.
    assert not snapshot.broken({"files": {"a .b": "number"}}, {"files": {"a .b": "null"}})
    assert not snapshot.broken(now, {"cli": now["cli"] | {"towline run --another": "default null"}})


# Data of the version before


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Commands]:
    """What version 0.1 wrote, in another place than where it was written."""
    scenario.unpack(tmp_path)
    yield Commands(tmp_path)
    shutil.rmtree(tmp_path)


ENGINE = ("--engine", "scripted", "--model", "model", "--script", "replies.py")


def test_a_store_of_the_version_before_serves_and_finishes_its_work(data: Commands) -> None:
    store = ("--data", "serve")
    with data.started("serve", "--port", "0", "--sandbox", "process", *store, *ENGINE) as (process, output):
        url = output["url"]
        # The session that was running at the kill is run again.
        held = data.run("submit", "held.jsonl", "--wait", "--url", url)
        assert [(one["state"], one["usable"]) for one in held] == [("done", 1)]
        # A consumer of before, whose lease has expired, gets all that a new one gets.
        old, new = (_taken(url, name) for name in ("first", "second"))
        assert len(old) == len(new) == 5
        assert set(old) == set(new)
        exported = data.run("export", "alpha", "beta", "--out", "again.parquet", "--url", url)
        assert (exported["sessions"], exported["damaged"]) == (4, {})
        before, after = (_rows(data.folder / name) for name in ("traces.parquet", "again.parquet"))
        assert [{name: row[name] for name in old} for old, row in zip(before, after, strict=True)] == before
        _stop(process)
    assert data.run("store", "verify", *store)["damaged"] == {}


def _rows(path: Path) -> list[dict[str, Any]]:
    return sorted(pq.read_table(path).to_pylist(), key=lambda row: (row["rollout_id"], row["trace_id"]))


def _taken(url: str, consumer: str) -> list[str]:
    """The sessions that a consumer is handed, acknowledged."""
    found: list[str] = []
    while True:
        wanted = {"consumer": consumer, "unit": "session", "max": 10, "wait": 1}
        page = call(f"{url}/v1/results", wanted)["results"]
        if not page:
            return found
        found += [one["sessions"][0]["session_id"] for one in page]
        call(f"{url}/v1/results/ack", {"consumer": consumer, "result_ids": [one["result_id"] for one in page]})


def test_a_gateway_of_the_version_before_continues_its_open_session(data: Commands) -> None:
    ports = ("--port", "0", "--control-port", "0", "--data", "gateway")
    opened = json.loads((data.folder / "gateway/open.json").read_text())
    with data.started("gateway", *ports, *ENGINE) as (process, output):
        control = f"{output['control_url']}/v1/sessions"
        assert call(f"{control}/sealed/trajectory", None, CONTROL_KEY)["session_id"] == "sealed"
        assert call(f"{control}/open", None, CONTROL_KEY)["turns"] == 1
        messages = [{"role": "user", "content": "Say it."}]
        messages += [{"role": "assistant", "content": "It is 42."}, {"role": "user", "content": "Again."}]
        call(f"{output['base_url']}/v1/chat/completions", {"model": "any", "messages": messages}, opened["key"])
        call(f"{control}/open", None, CONTROL_KEY, "DELETE")
        assert len(call(f"{control}/open/trajectory", None, CONTROL_KEY)["turns"]) == 2
        _stop(process)


def test_folders_of_the_version_before_are_resumed_and_read(data: Commands) -> None:
    def finished(folder: str) -> int:
        return (data.folder / folder / "progress.jsonl").read_text().count('"session_id"')

    generate = ("generate", "tasks.jsonl", "--harness", "shell", *ENGINE, "--out", "generate", "--duplicates", "keep")
    assert finished("generate") == 2
    output = data.run(*generate, "--samples", "2")
    assert (output["samples"], output["accepted"], output["failed"], finished("generate")) == (4, 4, 0, 4)
    evaluate = ("eval", "tasks.jsonl", "--harness", "shell", *ENGINE, "--out", "eval", "--samples", "2")
    assert finished("eval") == 4
    assert data.run(*evaluate, "--compare", "eval")["all"]["pass@1"]["value"] == 1.0
    assert finished("eval") == 4
    for path in (data.folder / "run/trajectories").iterdir():
        shown = data.run("trace", str(path))
        assert len(shown["turns"]) == 2


def test_a_checkpoint_of_the_version_before_is_resumed(data: Commands) -> None:
    words = ("train", "scored.jsonl", "--model", "model", "--out", "train", "--steps", "1", "--groups", "1")
    options = (
        "--samples",
        "4",
        "--synchronous",
        "--sandbox",
        "process",
        "--measure",
        "tasks.jsonl",
        "--no-tensorboard",
    )
    output = data.run(*words, *options)
    assert [(one["step"], one["sessions_used"]) for one in output["success"]] == [(1, 4)]


def _stop(process: subprocess.Popen[Any]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
