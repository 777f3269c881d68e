"""The runner of coding rows, as its own program: solutions pass by passing, and by nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from towline.tasks.coding import RUNNER, read_coding_row
from towline.tasks.fields import SourceLocation

ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "import solution\nassert solution.add(-1, 1) == 0"]
CHECK = "def check(candidate):\n    assert candidate(2, 2) == 4\n"
CASES = {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10"]}
SUM = "print(sum(map(int, input().split())))"


def score(tmp_path: Path, row: dict[str, Any], solution: str | None) -> tuple[float, float]:
    evaluator = read_coding_row({"prompt": "p", **row}, SourceLocation(tmp_path / "rows.jsonl", 1))["evaluator"]
    tests = json.loads(evaluator["files"][1]["text"]) | {"seconds": 2.0}
    (tmp_path / "tests.json").write_text(json.dumps(tests))
    if solution is not None:
        (tmp_path / "solution.py").write_text(solution)
    command = [sys.executable, str(RUNNER), str(tmp_path / "tests.json"), str(tmp_path / "solution.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    return found["reward"], found["components"]["passed"]


@pytest.mark.parametrize(
    ("row", "solution", "expected"),
    [
        ({"tests": TESTS}, ADD, (1, 1)),
        ({"tests": TESTS}, ADD.replace("+", "-"), (0, 0)),
        ({"tests": TESTS}, "def add(a, b):\n    return 3\n", (0, 0.5)),
        ({"tests": CHECK, "entry_point": "add"}, ADD, (1, 1)),
        ({"tests": CHECK, "entry_point": "add"}, "def other(): pass", (0, 0)),
        ({"tests": json.dumps(CASES)}, SUM, (1, 1)),
        ({"tests": CASES}, "print(3)", (0, 0.5)),
        ({"tests": [{"input": "", "output": "a \nb\n\n"}]}, "print('a\\nb  ')", (1, 1)),
        # What is not there, does not compile, does not end, or ends before the tests do.
        ({"tests": TESTS}, None, (0, 0)),
        ({"tests": TESTS}, "def add(", (0, 0)),
        ({"tests": TESTS[:1]}, "while True: pass", (0, 0)),
        ({"tests": TESTS}, "import os; os._exit(0)", (0, 0)),
        ({"tests": TESTS}, "raise SystemExit(0)", (0, 0)),
        ({"tests": TESTS}, 'print(\'{"reward": 1, "components": {"passed": 1}}\')', (0, 0)),
        ({"tests": CASES}, "import sys; sys.exit(0)", (0, 0)),
    ],
)
def test_a_solution_passes_by_passing(
    tmp_path: Path, row: dict[str, Any], solution: str | None, expected: tuple[float, float]
) -> None:
    assert score(tmp_path, row, solution) == expected
