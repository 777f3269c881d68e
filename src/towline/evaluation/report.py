"""An evaluation as a record: what was run, every task's tally by harness, the figures, and a comparison.

A sample counts if it came to its end and was scored. What failed for reasons of infrastructure, and what the evaluator
could not score, leaves the tally and is told: it is never a sample that did not pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from towline.errors import TowlineError
from towline.evaluation.statistics import Difference, Estimate, Tally, difference, estimate, wilson
from towline.ledger import Sample
from towline.schema import Model, SessionState
from towline.schema.files import write_atomically

FILE = "eval.json"


class EvaluationError(TowlineError):
    """An evaluation that cannot be read or compared."""


class TaskTally(Model):
    """The samples of one task with one harness."""

    n: int = 0
    """Samples that count."""
    passed: int = 0
    unscored: int = 0
    failed: int = 0
    rewards: list[float] = Field(default_factory=list)

    @property
    def tally(self) -> Tally:
        return Tally(self.n, self.passed)


class Evaluation(Model):
    """What is kept of an evaluation, and what a later one is compared with."""

    recipe: dict[str, Any] = Field(default_factory=dict)
    """Engine, model, template, and how sessions were run."""
    samples: int
    """Asked for, of every task."""
    passing: str
    """The expression that a sample passes by."""
    harnesses: dict[str, dict[str, TaskTally]] = Field(default_factory=dict)
    """By harness and task."""

    def write(self, folder: Path) -> Path:
        path = folder / FILE
        write_atomically(
            path, json.dumps({**self.model_dump(mode="json"), "figures": figures(self)}, indent=2).encode()
        )
        return path

    @classmethod
    def read(cls, path: Path) -> Evaluation:
        """From the folder of a run or its file."""
        path = path / FILE if path.is_dir() else path
        try:
            fields = json.loads(path.read_bytes())
            if not isinstance(fields, dict):
                raise ValueError("it is no object")
            return cls.model_validate({name: value for name, value in fields.items() if name != "figures"})
        except OSError as error:
            raise EvaluationError(f"cannot read an evaluation from {path}: {error.strerror}") from error
        except (ValueError, ValidationError) as error:
            raise EvaluationError(f"{path} is not an evaluation: {error}") from error


def tally(samples: Iterable[Sample], passes: Callable[[Sample], bool]) -> dict[str, dict[str, TaskTally]]:
    """By harness and task."""
    found: dict[str, dict[str, TaskTally]] = {}
    for sample in samples:
        own = found.setdefault(sample.harness, {}).setdefault(sample.task_id, TaskTally())
        if sample.state is not SessionState.DONE:
            own.failed += 1
        elif sample.reward is None:
            own.unscored += 1
        else:
            own.n += 1
            own.passed += passes(sample)
            own.rewards.append(sample.reward)
    return found


def ks(samples: int) -> list[int]:
    """1, the powers of two between, and all of them."""
    powers = [2**i for i in range(1, samples.bit_length()) if 2**i < samples]
    return sorted({1, *powers, samples})


def figures(evaluation: Evaluation) -> dict[str, Any]:
    """pass@k by harness and over all, and every task's own."""
    over = [one for tasks in evaluation.harnesses.values() for one in tasks.values()]
    return {
        "interval": "95 %, Wilson on the effective number of samples, tasks as clusters",
        "all": _figures(over, evaluation.samples),
        "harnesses": {
            name: {
                **_figures(list(tasks.values()), evaluation.samples),
                "tasks": {task: task_figures(one, evaluation.samples) for task, one in tasks.items()},
            }
            for name, tasks in evaluation.harnesses.items()
        },
    }


def _figures(tallies: list[TaskTally], samples: int) -> dict[str, Any]:
    estimates = {f"pass@{k}": _plain(estimate([one.tally for one in tallies], k)) for k in ks(samples)}
    rewards = [reward for one in tallies for reward in one.rewards]
    return {
        **estimates,
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "tasks_counted": sum(one.n > 0 for one in tallies),
        "samples": sum(one.n for one in tallies),
        "unscored": sum(one.unscored for one in tallies),
        "failed": sum(one.failed for one in tallies),
    }


def task_figures(one: TaskTally, samples: int) -> dict[str, Any]:
    estimates = {k: estimate([one.tally], k) for k in ks(samples)}
    low, high = wilson(one.passed / one.n, one.n) if one.n else (0.0, 1.0)
    return {
        "n": one.n,
        "passed": one.passed,
        "pass@1": {"value": one.passed / one.n, "low": low, "high": high} if one.n else None,
        **{f"pass@{k}": None if found is None else found.value for k, found in estimates.items() if k > 1},
        "unscored": one.unscored,
        "failed": one.failed,
    }


def _plain(found: Estimate | Difference | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


@dataclass
class Comparison:
    """A later evaluation beside an earlier one."""

    differences: dict[str, dict[str, Difference | None]] = field(default_factory=dict)
    """By harness, and `all`; then by pass@k."""
    settings: list[str] = field(default_factory=list)
    """What was not the same in both besides the model: a reason to doubt the comparison."""
    only_earlier: int = 0
    only_later: int = 0
    """Tasks with a harness that only one of the two has."""

    def as_json(self) -> dict[str, Any]:
        found = {name: {k: _plain(one) for k, one in by_k.items()} for name, by_k in self.differences.items()}
        interval = "95 %, paired by task, percentile bootstrap over tasks"
        left = {"only_earlier": self.only_earlier, "only_later": self.only_later}
        return {"interval": interval, "differences": found, "settings": self.settings, **left}


def compare(earlier: Evaluation, later: Evaluation) -> Comparison:
    made = Comparison(settings=_other_settings(earlier, later))
    everything: list[tuple[Tally, Tally]] = []
    chosen = ks(min(earlier.samples, later.samples))
    names = {(harness, task) for harness, tasks in later.harnesses.items() for task in tasks}
    before = {(harness, task) for harness, tasks in earlier.harnesses.items() for task in tasks}
    made.only_earlier, made.only_later = len(before - names), len(names - before)
    for harness, tasks in later.harnesses.items():
        old = earlier.harnesses.get(harness, {})
        pairs = [(old[task].tally, one.tally) for task, one in tasks.items() if task in old]
        everything += pairs
        if pairs:
            made.differences[harness] = {f"pass@{k}": difference(pairs, k) for k in chosen}
    if not everything:
        raise EvaluationError("the two evaluations have no task with the same harness in common")
    made.differences["all"] = {f"pass@{k}": difference(everything, k) for k in chosen}
    return made


def _other_settings(earlier: Evaluation, later: Evaluation) -> list[str]:
    told = []
    if earlier.passing != later.passing:
        told.append(f"passing: {earlier.passing!r} and {later.passing!r}")
    mine, theirs = earlier.recipe.get("session"), later.recipe.get("session")
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        told += [
            f"session.{name}: {mine.get(name)} and {theirs.get(name)}"
            for name in sorted({*mine, *theirs})
            if mine.get(name) != theirs.get(name)
        ]
    return told
