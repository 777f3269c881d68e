"""Results of single tests from what test programs print.

A test that is printed with different results, as one that is tried again, has the worst of them. A test that is not printed
has no result: it did not pass if the log says that the tests could not be built or loaded; otherwise nothing is known of it,
which is an error and never a score.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from towline.evaluators.base import EvaluationError
from towline.evaluators.logformats import Result, readers
from towline.schema import LogFormat

__all__ = ["Result", "TestLog", "passed", "read", "results", "share"]

_ORDER = [Result.PASSED, Result.SKIPPED, Result.FAILED]
_LONGEST = 2000
"""Characters of a line that names a test: whatever prints longer ones is not a test program."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NAMED = 3
"""Missing tests that an error names."""
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
"""What test programs, compilers and loaders print when tests cannot be built or loaded."""


@dataclass(slots=True)
class TestLog:
    """What a log says of single tests."""

    __test__ = False  # no test of pytest's, in spite of its name

    results: dict[str, Result] = field(default_factory=dict)
    unbuilt: bool = False
    """The tests, or a part of them, could not be built or loaded."""

    def names(self, test: str) -> bool:
        """Whether the log has a result of the test."""
        return bool(_matching(self.results, test))

    def check(self, tests: Iterable[str], log_format: LogFormat | None = None) -> None:
        """`EvaluationError` if the log does not tell how one of the tests ended, and not why either."""
        if self.unbuilt:
            return
        missing = [test for test in tests if not self.names(test)]
        if not missing:
            return
        named = ", ".join(map(repr, missing[:_NAMED])) + (
            f" and {len(missing) - _NAMED} more" if missing[_NAMED:] else ""
        )
        if self.results:
            known = next(iter(self.results))
            raise EvaluationError(
                f"the tests' log has no result of {named}; it names {len(self.results)} others, {known!r} for one"
            )
        known = log_format or ", ".join(LogFormat)
        raise EvaluationError(
            f"the tests' log is not understood: it has no result of {named} in a known format ({known})"
        )


def read(output: str, log_format: LogFormat | None = None, *, failed: bool = True) -> TestLog:
    """What a test program printed, read in one format or, where that is not known, in all of them.

    `failed` says that the program itself ended with a failure: only then is it asked for why. Code under test prints there
    too, so no line costs more than its length.
    """
    log = TestLog()
    chosen = readers(log_format)
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


def results(output: str, log_format: LogFormat | None = None) -> dict[str, Result]:
    """Every test that the output names, with its result."""
    return read(output, log_format).results


def passed(found: dict[str, Result], name: str) -> bool:
    """Whether a test passed. Published lists cut names inside a test's parameters: then all that begin so must have."""
    outcomes = _matching(found, name)
    return bool(outcomes) and all(outcome is Result.PASSED for outcome in outcomes)


def share(found: dict[str, Result], names: Iterable[str]) -> float:
    """The share of the named tests that passed; all of none."""
    outcomes = [passed(found, name) for name in names]
    return sum(outcomes) / len(outcomes) if outcomes else 1.0


def _matching(found: dict[str, Result], name: str) -> list[Result]:
    """The results of the tests that a name stands for."""
    for known in (name, _other(name)):
        if known in found:
            return [found[known]]
    if "::" in name and "[" in name and "]" not in name:
        return [result for known, result in found.items() if known.startswith(name)]
    return []


def _unbuilt(line: str) -> bool:
    if line.startswith(_UNBUILT_STARTS) or any(part in line for part in _UNBUILT_PARTS) or _COMPILER.match(line):
        return True
    # pytest's summary of a module that it could not import: `ERROR tests/test_a.py - ImportError`.
    return line.startswith("ERROR ") and line.partition(" - ")[0].endswith(".py")


def _note(found: dict[str, Result], name: str, result: Result) -> None:
    found[name] = max(result, found.get(name, result), key=_ORDER.index)


def _other(name: str) -> str:
    """unittest writes a test's name in two ways, with and without the method after the class."""
    match = re.fullmatch(r"(\w+) \(([\w.<>]+)\)", name)
    if match is None:
        return ""
    method, where = match[1], match[2]
    return (
        f"{method} ({where.removesuffix(f'.{method}')})"
        if where.endswith(f".{method}")
        else f"{method} ({where}.{method})"
    )
