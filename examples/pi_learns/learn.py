"""Pi learns: the real program from npm is the harness in the training loop, with its own prompt and tools in the context.

    python examples/pi_learns/learn.py

It records Pi's prompt once, creates a tiny model for it, starts a rollout service and trains by asynchronous GRPO on Pi's
sessions. Restarted with the same `--out`, it resumes from its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from notes import training_task
from pi_model import CHANCE, STEPS, create
from pi_prompt import record_prompt

from towline.client import Client
from towline.trainers.grpo.learner import Learner, LearnerSettings
from towline.trainers.grpo.loop import Grpo, GrpoSettings, TrainingStep
from towline.trainers.grpo.loss import LossSettings
from towline.trainers.grpo.metrics import MetricsLog, read_metrics
from towline.trainers.grpo.run import TrainingRun
from towline.trainers.service import own_service

ENDS = 5
"""Number of updates at the start and at the end that are compared."""


def main() -> None:
    given = _arguments()
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    # One thread for the learner; the other core runs Pi.
    torch.set_num_threads(1)
    began = time.perf_counter()
    print("recording Pi's prompt …", flush=True)
    prompt = record_prompt()
    model = create(out / "model", prompt, seed=given.seed, steps=given.warm_up, progress=_progress)
    print(f"model ready after {time.perf_counter() - began:.0f} s; chance level is {CHANCE:.0%}", flush=True)
    train(model, out, given)
    print(json.dumps(conclude(out, time.perf_counter() - began), indent=2))


def train(model: Path, out: Path, given: argparse.Namespace) -> None:
    """Run all remaining updates."""
    learner = Learner(
        model,
        # The evaluator scores call and answer separately; the outcome combines both and would only blur the signal.
        LearnerSettings(rate=given.rate, outcome_weight=0.0, loss=LossSettings(entropy=given.entropy)),
        seed=given.seed,
    )
    settings = GrpoSettings(
        run=out.resolve().name, steps=given.steps, groups=given.groups, permute=given.control, seed=given.seed
    )
    metrics = MetricsLog(out)
    with own_service(model, out, ["--concurrency", str(given.concurrency)]) as url, Client(url) as client:
        tasks = lambda number: training_task(number, samples=given.samples, seed=given.seed)  # noqa: E731
        TrainingRun(Grpo(client, learner, tasks, out, settings), metrics, given.rate, on_step=_print_step).run()
    metrics.close()


def _print_step(step: TrainingStep) -> None:
    update = step.update
    seconds = step.waited + step.learned + step.pushed
    print(f"update {update.version:3}  success {update.mean_reward:6.1%}  {seconds:4.0f} s  {step.line()}", flush=True)


def _progress(done: int, total: int, what: str) -> None:
    if done % 100 == 0 or done == total:
        print(f"warm-up {done}/{total}  {what}", flush=True)


def conclude(out: Path, seconds: float) -> dict[str, Any]:
    """Write `summary.json` and the curve, and return the summary."""
    steps = [line for line in read_metrics(out) if "mean_reward" in line]
    success = [line["mean_reward"] for line in steps]
    first, last = (sum(part) / len(part) for part in (success[:ENDS], success[-ENDS:]))
    found = {
        "updates": len(steps),
        "sessions": steps[-1]["sessions_used"],
        "minutes_since_start": round(seconds / 60, 1),
        "success_first": round(first, 4),
        "success_last": round(last, 4),
        "points": round(100 * (last - first), 1),
        "trained_tokens": sum(line["trained_tokens"] for line in steps),
        "row_tokens": sum(line["row_tokens"] for line in steps),
        "worst_own_logprob": max(line["worst_logprob"] for line in steps),
    }
    (out / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
    draw(success, out / "curve.png")
    return found


def draw(success: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3), constrained_layout=True)
    updates = range(1, len(success) + 1)
    axes.plot(updates, success, "o-", markersize=3, label="sessions of each update")
    ends = ((1, success[:ENDS]), (len(success) - ENDS + 1, success[-ENDS:]))
    for start, part in ends:
        mean = sum(part) / len(part)
        axes.hlines(mean, start, start + len(part) - 1, colors="tab:orange", linewidth=4, alpha=0.5)
        axes.annotate(
            f"{mean:.0%}", (start + (len(part) - 1) / 2, mean), (0, 6), textcoords="offset points", ha="center"
        )
    axes.axhline(CHANCE, color="grey", linestyle=":", label="chance")
    axes.set(ylim=(0, 1.05), xlabel="update", ylabel="success", title="Pi learns to read the note that was asked about")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a tiny model by GRPO on sessions of the real Pi.")
    parser.add_argument("--out", type=Path, default=Path("runs/pi-learns"), help="model, checkpoint, metrics, curve")
    parser.add_argument("--steps", type=int, default=20, help="updates")
    parser.add_argument("--groups", type=int, default=16, help="groups an update")
    parser.add_argument("--samples", type=int, default=4, help="sessions a group")
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--entropy", type=float, default=0.01)
    parser.add_argument("--concurrency", type=int, default=4, help="sessions at the same time")
    parser.add_argument("--warm-up", type=int, default=STEPS, help="steps of the format warm-up")
    parser.add_argument("--control", action="store_true", help="shuffle rewards within each group")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
