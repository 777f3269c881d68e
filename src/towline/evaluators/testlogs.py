"""Results of individual tests from the output of test runners.

A test that is printed with different results (a retry, say) has the worst of them. A test that is not printed has no
result: it did not pass if the log says that the tests could not be built or loaded; otherwise its result is unknown, which
is an error and never a score.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from towline.evaluators.hostile.failures import EvaluationError
from towline.evaluators.hostile.testlog_formats import FORMATS, CaseResult, log_readers

__all__ = ["CaseResult", "TestLog", "passed", "read_results", "read_test_log", "share"]

_ORDER = [CaseResult.PASSED, CaseResult.SKIPPED, CaseResult.FAILED]
_LONGEST = 2000
"""Longest line, in characters, that can name a test; test runners print no longer ones."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NAMED = 3
"""Maximum number of missing tests that an error names."""
_UNBUILT_STARTS = (
    "ImportError",
    "ModuleNotFoundError",
    "SyntaxError",
    "IndentationError",
    "Error: Cannot find module",
    "Error [ERR_MODULE_NOT_FOUND]",
    "error: could not compile",
    "[ERROR] COMPILATION ERROR",
    "collect2: error",
    "ninja: build stopped",
)
_UNBUILT_PARTS = (
    " ERROR collecting ",
    " during collection",
    "unittest.loader._FailedTest",
    "[build failed]",
    "[setup failed]",
    "Test suite failed to run",
    "Compilation failed; see the compiler",
    ": error TS",
)
_COMPILER = re.compile(r"[^\s:]{1,300}:\d{1,7}:(?:\d{1,7}:)? (?:fatal )?error: ")
"""Output of test runners, compilers and loaders when tests cannot be built or loaded."""


@dataclass(slots=True)
class TestLog:
    """The results of individual tests in a log."""

    __test__ = False  # keeps pytest from collecting it by its name

    results: dict[str, CaseResult] = field(default_factory=dict)
    unbuilt: bool = False
    """Some or all of the tests could not be built or loaded."""

    def names(self, test: str) -> bool:
        """Whether the log has a result for the test."""
        return bool(_matching(self.results, test))

    def check(self, tests: Iterable[str], log_format: str | None = None, *, code: int = 0) -> None:
        """Raise `EvaluationError` if the log has no result for one of the tests, and no build failure that explains it; or
        if the runner exited with a failure and the log names none, so that it does not describe what happened."""
        if self.unbuilt:
            return
        missing = [test for test in tests if not self.names(test)]
        if not missing:
            if code and CaseResult.FAILED not in self.results.values():
                raise EvaluationError(f"the tests exited with code {code}, but their log names no test that failed")
            return
        named = ", ".join(map(repr, missing[:_NAMED])) + (
            f" and {len(missing) - _NAMED} more" if missing[_NAMED:] else ""
        )
        if self.results:
            known = next(iter(self.results))
            raise EvaluationError(
                f"the test log has no result for {named}; it has {len(self.results)} others, for example {known!r}"
            )
        known = log_format or ", ".join(FORMATS)
        raise EvaluationError(f"the test log has no result for {named} in a known format ({known}); set `log_format`")


def read_test_log(output: str, log_format: str | None = None, *, failed: bool = True) -> TestLog:
    """Parse the output of a test runner in one format or, if that is unknown, in all of them.

    `failed`: the runner itself exited with a failure; only then is the output searched for a build failure. Code under test
    prints to the same output, so the cost per line is linear in its length.
    """
    log = TestLog()
    chosen = log_readers(log_format)
    for raw in _COLOUR.sub("", output).splitlines():
        if len(raw) > _LONGEST:
            continue
        line = raw.strip()
        if failed and not log.unbuilt:
            log.unbuilt = _unbuilt(line)
        for reader in chosen:
            for name, result in reader(raw.rstrip(), line):
                _note(log.results, name, result)
    return log


def read_results(output: str, log_format: str | None, failed: bool) -> tuple[dict[str, str], bool]:
    """`read_test_log` as plain data, for a worker: the results, and whether tests could not be built."""
    log = read_test_log(output, log_format, failed=failed)
    return {name: result.value for name, result in log.results.items()}, log.unbuilt


def passed(found: dict[str, CaseResult], name: str, *, or_skipped: bool = False) -> bool:
    """Whether a test passed. Published lists truncate names in a test's parameters; then all matches must have passed."""
    outcomes = _matching(found, name)
    fine = (CaseResult.PASSED, CaseResult.SKIPPED) if or_skipped else (CaseResult.PASSED,)
    return bool(outcomes) and all(outcome in fine for outcome in outcomes)


def share(found: dict[str, CaseResult], names: Iterable[str], *, or_skipped: bool = False) -> float:
    """The share of the named tests that passed; 1 if none is named. `or_skipped`: a skipped test counts as passed, as
    SWE-bench has it for tests that passed before."""
    outcomes = [passed(found, name, or_skipped=or_skipped) for name in names]
    return sum(outcomes) / len(outcomes) if outcomes else 1.0


def _matching(found: dict[str, CaseResult], name: str) -> list[CaseResult]:
    """The results of the tests that a name refers to."""
    for known in (name, _other(name)):
        if known in found:
            return [found[known]]
    if "::" in name and "[" in name and "]" not in name:
        return [result for known, result in found.items() if known.startswith(name)]
    return []


def _unbuilt(line: str) -> bool:
    if line.startswith(_UNBUILT_STARTS) or any(part in line for part in _UNBUILT_PARTS) or _COMPILER.match(line):
        return True
    # pytest's summary line for a module it could not import: `ERROR tests/test_a.py - ImportError`.
    return line.startswith("ERROR ") and line.partition(" - ")[0].endswith(".py")


def _note(found: dict[str, CaseResult], name: str, result: CaseResult) -> None:
    found[name] = max(result, found.get(name, result), key=_ORDER.index)


def _other(name: str) -> str:
    """The other form of a unittest name: with or without the method after the class."""
    match = re.fullmatch(r"(\w+) \(([\w.<>]+)\)", name)
    if match is None:
        return ""
    method, where = match[1], match[2]
    return (
        f"{method} ({where.removesuffix(f'.{method}')})"
        if where.endswith(f".{method}")
        else f"{method} ({where}.{method})"
    )
