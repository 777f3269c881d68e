"""Node hosts on the nodes of a Slurm job, started by `srun` from the server, which runs inside the job. No Ray, no daemon.

`srun` passes on the standard input of a host, so its settings and its token are in no argument and no file, and a host ends
with the server. The batch script writes the file of nodes, as it knows their addresses.
"""

from __future__ import annotations

import os
from pathlib import Path

from towline.cluster.child_hosts import HostPlace
from towline.errors import ConfigError


def slurm_places(nodes: Path, data: Path) -> list[HostPlace]:
    """A host per line of `nodes`, which is `NAME ADDRESS`. Its data is in `data`, which all nodes share."""
    if "SLURM_JOB_ID" not in os.environ:
        raise ConfigError("--cluster slurm: this is not inside a Slurm job; start one with: towline cluster up")
    try:
        lines = [line.split() for line in nodes.read_text("utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--cluster slurm: {nodes}: {error.strerror}") from error
    if not lines or any(len(line) != 2 for line in lines):
        raise ConfigError(f"--cluster slurm: {nodes}: each line must be NODE ADDRESS")
    return [HostPlace(name, data / "nodes" / name, _step(name), f"{address}:0") for name, address in lines]


def _step(node: str) -> tuple[str, ...]:
    """A job step on one node, with all that the job has there. Output comes line by line."""
    where = ("--nodes=1", "--ntasks=1", f"--nodelist={node}", "--overlap", "--cpu-bind=none", "--unbuffered")
    # Nodes that run sessions are the first part of a job with model servers.
    part = ("--het-group=0",) if "SLURM_HET_SIZE" in os.environ else ()
    return ("srun", *where, *part)
