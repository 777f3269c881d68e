"""How test programs print the results of single tests, one reader for each format.

A reader gets the lines of a log in order, each as it is and without its indentation, and gives the names and results that it
finds. It gives a test every name that published data sets use for it. No line costs more than its length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import StrEnum

from towline.schema import LogFormat


class Result(StrEnum):
    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"


Found = list[tuple[str, Result]]
Reader = Callable[[str, str], Found]

_PYTEST = {
    "PASSED": Result.PASSED,
    "FAILED": Result.FAILED,
    "ERROR": Result.FAILED,
    "XFAIL": Result.PASSED,
    "XPASS": Result.FAILED,
    "SKIPPED": Result.SKIPPED,
}
_UNITTEST = {
    "ok": Result.PASSED,
    "FAIL": Result.FAILED,
    "ERROR": Result.FAILED,
    "skipped": Result.SKIPPED,
    "expected failure": Result.PASSED,
    "unexpected success": Result.FAILED,
}
_SYMPY_WORDS = {
    "ok": Result.PASSED,
    "OK": Result.PASSED,
    "f": Result.PASSED,
    "s": Result.SKIPPED,
    "F": Result.FAILED,
    "E": Result.FAILED,
}
_UNITTEST_NAME = re.compile(r"(\w+ \([\w.<>]+\))")
_HEADING = re.compile(r"(?:FAIL|ERROR): (?P<name>\S+ \([\w.<>]+\))")
_SYMPY = re.compile(r"(?P<name>test_\w+) (?P<word>ok|OK|F|E|f|s)(?: |$)")
_DURATION = re.compile(r"\s*\(?\b\d+(?:\.\d+)?\s?(?:ms|s|m)\)?$")
_MARKS = {
    **dict.fromkeys("✓✔√", Result.PASSED),
    **dict.fromkeys("✕✖\u00d7✗", Result.FAILED),
    **dict.fromkeys("○↓﹣", Result.SKIPPED),
}
_NUMBERED = re.compile(r"\d{1,6}\) (?P<title>.+)")
_TAP = re.compile(r"(?P<word>not ok|ok) \d{1,9}(?: |$)(?P<title>.*)")
_TAIL = 100
"""Characters at the end of a line in which a result or a duration stands."""


def _python() -> Reader:
    """pytest, unittest (Django's runner too) and sympy's."""
    described = begun = ""
    """A unittest's name of which the description comes next, and one whose result comes after what the test prints."""

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
        # A reason may follow; in a test's own parameters there may be a dash as well.
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
        return [(heading["name"], Result.FAILED)]
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
    words = {"PASS": Result.PASSED, "FAIL": Result.FAILED, "SKIP": Result.SKIPPED}

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
    """Jest, Mocha, Vitest and `node --test`: a mark, the title, perhaps how long it took; suites by indentation."""
    suites: list[tuple[int, str]] = []
    over = False
    """Mocha names its failures once more at the end, under numbers that begin anew."""

    def read(raw: str, line: str) -> Found:
        nonlocal over
        if not line:
            return []
        indent = len(raw) - len(raw.lstrip())
        result = _MARKS.get(line[0])
        title = line[1:].strip()
        if result is None and not over and indent and (numbered := _NUMBERED.fullmatch(line)):
            result, title = Result.FAILED, numbered["title"]
        while suites and suites[-1][0] >= indent:
            suites.pop()
        if result is None:
            words = line.split(" ", 2)
            over = over or (len(words) == 2 and words[0].isdigit() and words[1] == "failing")
            if len(suites) < 32:
                suites.append((indent, line.removeprefix("▶ ").strip()))
            return []
        if result is Result.SKIPPED:
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
    words = {"ok": Result.PASSED, "FAILED": Result.FAILED, "ignored": Result.SKIPPED}
    marks = {"PASS": Result.PASSED, "FAIL": Result.FAILED, "SKIP": Result.SKIPPED}

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
        result = Result.SKIPPED if skipped else Result.PASSED if match["word"] == "ok" else Result.FAILED
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
        result = {"Passed": Result.PASSED, "Skipped": Result.SKIPPED}.get(word, Result.FAILED)
        return [(name.strip(), result)]

    return read


def _gtest() -> Reader:
    """GoogleTest's `[       OK ] Suite.Test (0 ms)`."""
    words = {"OK": Result.PASSED, "FAILED": Result.FAILED, "SKIPPED": Result.SKIPPED}

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
    words = {"PASSED": Result.PASSED, "FAILED": Result.FAILED, "SKIPPED": Result.SKIPPED}

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
            return [(name.strip(), Result.PASSED if fine else Result.FAILED)] if counts and name else []
        if "<<< FAILURE!" in line or "<<< ERROR!" in line:
            name = line.partition(" ")[0]
            method, bracket, owner = name.partition("(")
            known = [f"{owner.rstrip(')')}.{method}", method] if bracket else [name]
            return [(one, Result.FAILED) for one in (name, *known)]
        return []

    return read


FORMATS: dict[LogFormat, Callable[[], Reader]] = {
    LogFormat.PYTEST: _python,
    LogFormat.UNITTEST: _python,
    LogFormat.SYMPY: _python,
    LogFormat.GO: _go,
    LogFormat.JEST: _marks,
    LogFormat.MOCHA: _marks,
    LogFormat.VITEST: _marks,
    LogFormat.NODE: _marks,
    LogFormat.CARGO: _cargo,
    LogFormat.TAP: _tap,
    LogFormat.CTEST: _ctest,
    LogFormat.GTEST: _gtest,
    LogFormat.MAVEN: _jvm,
    LogFormat.GRADLE: _jvm,
}


def readers(log_format: LogFormat | None) -> list[Reader]:
    """Fresh readers of a log in the format, or in any if it is not known."""
    makers = list(dict.fromkeys(FORMATS.values())) if log_format is None else [FORMATS[log_format]]
    return [make() for make in makers]
