"""Results of single tests from what test programs print: pytest, unittest (Django's runner too) and sympy's.

A test that is printed with different results, as one that is tried again, has the worst of them. What is not printed did
not pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum


class Result(StrEnum):
    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"


_ORDER = [Result.PASSED, Result.SKIPPED, Result.FAILED]
_WORDS = {
    "PASSED": Result.PASSED,
    "XFAIL": Result.PASSED,
    "XPASS": Result.FAILED,
    "FAILED": Result.FAILED,
    "ERROR": Result.FAILED,
    "SKIPPED": Result.SKIPPED,
    "ok": Result.PASSED,
    "OK": Result.PASSED,
    "expected failure": Result.PASSED,
    "unexpected success": Result.FAILED,
    "skipped": Result.SKIPPED,
    "FAIL": Result.FAILED,
    "F": Result.FAILED,
    "E": Result.FAILED,
    "f": Result.PASSED,
}
_LONGEST = 2000
"""Characters of a line that names a test: whatever prints longer ones is not a test program."""
_PYTEST = ("PASSED", "FAILED", "ERROR", "XFAIL", "XPASS", "SKIPPED")
_UNITTEST = ("ok", "FAIL", "ERROR", "skipped", "expected failure", "unexpected success")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NAMED = re.compile(r"(\w+ \([\w.<>]+\))")
_HEADING = re.compile(r"(?P<word>FAIL|ERROR): (?P<name>\S+ \([\w.<>]+\))")
_SYMPY = re.compile(r"(?P<name>test_\w+) (?P<word>ok|OK|F|E|f|s)(?: |$)")


def results(output: str) -> dict[str, Result]:
    """Every test that the output names, with its result. Code under test prints there too, so no line costs more than
    its length."""
    found: dict[str, Result] = {}
    waiting = ""
    for raw in _COLOUR.sub("", output).splitlines():
        line = raw.strip()
        if len(line) > _LONGEST:
            continue
        named = _NAMED.match(line)
        if named and named[0] == line:
            # The first line of the test's own description comes next, with the result.
            waiting = line
            continue
        for name, word in _read(line, waiting):
            _note(found, name, _WORDS.get(word, Result.SKIPPED))
        waiting = ""
    return found


def _read(line: str, waiting: str) -> list[tuple[str, str]]:
    """The tests that a line is about, each with the word for its result."""
    first, _, rest = line.partition(" ")
    if first in _PYTEST and "::" in rest:
        # A reason may follow; in a test's own parameters there may be a dash as well.
        return [(rest, first)] if first == "PASSED" else [(rest, first), (rest.partition(" - ")[0], first)]
    if "::" in first:
        return _verbose(line)
    if " ... " in line:
        head, _, tail = line.partition(" ... ")
        word = next((word for word in _UNITTEST if tail.endswith(word) or tail.startswith(f"{word} ")), "")
        named = _NAMED.match(head)
        names = [named[1]] if named else [name for name in (waiting, head) if name]
        return [(name, word) for name in names] if word else []
    match = _HEADING.match(line) or _SYMPY.match(line)
    return [(match["name"], match["word"])] if match else []


def _verbose(line: str) -> list[tuple[str, str]]:
    """pytest's `path::test WORD (reason) [ 50%]`."""
    if line.endswith("%]"):
        line = line.rpartition("[")[0].rstrip()
    name, _, word = line.rpartition(" ")
    if word in _PYTEST:
        return [(name.rstrip(), word)]
    for word in _PYTEST:
        at = line.find(f" {word} (")
        if at > 0 and line.endswith(")"):
            return [(line[:at], word)]
    return []


def passed(found: dict[str, Result], name: str) -> bool:
    """Whether a test passed; unittest writes its name in two ways, with and without the method after the class."""
    if name in found:
        return found[name] is Result.PASSED
    return found.get(_other(name)) is Result.PASSED


def share(found: dict[str, Result], names: Iterable[str]) -> float:
    """The share of the named tests that passed; all of none."""
    outcomes = [passed(found, name) for name in names]
    return sum(outcomes) / len(outcomes) if outcomes else 1.0


def _note(found: dict[str, Result], name: str, result: Result) -> None:
    worst = max(result, found.get(name, result), key=_ORDER.index)
    found[name] = worst


def _other(name: str) -> str:
    match = re.fullmatch(r"(\w+) \(([\w.<>]+)\)", name)
    if match is None:
        return ""
    method, where = match[1], match[2]
    return (
        f"{method} ({where.removesuffix(f'.{method}')})"
        if where.endswith(f".{method}")
        else f"{method} ({where}.{method})"
    )
