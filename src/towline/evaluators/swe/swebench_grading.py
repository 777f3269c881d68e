"""Grading by the `swebench` package, in a child process that is killed at its time limit.

The package decides which tests of the row passed, from the log of the row's own parser. What it cannot read is an error,
never a 0: no result at all, or none of the row's tests among the results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from towline.common import swebench_package
from towline.errors import ConfigError
from towline.evaluators.base import EvaluationError

CHILD = Path(__file__).with_name("swebench_child.py")
_SECONDS = 60
_START = 30.0
"""Seconds to start the child, on a busy machine."""


class SwebenchOptions(BaseModel):
    """What the package needs of a row besides its tests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instance_id: str = Field(min_length=1)
    log_parser: str = Field(min_length=1)
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    repo: str = ""
    version: str = ""


def check(options: SwebenchOptions) -> None:
    """`ConfigError` unless the package is installed and knows the parser."""
    known = swebench_package.parsers()
    if not known:
        raise ConfigError(
            "evaluator.swebench: the package `swebench` is not installed: pip install 'towline[swebench]'"
        )
    if options.log_parser not in known:
        raise ConfigError(f"evaluator.swebench.log_parser: the package has no parser {options.log_parser!r}")


def grade(
    options: SwebenchOptions, log: str, code: int, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]
) -> tuple[bool, dict[str, float]]:
    """Whether the row is resolved, and the shares of its tests that passed."""
    check(options)
    request = options.model_dump() | {
        "package": str(swebench_package.folder()),
        "log": log,
        "code": code,
        "fail_to_pass": list(fail_to_pass),
        "pass_to_pass": list(pass_to_pass),
    }
    found = _run(request)
    if not found["patch_successfully_applied"]:
        reason = found.get("infra_failure_reason", "the log has no test results")
        raise EvaluationError(f"swebench finds no results in the test log ({options.log_parser}): {reason}")
    status = found["tests_status"]
    named = set(found["named"])
    tests = [*fail_to_pass, *pass_to_pass]
    if options.eval_type == "pass_and_fail" and not any(test in named or "[" in test for test in tests):
        example = f", for example {min(named)!r}" if named else ""
        raise EvaluationError(f"the test log has no result for any of the row's tests; it has {len(named)}{example}")
    shares = {
        name.lower(): len(status[name]["success"]) / max(1, len(status[name]["success"]) + len(status[name]["failure"]))
        if status[name]["success"] or status[name]["failure"]
        else 1.0
        for name in ("FAIL_TO_PASS", "PASS_TO_PASS")
    }
    return bool(found["resolved"]), shares


def _run(request: dict[str, Any]) -> dict[str, Any]:
    try:
        done = subprocess.run(
            # Isolated mode: nothing is imported from the working folder.
            [sys.executable, "-I", str(CHILD), str(_SECONDS)],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=_SECONDS + _START,
            cwd="/",
            env={name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EvaluationError(f"grading with swebench timed out after {error.timeout:g} seconds") from error
    try:
        found = json.loads(done.stdout)
    except ValueError as error:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = said[-1][:300] if said else f"its process ended with {done.returncode}"
        raise EvaluationError(f"swebench could not grade the test log: {reason}") from error
    assert isinstance(found, dict)
    return found
