"""A run's metrics: always a JSONL file, optionally TensorBoard and Weights & Biases; and its curves as a PNG."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from towline.errors import ConfigError
from towline.trainers.grpo.learner import ON_POLICY_BOUND


class MetricsSink(Protocol):
    """A further destination of metrics."""

    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """Writes every metric of every step to `metrics.jsonl`, and numbers to the sinks."""

    def __init__(self, folder: Path, *sinks: MetricsSink):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self._file = self.path.open("a", encoding="utf-8")
        self._sinks = sinks

    def measured(self, step: int) -> bool:
        """Whether held-out success at this step is already in the file."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return any(line.startswith(f'{{"step": {step},') and '"success":' in line for line in lines)

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"step": step, **figures}) + "\n")
        self._file.flush()
        numbers = {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}
        for sink in self._sinks:
            sink.write(step, numbers)

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run; for a step that was repeated after a crash, the last one."""
    steps: dict[tuple[int, bool], dict[str, Any]] = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        steps[found["step"], "success" in found] = found
    return [steps[key] for key in sorted(steps)]


class TensorBoard:
    def __init__(self, folder: Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigError("tensorboardX is not installed: pip install 'towline[train]'") from error
        # TensorBoard names files by the second; a run resumed within the same second must not overwrite its file.
        self._writer = SummaryWriter(str(folder), filename_suffix=f".{time.time_ns()}")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, project: str, name: str, config: Mapping[str, Any]):
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("Weights & Biases is not installed: pip install wandb") from error
        self._run = wandb.init(project=project, name=name, config=dict(config), resume="allow", id=name)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def draw_curves(lines: Sequence[Mapping[str, Any]], path: Path, title: str = "") -> None:
    """Write a PNG of the run's reward, held-out success, entropy, staleness and logprob differences."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError("matplotlib is not installed: pip install 'towline[train]'") from error
    steps = [line for line in lines if "mean_reward" in line]
    held_out = [line for line in lines if "success" in line]
    figure, (success, exploring, exact) = pyplot.subplots(3, 1, figsize=(7, 8), sharex=True, constrained_layout=True)

    def plot(axes: Any, name: str, label: str, of: Sequence[Mapping[str, Any]] = steps, **style: Any) -> None:
        axes.plot([line["sessions_used"] for line in of], [line[name] for line in of], label=label, **style)

    plot(success, "mean_reward", "reward in training")
    if held_out:
        plot(success, "success", "success on held-out tasks", held_out, marker="o")
    low, high = success.get_ylim()
    success.set_ylim(min(low, -0.02), max(high, 1.02))
    success.legend(loc="lower right")
    plot(exploring, "entropy", "entropy, nats per token")
    plot(exploring, "staleness", "staleness, versions")
    exploring.set_ylim(bottom=0.0, top=max(0.1, 1.35 * exploring.get_ylim()[1]))
    exploring.legend(loc="upper right", ncols=2)
    exact.set_yscale("log")
    plot(exact, "worst_logprob", "max |learner - recorded| logprob, same weights")
    plot(exact, "mismatch_kl", "mismatch KL per token, stale tokens included")
    exact.axhline(
        ON_POLICY_BOUND, color="grey", linestyle="--", linewidth=1, label=f"bound for same weights, {ON_POLICY_BOUND:g}"
    )
    exact.set_ylim(top=max(1.0, exact.get_ylim()[1]) * 100)
    exact.legend(loc="upper right")
    exact.set_xlabel("sessions")
    if title:
        figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
