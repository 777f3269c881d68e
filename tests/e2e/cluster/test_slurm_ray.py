"""The Ray part of the Slurm job, with the real Ray: an ordinary user's nodes join, work runs on each, strangers stay out.

Ray looks for addresses outside. The nodes of this cluster have no route out, so it finds none.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster.slurm import CALL_SECONDS, UID, SlurmCluster, slurm_cluster

pytestmark = pytest.mark.timeout(900)

NODES = 3
_PACKAGES = sorted((Path(__file__).parents[3] / ".venv-ray/lib").glob("python*/site-packages"))
# Stands in for `towline serve`: waits for the nodes, and has work done on each.
DRIVER = """
import json, os, sys, time
import ray

ray.init(address="auto", log_to_driver=False)
until = time.monotonic() + 240
while len([node for node in ray.nodes() if node["Alive"]]) < {nodes}:
    assert time.monotonic() < until, ray.nodes()
    time.sleep(0.5)

@ray.remote(num_cpus=2)
def where():
    time.sleep(1)
    return os.getuid(), ray.util.get_node_ip_address()

done = sorted(ray.get([where.remote() for _ in range({nodes})], timeout=240))
print(json.dumps({{"url": "http://ray", "done": done}}), flush=True)
time.sleep(600)
"""
STRANGER = "import ray; ray.init(address='{address}', log_to_driver=False); print('joined')"


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    assert _PACKAGES, "`make test-cluster` installs Ray"
    with slurm_cluster(NODES, {"ray": _PACKAGES[-1]}) as cluster:
        yield cluster


def test_nodes_join_with_the_token_of_the_job(slurm: SlurmCluster) -> None:
    folder = slurm.home / "run"
    folder.mkdir()
    (folder / "driver.py").write_text(DRIVER.format(nodes=NODES))
    program = (
        f'case " $* " in *" keys "*) exec {slurm.python} -m towline "$@";; *) exec {slurm.python} driver.py;; esac'
    )
    ray = [slurm.python, "-m", "ray.scripts.scripts"]
    settings = {
        "kind": "slurm",
        "program": ["sh", "-c", program, "program"],
        "ray_program": ray,
        "slurm": {"nodes": NODES, "cpus_per_task": 2, "ray": True},
    }
    inside = {"PYTHONPATH": f"{slurm.place}/repository/src:{slurm.place}/ray:{slurm.place}/packages"}
    inside |= {f"TOWLINE_CLUSTER__{name.upper()}": text(value) for name, value in settings.items()}
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, UID, UID)

    def towline(*words: str) -> Any:
        done = slurm.towline(*words, "--json", cwd=folder, seconds=300, **inside)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    job = towline("cluster", "up")
    until = time.monotonic() + 300
    while not (status := towline("cluster", "status"))["url"]:
        log = Path(status["log"])
        assert status["active"], log.read_text()[-6000:]
        assert time.monotonic() < until, log.read_text()[-6000:]
        time.sleep(1)
    answer = json.loads((folder / "towline-data/cluster/endpoint.json").read_text())
    assert answer["done"] == [[UID, slurm.address(node)] for node in range(1, NODES + 1)]

    # The same user's programs have no token either.
    address = f"{slurm.address(1)}:{20000 + int(job['job_id'])}"
    stranger = ["timeout", "50", slurm.python, "-c", STRANGER.format(address=address)]
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    refused = slurm.as_user(stranger, seconds=CALL_SECONDS, **inside, **quiet)
    assert refused.returncode != 0
    assert "joined" not in refused.stdout
    assert "token" in refused.stderr

    towline("cluster", "down")
    left = slurm.as_user(["squeue", "--noheader"])
    assert (left.returncode, left.stdout) == (0, "")
    # Nothing of Ray outlives the job but processes that have exited: the first process of these nodes reaps no orphans.
    until = time.monotonic() + 60
    while alive := ray_processes():
        assert time.monotonic() < until, alive
        time.sleep(0.5)


def ray_processes() -> list[str]:
    """The user's processes of Ray that have not exited."""
    listed = subprocess.run(
        ["ps", "-o", "stat=,args=", "-u", str(UID)], capture_output=True, text=True, timeout=CALL_SECONDS, check=False
    )
    return [line for line in listed.stdout.splitlines() if not line.startswith("Z") and "ray" in line]


def text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
