"""The output of a published evaluation script: the tests' own part of it, and their exit code.

SWE-bench's scripts print marks around the tests, and end with a command that resets the test files: the script's exit code
is that command's.
"""

from __future__ import annotations

import re

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
_CODE = re.compile(r"^>>>>> Test Exit Code: (\d{1,3})\s*$", re.MULTILINE)


def test_output(output: str, code: int) -> tuple[str, int]:
    """The part between the marks and the recorded exit code; all of it, and `code`, where the marks are missing."""
    _, start, rest = output.partition(START)
    inside, end, after = rest.rpartition(END)
    if not start or not end:
        return output, code
    recorded = _CODE.search(after)
    return inside, int(recorded[1]) if recorded else code
