"""Coding rows: `prompt` and `tests`, scored by running the tests in a clean sandbox against the agent's one file.

`tests` is Python text (asserts, or HumanEval's `check(candidate)` with `entry_point`), a list of such texts, a list of
`{"input", "output"}`, or `{"inputs": […], "outputs": […]}` for programs that read stdin and print. `file` is the path of the
solution (default `/work/solution.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from towline.tasks.fields import SourceLocation, instruction_text

RUNNER = Path(__file__).with_name("coding_runner.py")
_SOLUTION = "/work/solution.py"
_SECONDS = 10.0
"""Timeout per test: one run of a program, or one text of test code."""


def read_coding_row(row: dict[str, Any], location: SourceLocation) -> dict[str, Any]:
    text = instruction_text(row.get("prompt"), location, "prompt")
    file = row.get("file", _SOLUTION)
    if not isinstance(file, str) or not file.startswith("/") or not file.endswith(".py"):
        raise location.error("file", "must be an absolute path inside the sandbox that ends in .py")
    tests = _tests(row, location)
    if file not in text:
        how = "reads standard input and prints its answer" if "cases" in tests else "the tests will import"
        text += f"\n\nWrite the solution to {file}: Python 3 that {how}."
    number = len(tests.get("cases", tests.get("code", [])))
    return {
        "instruction": text,
        "evaluator": {
            "kind": "command",
            "command": ["python3", "/tests/run.py", "/tests/tests.json", file],
            "files": [
                {"target": "/tests/run.py", "text": RUNNER.read_text("utf-8")},
                {"target": "/tests/tests.json", "text": json.dumps(tests)},
            ],
            "carry": [file],
            "hidden": ["/tests"],
            "reward": "json",
            "seconds": 30 + number * (_SECONDS + 1),
        },
    }


def _tests(row: dict[str, Any], location: SourceLocation) -> dict[str, Any]:
    tests = row["tests"]
    if isinstance(tests, str) and tests.lstrip().startswith(("{", "[")):
        # Published datasets often store the object as JSON text.
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = row["tests"]
    if isinstance(tests, dict):
        if not isinstance(tests.get("inputs"), list) or not isinstance(tests.get("outputs"), list):
            raise location.error("tests", "an object of tests needs the lists `inputs` and `outputs`")
        if len(tests["inputs"]) != len(tests["outputs"]):
            raise location.error("tests", f"{len(tests['inputs'])} inputs for {len(tests['outputs'])} outputs")
        tests = [{"input": i, "output": o} for i, o in zip(tests["inputs"], tests["outputs"], strict=True)]
    texts = [tests] if isinstance(tests, str) else tests
    if not isinstance(texts, list) or not texts:
        raise location.error("tests", "must be Python code, a list of Python code, or inputs with outputs")
    if all(isinstance(one, dict) for one in texts):
        cases = []
        for index, one in enumerate(texts):
            given = {name: one.get(name) for name in ("input", "output")}
            if not all(isinstance(value, str) for value in given.values()):
                raise location.error(f"tests.{index}", "a case needs `input` and `output`, both text")
            cases.append(given)
        return {"cases": cases, "seconds": _SECONDS}
    if not all(isinstance(one, str) and one.strip() for one in texts):
        raise location.error("tests", "code and cases cannot be mixed, and none may be empty")
    entry = row.get("entry_point", "")
    if not isinstance(entry, str):
        raise location.error("entry_point", "must be the name of a function")
    return {"code": texts, "entry_point": entry, "seconds": _SECONDS}
