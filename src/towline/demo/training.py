"""The demo's second part: a service, agents in sandboxes, asynchronous GRPO, and success on questions never trained on.

What is printed at the end is the fidelity report: how far the learner's own logprobs were from the recorded ones at every
step, and one forward pass of the final weights over the sessions that measured them.
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
from towline.demo.agent import AGENT
from towline.demo.session import BOUND, recompute
from towline.tiny.tasks import held_out_tasks, training_task
from towline.trainers.curves import draw
from towline.trainers.grpo import Grpo, GrpoSettings
from towline.trainers.learner import OWN_BOUND, Learner, LearnerSettings
from towline.trainers.live import LiveView
from towline.trainers.loss import LossSettings
from towline.trainers.metrics import Metrics, read
from towline.trainers.run import Run
from towline.trainers.service import own_service

HELD_OUT = 64
"""Questions about pairs that no training task asks for."""


@dataclass(frozen=True, slots=True)
class Training:
    steps: int = 28
    groups: int = 12
    samples: int = 8
    rate: float = 1.2e-3
    updates: int = 6
    entropy: float = 0.005
    concurrency: int = 16
    measurements: int = 3
    """How often success is measured after the start; the last time is at the end."""
    permute: bool = False
    """The control: rewards are shuffled within each group, so that there is nothing to learn."""


def train(console: Console, model: Path, folder: Path, training: Training, seed: int) -> dict[str, Any]:
    """Train the tiny model on the registry and measure it; what was found, with `problems` that should not be."""
    torch.set_num_threads(1)
    # A demo starts anew; `towline train` is what goes on from where it was.
    shutil.rmtree(folder, ignore_errors=True)
    learner = Learner(
        model,
        # The evaluator scores the call and the answer by themselves: the outcome is both, and would only blur them.
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
    metrics = Metrics(folder)
    options = ["--concurrency", str(training.concurrency)]
    console.print(
        f"{training.steps} updates of {training.groups} groups of {training.samples} sessions: each session runs "
        "the example agent in a sandbox of its own. Rollouts go on while the learner learns.",
        highlight=False,
    )
    shown = LiveView(console, training.steps, "held-out questions")
    with own_service(model, folder, options) as url, Client(url) as client, shown:
        run = Run(
            Grpo(
                client,
                learner,
                lambda n: training_task(n, AGENT, samples=training.samples, seed=seed),
                folder,
                settings,
            ),
            metrics,
            training.rate,
            held_out_tasks(AGENT, HELD_OUT),
            frozenset(training.steps * place // training.measurements for place in range(1, training.measurements)),
        )
        shown.attach(run)
        run.run()
    metrics.close()
    worst = recompute(folder / "weights" / f"v{training.steps}", run.played)
    return _conclude(console, folder, run, worst)


def _conclude(console: Console, folder: Path, run: Run, worst: float) -> dict[str, Any]:
    """The fidelity report, and what it comes to."""
    lines = [line for line in read(folder) if "mean_reward" in line]
    own = max(line["worst_logprob"] for line in lines)
    reports = [trajectory.report for trajectory in run.played]
    off = {
        f"a token that the learner's own weights sampled is {own:.1e} off": own < OWN_BOUND,
        f"a recorded logprob is {worst:.1e} off the final weights": worst < BOUND,
        "a held-out session has more than one chain": all(report.chains == 1 for report in reports),
        "a held-out session was not scored": all(one.reward is not None for one in run.played),
    }
    problems = [problem for problem, fine in off.items() if not fine]
    console.rule("fidelity")
    tokens = sum(line["trained_tokens"] for line in lines)
    age = sum(line["staleness"] * line["trained_tokens"] for line in lines)
    said = [
        f"{tokens:,} tokens learned from, {sum(line['own_tokens'] for line in lines):,} of them sampled by the very weights "
        f"that learned: max |learner - recorded| logprob {own:.1e} (bound {OWN_BOUND:g}).",
        f"Final weights over the {sum(report.trained_tokens for report in reports):,} sampled tokens of the "
        f"{len(reports)} held-out sessions: max |Δlogp| {worst:.1e} (bound {BOUND:g}), "
        f"{sum(report.chains for report in reports)} conversations in as many exact chains.",
        f"Tokens were {age / max(1, tokens):.1f} versions old on average when they were learned from; "
        f"{lines[-1]['dropped_groups']} groups were too old and dropped.",
    ]
    for text in said:
        console.print(Text(text), soft_wrap=True)
    for problem in problems:
        console.print(Text(f"Off: {problem}", "bold red"))
    first, last = run.measurements[0], run.measurements[-1]
    console.print(
        Text(f"Success on held-out questions: {first.success:.1%} to {last.success:.1%}", "bold green").append(
            f" in {last.sessions:,} sessions. Curves: {folder / 'curves.png'}", "not bold default"
        )
    )
    draw(read(folder), folder / "curves.png", "Towline demo: success on the registry")
    found = {"out": str(folder), "worst_own_logprob": own, "max_abs_dlogp": worst, "trained_tokens": tokens}
    return {**found, **run.as_json(), "problems": problems}
