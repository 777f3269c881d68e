"""The example trainer, killed repeatedly: its checkpoint has every session exactly once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from support.client.stand_in_service import StandIn, serving

SCRIPT = Path(__file__).parents[2] / "examples/trainer/train.py"
PATIENCE = 120
"""Seconds that anything here may take."""


def test_killed_trainer_uses_every_session_exactly_once(tmp_path: Path) -> None:
    assert len(SCRIPT.read_text().splitlines()) < 40
    checkpoint = tmp_path / "checkpoint.json"
    service = StandIn(at_once=False)

    def used() -> list[str]:
        return json.loads(checkpoint.read_text())["used"] if checkpoint.exists() else []

    with serving(service) as url:
        environment = os.environ | {"TOWLINE_URL": url, "CHECKPOINT": str(checkpoint), "LEASE": "1"}

        def run_until(moment: Callable[[], bool]) -> None:
            trainer = subprocess.Popen([sys.executable, str(SCRIPT)], env=environment)
            try:
                until = time.monotonic() + PATIENCE
                while not moment():
                    assert trainer.poll() is None, "the trainer ended by itself"
                    assert time.monotonic() < until
                    time.sleep(0.005)
            finally:
                trainer.kill()
                trainer.wait(PATIENCE)

        # Killed before the first batch is whole.
        finishing = threading.Thread(target=finish_slowly, args=(service,), daemon=True)
        finishing.start()
        run_until(lambda: len(service.delivered) >= 3)
        assert used() == []
        # Killed in the middle, at no moment in particular.
        run_until(lambda: len(used()) >= 16)
        # Killed after a checkpoint and before its acknowledgement. The first one heard is that of the start.
        before, service.most_acks = len(used()), service.acks + 1
        run_until(lambda: len(used()) > before)
        assert set(used()) - {name for _, name in service.acked}
        service.most_acks = 1_000_000
        # And led to its end.
        subprocess.run([sys.executable, str(SCRIPT)], env=environment, check=True, timeout=PATIENCE)
        finishing.join(PATIENCE)
        assert not finishing.is_alive()

    state = json.loads(checkpoint.read_text())
    assert sorted(state["used"]) == sorted(f"s-{name}" for name in service.trajectories)
    assert len(state["used"]) == 64
    assert len(service.tasks) == 16
    trained = sum(trace.trained_tokens for one in service.trajectories.values() for trace in one.traces)
    assert state["trained_tokens"] == trained
    assert {name for _, name in service.acked} == set(state["used"])
    # The kills did cost something: results were handed out again, and not used again.
    assert len(service.delivered) > 64


def finish_slowly(service: StandIn) -> None:
    while len(service.tasks) < 16:
        time.sleep(0.01)
    for sample in range(4):
        for task_id in list(service.tasks):
            service.finish(task_id, sample)
            time.sleep(0.02)
