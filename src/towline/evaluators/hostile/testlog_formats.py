"""How test runners print the results of individual tests: one reader per log format.

A reader gets the lines of a log in order, each as printed and without its indentation, and returns the names and results
that it finds. It returns every name that published datasets use for a test. The cost per line is linear in its length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import StrEnum


class CaseResult(StrEnum):
    """The result of one test."""

    PASSED = "passed"
    """It ran and passed (an expected failure too)."""
    SKIPPED = "skipped"
    """It did not run."""
    FAILED = "failed"
    """It failed, or could not be set up."""


Found = list[tuple[str, CaseResult]]
Reader = Callable[[str, str], Found]

_PYTEST = {
    "PASSED": CaseResult.PASSED,
    "FAILED": CaseResult.FAILED,
    "ERROR": CaseResult.FAILED,
    "XFAIL": CaseResult.PASSED,
    "XPASS": CaseResult.FAILED,
    "SKIPPED": CaseResult.SKIPPED,
}
_UNITTEST = {
    "ok": CaseResult.PASSED,
    "FAIL": CaseResult.FAILED,
    "ERROR": CaseResult.FAILED,
    "skipped": CaseResult.SKIPPED,
    "expected failure": CaseResult.PASSED,
    "unexpected success": CaseResult.FAILED,
}
_SYMPY_WORDS = {
    "ok": CaseResult.PASSED,
    "OK": CaseResult.PASSED,
    "f": CaseResult.PASSED,
    "s": CaseResult.SKIPPED,
    "F": CaseResult.FAILED,
    "E": CaseResult.FAILED,
}
_UNITTEST_NAME = re.compile(r"(\w+ \([\w.<>]+\))")
_HEADING = re.compile(r"(?:FAIL|ERROR): (?P<name>\S+ \([\w.<>]+\))")
_SYMPY = re.compile(r"(?P<name>test_\w+) (?P<word>ok|OK|F|E|f|s)(?: |$)")
_DURATION = re.compile(r"\s*\(?\b\d+(?:\.\d+)?\s?(?:ms|s|m)\)?$")
_MARKS = {
    **dict.fromkeys("✓✔√", CaseResult.PASSED),
    **dict.fromkeys("✕✖\u00d7✗", CaseResult.FAILED),
    **dict.fromkeys("○↓﹣", CaseResult.SKIPPED),
}
_NUMBERED = re.compile(r"\d{1,6}\) (?P<title>.+)")
_TAP = re.compile(r"(?P<word>not ok|ok) \d{1,9}(?: |$)(?P<title>.*)")
_TAIL = 100
"""Characters at the end of a line that can contain a result or a duration."""


def _python() -> Reader:
    """pytest, unittest (including Django's runner) and sympy."""
    described = begun = ""
    """A unittest name whose description follows, and one whose result follows the test's own output."""

    def read(raw: str, line: str) -> Found:
        nonlocal described, begun
        named = _UNITTEST_NAME.match(line)
        if named and named[0] == line:
            described = line
            return []
        if begun and line in _UNITTEST:
            name, begun = begun, ""
            return [(name, _UNITTEST[line])]
        found = _python_line(line, described)
        if found:
            begun = ""
        elif named and " ... " in line:
            begun = named[1]
        described = ""
        return found

    return read


def _python_line(line: str, waiting: str) -> Found:
    first, _, rest = line.partition(" ")
    if first in _PYTEST and "::" in rest:
        # A reason may follow; a test's own parameters may contain a dash as well.
        names = [rest] if first == "PASSED" else [rest, rest.partition(" - ")[0]]
        return [(name, _PYTEST[first]) for name in names]
    if "::" in first:
        return _verbose(line)
    if " ... " in line:
        head, _, tail = line.partition(" ... ")
        word = next((word for word in _UNITTEST if tail.endswith(word) or tail.startswith(f"{word} ")), "")
        named = _UNITTEST_NAME.match(head)
        names = [named[1]] if named else [name for name in (waiting, head) if name]
        return [(name, _UNITTEST[word]) for name in names] if word else []
    if heading := _HEADING.match(line):
        return [(heading["name"], CaseResult.FAILED)]
    if sympy := _SYMPY.match(line):
        return [(sympy["name"], _SYMPY_WORDS[sympy["word"]])]
    return []


def _verbose(line: str) -> Found:
    """pytest's `path::test WORD (reason) [ 50%]`."""
    if line.endswith("%]"):
        line = line.rpartition("[")[0].rstrip()
    name, _, word = line.rpartition(" ")
    if word in _PYTEST:
        return [(name.rstrip(), _PYTEST[word])]
    for word, result in _PYTEST.items():
        at = line.find(f" {word} (")
        if at > 0 and line.endswith(")"):
            return [(line[:at], result)]
    return []


def _go() -> Reader:
    """`go test -v`, and `-json`."""
    words = {"PASS": CaseResult.PASSED, "FAIL": CaseResult.FAILED, "SKIP": CaseResult.SKIPPED}

    def read(raw: str, line: str) -> Found:
        if line.startswith("--- "):
            word, _, rest = line[4:].partition(": ")
            if word in words and rest:
                return [(rest.rpartition(" (")[0] or rest, words[word])]
        if line.startswith('{"') and '"Test"' in line:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                return []
            if isinstance(event, dict) and isinstance(event.get("Test"), str):
                word = str(event.get("Action", "")).upper()
                return [(event["Test"], words[word])] if word in words else []
        return []

    return read


def _marks() -> Reader:
    """Jest, Mocha, Vitest and `node --test`: a mark, the title, optionally a duration; suites by indentation."""
    suites: list[tuple[int, str]] = []
    over = False
    """Mocha repeats its failures at the end, numbered from 1."""

    def read(raw: str, line: str) -> Found:
        nonlocal over
        if not line:
            return []
        indent = len(raw) - len(raw.lstrip())
        result = _MARKS.get(line[0])
        title = line[1:].strip()
        if result is None and not over and indent and (numbered := _NUMBERED.fullmatch(line)):
            result, title = CaseResult.FAILED, numbered["title"]
        while suites and suites[-1][0] >= indent:
            suites.pop()
        if result is None:
            words = line.split(" ", 2)
            over = over or (len(words) == 2 and words[0].isdigit() and words[1] == "failing")
            if len(suites) < 32:
                suites.append((indent, line.removeprefix("▶ ").strip()))
            return []
        if result is CaseResult.SKIPPED:
            title = title.removesuffix(" # SKIP").removeprefix("skipped ")
        title = title[:-_TAIL] + _DURATION.sub("", title[-_TAIL:])
        path = [suite for _, suite in suites if not suite.startswith(("PASS ", "FAIL "))]
        names = [title, " > ".join([*path, title]), " ".join([*path, title])]
        if " > " in title:
            # Vitest puts the file first.
            names += [title.partition(" > ")[2], title.rpartition(" > ")[2]]
        return [(name, result) for name in dict.fromkeys(names) if name]

    return read


def _cargo() -> Reader:
    """`cargo test`, and nextest's lines."""
    words = {"ok": CaseResult.PASSED, "FAILED": CaseResult.FAILED, "ignored": CaseResult.SKIPPED}
    marks = {"PASS": CaseResult.PASSED, "FAIL": CaseResult.FAILED, "SKIP": CaseResult.SKIPPED}

    def read(raw: str, line: str) -> Found:
        if line.startswith("test ") and " ... " in line:
            name, _, tail = line[5:].rpartition(" ... ")
            word = tail.partition(" ")[0].rstrip(",")
            return [(name.removesuffix(" - should panic"), words[word])] if word in words else []
        first, _, rest = line.partition(" ")
        if first in marks and rest.lstrip().startswith("["):
            name = rest.partition("]")[2].strip()
            return [(known, marks[first]) for known in dict.fromkeys((name, name.partition(" ")[2])) if known]
        return []

    return read


def _tap() -> Reader:
    """The Test Anything Protocol: Perl, node's `--test-reporter tap`, bats."""

    def read(raw: str, line: str) -> Found:
        match = _TAP.match(line)
        if match is None:
            return []
        title, _, directive = f" {match['title']}".partition(" # ")
        skipped = directive.lower().startswith(("skip", "todo"))
        result = CaseResult.SKIPPED if skipped else CaseResult.PASSED if match["word"] == "ok" else CaseResult.FAILED
        title = title.strip()
        bare = title.removeprefix("- ").strip()
        return [(name, result) for name in dict.fromkeys((bare, title, f"- {bare}")) if bare]

    return read


def _ctest() -> Reader:
    """`1/3 Test #1: name ....   Passed    0.01 sec`."""

    def read(raw: str, line: str) -> Found:
        head, _, rest = line.partition(": ")
        counted, _, number = head.partition("Test")
        if not (counted.strip().replace("/", "").isdigit() and number.strip().startswith("#")):
            return []
        name, dots, tail = rest.partition(" ..")
        if not dots:
            name, dots, tail = rest.partition(" ")
        word = tail.lstrip(" .*").partition(" ")[0]
        if not name or not word:
            return []
        result = {"Passed": CaseResult.PASSED, "Skipped": CaseResult.SKIPPED}.get(word, CaseResult.FAILED)
        return [(name.strip(), result)]

    return read


def _gtest() -> Reader:
    """GoogleTest's `[       OK ] Suite.Test (0 ms)`."""
    words = {"OK": CaseResult.PASSED, "FAILED": CaseResult.FAILED, "SKIPPED": CaseResult.SKIPPED}

    def read(raw: str, line: str) -> Found:
        if not line.startswith("["):
            return []
        word, closed, rest = line[1:].partition("]")
        name = rest.strip().partition(" ")[0].rstrip(",")
        known = closed and word.strip() in words and "." in name
        return [(name, words[word.strip()])] if known else []

    return read


def _jvm() -> Reader:
    """Maven Surefire's classes and failed methods; Gradle's `Class > method() PASSED`."""
    words = {"PASSED": CaseResult.PASSED, "FAILED": CaseResult.FAILED, "SKIPPED": CaseResult.SKIPPED}

    def read(raw: str, line: str) -> Found:
        head, _, word = line.rpartition(" ")
        if word in words and " > " in head:
            names = (head, head.removesuffix("()"), head.rpartition(" > ")[2].removesuffix("()"))
            return [(name.strip(), words[word]) for name in dict.fromkeys(names) if name.strip()]
        for level in ("[INFO] ", "[ERROR] ", "[WARNING] "):
            line = line.removeprefix(level)
        if line.startswith("Tests run:"):
            counts, _, name = line.rpartition(" in ")
            fine = all(f"{what}: 0" in counts for what in ("Failures", "Errors"))
            return [(name.strip(), CaseResult.PASSED if fine else CaseResult.FAILED)] if counts and name else []
        if "<<< FAILURE!" in line or "<<< ERROR!" in line:
            name = line.partition(" ")[0]
            method, bracket, owner = name.partition("(")
            known = [f"{owner.rstrip(')')}.{method}", method] if bracket else [name]
            return [(one, CaseResult.FAILED) for one in (name, *known)]
        return []

    return read


FORMATS: dict[str, Callable[[], Reader]] = {
    "pytest": _python,
    "unittest": _python,
    "sympy": _python,
    "go": _go,
    "jest": _marks,
    "mocha": _marks,
    "vitest": _marks,
    "node": _marks,
    "cargo": _cargo,
    "tap": _tap,
    "ctest": _ctest,
    "gtest": _gtest,
    "maven": _jvm,
    "gradle": _jvm,
}
"""By the names of `towline.schema.LogFormat`."""


def log_readers(log_format: str | None) -> list[Reader]:
    """New readers for a log of the format, or for all formats if it is unknown."""
    makers = list(dict.fromkeys(FORMATS.values())) if log_format is None else [FORMATS[log_format]]
    return [make() for make in makers]
