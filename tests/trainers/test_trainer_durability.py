"""The reference trainer under `kill -9`: every session is used once, no step is lost, and none is made twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from towline.client import Client
from towline.demo import tiny_model
from towline.demo.registry import EXAMPLE_AGENT, training_task
from towline.schema import TaskState, Unit
from towline.trainers.grpo import metrics
from towline.trainers.service import own_service

pytestmark = pytest.mark.timeout(900)
"""Several processes, each of which imports torch: minutes on a machine that is busy with other things."""

POINTS = (
    "trainer.learning:2",
    "trainer.in_checkpoint",
    "trainer.before_ack",
    "trainer.before_push",
)
"""Where it is killed, one after the other, in the life of one run. The last two come after a checkpoint."""
GROUPS, SAMPLES = 2, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model.create(tmp_path_factory.mktemp("models") / "tiny", steps=20)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task whose rewards differ whatever the model says, so that there is always something to learn."""
    folder = tmp_path_factory.mktemp("tasks")
    judge = "import hashlib\n\n\ndef reward(trajectory):\n"
    judge += "    return int(hashlib.md5(trajectory.session_id.encode()).hexdigest()[:8], 16) / 2**32\n"
    (folder / "judge.py").write_text(judge)
    evaluator = {"kind": "python", "function": f"{folder / 'judge.py'}:reward"}
    made = training_task(0, EXAMPLE_AGENT, samples=SAMPLES).model_copy(update={"evaluator": evaluator})
    (folder / "task.jsonl").write_text(made.model_dump_json() + "\n")
    return folder / "task.jsonl"


def train(
    model: Path, task: Path, out: Path, steps: int, *options: str, crash_at: str = ""
) -> subprocess.CompletedProcess[str]:
    command = ["train", str(task), "--model", str(model), "--out", str(out), "--steps", str(steps)]
    command += ["--groups", str(GROUPS), "--samples", str(SAMPLES), "--updates", "2", "--json"]
    return subprocess.run(
        [sys.executable, "-m", "towline", *command, *options],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "TOWLINE_CRASH_AT": crash_at},
    )


def checkpoint(out: Path) -> tuple[int, dict[str, Any]]:
    """The version of the checkpoint, and what the trainer wrote beside the weights; version 0 if there is none."""
    path = out / "checkpoint" / "learner.pt"
    if not path.exists():
        return 0, {"used": []}
    state = torch.load(path, weights_only=True)
    return state["version"], json.loads(state["extra"])


def test_a_trainer_killed_at_every_point_uses_every_session_once(model: Path, task: Path, tmp_path: Path) -> None:
    out, steps = tmp_path / "run", 4
    used: dict[int, list[str]] = {}
    with own_service(model, tmp_path / "service", ["--concurrency", "4"]) as url, Client(url) as client:
        for point in POINTS:
            before, _ = checkpoint(out)
            killed = train(model, task, out, steps, "--url", url, crash_at=point)
            assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
            version, extra = checkpoint(out)
            assert version == before + (point in POINTS[-2:]), point
            used[version] = extra["used"]
        done = train(model, task, out, steps, "--url", url)
        assert done.returncode == 0, done.stderr[-3000:]
        used |= {line["version"]: line["used"] for line in metrics.read_metrics(out) if "used" in line}
        _check_all_were_used_once(client, out.name, used, steps)
        assert json.loads(done.stdout)["last"]["sessions_used"] == steps * GROUPS * SAMPLES
        assert checkpoint(out)[0] == client.policy().version == steps


def _check_all_were_used_once(client: Client, run: str, used: dict[int, list[str]], steps: int) -> None:
    del used[0]
    assert sorted(used) == list(range(1, steps + 1))
    ids = [one for version in used for one in used[version]]
    assert len(ids) == len(set(ids)) == steps * GROUPS
    tasks = [task for task in client.tasks() if task.task_id.startswith(f"{run}/")]
    assert len(tasks) == steps * GROUPS, "a group that no step uses, or that one would have needed"
    assert all(task.state is TaskState.DONE for task in tasks)
    # Another consumer sees what was handed out: the very results of the very tasks.
    handed = [
        one
        for one in client.lease("auditor", Unit.GROUP, max=1000, wait=0).results
        if one.task_id in {task.task_id for task in tasks}
    ]
    assert {one.result_id for one in handed} == set(ids)
    sessions = [session.session_id for one in handed for session in one.sessions]
    assert len(sessions) == len(set(sessions)) == steps * GROUPS * SAMPLES
    # Nothing of it is left to the trainer, leased or not.
    assert client.release(run) == 0
    left = client.lease(run, Unit.GROUP, max=1000, wait=0).results
    assert not [one for one in left if one.task_id.startswith(f"{run}/")]


def test_a_trainer_killed_with_its_local_service_resumes_with_its_store(
    model: Path, task: Path, tmp_path: Path
) -> None:
    out, options = tmp_path / "run", ["--concurrency", "4", "--max-staleness", "0"]
    killed = train(model, task, out, 2, *options, crash_at="trainer.before_ack")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    version, extra = checkpoint(out)
    assert version == 1
    # The service died with it, or the next one could not have the store.
    done = train(model, task, out, 2, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    last = json.loads(done.stdout)["last"]
    assert (last["version"], last["sessions_used"]) == (2, 2 * GROUPS * SAMPLES)
    # What was rolled out ahead has become too old meanwhile: it is done with as well, and others took its place.
    assert len({*extra["used"], *last["used"]}) == 2 * GROUPS + last["dropped_groups"]
    assert last["staleness"] == 0.0
    assert 0.0 < last["worst_logprob"] < 1e-3
