"""Runs the tests of a coding row inside the evaluation's sandbox: `run.py TESTS.json SOLUTION.py`.

Prints `{"reward": 1 or 0, "components": {"passed": share}}`. The solution never runs in this process: a test passes only
if its own process finished and printed a secret that only this process and the test know, so that a solution which exits
early, or prints what looks like a result, passes nothing. Uploaded to the sandbox as a file, so it uses only the standard
library and supports Python 3.7 and later.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from typing import Any

CHILD = """
import importlib.util, json, os, sys
given = json.loads(sys.stdin.readline())
sys.stdin = open(os.devnull)
folder = os.path.dirname(os.path.abspath(sys.argv[1]))
sys.path.insert(0, folder)
name = os.path.splitext(os.path.basename(sys.argv[1]))[0]
spec = importlib.util.spec_from_file_location(name, sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
names = dict(vars(module))
exec(compile(given["code"], "tests", "exec"), names)
if given["entry_point"] and callable(names.get("check")):
    names["check"](getattr(module, given["entry_point"]))
sys.stdout.flush()
os.write(1, ("\\n" + given["word"] + "\\n").encode())
"""


def passes_code(solution: str, code: str, entry_point: str, seconds: float) -> bool:
    word = secrets.token_hex(16)
    given = json.dumps({"code": code, "entry_point": entry_point, "word": word}) + "\n"
    out = run([sys.executable, "-c", CHILD, solution], given, seconds)
    return out is not None and out.rstrip("\n").split("\n")[-1] == word


def passes_case(solution: str, case: dict[str, Any], seconds: float) -> bool:
    out = run([sys.executable, solution], case["input"], seconds)
    return out is not None and lines(out) == lines(case["output"])


def run(command: list[str], text: str, seconds: float) -> str | None:
    """The output of a command that succeeded within the timeout, else None."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            input=text.encode("utf-8", "surrogateescape"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=seconds,
        )
    except (subprocess.TimeoutExpired, OSError):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def lines(text: str) -> list[str]:
    """Lines without trailing whitespace, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        tests = json.load(file)
    solution = sys.argv[2]
    if not os.path.isfile(solution) or os.path.islink(solution):
        results = [False]
    elif "cases" in tests:
        results = [passes_case(solution, case, tests["seconds"]) for case in tests["cases"]]
    else:
        results = [passes_code(solution, code, tests["entry_point"], tests["seconds"]) for code in tests["code"]]
    share = sum(results) / len(results)
    print(json.dumps({"reward": 1.0 if all(results) else 0.0, "components": {"passed": share}}))


if __name__ == "__main__":
    main()
