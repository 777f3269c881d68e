"""A local rollout service for the duration of a training run, in its own process so that learning never blocks it.

It dies with the trainer, even if the trainer is killed: an orphaned service would hold the store that the next run of the
same trainer needs. Everything it accepted is in that store.
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
    """Start `towline serve` on a free loopback port and yield its URL. Its log is `data`/service.log."""
    data.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "towline", "serve", "--json", "--port", "0", "--model", str(model)]
    command += ["--data", str(data / "service"), *options]
    with (data / "service.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=_environment(), preexec_fn=_die_with_parent
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            process.wait(_STOP_SECONDS)
            log_path = data / "service.log"
            tail = log_path.read_text("utf-8", "replace").strip()[-1500:]
            raise ConfigError(f"the service did not start; the end of {log_path}: {tail}")
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
    """One engine thread by default: more would only compete with the learner."""
    return {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
