"""A run's figures: in the JSONL, in TensorBoard's own files, in the picture, and before a person's eyes."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from towline.trainers.grpo.learner import UpdateReport
from towline.trainers.grpo.loop import TrainingStep
from towline.trainers.grpo.metrics import MetricsLog, TensorBoard, draw_curves, read_metrics
from towline.trainers.grpo.run import HeldOutMeasurement, LiveView, sparkline


def step(version: int, reward: float, *, incomplete: int = 0) -> TrainingStep:
    update = UpdateReport(version, sessions=4, mean_reward=reward, entropy=0.5, worst_logprob=2e-6, mismatch_kl=3e-5)
    return TrainingStep(update, 1.0, 2.0, 0.5, 4 * version, 1, incomplete, ["r1"])


def events(folder: Path) -> Iterator[Event]:
    """What TensorBoard would read: records of a length, its checksum, an event and its checksum."""
    for file in folder.glob("events.out.tfevents.*"):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def test_metrics_are_in_jsonl_and_tensorboard_and_a_repeated_step_counts_once(tmp_path: Path) -> None:
    for rewards in ((0.25, 0.5), (0.75,)):
        # The second time is after a crash that came before the second step's checkpoint.
        metrics = MetricsLog(tmp_path, TensorBoard(tmp_path / "tensorboard"))
        if len(rewards) == 2:
            metrics.write(0, {"sessions_used": 0, "success": 0.125})
            metrics.write(1, step(1, rewards[0]).as_json())
        metrics.write(2, step(2, rewards[-1]).as_json())
        metrics.close()
    lines = read_metrics(tmp_path)
    assert [(line["step"], line.get("mean_reward"), line.get("success")) for line in lines] == [
        (0, None, 0.125),
        (1, 0.25, None),
        (2, 0.75, None),
    ]
    written = [
        (event.step, value.tag, value.simple_value)
        for event in events(tmp_path / "tensorboard")
        for value in event.summary.value
    ]
    assert {(0, "success", 0.125), (1, "mean_reward", 0.25), (2, "mean_reward", 0.75)} <= set(written)
    assert {"entropy", "mismatch_kl", "worst_logprob", "staleness", "sessions_used"} <= {tag for _, tag, _ in written}
    draw_curves(lines, tmp_path / "curves.png", "a run")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def follow(console: Console) -> str:
    with LiveView(console, 2) as view:
        view.on_measurement(HeldOutMeasurement(0, 0, 0.25, 4))
        view.on_status("waiting for sessions")
        view.on_step(step(1, 0.25))
        view.on_step(step(2, 1.0, incomplete=3))
        view.on_measurement(HeldOutMeasurement(2, 8, 0.75, 4))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_gets_one_line_per_update() -> None:
    lines = follow(Console(file=io.StringIO(), width=160)).splitlines()
    assert len(lines) == 4
    assert lines[0].endswith("0 sessions: 25.0% of 4 held-out tasks right")
    assert lines[1].startswith("update   1 of 2: reward 0.25")
    assert "max |Δlogp| 2e-06" in lines[1]
    assert lines[2].endswith("8 sessions, 3 groups failed")


def test_a_terminal_gets_a_live_view_and_keeps_the_measurements() -> None:
    shown = follow(Console(file=io.StringIO(), width=120, height=40, force_terminal=True, color_system=None))
    assert "2/2" in shown
    assert "▃█ 1.00" in shown
    assert "25% → 75%" in shown
    assert "after     8 sessions: 75.0% of 4 held-out tasks right" in shown
    assert sparkline([]) == ""
    assert sparkline([-1.0, 3.0]) == "▁█"
