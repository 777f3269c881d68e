"""The demo's second part: a service, agents in sandboxes, asynchronous GRPO, and success on held-out questions.

It ends with the fidelity report: the difference between the learner's logprobs and the recorded ones at every step, and one
forward pass of the final weights over the held-out sessions that they sampled.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from towline.client import Client
from towline.demo.registry import EXAMPLE_AGENT, held_out_tasks, training_task
from towline.demo.session import LOGPROB_BOUND, recompute
from towline.trainers.grpo.learner import ON_POLICY_BOUND, Learner, LearnerSettings
from towline.trainers.grpo.loop import Grpo, GrpoSettings
from towline.trainers.grpo.loss import LossSettings
from towline.trainers.grpo.metrics import MetricsLog, draw_curves, read_metrics
from towline.trainers.grpo.run import LiveView, TrainingRun
from towline.trainers.service import own_service

HELD_OUT = 64
"""Questions about pairs that no training task asks for."""


@dataclass(frozen=True, slots=True)
class Training:
    """Settings of the demo's training run."""

    steps: int = 28
    groups: int = 12
    samples: int = 8
    rate: float = 1.2e-3
    updates: int = 6
    entropy: float = 0.005
    concurrency: int = 16
    measurements: int = 3
    """Success measurements after the one at the start; the last is at the end."""
    permute: bool = False
    """Control experiment: shuffle rewards within each group, so that there is nothing to learn."""


def train(console: Console, model: Path, folder: Path, training: Training, seed: int) -> dict[str, Any]:
    """Train the tiny model on the registry and measure it. `problems` in the result lists failed checks."""
    torch.set_num_threads(1)
    # The demo always starts from scratch; `towline train` resumes.
    shutil.rmtree(folder, ignore_errors=True)
    learner = Learner(
        model,
        # The evaluator scores call and answer separately; the outcome combines both and would only blur the signal.
        LearnerSettings(
            rate=training.rate,
            updates=training.updates,
            outcome_weight=0.0,
            loss=LossSettings(entropy=training.entropy),
        ),
        seed=seed,
    )
    settings = GrpoSettings(
        run=f"demo-{seed}", steps=training.steps, groups=training.groups, permute=training.permute, seed=seed
    )
    metrics = MetricsLog(folder)
    options = ["--concurrency", str(training.concurrency)]
    console.print(
        f"{training.steps} updates of {training.groups} groups of {training.samples} sessions; each session runs "
        "the example agent in its own sandbox. Rollouts continue while the learner trains.",
        highlight=False,
    )
    shown = LiveView(console, training.steps, "held-out questions")
    with own_service(model, folder, options) as url, Client(url) as client, shown:
        run = TrainingRun(
            Grpo(
                client,
                learner,
                lambda n: training_task(n, EXAMPLE_AGENT, samples=training.samples, seed=seed),
                folder,
                settings,
            ),
            metrics,
            training.rate,
            held_out_tasks(EXAMPLE_AGENT, HELD_OUT),
            frozenset(training.steps * place // training.measurements for place in range(1, training.measurements)),
        )
        shown.attach(run)
        run.run()
    metrics.close()
    worst = recompute(folder / "weights" / f"v{training.steps}", run.held_out_trajectories)
    return _conclude(console, folder, run, worst)


def _conclude(console: Console, folder: Path, run: TrainingRun, worst: float) -> dict[str, Any]:
    """Print the fidelity report and success; draw the curves."""
    lines = [line for line in read_metrics(folder) if "mean_reward" in line]
    own = max(line["worst_logprob"] for line in lines)
    reports = [trajectory.report for trajectory in run.held_out_trajectories]
    checks = {
        f"the logprob of a token sampled with the learner's current weights is off by {own:.1e}": own < ON_POLICY_BOUND,
        f"a recorded logprob differs from the final weights' by {worst:.1e}": worst < LOGPROB_BOUND,
        "a held-out session has more than one chain": all(report.chains == 1 for report in reports),
        "a held-out session was not scored": all(one.reward is not None for one in run.held_out_trajectories),
    }
    problems = [problem for problem, passed in checks.items() if not passed]
    console.rule("fidelity")
    tokens = sum(line["trained_tokens"] for line in lines)
    age = sum(line["staleness"] * line["trained_tokens"] for line in lines)
    summary = [
        f"{tokens:,} trained tokens, {sum(line['own_tokens'] for line in lines):,} of them sampled with the learner's "
        f"current weights: max |learner - recorded| logprob {own:.1e} (bound {ON_POLICY_BOUND:g}).",
        f"Final weights over the {sum(report.trained_tokens for report in reports):,} sampled tokens of the "
        f"{len(reports)} held-out sessions: max |Δlogp| {worst:.1e} (bound {LOGPROB_BOUND:g}), "
        f"{sum(report.chains for report in reports)} exact chains.",
        f"Trained tokens were {age / max(1, tokens):.1f} versions old on average; "
        f"{lines[-1]['dropped_groups']} groups were dropped as too old.",
    ]
    for text in summary:
        console.print(Text(text), soft_wrap=True)
    for problem in problems:
        console.print(Text(f"Failed: {problem}", "bold red"))
    first, last = run.measurements[0], run.measurements[-1]
    console.print(
        Text(f"Success on held-out questions: {first.success:.1%} to {last.success:.1%}", "bold green").append(
            f" in {last.sessions:,} sessions. Curves: {folder / 'curves.png'}", "not bold default"
        )
    )
    draw_curves(read_metrics(folder), folder / "curves.png", "Towline demo: success on the registry")
    figures = {"out": str(folder), "worst_own_logprob": own, "max_abs_dlogp": worst, "trained_tokens": tokens}
    return {**figures, **run.as_json(), "problems": problems}
