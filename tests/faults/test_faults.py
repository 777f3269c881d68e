"""An engine that fails in the second turn or later: no session is scored, whatever the engine, the fault and the command.

Each task names one fault and what its agent does about it: lie (exit 0 with an answer of its own), fail, hang until the
budget ends, or continue without the answer. One good and one slow task are among them, and are scored as ever.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.faults.fault_proxy import FAULTS, SLOW
from support.faults.fault_rig import ENGINES, FaultyEngine, faulty_engine
from towline import AsyncClient
from towline.schema import EndReason, FailureReason, SessionState
from towline.trainers.grpo import metrics

PROGRAM = Path(__file__).parents[1] / "support" / "faults" / "program"
STALL = 8.0
"""Seconds without a token after which a turn has stalled."""
RUN = 90.0
_PATIENCE = 400.0
_ON_ERROR = ("lie", "fail", "skip")
OUTAGE = float(os.environ.get("TOWLINE_TEST_OUTAGE", "30"))

pytestmark = pytest.mark.timeout(900)


def task(name: str, fault: str = "none", on_error: str = "lie", turns: int = 3, **fields: Any) -> dict[str, Any]:
    command = f"{{python}} {{program}}/agent.py {turns} {2 + len(name) % 2} {fault} {on_error}"
    return {
        "task_id": name,
        "instruction": "Begin.",
        "harness": "shell",
        "harness_options": {"command": command, "folder": str(PROGRAM)},
        "evaluator": {"kind": "completed", "codes": [0, 3]},
        "max_attempts": 2,
        "timeouts": {"run": RUN},
        **fields,
    }


def fault_tasks() -> list[dict[str, Any]]:
    made = [task(f"fault-{fault}", fault, _ON_ERROR[n % 3]) for n, fault in enumerate(FAULTS)]
    # After a failed turn, a harness that waits for ever ends by its budget.
    made.append(task("fault-hang", "status_500", "hang", timeouts={"run": 15.0}, max_attempts=1))
    return made


def environment() -> dict[str, str]:
    return {**os.environ, "TOWLINE_ENGINE__STALL_SECONDS": str(STALL), "COLUMNS": "400"}


async def command(*words: str, data: Path | None = None) -> tuple[int, str, str]:
    """A command of Towline's, run to its end: exit code and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "towline", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), _PATIENCE)
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
        raise AssertionError(f"{words[0]} did not end; it said: {err.decode()[-3000:]}") from None
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def serving(data: Path, options: Sequence[str]) -> AsyncIterator[AsyncClient]:
    log = data.with_suffix(".log").open("wb")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "towline", "serve", "--port", "0", "--data", str(data), "--sandbox", "process"),
        *("--json", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), _PATIENCE)
        assert line, data.with_suffix(".log").read_text()
        async with AsyncClient(json.loads(line)["url"]) as client:
            yield client
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), _PATIENCE)
        log.close()


def check_failed(name: str, state: str, failure: str | None, error: str | None, reward: float | None) -> None:
    assert state == SessionState.FAILED.value, (name, state)
    expected = {FailureReason.STALL.value} if "stall" in name else {FailureReason.ENGINE.value}
    assert failure in expected, (name, failure, error)
    assert error, name
    assert reward is None, (name, reward)


@pytest.mark.parametrize("kind", ENGINES)
async def test_serve(kind: str, model: Path, tmp_path: Path) -> None:
    async with faulty_engine(kind, model) as engine, serving(tmp_path / "data", engine.options) as client:
        tasks = [*fault_tasks(), task("good"), task("slow", SLOW)]
        await client.submit(tasks)
        status = {one["task_id"]: await client.wait(one["task_id"], _PATIENCE) for one in tasks}
        _check_injected(engine)
        for name, found in status.items():
            (session,) = found.sessions
            if name.startswith("fault-"):
                assert found.usable == 0, name
                check_failed(name, session.state.value, session.failure, session.error, None)
                if found.sessions[0].attempt == 1:
                    assert name == "fault-hang", "a failed session is retried"
            else:
                assert (session.state, found.usable) == (SessionState.DONE, 1), (name, session.error)
        # What a trainer is handed: the good ones, and of the others nothing that it could learn from.
        handed = {one.task_id: one async for one in client.results("trainer", idle=3.0)}
        assert handed.keys() == status.keys()
        for name, result in handed.items():
            (summary,) = result.sessions
            if name.startswith("fault-"):
                assert not summary.usable
                check_failed(name, summary.state.value, summary.failure, summary.error, summary.reward)
            else:
                assert summary.usable
                assert summary.reward == 1.0
                assert summary.end_reason is EndReason.EXITED


def _check_injected(engine: FaultyEngine) -> None:
    assert set(FAULTS) <= set(engine.proxy.injected), engine.proxy.injected


@pytest.mark.parametrize("kind", ENGINES)
async def test_eval(kind: str, model: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(json.dumps(one) for one in [*fault_tasks(), task("good")]))
    async with faulty_engine(kind, model) as engine:
        words = ["eval", str(tasks), "--harness", "shell", "--sandbox", "process", "--out", str(tmp_path / "run")]
        code, out, err = await command(*words, *engine.options, "--json")
        _check_injected(engine)
    told = json.loads(out)
    assert code == 1, err
    assert "infrastructure failed" in err, err
    assert set(told["failures"]) == {"engine", "stall"}, told["failures"]
    assert (told["all"]["samples"], told["all"]["failed"]) == (1, len(FAULTS) + 1)
    assert told["all"]["pass@1"]["value"] == 1.0, "only the good task is in the tally"
    for line in (tmp_path / "run/progress.jsonl").read_text().splitlines():
        sample = json.loads(line)
        if sample.get("task_id", "").startswith("fault-"):
            check_failed(sample["task_id"], sample["state"], sample["failure"], sample["error"], sample["reward"])
            assert not sample["usable"]


def train_words(tasks: Path, out: Path, *options: str) -> list[str]:
    words = ["train", str(tasks), "--sandbox", "process", "--out", str(out), "--no-tensorboard", "--json"]
    return [*words, "--steps", "1", "--samples", "2", "--ahead", "1", *options]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_train(kind: str, model: Path, tmp_path: Path) -> None:
    """Groups that failed are never learned from; a run that gets no others ends with the reason."""
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "run"
    tasks.write_text("\n".join(json.dumps(one) for one in fault_tasks() if one["task_id"] != "fault-hang"))
    async with faulty_engine(kind, model) as engine:
        words = train_words(tasks, out, "--groups", str(len(FAULTS) // 2), "--max-failed", "1")
        code, _, err = await command(*words, *engine.options)
        _check_injected(engine)
    assert code == 1, err
    assert "too few usable sessions" in err, err
    assert not [line for line in metrics.read_metrics(out) if "mean_reward" in line], "nothing was learned"
    _no_fault_is_usable(out / "service")


async def test_train_ends_when_too_many_sessions_failed(model: Path, tmp_path: Path) -> None:
    """The trainer learns from the groups of good tasks, and ends when more than the accepted share of sessions failed."""
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "run"
    good = task("good", on_error="coin", evaluator={"kind": "completed"})
    bad = task("bad", "status_500")
    made = [{**one, "task_id": f"{n}"} for n, one in enumerate([good, bad, bad, bad] * 4)]
    tasks.write_text("\n".join(json.dumps(one) for one in made))
    async with faulty_engine("sglang", model) as engine:
        words = train_words(tasks, out, "--groups", "8", "--max-failed", "0.3")
        code, _, err = await command(*words, *engine.options)
    assert code == 1, err
    assert "infrastructure failed" in err, err
    assert "engine" in err, err
    _no_fault_is_usable(out / "service")


def _no_fault_is_usable(data: Path) -> None:
    """In the service's own store, every session of a task that names a fault is without a score."""
    database = next(iter(data.glob("*.db")), None) or next(iter(data.glob("*.sqlite*")))
    with sqlite3.connect(database) as store:
        query = "select t.body, r.body, r.usable from results r join tasks t on t.task_id = r.task_id where r.unit = 'session'"
        rows = store.execute(query).fetchall()
    assert rows
    faulty = 0
    for body, result, usable in rows:
        words = json.loads(body)["harness_options"]["command"].split()
        if words[-2] != "none":
            faulty += 1
            assert not usable
            found = json.loads(result)
            assert (found["state"], found["reward"]) == ("failed", None)
            assert found["failure"] in ("engine", "stall"), found
    assert faulty


async def test_an_openai_engine_is_not_trained(model: Path, tmp_path: Path) -> None:
    async with faulty_engine("openai", model) as engine:
        code, _, err = await command("train", "--registry", "--out", str(tmp_path / "run"), *engine.options)
    assert code == 1
    assert "cannot load new weights" in err


@pytest.mark.parametrize("kind", ENGINES)
async def test_an_outage_loses_no_task(kind: str, model: Path, tmp_path: Path) -> None:
    """Sixty tasks are queued when the engine goes away. They wait, and all of them are done when it is back."""
    async with (
        faulty_engine(kind, model) as engine,
        serving(tmp_path / "data", [*engine.options, "--concurrency", "8"]) as client,
    ):
        tasks = [task(f"t{n:02d}", turns=2, max_attempts=3) for n in range(60)]
        await client.submit(tasks[:4])
        await client.wait("t00", _PATIENCE)
        engine.proxy.away = True
        await client.submit(tasks[4:])
        await asyncio.sleep(OUTAGE)
        assert engine.proxy.refused, "the outage was noticed"
        engine.proxy.away = False
        for one in tasks:
            found = await client.wait(one["task_id"], _PATIENCE)
            assert found.usable == 1, (one["task_id"], found.sessions)
