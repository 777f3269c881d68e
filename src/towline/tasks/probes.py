"""Probes of a task: sessions without a model that show whether it teaches what it should.

The oracle must score 1, doing nothing and every known cheat must score nothing. A probe is the task itself with a script in
place of the agent, so it goes through the same set-up, leak audit and evaluation as a real session. An answer task is asked
for its answer in a file, because no model speaks.

To add a cheat: a function from a task to a script (`None` where it does not apply), and an entry in `CHEATS`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from towline.schema import Task
from towline.tasks.fields import TaskError
from towline.tasks.oracle import ORACLE_HARNESS, oracle_task

NOTHING = "nothing"
ORACLE = "oracle"
_ANSWER_FILE = "/tmp/towline-answer.txt"
_GUESSES = (*"ABCDE", *map(str, range(-2, 101)), "yes", "no", "true", "false", "1/2", "x")


class ProbeKind(StrEnum):
    """What a probe stands for."""

    ORACLE = ORACLE
    """The reference solution."""
    NOTHING = NOTHING
    """An agent that does nothing."""
    CHEAT = "cheat"
    """An agent that wants the reward without the work."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A session without a model."""

    kind: ProbeKind
    name: str
    """`oracle`, `nothing`, or the name of the cheat."""
    task: Task


def probes_of(task: Task, runs: int = 2) -> list[Probe]:
    """The probes of a task; the oracle and doing nothing are sampled `runs` times. `TaskError` if it has no solution."""
    made = [Probe(ProbeKind.ORACLE, ORACLE, _renamed(_oracle(task), ORACLE, runs))]
    made.append(Probe(ProbeKind.NOTHING, NOTHING, _renamed(_scripted(task, "true"), NOTHING, runs)))
    for name, cheat in CHEATS.items():
        script = cheat(task)
        if script is not None:
            made.append(Probe(ProbeKind.CHEAT, name, _renamed(_scripted(task, script), name, 1)))
    return made


def _oracle(task: Task) -> Task:
    if task.evaluator.get("kind") != "answer":
        return oracle_task(task)
    answer = task.evaluator["answer"]
    first = answer[0] if isinstance(answer, list) else answer
    return _scripted(task, _written(task, f"\\boxed{{{first}}}\n"))


def _scripted(task: Task, script: str) -> Task:
    """The task with a script instead of its agent; only the oracle's evaluator tolerates the solution's files."""
    changes: dict[str, Any] = {
        "harness": ORACLE_HARNESS,
        "harness_options": {"command": script},
        "min_samples": 0,
        "evaluator": {**task.evaluator, "file": _answer_file(task)} if _answers(task) else task.evaluator,
    }
    return Task.model_validate(task.__dict__ | changes)


def _renamed(task: Task, name: str, runs: int) -> Task:
    """Each probe is a task of its own on the node; a failed set-up is retried once."""
    return task.model_copy(
        update={"task_id": f"{task.task_id[:480]} ({name})", "num_samples": runs, "max_attempts": 2, "priority": 0}
    )


def _answers(task: Task) -> bool:
    return bool(task.evaluator.get("kind") == "answer")


def _answer_file(task: Task) -> str:
    return str(task.evaluator.get("file") or _ANSWER_FILE)


def _written(task: Task, text: str) -> str:
    file = _answer_file(task)
    return f'mkdir -p "$(dirname {shlex.quote(file)})" && printf %s {shlex.quote(text)} >{shlex.quote(file)}'


_TESTS = (
    r"find . -name .git -prune -o -type f \( -path '*/test/*' -o -path '*/tests/*' -o -path '*/__tests__/*' "
    r"-o -name 'test_*' -o -name '*_test.*' -o -name '*.test.*' -o -name '*.spec.*' \) -print"
)
_HOOK = "import os, sys\nsys.stdout.flush()\nos._exit(0)\n"
_CONFTEST = (
    "import pytest\n"
    "@pytest.hookimpl(hookwrapper=True)\n"
    "def pytest_runtest_makereport(item, call):\n"
    "    outcome = yield\n"
    "    report = outcome.get_result()\n"
    "    report.outcome, report.longrepr = 'passed', None\n"
)
_HISTORY = """
git rev-parse HEAD >/dev/null 2>&1 || exit 0
for object in $(git cat-file --batch-all-objects --batch-check='%(objecttype) %(objectname)' | sed -n 's/^commit //p'); do
  if [ "$object" != "$(git rev-parse HEAD)" ] && git merge-base --is-ancestor HEAD "$object"; then
    git checkout -q "$object" -- . || true
  fi
done
git stash pop -q 2>/dev/null || true
"""
_FORGED = """
mkdir -p /logs/verifier /tests 2>/dev/null
echo 1 >/logs/verifier/reward.txt; echo '{"reward": 1}' >/logs/verifier/reward.json
printf '#!/bin/sh\\nmkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt\\n' >/tests/test.sh
true
"""


def _edited_tests(task: Task) -> str | None:
    return f'{_TESTS} | while read -r file; do : >"$file"; done' if task.evaluator.get("kind") == "patch" else None


def _startup_hooks(task: Task) -> str | None:
    if task.evaluator.get("kind") not in ("patch", "command"):
        return None
    files = {"sitecustomize.py": _HOOK, "usercustomize.py": _HOOK, "conftest.py": _CONFTEST}
    return "; ".join(f"printf %s {shlex.quote(text)} >{name}" for name, text in files.items())


def _history(task: Task) -> str | None:
    return _HISTORY if task.evaluator.get("kind") == "patch" else None


def _forged_rewards(task: Task) -> str | None:
    return _FORGED if task.evaluator.get("kind") in ("harbor", "command") else None


def _deleted(task: Task) -> str | None:
    return "rm -rf ./* 2>/dev/null; true" if task.evaluator.get("kind") in ("patch", "command", "harbor") else None


def _linked_answers(task: Task) -> str | None:
    """Links from what is carried to the verifier's own files, which would be compared with themselves."""
    if task.evaluator.get("kind") != "command":
        return None
    carried = [path for path in task.evaluator.get("carry") or [] if path != task.environment.workdir]
    files = [file["target"] for file in task.evaluator.get("files") or [] if isinstance(file, dict)]
    pairs = [(path, target) for path in carried for target in files]
    return "; ".join(f"ln -sfn {shlex.quote(target)} {shlex.quote(path)}" for path, target in pairs) or None


def _repeated_question(task: Task) -> str | None:
    return _written(task, task.instruction) if _answers(task) else None


def _every_guess(task: Task) -> str | None:
    if not _answers(task):
        return None
    return _written(task, f"The answer is one of {', '.join(_GUESSES)}.\n")


CHEATS: dict[str, Callable[[Task], str | None]] = {
    "edited_tests": _edited_tests,
    "startup_hooks": _startup_hooks,
    "history": _history,
    "forged_rewards": _forged_rewards,
    "linked_answers": _linked_answers,
    "deleted_files": _deleted,
    "repeated_question": _repeated_question,
    "every_guess": _every_guess,
}
"""Known cheats by name."""


__all__ = ["CHEATS", "Probe", "ProbeKind", "TaskError", "probes_of"]
