"""R2E-Gym's rule: the tests end exactly as expected, those that are expected to fail included.

The results are those of pytest's short summary. A test's name is what follows the file in its id, joined by dots, without
the reason that pytest prints behind it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from towline.evaluators.hostile.failures import EvaluationError

_SUMMARY = "short test summary info"
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_WORDS = ("PASSED", "FAILED", "ERROR")


def summary_results(output: str) -> dict[str, str]:
    """The words of pytest's short summary by test; `EvaluationError` if there is no summary."""
    text = _COLOUR.sub("", output)
    if _SUMMARY not in text:
        raise EvaluationError("the test log has no short summary of pytest, so no test has a result; run it with -rA")
    found: dict[str, str] = {}
    for line in text.partition(_SUMMARY)[2].splitlines():
        word, _, rest = line.strip().partition(" ")
        if word in _WORDS and "::" in rest:
            found[test_name(".".join(rest.split("::")[1:]))] = word
    return found


def test_name(name: str) -> str:
    return _COLOUR.sub("", name).partition(" - ")[0].strip()


def share_as_expected(found: Mapping[str, str], expected: Mapping[str, str]) -> float:
    """The share of all tests, expected or found, that ended as expected: 1 only if the two are equal."""
    wanted = {test_name(name): word for name, word in expected.items() if name}
    names = {name for name in {*found, *wanted} if name}
    return sum(found.get(name) == wanted.get(name) for name in names) / len(names) if names else 1.0
