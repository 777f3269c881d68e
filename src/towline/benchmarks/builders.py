"""The builder ablation: training cost and fidelity of each builder, in otherwise equal training runs.

Each run starts from the same model, which writes a line of reasoning before every reply, and learns by synchronous GRPO from
the same tasks with the same settings: interviews of several registry questions, held by the example agent in sandboxes. The
runs differ in how sessions become rows, and in whether the agent sends the model's reasoning back:

- `exact` continues every conversation from its own tokens, so a session is one row;
- `merged` renders every request in full, as a plain chat server does, and stitches the rows afterwards;
- `per_turn` renders every request in full and makes one row per turn;
- `as sent` is `exact` under the policy that shows the model what the agent sent: dropped reasoning forks.

An interview has two turns per question, and every request sends the whole history. So the tokens a trainer processes grow
linearly with the conversation if a session is one row, and quadratically with one row per turn.

Nothing is in flight during learning, and every token is sampled with the weights that learn from it, so any error of a
recorded logprob is caused by the builder. Sampling is not seeded across processes, so success varies slightly by chance.
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

from towline.common.progress import OnCount
from towline.demo import tiny_model
from towline.demo.registry import (
    REGISTRY_PATH,
    PairSplit,
    RegistryInstance,
    draw_instance,
    score_question,
)
from towline.schema import BuilderName, ContextPolicy, Task, Trajectory, Turn


def interview_task(
    instance: RegistryInstance, agent: Path, *, samples: int, settings: Mapping[str, Any], options: Sequence[str] = ()
) -> Task:
    """The task of one interview, with the sessions' `settings` and the agent's `options`."""
    return Task.model_validate(
        {
            "task_id": "interview",
            "instruction": instance.questions[0].text,
            "harness": "shell",
            "harness_options": {
                "command": ["python3", "-S", "-E", f"{{program}}/{agent.name}", "--registry", REGISTRY_PATH, *options],
                "folder": str(agent.parent.resolve()),
            },
            "environment": {"files": [{"target": REGISTRY_PATH, "text": instance.to_json()}]},
            "evaluator": {
                "kind": "python",
                "function": "towline.benchmarks.builders:reward",
                "arguments": {"instance": instance.to_arguments()},
            },
            "num_samples": samples,
            "timeouts": {"init": 120.0, "run": 300.0, "evaluate": 60.0},
            "settings": {
                "sampling": {"max_tokens": 48},
                "limits": {"turns": 3 * len(instance.questions)},
                **settings,
            },
        }
    )


def reward(trajectory: Trajectory, instance: dict[str, Any]) -> dict[str, Any]:
    """The share of correctly answered questions, with a reward per turn for its part in the answer."""
    interview = RegistryInstance.from_arguments(instance)
    per_turn: dict[str, float] = {}
    right = 0
    for question, turns in zip(interview.questions, _by_question(trajectory.turns), strict=False):
        score = score_question(interview, question, [turn.reply for turn in turns])
        right += score.success
        per_turn |= {turn.id: float(score.answer) for turn in turns}
        per_turn[turns[0].id] = float(score.tool and score.item)
    return {"reward": right / len(interview.questions), "per_turn": per_turn}


def _by_question(turns: Sequence[Turn]) -> list[list[Turn]]:
    """The turns of each question. A turn whose request ends with a user message starts the next question, whether its
    messages are only the new ones or, after a fork, the whole conversation."""
    questions: list[list[Turn]] = []
    for turn in sorted(turns, key=lambda turn: turn.index):
        if turn.messages and turn.messages[-1]["role"] == "user":
            questions.append([])
        if questions:
            questions[-1].append(turn)
    return questions


PAPER_SPEEDUP = 5.39
"""Speed-up of training with prefix merging over one row per request, in the paper's own ablation."""


@dataclass(frozen=True, slots=True)
class AblationRun:
    """One training run of the ablation."""

    name: str
    drops: bool
    """Whether the agent drops reasoning from the replies it sends back."""
    settings: Mapping[str, Any]

    @property
    def title(self) -> str:
        return f"{self.name}, reasoning {'dropped' if self.drops else 'kept'}"


_EXACT = {"builder": BuilderName.EXACT.value, "capture": "exact"}
_MERGED = {"builder": BuilderName.MERGED.value, "capture": "plain"}
_PER_TURN = {"builder": BuilderName.PER_TURN.value, "capture": "plain"}
RUNS = (
    AblationRun("exact", False, _EXACT),
    AblationRun("merged", False, _MERGED),
    AblationRun("per_turn", False, _PER_TURN),
    AblationRun("exact", True, _EXACT),
    AblationRun("merged", True, _MERGED),
    AblationRun("per_turn", True, _PER_TURN),
    AblationRun("as sent", True, {**_EXACT, "policy": ContextPolicy.AS_SENT.value}),
)


@dataclass(frozen=True, slots=True)
class AblationPlan:
    """Settings shared by all runs."""

    questions: int = 6
    steps: int = 14
    groups: int = 4
    samples: int = 8
    held_out: int = 16
    """Conversations on pairs that no training task asks for."""
    warm_up: int = tiny_model.WARMUP_STEPS
    rate: float = 1e-3
    entropy: float = 0.02
    seed: int = 0
    concurrency: int = 16

    @property
    def sessions(self) -> int:
        return self.steps * self.groups * self.samples


QUICK_PLAN = AblationPlan(questions=2, steps=1, groups=1, samples=3, held_out=1, warm_up=120, concurrency=3)
"""A smoke test of seconds instead of minutes; its figures are not meaningful."""


def run(
    plan: AblationPlan | None = None,
    sides: Sequence[AblationRun] = RUNS,
    progress: OnCount = lambda done, total, what: None,
    *,
    model: Path | None = None,
) -> dict[str, Any]:
    """Run the ablation's runs one after the other, each with its own service. `model` is the tiny model's folder."""
    plan = plan or AblationPlan()
    served = tiny_model.create(
        model or tiny_model.default_folder().with_name(f"tiny-thinking-{plan.warm_up}"),
        steps=plan.warm_up,
        thinking=True,
        progress=lambda done, total, what: progress(done, total, f"creating a tiny model that reasons (once): {what}"),
    )
    total = len(sides) * plan.steps
    results = []
    for number, side in enumerate(sides):

        def step(done: int, side: AblationRun = side, before: int = number * plan.steps) -> None:
            progress(before + done, total, side.title)

        step(0)
        with tempfile.TemporaryDirectory(prefix="towline-builders-") as folder:
            results.append(_train(side, plan, served, Path(folder), step))
    _add_ratios(results)
    return {
        "questions": plan.questions,
        "sessions": plan.sessions,
        "steps": plan.steps,
        "held_out": plan.held_out * plan.questions,
        "paper": PAPER_SPEEDUP,
        "sides": results,
    }


def _train(
    side: AblationRun, plan: AblationPlan, model: Path, folder: Path, on_progress: Callable[[int], None]
) -> dict[str, Any]:
    import torch

    from towline.client import Client
    from towline.trainers.grpo.learner import Learner, LearnerSettings, UpdateReport
    from towline.trainers.grpo.loop import Grpo, GrpoSettings, TrainingStep
    from towline.trainers.grpo.loss import LossSettings
    from towline.trainers.grpo.metrics import MetricsLog
    from towline.trainers.grpo.run import TrainingRun
    from towline.trainers.service import own_service

    class Metered(Learner):
        cpu = 0.0

        def update(self, groups: Mapping[str, Sequence[Trajectory]]) -> UpdateReport:
            began = time.process_time()
            report = super().update(groups)
            self.cpu += time.process_time() - began
            return report

    torch.set_num_threads(1)
    # Small batches, so that rows of similar length go together and padding does not count against one row per turn.
    # Every session goes through the model, so that builders are compared on the same work.
    learning = LearnerSettings(
        rate=plan.rate, batch_tokens=4096, keep_equal=True, loss=LossSettings(entropy=plan.entropy)
    )
    learner = Metered(model, learning, seed=plan.seed)
    settings = GrpoSettings(
        run="ablation", steps=plan.steps, groups=plan.groups, synchronous=True, max_staleness=None, seed=plan.seed
    )
    held_out = [_task(side, plan, number, PairSplit.HELD_OUT) for number in range(plan.held_out)]
    steps: list[TrainingStep] = []

    def on_step(step: TrainingStep) -> None:
        steps.append(step)
        on_progress(len(steps))

    metrics = MetricsLog(folder)
    with own_service(model, folder, ["--concurrency", str(plan.concurrency)]) as url, Client(url) as client:
        trainer = Grpo(client, learner, lambda number: _task(side, plan, number), folder, settings)
        run = TrainingRun(trainer, metrics, plan.rate, held_out, on_step=on_step)
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


def _task(side: AblationRun, plan: AblationPlan, number: int, split: PairSplit = PairSplit.TRAINING) -> Task:
    from towline.demo.registry import EXAMPLE_AGENT

    instance = draw_instance(Random(f"{split} {plan.seed} {number}"), split, plan.questions)
    samples = 1 if split is PairSplit.HELD_OUT else plan.samples
    options = ["--drop-reasoning"] if side.drops else []
    return interview_task(instance, EXAMPLE_AGENT, samples=samples, settings=side.settings, options=options)


def _add_ratios(sides: Sequence[dict[str, Any]]) -> None:
    """Add each run's cost relative to `exact` with the same agent."""
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
    "processed tokens": lambda side: f"{side['padded_tokens']:,} ({_ratio(side['token_ratio'])})",
    "trained tokens": lambda side: f"{side['trained_tokens']:,}",
    "trainer time": lambda side: _ratio(side["trainer_ratio"]),
    "trainer CPU": lambda side: _ratio(side["trainer_cpu_ratio"]),
    "run time": lambda side: _ratio(side["run_ratio"]),
    "mismatch KL": lambda side: f"{side['mismatch_kl']:.1e}",
    "max Δlogp": lambda side: f"{side['worst_logprob']:.1e}",
    "success": lambda side: f"{side['success_before']:.0%} → {side['success']:.0%}",
}


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def render(result: Mapping[str, Any], console: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False, title_justify="left", title=_title(result))
    for place, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if place < 2 else "right")
    for side in result["sides"]:
        table.add_row(*(show(side) for show in _COLUMNS.values()))
    console.print(table)
    for line in _conclusions(result):
        console.print(line, highlight=False)


def markdown(result: Mapping[str, Any]) -> str:
    """The table in Markdown, as in the README."""
    lines = [" | ".join(_COLUMNS), "|".join("---" if place < 2 else "---:" for place in range(len(_COLUMNS)))]
    lines += [" | ".join(show(side) for show in _COLUMNS.values()) for side in result["sides"]]
    table = "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines)
    return "\n\n".join([_title(result) + ":", table, "\n".join(_conclusions(result))])


def _title(result: Mapping[str, Any]) -> str:
    return (
        f"{result['sessions']:,} sessions of {2 * result['questions']} turns in {result['steps']} updates; success on "
        f"{result['held_out']} held-out questions, before and after"
    )


def _conclusions(result: Mapping[str, Any]) -> list[str]:
    """The cost of one row per turn, next to the paper's figure."""
    return [
        f"Reasoning {side['reasoning']}: training on one row per turn takes {side['trainer_ratio']:.2f}x as long as on "
        f"exact rows (the paper: {result['paper']}x for one row per request over prefix merging)."
        for side in result["sides"]
        if side["name"] == "per_turn" and side["trainer_ratio"] is not None
    ]
