"""Logs of test programs, as they print them: every named test has its result, and what is not understood is an error."""

from __future__ import annotations

import pytest

from towline.evaluators import testlogs
from towline.evaluators.base import EvaluationError
from towline.evaluators.hostile.testlog_formats import FORMATS
from towline.evaluators.testlogs import CaseResult
from towline.schema import LogFormat

PASSED, FAILED, SKIPPED = CaseResult.PASSED, CaseResult.FAILED, CaseResult.SKIPPED
PYTEST = """
============================= test session starts ==============================
tests/test_a.py::test_one PASSED                                         [ 33%]
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_cases[a b-1]
FAILED tests/test_a.py::test_two - AssertionError: no
SKIPPED [1] tests/test_a.py:9: later
"""
UNITTEST = """
test_sum (tests.test_lib.T.test_sum) ... FAIL
test_loud (tests.test_lib.T.test_loud) ... it prints
more
ok
test_zero (tests.test_lib.T.test_zero)
What zero does. ... ok
"""
GO = """
=== RUN   TestAdd
--- PASS: TestAdd (0.00s)
=== RUN   TestSub
=== RUN   TestSub/of_zero
    sub_test.go:10: no
--- FAIL: TestSub (0.00s)
    --- FAIL: TestSub/of_zero (0.00s)
    --- PASS: TestSub/of_one (0.00s)
=== RUN   TestNet
--- SKIP: TestNet (0.00s)
FAIL
FAIL	example.com/x	0.003s
"""
GO_JSON = """
{"Time":"2024-01-01T00:00:00Z","Action":"run","Package":"example.com/x","Test":"TestAdd"}
{"Time":"2024-01-01T00:00:00Z","Action":"pass","Package":"example.com/x","Test":"TestAdd","Elapsed":0}
{"Time":"2024-01-01T00:00:00Z","Action":"fail","Package":"example.com/x","Test":"TestSub","Elapsed":0}
{"Time":"2024-01-01T00:00:00Z","Action":"fail","Package":"example.com/x","Elapsed":0.003}
"""
JEST = """
FAIL ./a.test.js
  Slug
    ✓ joins words (1 ms)
    ✕ drops accents (later)
    ○ skipped is skipped
    nested
      ✓ joins more

  ● Slug › drops accents (later)

    no

    > 3 |   it('drops accents (later)', () => { throw new Error('no'); });

Tests:       1 failed, 1 skipped, 2 passed, 4 total
"""
MOCHA = """
  Slug
    ✔ joins words
    1) drops accents (later)
    - is skipped
    nested
      ✔ joins more


  2 passing (7ms)
  1 pending
  1 failing

  1) Slug
       drops accents (later):
     Error: no
"""
VITEST = """
 RUN  v3.2.7 /repo

 ✓ a.test.js > Slug > joins words 1ms
 × a.test.js > Slug > drops accents (later) 21ms
   → no
 ↓ a.test.js > Slug > is skipped

 Test Files  1 failed (1)
"""
VITEST_PLAIN = """
 ❯ a.test.js (3 tests | 1 failed | 1 skipped) 5ms
   ✓ Slug > joins words 1ms
   × Slug > drops accents (later) 3ms
     → no
   ↓ Slug > is skipped
"""
NODE = """
▶ Slug
  ✔ joins words (0.631145ms)
  ✖ drops accents (0.87787ms)
    AssertionError [ERR_ASSERTION]: 1 == 2

  ﹣ later (0.14818ms) # SKIP
✖ Slug (2.678268ms)
✔ one gap (0.10794ms)
ℹ tests 4
"""
CARGO = """
running 4 tests
test tests::adds ... ok
test tests::later ... ignored
test tests::fails ... FAILED
test tests::panics - should panic ... ok

test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.47s
"""
NEXTEST = """
        PASS [   0.004s] cr tests::adds
        FAIL [   0.005s] cr tests::fails
"""
TAP = """
1..4
ok 1 - one gap
not ok 2 - two gaps
#   Failed test 'two gaps'
ok 3 # skip no net
    # Subtest: nested
    ok 1 - inner
not ok 4 - later # TODO not yet
"""
CTEST = """
    Start 1: ring_push
1/3 Test #1: ring_push .................................................................   Passed    0.01 sec
2/3 Test #2: ring_overflow_with_a_rather_long_name_that_uses_up_all_dots_of_the_line ...***Failed    0.01 sec
3/3 Test #3: name ......................................................................***Not Run   0.00 sec
"""
GTEST = """
[==========] Running 2 tests from 1 test suite.
[ RUN      ] Ring.Push
[       OK ] Ring.Push (0 ms)
[ RUN      ] Ring.Pop/1
[  FAILED  ] Ring.Pop/1, where GetParam() = 4 (0 ms)
[  PASSED  ] 1 test.
"""
MAVEN = """
[INFO] Running org.example.SlugTest
[INFO] Tests run: 3, Failures: 0, Errors: 0, Skipped: 0, Time elapsed: 0.05 s - in org.example.SlugTest
[ERROR] Tests run: 2, Failures: 1, Errors: 0, Skipped: 0, Time elapsed: 0.06 s <<< FAILURE! -- in org.example.QueryTest
[ERROR] org.example.QueryTest.parses -- Time elapsed: 0.003 s <<< FAILURE!
[ERROR] older(org.example.OldTest)  Time elapsed: 0.002 s  <<< ERROR!
[INFO] BUILD FAILURE
"""
GRADLE = """
> Task :test FAILED
SlugTest > joinsWords() PASSED
QueryTest > parses() FAILED
"""
LOGS: dict[str, tuple[LogFormat, str, dict[str, CaseResult]]] = {
    "pytest": (
        LogFormat.PYTEST,
        PYTEST,
        {
            "tests/test_a.py::test_one": PASSED,
            "tests/test_a.py::test_two": FAILED,
            # As published lists cut it.
            "tests/test_a.py::test_cases[a": PASSED,
        },
    ),
    "unittest": (
        LogFormat.UNITTEST,
        UNITTEST,
        {
            "test_sum (tests.test_lib.T)": FAILED,
            "test_loud (tests.test_lib.T)": PASSED,
            "test_zero (tests.test_lib.T)": PASSED,
            "What zero does.": PASSED,
        },
    ),
    "sympy": (LogFormat.SYMPY, "test_sum ok\ntest_zero F\n", {"test_sum": PASSED, "test_zero": FAILED}),
    "go": (
        LogFormat.GO,
        GO,
        {"TestAdd": PASSED, "TestSub": FAILED, "TestSub/of_zero": FAILED, "TestSub/of_one": PASSED, "TestNet": SKIPPED},
    ),
    "go -json": (LogFormat.GO, GO_JSON, {"TestAdd": PASSED, "TestSub": FAILED}),
    "jest": (
        LogFormat.JEST,
        JEST,
        {
            "joins words": PASSED,
            "Slug > joins words": PASSED,
            "Slug joins words": PASSED,
            "Slug > nested > joins more": PASSED,
            "drops accents (later)": FAILED,
            "is skipped": SKIPPED,
        },
    ),
    "mocha": (
        LogFormat.MOCHA,
        MOCHA,
        {"joins words": PASSED, "Slug > nested > joins more": PASSED, "drops accents (later)": FAILED},
    ),
    "vitest": (
        LogFormat.VITEST,
        VITEST,
        {
            "a.test.js > Slug > joins words": PASSED,
            "Slug > joins words": PASSED,
            "a.test.js > Slug > drops accents (later)": FAILED,
            "a.test.js > Slug > is skipped": SKIPPED,
        },
    ),
    "vitest without --reporter": (
        LogFormat.VITEST,
        VITEST_PLAIN,
        {"Slug > joins words": PASSED, "Slug > drops accents (later)": FAILED},
    ),
    "node": (
        LogFormat.NODE,
        NODE,
        {
            "joins words": PASSED,
            "Slug > joins words": PASSED,
            "drops accents": FAILED,
            "later": SKIPPED,
            "one gap": PASSED,
        },
    ),
    "cargo": (
        LogFormat.CARGO,
        CARGO,
        {"tests::adds": PASSED, "tests::later": SKIPPED, "tests::fails": FAILED, "tests::panics": PASSED},
    ),
    "nextest": (LogFormat.CARGO, NEXTEST, {"tests::adds": PASSED, "cr tests::adds": PASSED, "tests::fails": FAILED}),
    "tap": (
        LogFormat.TAP,
        TAP,
        {"one gap": PASSED, "- one gap": PASSED, "two gaps": FAILED, "inner": PASSED, "later": SKIPPED},
    ),
    "ctest": (
        LogFormat.CTEST,
        CTEST,
        {
            "ring_push": PASSED,
            "ring_overflow_with_a_rather_long_name_that_uses_up_all_dots_of_the_line": FAILED,
            "name": FAILED,
        },
    ),
    "gtest": (LogFormat.GTEST, GTEST, {"Ring.Push": PASSED, "Ring.Pop/1": FAILED}),
    "maven": (
        LogFormat.MAVEN,
        MAVEN,
        {
            "org.example.SlugTest": PASSED,
            "org.example.QueryTest": FAILED,
            "org.example.QueryTest.parses": FAILED,
            "org.example.OldTest.older": FAILED,
        },
    ),
    "gradle": (LogFormat.GRADLE, GRADLE, {"SlugTest > joinsWords()": PASSED, "QueryTest > parses()": FAILED}),
}


@pytest.mark.parametrize("name", LOGS)
def test_every_test_of_a_log_has_its_result(name: str) -> None:
    log_format, output, expected = LOGS[name]
    for chosen in (log_format, None):
        log = testlogs.read_test_log(output, chosen)
        log.check(expected)
        for test, result in expected.items():
            assert testlogs.passed(log.results, test) is (result is PASSED), (chosen, test)
        with pytest.raises(EvaluationError, match="has no result for 'nobody'"):
            log.check([*expected, "nobody"])


def test_every_format_is_read_and_tested() -> None:
    assert set(FORMATS) == set(LogFormat) == {log_format for log_format, _, _ in LOGS.values()}


@pytest.mark.parametrize("output", ["", "all good\n", "5 tests, 0 failures\n", "PASS\nok  \texample.com/x\t0.003s\n"])
def test_a_log_that_is_not_understood_is_an_error(output: str) -> None:
    for failed in (False, True):
        with pytest.raises(EvaluationError, match="in a known format"):
            testlogs.read_test_log(output, failed=failed).check(["TestAdd"])


@pytest.mark.parametrize(
    "output",
    [
        "ERROR tests/test_a.py - ImportError: cannot import name 'new'\n!!! Interrupted: 1 error during collection !!!\n",
        "ERROR: tests.test_a (unittest.loader._FailedTest.tests.test_a)\n",
        "Traceback (most recent call last):\nImportError: cannot import name 'new'\n",
        "# example.com/x\n./a_test.go:3:5: undefined: New\nFAIL\texample.com/x [build failed]\nFAIL\n",
        "error[E0425]: cannot find function `new`\nerror: could not compile `cr` (lib test) due to 1 previous error\n",
        "FAIL ./a.test.js\n  ● Test suite failed to run\n",
        "test.c:3:5: error: implicit declaration of function 'new'\nmake: *** [Makefile:3: test] Error 1\n",
        "[ERROR] COMPILATION ERROR : \n[ERROR] /x/ATest.java:[3,5] cannot find symbol\n",
    ],
)
def test_tests_that_cannot_be_built_did_not_pass(output: str) -> None:
    log = testlogs.read_test_log(output, failed=True)
    log.check(["TestAdd"])
    assert testlogs.share(log.results, ["TestAdd"]) == 0
    # A successful run was built: such words are then output of the code.
    with pytest.raises(EvaluationError):
        testlogs.read_test_log(output, failed=False).check(["TestAdd"])


def test_no_line_costs_more_than_its_length() -> None:
    """What the code under test prints to keep the reader busy."""
    for noise in (
        "1) " * 600,
        "✓ " + "(1 ms) " * 280,
        "ok 1 " + "# " * 900,
        "1/1 Test #1: " + "." * 1900,
        "[" * 1900,
        "a" * 1900 + ":1:1: error: ",
        "Tests run:" + " in " * 450,
        '{"Test"' + "[" * 1900,
        "test " + " ... " * 380,
        " " * 1900 + "x",
    ):
        testlogs.read_test_log("\n".join([noise] * 500))
