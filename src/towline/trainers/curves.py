"""The curves of a run as a picture: reward and held-out success, entropy, and how exact the data was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from towline.errors import ConfigError
from towline.trainers.learner import OWN_BOUND


def draw(lines: Sequence[Mapping[str, Any]], path: Path, title: str = "") -> None:
    """Write a PNG of the run's metrics."""
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
    plot(exploring, "entropy", "entropy, nats a token")
    plot(exploring, "staleness", "staleness, versions")
    exploring.set_ylim(bottom=0.0, top=max(0.1, 1.35 * exploring.get_ylim()[1]))
    exploring.legend(loc="upper right", ncols=2)
    exact.set_yscale("log")
    plot(exact, "worst_logprob", "max |learner - recorded| logprob, same weights")
    plot(exact, "mismatch_kl", "mismatch KL a token, older weights included")
    exact.axhline(OWN_BOUND, color="grey", linestyle="--", linewidth=1, label=f"bound of the former, {OWN_BOUND:g}")
    exact.set_ylim(top=max(1.0, exact.get_ylim()[1]) * 100)
    exact.legend(loc="upper right")
    exact.set_xlabel("sessions")
    if title:
        figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
