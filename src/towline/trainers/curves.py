"""The curves of a run as a picture: reward and held-out success, entropy, and how exact the data was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from towline.errors import ConfigError


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
    figure, axes = pyplot.subplots(3, 1, figsize=(7, 8), sharex=True, constrained_layout=True)
    axes[0].plot([s["sessions_used"] for s in steps], [s["mean_reward"] for s in steps], label="reward in training")
    if held_out:
        xs, ys = [s["sessions_used"] for s in held_out], [s["success"] for s in held_out]
        axes[0].plot(xs, ys, "o-", label="success on held-out tasks")
    axes[0].set_ylim(-0.02, 1.02)
    axes[0].legend(loc="lower right")
    axes[1].plot([s["sessions_used"] for s in steps], [s["entropy"] for s in steps], label="entropy")
    axes[1].plot([s["sessions_used"] for s in steps], [s["staleness"] for s in steps], label="staleness, versions")
    axes[1].legend(loc="upper right")
    axes[2].semilogy([s["sessions_used"] for s in steps], [max(s["worst_logprob"], 1e-9) for s in steps])
    axes[2].set_ylabel("max |learner - recorded| logprob")
    axes[2].set_xlabel("sessions")
    if title:
        figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
