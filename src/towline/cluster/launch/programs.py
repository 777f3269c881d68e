"""Calls of `sbatch`, `kubectl` and the like: bounded in time, with errors that say what to do.

No secret is ever an argument: other users of the machine see arguments. What a program needs of them is in its standard
input or in the environment.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from towline.errors import TowlineError

SECONDS = 60.0
"""How long one call may take."""
_HINTS = {
    "kubectl": "install it, and give it access to the Kubernetes cluster",
    "sbatch": "run this on a login node of the Slurm cluster",
    "scancel": "run this on a login node of the Slurm cluster",
    "squeue": "run this on a login node of the Slurm cluster",
}


class LaunchError(TowlineError):
    """Slurm or Kubernetes refused, did not answer, or its program is missing."""


def call_program(command: Sequence[str], *, stdin: str = "", seconds: float = SECONDS) -> str:
    """The output of a program; raises `LaunchError` if it is missing, fails, or takes longer than `seconds`."""
    program = command[0]
    if shutil.which(program) is None:
        raise LaunchError(f"{program} was not found; {_HINTS[program]}, or use --dry-run to see what it would get")
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{program} did not answer within {seconds:g} seconds; is the cluster reachable?") from error
    if done.returncode:
        said = " ".join((done.stderr.strip() or done.stdout.strip() or "no output").split())
        raise LaunchError(f"{program} failed with status {done.returncode}: {said[:2000]}")
    return done.stdout
