"""What the builders cost a trainer and what their rows are worth: the same training run with each, side by side.

Each run starts from the same model, which reasons a line before every reply, and learns by synchronous GRPO from the same
tasks with the same settings: conversations of several questions, held by the example agent in sandboxes. What differs is
how sessions become rows, and whether the agent sends the model's reasoning back:

- `exact` continues every conversation from its own tokens, so a session is a row;
- `merged` renders every request anew, as a plain chat server does, and stitches the rows afterwards;
- `per_turn` renders every request anew and makes a row of each;
- `as sent` is `exact` under the policy that shows the model what the agent sent: dropped reasoning forks.

Nothing is under way while the trainer learns, and every token is of the weights that it learns from: whatever a recorded
logprob is off is the builder's doing. Sampling is not seeded across processes, so success differs a little from run to
run by chance alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from towline import tiny
from towline.benchmarks import interviews
from towline.schema import BuilderName, ContextPolicy, Task, Trajectory
from towline.tiny.registry import Split, draw

PAPER = 5.39
"""How many times faster training with prefix merging was than with a row a request, in the paper's own ablation."""

Report = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the runs."""

    name: str
    drops: bool
    """Whether the agent sends replies back without their reasoning."""
    settings: Mapping[str, Any]

    @property
    def title(self) -> str:
        return f"{self.name}, reasoning {'dropped' if self.drops else 'kept'}"


_EXACT = {"builder": BuilderName.EXACT.value, "capture": "exact"}
_MERGED = {"builder": BuilderName.MERGED.value, "capture": "plain"}
_PER_TURN = {"builder": BuilderName.PER_TURN.value, "capture": "plain"}
SIDES = (
    Side("exact", False, _EXACT),
    Side("merged", False, _MERGED),
    Side("per_turn", False, _PER_TURN),
    Side("exact", True, _EXACT),
    Side("merged", True, _MERGED),
    Side("per_turn", True, _PER_TURN),
    Side("as sent", True, {**_EXACT, "policy": ContextPolicy.AS_SENT.value}),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What every run does alike."""

    questions: int = 6
    steps: int = 14
    groups: int = 4
    samples: int = 8
    held_out: int = 16
    """Conversations on pairs that no training task asks for."""
    warm_up: int = tiny.STEPS
    rate: float = 1e-3
    entropy: float = 0.02
    seed: int = 0
    concurrency: int = 16

    @property
    def sessions(self) -> int:
        return self.steps * self.groups * self.samples


QUICK = Plan(questions=2, steps=1, groups=1, samples=3, held_out=1, warm_up=120, concurrency=3)
"""Seconds instead of minutes: it shows that everything runs, and no figure means much."""


def run(
    plan: Plan | None = None,
    sides: Sequence[Side] = SIDES,
    report: Report | None = None,
    *,
    model: Path | None = None,
) -> dict[str, Any]:
    """All sides, one after the other; each has a service of its own. `model` is where the tiny model is or is made."""
    plan, say = plan or Plan(), report or (lambda done, total, what: None)
    served = tiny.create(
        model or tiny.default_folder().with_name(f"tiny-thinking-{plan.warm_up}"),
        steps=plan.warm_up,
        thinking=True,
        progress=lambda done, total, what: say(done, total, f"making a tiny model that reasons, once: {what}"),
    )
    total = len(sides) * plan.steps
    found = []
    for number, side in enumerate(sides):

        def step(done: int, side: Side = side, before: int = number * plan.steps) -> None:
            say(before + done, total, side.title)

        step(0)
        with tempfile.TemporaryDirectory(prefix="towline-builders-") as folder:
            found.append(_train(side, plan, served, Path(folder), step))
    _relate(found)
    return {
        "questions": plan.questions,
        "sessions": plan.sessions,
        "steps": plan.steps,
        "held_out": plan.held_out * plan.questions,
        "paper": PAPER,
        "sides": found,
    }


def _train(side: Side, plan: Plan, model: Path, folder: Path, told: Callable[[int], None]) -> dict[str, Any]:
    import torch

    from towline.client import Client
    from towline.trainers.grpo import Grpo, GrpoSettings, Step
    from towline.trainers.learner import Learner, LearnerSettings, Update
    from towline.trainers.loss import LossSettings
    from towline.trainers.metrics import Metrics
    from towline.trainers.run import Run
    from towline.trainers.service import own_service

    class Metered(Learner):
        cpu = 0.0

        def update(self, groups: Mapping[str, Sequence[Trajectory]]) -> Update:
            began = time.process_time()
            report = super().update(groups)
            self.cpu += time.process_time() - began
            return report

    torch.set_num_threads(1)
    # Batches so small that rows of one length go together: else a row a turn would be charged for padding as well.
    # And every session goes through: builders are compared on the same work.
    learning = LearnerSettings(
        rate=plan.rate, batch_tokens=4096, keep_equal=True, loss=LossSettings(entropy=plan.entropy)
    )
    learner = Metered(model, learning, seed=plan.seed)
    settings = GrpoSettings(
        run="ablation", steps=plan.steps, groups=plan.groups, synchronous=True, max_staleness=None, seed=plan.seed
    )
    held_out = [_task(side, plan, number, Split.HELD_OUT) for number in range(plan.held_out)]
    steps: list[Step] = []

    def stepped(step: Step) -> None:
        steps.append(step)
        told(len(steps))

    metrics = Metrics(folder)
    with own_service(model, folder, ["--concurrency", str(plan.concurrency)]) as url, Client(url) as client:
        trainer = Grpo(client, learner, lambda number: _task(side, plan, number), folder, settings)
        run = Run(trainer, metrics, plan.rate, held_out, stepped=stepped)
        run.run()
    metrics.close()
    updates = [step.update for step in steps]
    trained = sum(one.trained_tokens for one in updates)
    return {
        "name": side.name,
        "reasoning": "dropped" if side.drops else "kept",
        "sessions": trainer.sessions,
        "rows": sum(one.rows for one in updates),
        "row_tokens": sum(one.row_tokens for one in updates),
        "padded_tokens": sum(one.padded_tokens for one in updates),
        "trained_tokens": trained,
        "mismatch_kl": sum(one.mismatch_kl * one.trained_tokens for one in updates) / max(1, trained),
        "worst_logprob": max(one.worst_logprob for one in updates),
        "success_before": run.measurements[0].success,
        "success": run.measurements[-1].success,
        "rewards": [one.mean_reward for one in updates],
        "trainer_seconds": sum(step.learned for step in steps),
        "trainer_cpu_seconds": learner.cpu,
        "run_seconds": sum(step.waited + step.learned + step.pushed for step in steps),
    }


def _task(side: Side, plan: Plan, number: int, split: Split = Split.TRAINING) -> Task:
    from towline.demo import AGENT

    instance = draw(Random(f"{split} {plan.seed} {number}"), split, plan.questions)
    samples = 1 if split is Split.HELD_OUT else plan.samples
    options = ["--drop-reasoning"] if side.drops else []
    return interviews.task_of(instance, AGENT, samples=samples, settings=side.settings, options=options)


def _relate(sides: Sequence[dict[str, Any]]) -> None:
    """Each side's cost as a multiple of that of `exact` with the same agent."""
    for side in sides:
        base = next((one for one in sides if one["name"] == "exact" and one["reasoning"] == side["reasoning"]), None)
        for ratio, figure in _RATIOS.items():
            side[ratio] = side[figure] / base[figure] if base and base[figure] else None


_RATIOS = {
    "token_ratio": "padded_tokens",
    "trainer_ratio": "trainer_seconds",
    "trainer_cpu_ratio": "trainer_cpu_seconds",
    "run_ratio": "run_seconds",
}
_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "reasoning": lambda side: str(side["reasoning"]),
    "builder": lambda side: str(side["name"]),
    "rows": lambda side: f"{side['rows']:,}",
    "row tokens": lambda side: f"{side['row_tokens']:,}",
    "through the trainer": lambda side: f"{side['padded_tokens']:,} ({_times(side['token_ratio'])})",
    "trained": lambda side: f"{side['trained_tokens']:,}",
    "trainer time": lambda side: _times(side["trainer_ratio"]),
    "trainer CPU": lambda side: _times(side["trainer_cpu_ratio"]),
    "run time": lambda side: _times(side["run_ratio"]),
    "mismatch KL": lambda side: f"{side['mismatch_kl']:.1e}",
    "max Δlogp": lambda side: f"{side['worst_logprob']:.1e}",
    "success": lambda side: f"{side['success_before']:.0%} → {side['success']:.0%}",
}


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def render(result: Mapping[str, Any], console: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False, title_justify="left", title=_said(result))
    for place, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if place < 2 else "right")
    for side in result["sides"]:
        table.add_row(*(show(side) for show in _COLUMNS.values()))
    console.print(table)
    for line in _conclusions(result):
        console.print(line, highlight=False)


def markdown(result: Mapping[str, Any]) -> str:
    """The table as the README has it."""
    lines = [" | ".join(_COLUMNS), "|".join("---" if place < 2 else "---:" for place in range(len(_COLUMNS)))]
    lines += [" | ".join(show(side) for show in _COLUMNS.values()) for side in result["sides"]]
    table = "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines)
    return "\n\n".join([_said(result) + ":", table, "\n".join(_conclusions(result))])


def _said(result: Mapping[str, Any]) -> str:
    return (
        f"{result['sessions']:,} sessions of {2 * result['questions']} turns in {result['steps']} updates; success on "
        f"{result['held_out']} held-out questions, before and after"
    )


def _conclusions(result: Mapping[str, Any]) -> list[str]:
    """What a row a turn costs, beside what the paper found."""
    return [
        f"Reasoning {side['reasoning']}: training on a row a turn takes {side['trainer_ratio']:.2f} times as long as on "
        f"exact rows (the paper, a row a request against prefix merging: {result['paper']})."
        for side in result["sides"]
        if side["name"] == "per_turn" and side["trainer_ratio"] is not None
    ]
