"""Grading by the real `swebench` package, in its child process; our own grading agrees with it, format by format."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from towline.common import swebench_package
from towline.errors import ConfigError
from towline.evaluators.base import EvaluationError
from towline.evaluators.patch import PatchEvaluator, PatchOptions
from towline.evaluators.registry import make_evaluator
from towline.evaluators.swe import eval_script, swebench_child, swebench_grading
from towline.sandboxes.base import CommandResult
from towline.schema import LogFormat, Reward

PYTEST = """============================= test session starts ==============================
collected 6 items
tests/test_a.py FF.sx                                                    [100%]
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_par[a b]
PASSED tests/test_a.py::test_par[1-2]
SKIPPED [1] tests/test_a.py:9: not here
XFAIL tests/test_a.py::test_known - a reason
FAILED tests/test_a.py::test_two - assert 1 == 2
ERROR tests/test_a.py::test_three - KeyError: 'x'
========================= 2 failed, 3 passed in 0.03s =========================
"""
DJANGO = """test_one (a.tests.T) ... ok
test_two (a.tests.T) ... FAIL
test_three (a.tests.T) ... skipped 'not here'
test_four (a.tests.T)
Some words on it. ... ok
test_five (a.tests.T) ... ERROR
======================================================================
FAIL: test_two (a.tests.T)
----------------------------------------------------------------------
Ran 5 tests in 0.001s
"""
SYMPY = """sympy/a/tests/test_b.py[3] 
test_one ok
test_two F
test_three E
________________________________________________________________________________
_________________ sympy/a/tests/test_b.py:test_two __________________
"""
GO = """=== RUN   TestOne
--- PASS: TestOne (0.00s)
=== RUN   TestTwo
    a_test.go:3: no
--- FAIL: TestTwo (0.10s)
=== RUN   TestThree/sub_case
    --- PASS: TestThree/sub_case (0.00s)
--- SKIP: TestFour (0.00s)
FAIL
"""
CARGO = """running 3 tests
test a::one ... ok
test a::two ... FAILED
test b::three ... ok
test result: FAILED. 2 passed; 1 failed
"""
TAP = """TAP version 13
ok 1 - one gap
not ok 2 - two gaps
ok 3 - three # SKIP later
1..3
"""
GTEST = """[ RUN      ] Suite.One
[       OK ] Suite.One (0 ms)
[ RUN      ] Suite.Two
[  FAILED  ] Suite.Two (1 ms)
"""
MAVEN = """[INFO] Tests run: 3, Failures: 0, Errors: 0, Skipped: 0, Time elapsed: 0.1 s - in org.a.OneTest
[ERROR] Tests run: 2, Failures: 1, Errors: 0, Skipped: 0, Time elapsed: 0.1 s <<< FAILURE! - in org.a.TwoTest
"""
JEST = """PASS src/a.test.js
  group
    ✓ one (3 ms)
    ✕ two (1 ms)
    ○ skipped three
"""
VITEST = """ ✓ src/a.test.ts > group > one 3ms
 × src/a.test.ts > group > two 4ms
"""
CASES = [
    # parser, our format, log, passing, failing, passing before and skipped now
    ("parse_log_pytest", "pytest", PYTEST, ["tests/test_a.py::test_one", "tests/test_a.py::test_known"], ["tests/test_a.py::test_two", "tests/test_a.py::test_three"], ""),
    ("parse_log_pytest_v2", "pytest", PYTEST, ["tests/test_a.py::test_one", "tests/test_a.py::test_par[1-2]"], ["tests/test_a.py::test_two"], ""),
    ("parse_log_scikit", "pytest", PYTEST, ["tests/test_a.py::test_one"], ["tests/test_a.py::test_two"], ""),
    ("parse_log_requests", "pytest", PYTEST, ["tests/test_a.py::test_one"], ["tests/test_a.py::test_two"], ""),
    ("parse_log_django", "unittest", DJANGO, ["test_one (a.tests.T)"], ["test_two (a.tests.T)", "test_five (a.tests.T)"], "test_three (a.tests.T)"),
    ("parse_log_sympy", "sympy", SYMPY, ["test_one"], ["test_two", "test_three"], ""),
    ("parse_log_gotest", "go", GO, ["TestOne", "TestThree/sub_case"], ["TestTwo"], "TestFour"),
    ("parse_log_cargo", "cargo", CARGO, ["a::one", "b::three"], ["a::two"], ""),
    ("parse_log_tap", "tap", TAP, ["- one gap"], ["- two gaps"], ""),
    ("parse_log_googletest", "gtest", GTEST, ["Suite.One"], ["Suite.Two"], ""),
    ("parse_log_jest", "jest", JEST, ["one"], ["two"], ""),
]  # fmt: skip


def graded(log: str, fail: list[str], keep: list[str], code: int, **how: object) -> Reward:
    spec = {"kind": "patch", "command": "x", "fail_to_pass": fail, "pass_to_pass": keep, **how}
    evaluator = PatchEvaluator(PatchOptions.model_validate(spec))
    return evaluator._score(CommandResult(code, log.encode(), b"", False, False))


def in_process(request: dict[str, Any]) -> dict[str, Any]:
    """What the child process does, without its limits; the modules that it loads do not stay."""
    before = set(sys.modules)
    try:
        return swebench_child.report(request)
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("swebench", "unidiff"):
                del sys.modules[name]


def by_package(parser: str, **more: str) -> dict[str, dict[str, str]]:
    return {"swebench": {"instance_id": "o__r-1", "log_parser": parser, **more}}


@pytest.mark.parametrize(
    ("parser", "log_format", "log", "passing", "failing", "skipped"), CASES, ids=[case[0] for case in CASES]
)
def test_both_graders_agree(
    parser: str,
    log_format: str,
    log: str,
    passing: list[str],
    failing: list[str],
    skipped: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every pair of a test to fix and one to keep; the package's functions run in this process, to be quick."""
    monkeypatch.setattr(swebench_grading, "_run", in_process)
    tests = [*passing, *failing, *([skipped] if skipped else [])]
    for fail in ([test] for test in tests):
        for keep in ([], *([test] for test in tests if test not in fail)):
            theirs = graded(log, fail, keep, 1, **by_package(parser))
            ours = graded(log, fail, keep, 1, log_format=LogFormat(log_format))
            assert (ours.value, ours.components) == (theirs.value, theirs.components), (fail, keep)
            right = fail[0] in passing and all(test in passing or test == skipped for test in keep)
            assert theirs.value == float(right), (fail, keep)


def test_every_format_of_the_package_that_has_our_name_was_compared() -> None:
    compared = {case[1] for case in CASES}
    assert compared >= {"pytest", "unittest", "sympy", "go", "cargo", "tap", "gtest", "jest"}


def test_what_the_package_cannot_read_is_never_a_score() -> None:
    for log in ("", "make: *** No rule to make target\n", "tests/test_a.py ..F\n"):
        with pytest.raises(EvaluationError, match="swebench finds no results in the test log"):
            graded(log, ["tests/test_a.py::test_one"], [], 1, **by_package("parse_log_pytest"))
    with pytest.raises(EvaluationError, match="no result for any of the row's tests; it has 6"):
        graded(PYTEST, ["other.py::test"], [], 1, **by_package("parse_log_pytest"))


def test_a_log_that_contradicts_its_exit_code_is_not_believed() -> None:
    """Code under test can print results and then exit; the test runner's exit code is another witness."""
    forged = "PASSED tests/test_a.py::test_one\n"
    with pytest.raises(EvaluationError, match="swebench finds no results"):
        graded(forged, ["tests/test_a.py::test_one"], [], 3, **by_package("parse_log_pytest"))
    with pytest.raises(EvaluationError, match="exited with code 3, but their log names no test that failed"):
        graded(forged, ["tests/test_a.py::test_one"], [], 3, log_format="pytest")


def test_the_marks_of_an_evaluation_script() -> None:
    log = f"+ : '{eval_script.START}'\n{GO}+ : '{eval_script.END}'\n>>>>> Test Exit Code: 1\nUpdated 1 path\n"
    # The script's own exit code is that of its last command.
    assert eval_script.test_output(log, 0)[1] == 1
    for how in (by_package("parse_log_gotest"), {"log_format": "go"}):
        assert graded(log, ["TestOne"], ["TestThree/sub_case"], 0, **how).value == 1
        assert graded(log, ["TestOne"], ["TestTwo"], 0, **how).value == 0


def test_fail_only_rows() -> None:
    """Parsers that print failures alone: a test that is not named passed, if the suite ran at all."""
    how = by_package("parse_log_marked", eval_type="fail_only")
    assert graded("3 specs, 0 failures\n", ["one"], [], 0, **how).value == 1
    with pytest.raises(EvaluationError, match="swebench finds no results"):
        graded("Error: Cannot find module 'jasmine'\n", ["one"], [], 1, **how)


def test_a_log_that_costs_too_much_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swebench_grading, "_SECONDS", 1)
    with pytest.raises(EvaluationError, match="swebench could not grade the test log: its process ended with -"):
        graded("PASSED x\n" * 4_000_000, ["x"], [], 0, **by_package("parse_log_pytest"))


def test_without_the_package_the_evaluator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"kind": "patch", "command": "x", "fail_to_pass": ["a"], **by_package("parse_log_nothing")}
    with pytest.raises(ConfigError, match=r"swebench\.log_parser: the package has no parser"):
        make_evaluator(spec)
    monkeypatch.setattr(swebench_package, "parsers", frozenset)
    with pytest.raises(ConfigError, match=r"pip install 'towline\[swebench\]'"):
        make_evaluator(spec)
