"""Which task next: samplers against a synthetic policy, a store that survives kill -9, budgets with their remainder."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from towline.cli import app
from towline.errors import ConfigError
from towline.schema import Task
from towline.trainers.curriculum.budget import Price, RunBudget
from towline.trainers.curriculum.curriculum import Curriculum
from towline.trainers.curriculum.samplers import PassEstimate, SamplerName, SamplerOptions, estimates, task_weights
from towline.trainers.curriculum.store import CurriculumError, CurriculumStore, GroupOutcome, TaskRate

GROUP = 8
TASKS = [
    Task(task_id=f"t{number:03}", instruction="do it", harness="pi", evaluator={"kind": "completed"})
    for number in range(120)
]


def pass_rate(task: Task, version: int) -> float:
    """A synthetic policy: most tasks are far too easy or far too hard, and it gets better with every update."""
    difficulty = (int(task.task_id[1:]) / len(TASKS) - 0.5) * 24
    return 1 / (1 + math.exp(difficulty - version / 20))


def outcome(number: int, task: Task, version: int, rewards: list[float]) -> GroupOutcome:
    return GroupOutcome(f"r{number}", task.task_id, version, rewards, len(rewards), 1000, 100, 2.0)


def zero_variance_share(sampler: SamplerName, updates: int = 60, groups: int = 8) -> float:
    """The share of a run's groups without a gradient; groups are observed an update after they were submitted."""
    store = CurriculumStore(Path(":memory:"))
    curriculum = Curriculum(TASKS, store, sampler, SamplerOptions(group=GROUP), seed=7)
    policy = random.Random(11)
    same = 0
    waiting: list[GroupOutcome] = []
    for version in range(updates):
        numbers = range(version * groups, (version + 1) * groups)
        chosen = [curriculum.task(number) for number in numbers]
        curriculum.add(waiting)
        waiting = []
        for number, task in zip(numbers, chosen, strict=True):
            rewards = [float(policy.random() < pass_rate(task, version)) for _ in range(GROUP)]
            same += len(set(rewards)) == 1
            waiting.append(outcome(number, task, version, rewards))
    store.close()
    return same / (updates * groups)


def test_zero_variance_groups_fall_by_half() -> None:
    shares = {sampler: zero_variance_share(sampler) for sampler in SamplerName}
    shown = ", ".join(f"{sampler} {share:.1%}" for sampler, share in shares.items())
    print(f"\ngroups without variance over 480 groups: {shown}")
    for sampler in (SamplerName.VARIANCE, SamplerName.PASS_RATE, SamplerName.BAND):
        assert shares[sampler] < shares[SamplerName.UNIFORM], shown
    assert shares[SamplerName.VARIANCE] <= shares[SamplerName.UNIFORM] / 2, shown


def test_weights() -> None:
    known = {"easy": PassEstimate(33, 1), "even": PassEstimate(17, 17), "hard": PassEstimate(1, 33)}
    options = SamplerOptions(group=8, low=0.3, high=0.7)
    names = [*known, "new"]
    assert task_weights(SamplerName.UNIFORM, names, known, options) == [1.0] * 4
    for sampler in (SamplerName.BAND, SamplerName.PASS_RATE, SamplerName.VARIANCE):
        easy, even, hard, new = task_weights(sampler, names, known, options)
        assert even > easy > 0
        assert even > hard > 0
        assert new > max(easy, hard), "what is not known is worth a try"
    # A task that was solved long ago becomes uncertain again.
    rates = [TaskRate("t", 0, 4, 32, 32, 1.0, 4)]
    now, later = estimates(rates, 0)["t"], estimates(rates, 320)["t"]
    assert now.mixed_group(8) < 0.3 < later.mixed_group(8)


@given(st.floats(0.5, 200), st.floats(0.5, 200), st.integers(2, 64))
def test_estimates_are_probabilities(passed: float, failed: float, size: int) -> None:
    estimate = PassEstimate(passed, failed)
    assert 0 <= estimate.mixed_group(size) <= 1
    assert 0 <= estimate.within(0.2, 0.8) <= 1
    assert estimate.mixed_group(size) <= estimate.mixed_group(size + 1) + 1e-12


PROGRAM = """
import sys
from pathlib import Path
from test_curriculum import GROUP, TASKS, outcome
from towline.trainers.curriculum.curriculum import Curriculum
from towline.trainers.curriculum.store import CurriculumStore

curriculum = Curriculum(TASKS, CurriculumStore(Path(sys.argv[1])), seed=3)
for number in range(100_000):
    task = curriculum.task(number)
    print("chosen", number, task.task_id, flush=True)
    curriculum.add([outcome(number, task, number // 8, [1.0] * (number % 8) + [0.0])])
    print("counted", number, flush=True)
"""


@pytest.mark.parametrize("lines", [1, 2, 37, 60])
def test_choices_and_counts_survive_kill_9(tmp_path: Path, lines: int) -> None:
    """Whatever was said before the kill is true after it, and the same numbers give the same tasks."""
    file = tmp_path / "curriculum.sqlite"
    path = [str(Path(__file__).parent), *sys.path]
    env = {"PYTHONPATH": ":".join(path), "PATH": "/usr/bin:/bin"}
    running = subprocess.Popen([sys.executable, "-c", PROGRAM, file], stdout=subprocess.PIPE, text=True, env=env)
    assert running.stdout is not None
    said = [next(running.stdout).split() for _ in range(lines)]
    running.send_signal(signal.SIGKILL)
    said += [line.split() for line in running.stdout.read().splitlines()]
    running.wait()
    store = CurriculumStore(file)
    chosen = {int(words[1]): words[2] for words in said if words[0] == "chosen" and len(words) == 3}
    counted = {int(words[1]) for words in said if words[0] == "counted" and len(words) == 2}
    assert chosen
    curriculum = Curriculum(TASKS, store, seed=3)
    assert {number: curriculum.task(number).task_id for number in chosen} == chosen
    groups = sum(rate.groups for rate in store.rates())
    assert len(counted) <= groups <= len(counted) + 1
    # What is delivered again is counted once; another seed does not change what was chosen.
    before = store.rates()
    curriculum.add([outcome(number, TASKS[0], 99, [0.0]) for number in counted])
    assert store.rates() == before
    assert {number: Curriculum(TASKS, store, seed=4).task(number).task_id for number in chosen} == chosen


def test_pass_rates_by_task_and_version(tmp_path: Path) -> None:
    store = CurriculumStore(tmp_path)
    curriculum = Curriculum(TASKS[:2], store, SamplerName.UNIFORM)
    for number, (version, rewards) in enumerate([(0, [0.0, 0.0]), (1, [1.0, 0.0]), (1, [1.0, 1.0]), (1, [])]):
        curriculum.add([outcome(number, TASKS[0], version, rewards)])
    first, second = store.rates()
    assert (first.version, first.rate, first.zero_variance, first.mean_reward) == (0, 0.0, 1, 0.0)
    assert (second.version, second.rate, second.zero_variance, second.groups) == (1, 0.75, 1, 3)
    assert Curriculum(TASKS[:2], store).version == 1
    store.choose(5, "gone")
    with pytest.raises(ConfigError, match="not among the tasks"):
        curriculum.task(5)
    with pytest.raises(ConfigError, match="at least one task"):
        Curriculum([], store)
    store.close()
    done = CliRunner().invoke(app, ["tasks", "rates", str(tmp_path), "--json"])
    found = json.loads(done.stdout)
    assert [(one["task_id"], one["version"], one["rate"]) for one in found["rates"]] == [
        ("t000", 0, 0),
        ("t000", 1, 0.75),
    ]
    assert found["spent"]["sessions"] == 6
    assert "0.75" in CliRunner().invoke(app, ["tasks", "rates", str(tmp_path)]).output
    assert CliRunner().invoke(app, ["tasks", "rates", str(tmp_path / "nothing")]).exit_code == 1
    (tmp_path / "text").write_text("not a database, but long enough to be taken for one" * 20)
    with pytest.raises(CurriculumError, match="is not a pass-rate store"):
        CurriculumStore(tmp_path / "text")


def test_budgets_and_what_is_left(tmp_path: Path) -> None:
    store = CurriculumStore(tmp_path)
    budget = RunBudget.parse(["tokens=5000", "sessions=10", "seconds=1e6", "money=0.01"], "1:10")
    curriculum = Curriculum(TASKS, store, budget=budget)
    assert curriculum.exhausted() == ""
    curriculum.add([outcome(0, TASKS[0], 0, [1.0, 0.0])])
    left = budget.remainder(curriculum.spending())
    assert (left["tokens"], left["sessions"], left["money"]) == (3900, 8, pytest.approx(0.008))
    assert "3,900 tokens, 8 sessions" in budget.line(curriculum.spending())
    for number in range(1, 5):
        curriculum.add([outcome(number, TASKS[0], 0, [1.0, 0.0])])
    # Ten sessions, 5,500 tokens, money for two more groups: two limits are reached, the first is named.
    assert curriculum.exhausted() == "tokens"
    assert RunBudget(sessions=10).exhausted(curriculum.spending()) == "sessions"
    assert RunBudget(money=1.0, price=Price(1, 10)).exhausted(curriculum.spending()) == ""
    assert budget.as_json(curriculum.spending())["remainder"]["tokens"] == 0
    # Time adds up over restarts.
    store.add_seconds(5)
    again = Curriculum(TASKS, CurriculumStore(tmp_path), budget=RunBudget(seconds=5))
    assert again.exhausted() == "seconds"
    for wrong in (["tokens"], ["tokens=x"], ["tokens=0"], ["words=5"], ["money=3"]):
        with pytest.raises(ConfigError, match="budget"):
            RunBudget.parse(wrong)
    for text in ("1", "a:b", "-1:2"):
        with pytest.raises(ConfigError, match="price"):
            Price.parse(text)
