"""The rendered job on a real Slurm: an ordinary user submits it, and sessions run to their end in bubblewrap sandboxes."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster.slurm import PATIENCE, UID, USER, SlurmCluster, slurm_cluster
from towline.demo import tiny_model

pytestmark = pytest.mark.timeout(900)

SESSIONS = 50
AGENT = """
import json, os, urllib.request
messages = [{"role": "user", "content": os.environ["TOWLINE_INSTRUCTION"]}]
for _ in range(2):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    messages.append(json.load(urllib.request.urlopen(request, timeout=300))["choices"][0]["message"])
    messages.append({"role": "user", "content": "Go on."})
open("answer.txt", "w").write("42")
"""
SCRIPT = """
def script(request):
    return "It is 42."
"""
# A user's strings may hold anything: none of it is run.
COMMENT = """it's "one" $(touch pwned) `touch pwned` # not a comment"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with slurm_cluster(4) as cluster:
        yield cluster


def prepare(slurm: SlurmCluster, name: str, *, sessions: int = SESSIONS, **cluster: Any) -> Path:
    """A folder of the user with settings, model and tasks."""
    folder = slurm.home / name
    folder.mkdir()
    tiny_model.create(folder / "model", seed=0, steps=1)
    (folder / "replies.py").write_text(SCRIPT)
    task = {
        "instruction": "Write 42 into answer.txt.",
        "harness": "shell",
        "harness_options": {"command": ["python3", "-c", AGENT]},
        "evaluator": {"kind": "command", "command": 'test "$(cat answer.txt)" = 42'},
    }
    lines = [json.dumps(task | {"task_id": f"t{number}", "num_samples": 5}) for number in range(sessions // 5)]
    (folder / "tasks.jsonl").write_text("\n".join(lines))
    settings = {
        "engine.kind": "scripted",
        "model.folder": "model",
        "server.port": 0,
        "node.run_workers": 8,
        "cluster.kind": "slurm",
        "cluster.program": [slurm.python, "-m", "towline"],
        "cluster.arguments": ["--script", "replies.py"],
        "cluster.slurm.options": [f"--comment={COMMENT}"],
        **cluster,
    }
    (folder / "towline.toml").write_text("".join(f"{key} = {toml(value)}\n" for key, value in settings.items()))
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, UID, UID)
    return folder


def toml(value: Any) -> str:
    """JSON is TOML, but for tables."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(one)}" for name, one in value.items()) + "}"
    return json.dumps(value)


def said(slurm: SlurmCluster, *words: str, folder: Path, seconds: float = PATIENCE, **variables: str) -> Any:
    """What a command of the user printed with `--json`."""
    variables = {"TOWLINE_CONFIG": "towline.toml"} | variables
    done = slurm.towline(*words, "--json", cwd=folder, seconds=seconds, **variables)
    logs = "".join(path.read_text(errors="replace")[-4000:] for path in folder.glob("*/cluster/job-*.log"))
    assert done.returncode == 0, f"towline {' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-3000:]}\n{logs}"
    return json.loads(done.stdout.splitlines()[-1])


def listening(slurm: SlurmCluster, folder: Path) -> dict[str, Any]:
    """The status of the job once its server listens."""
    until = time.monotonic() + 300
    while True:
        found = said(slurm, "cluster", "status", folder=folder)
        if found["url"]:
            return dict(found)
        log = Path(found["log"])
        text = log.read_text(errors="replace")[-6000:] if log.exists() else ""
        assert found["active"], f"{found}\n{text}\n{slurm.logs()}"
        assert time.monotonic() < until, f"{found}\n{text}"
        time.sleep(0.5)


def test_a_job_of_an_ordinary_user_runs_fifty_sessions(slurm: SlurmCluster) -> None:
    folder = prepare(slurm, "my 100% run")
    rendered = said(slurm, "cluster", "up", "--dry-run", folder=folder)["rendered"]
    assert not (folder / "towline-data").exists()

    job = said(slurm, "cluster", "up", folder=folder)
    assert (folder / "towline-data/cluster/job.sh").read_text() == rendered
    status = listening(slurm, folder)
    assert (status["job_id"], status["state"], status["detail"]) == (job["job_id"], "RUNNING", "n1")
    assert status["url"].startswith(f"http://{slurm.address(1)}:")
    shown = slurm.as_user(["squeue", "--noheader", "--format=%k|%u"])
    assert shown.stdout == f"{COMMENT}|{USER}\n"

    key = Path(status["key"])
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    service = {"TOWLINE_URL": status["url"], "TOWLINE_KEY": key.read_text().strip()}
    refused = slurm.towline("status", "--json", cwd=folder, TOWLINE_URL=status["url"])
    assert "API key missing" in refused.stderr
    tasks = said(slurm, "submit", "tasks.jsonl", "--wait", folder=folder, seconds=600, **service)
    assert [(one["state"], one["usable"]) for one in tasks] == [("done", 5)] * (SESSIONS // 5)
    sessions = sessions_of(slurm, folder, service)
    assert [one["state"] for one in sessions] == ["done"] * SESSIONS

    # One job at a time uses a data folder.
    again = slurm.towline("cluster", "up", cwd=folder, TOWLINE_CONFIG="towline.toml")
    assert again.returncode == 1
    assert f"slurm {job['job_id']} is RUNNING; stop it first: towline cluster down" in again.stderr
    assert said(slurm, "cluster", "down", folder=folder) == {"stopped": job["job_id"]}
    left = slurm.as_user(["squeue", "--noheader"])
    assert (left.returncode, left.stdout) == (0, "")
    log = Path(status["log"]).read_text()
    assert "towline: stopping" in log
    assert not list(folder.rglob("pwned"))
    assert service["TOWLINE_KEY"] not in rendered + log


def test_model_servers_are_another_part_of_the_job(slurm: SlurmCluster) -> None:
    program = f"{slurm.place}/repository/tests/support/cluster/model_server.py"
    engine = {"command": [slurm.python, program], "replicas": 2, "gpus": 0}
    sampling = {"session.sampling.max_tokens": 16}
    folder = prepare(slurm, "engines", sessions=10, **{"cluster.engine": engine, "cluster.arguments": [], **sampling})
    said(slurm, "cluster", "up", folder=folder)
    status = listening(slurm, folder)
    service = {"TOWLINE_URL": status["url"], "TOWLINE_KEY": Path(status["key"]).read_text().strip()}
    tasks = said(slurm, "submit", "tasks.jsonl", "--wait", folder=folder, seconds=600, **service)
    assert [(one["state"], one["usable"]) for one in tasks] == [("done", 5)] * 2
    said(slurm, "cluster", "down", folder=folder)
    log = Path(status["log"]).read_text()
    assert sorted(line for line in log.splitlines() if line.startswith("serving")) == ["serving on n2", "serving on n3"]


def test_fifty_sessions_on_four_nodes(slurm: SlurmCluster) -> None:
    """The server starts a host on every node by srun, and all of them run sessions."""
    four = {"cluster.slurm.nodes": 4, "cluster.slurm.cpus_per_task": 2}
    folder = prepare(slurm, "srun", **{**four, "node.run_workers": 2})
    said(slurm, "cluster", "up", folder=folder)
    status = listening(slurm, folder)
    service = {"TOWLINE_URL": status["url"], "TOWLINE_KEY": Path(status["key"]).read_text().strip()}
    tasks = said(slurm, "submit", "tasks.jsonl", "--wait", folder=folder, seconds=600, **service)
    assert [(one["state"], one["usable"]) for one in tasks] == [("done", 5)] * (SESSIONS // 5)
    sessions = sessions_of(slurm, folder, service)
    assert {one["node"] for one in sessions} == {"n1", "n2", "n3", "n4"}
    said(slurm, "cluster", "down", folder=folder)
    left = slurm.as_user(["squeue", "--noheader"])
    assert (left.returncode, left.stdout) == (0, "")


def test_a_dead_node_costs_its_sessions_and_not_the_job() -> None:
    with slurm_cluster(3) as slurm:
        three = {"cluster.slurm.nodes": 3, "cluster.slurm.cpus_per_task": 2}
        folder = prepare(slurm, "dies", sessions=15, **{**three, "node.run_workers": 2})
        # Long enough that some are running on every node when one dies.
        (folder / "replies.py").write_text('def script(request):\n    return {"text": "It is 42.", "delay": 3}\n')
        job = said(slurm, "cluster", "up", folder=folder)
        status = listening(slurm, folder)
        service = {"TOWLINE_URL": status["url"], "TOWLINE_KEY": Path(status["key"]).read_text().strip()}
        said(slurm, "submit", "tasks.jsonl", folder=folder, **service)
        until = time.monotonic() + PATIENCE
        while not [
            one for one in sessions_of(slurm, folder, service) if (one["node"], one["state"]) == ("n3", "running")
        ]:
            assert time.monotonic() < until, sessions_of(slurm, folder, service)
            time.sleep(0.5)
        slurm.kill_node(3)
        tasks = said(slurm, "submit", "tasks.jsonl", "--wait", folder=folder, seconds=600, **service)
        assert [(one["state"], one["usable"]) for one in tasks] == [("done", 5)] * 3
        lost = [one["node"] for one in sessions_of(slurm, folder, service) if one["state"] == "lost"]
        assert set(lost) == {"n3"}
        now = said(slurm, "cluster", "status", folder=folder)
        assert (now["job_id"], now["state"]) == (job["job_id"], "RUNNING")
        said(slurm, "cluster", "down", folder=folder)


def test_fifty_sessions_on_three_nodes_that_ray_joins() -> None:
    packages = sorted((Path(__file__).parents[3] / ".venv-ray/lib").glob("python*/site-packages"))
    assert packages, "`make test-cluster` installs Ray"
    with slurm_cluster(3, {"ray": packages[-1]}) as slurm:
        program = {"cluster.ray_program": [slurm.python, "-m", "ray.scripts.scripts"], "node.run_workers": 4}
        three = {"cluster.slurm.nodes": 3, "cluster.slurm.cpus_per_task": 2, "cluster.slurm.ray": True}
        folder = prepare(slurm, "ray", **program, **three)
        path = f"{slurm.place}/repository/src:{slurm.place}/ray:{slurm.place}/packages"
        said(slurm, "cluster", "up", folder=folder, PYTHONPATH=path)
        status = listening(slurm, folder)
        service = {"TOWLINE_URL": status["url"], "TOWLINE_KEY": Path(status["key"]).read_text().strip()}
        tasks = said(slurm, "submit", "tasks.jsonl", "--wait", folder=folder, seconds=600, **service)
        assert [(one["state"], one["usable"]) for one in tasks] == [("done", 5)] * (SESSIONS // 5)
        # A host is named by the address of its node.
        nodes = {one["node"].partition("-")[0] for one in sessions_of(slurm, folder, service)}
        assert nodes == {slurm.address(node) for node in (1, 2, 3)}
        said(slurm, "cluster", "down", folder=folder)


def sessions_of(slurm: SlurmCluster, folder: Path, service: dict[str, str]) -> list[dict[str, Any]]:
    return list(said(slurm, "sessions", "--limit", "200", folder=folder, **service))
