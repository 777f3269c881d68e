"""Equality of expressions with unknowns, by sympy, in a process of its own that is ended when its time is up.

sympy is the extra `math`. It never sees text: the other process builds its objects from a tree, node by node. Without
sympy, or out of time, two expressions that are not written the same are not equal, and the note says why.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from towline.evaluators.answers.expressions import Tree

CHILD = Path(__file__).with_name("symbolic_child.py")
_START = 60.0
"""Seconds of the clock that the process may take besides, on a busy machine."""


def available() -> bool:
    return importlib.util.find_spec("sympy") is not None


class Symbolic:
    """Decides about two trees, and notes what kept it from deciding."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.notes: list[str] = []
        self.asked = 0

    def __call__(self, expected: Tree, given: Tree) -> bool:
        self.asked += 1
        if not available():
            self._note(
                "sympy is not installed (pip install 'towline[math]'): expressions with unknowns compared as text"
            )
            return False
        try:
            done = subprocess.run(
                # Isolated: nothing of the folder it starts in is imported.
                [sys.executable, "-I", str(CHILD), str(self.seconds)],
                input=json.dumps([expected, given]).encode(),
                capture_output=True,
                timeout=self.seconds + _START,
                cwd="/",
                env={name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ},
                check=False,
            )
        except subprocess.TimeoutExpired:
            self._note(f"sympy did not decide within {self.seconds:g} seconds")
            return False
        if done.stdout.strip() in (b"equal", b"different"):
            return done.stdout.strip() == b"equal"
        if done.returncode == -signal.SIGPROF:
            self._note(f"sympy did not decide within {self.seconds:g} seconds")
            return False
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        self._note(f"sympy did not decide: {said[-1][:200] if said else f'its process ended with {done.returncode}'}")
        return False

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
