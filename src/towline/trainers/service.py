"""A rollout service for as long as a training run lasts: a process of its own, so that learning never holds it up.

It dies with the trainer, however that dies: a service that is left behind would hold the store that the next run of the
same trainer needs. What it had accepted is in that store.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from towline.errors import ConfigError

_STOP_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@contextlib.contextmanager
def own_service(model: Path, data: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """Start `towline serve` on a free port of loopback; its URL. What it logs is in `data`/service.log."""
    data.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "towline", "serve", "--json", "--port", "0", "--model", str(model)]
    command += ["--data", str(data / "service"), *options]
    with (data / "service.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=_environment(), preexec_fn=_die_with_the_parent
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            process.wait(_STOP_SECONDS)
            said = (data / "service.log").read_text("utf-8", "replace").strip()[-1500:]
            raise ConfigError(f"the service did not start; it said: {said}")
        yield str(json.loads(line)["url"])
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _environment() -> dict[str, str]:
    """One thread for the engine: beside a learner, more only get in each other's way."""
    return {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def _die_with_the_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
