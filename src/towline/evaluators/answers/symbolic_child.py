"""The child process that compares two trees with sympy: reads them as JSON, prints `equal` or `different`.

Memory and CPU time are limited before sympy is imported, so the cost of any expression is bounded. Runs by file path in
isolated mode and imports nothing of Towline.
"""

from __future__ import annotations

import importlib
import json
import resource
import signal
import sys
from typing import Any

_MEMORY = 2 * 1024**3
_IMPORTING = 15


def main() -> None:
    seconds = max(1, round(float(sys.argv[1])))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds + _IMPORTING, seconds + _IMPORTING))
    expected, given = json.load(sys.stdin)
    importlib.import_module("sympy")
    # CPU time gives the same result on a busy machine. The signal has no handler, so it also ends code that never returns
    # to Python.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    print("equal" if equal(expected, given) else "different")


def equal(expected: list[Any], given: list[Any]) -> bool:
    sympy = importlib.import_module("sympy")

    if expected[0] == "rel" and given[0] == "rel":
        sides = [build(sympy, relation[2]) - build(sympy, relation[3]) for relation in (expected, given)]
        if any(sympy.simplify(side) == 0 for side in sides):
            return all(sympy.simplify(side) == 0 for side in sides)
        # The same equation, possibly multiplied by a number.
        ratio = sympy.simplify(sides[0] / sides[1])
        return bool(ratio.is_number) and ratio != 0
    difference = build(sympy, expected) - build(sympy, given)
    if difference == 0:
        return True
    simple = sympy.simplify(difference)
    return bool(simple == 0 or simple.equals(0))


def build(sympy: Any, tree: list[Any]) -> Any:
    kind, *parts = tree
    if kind == "num":
        return sympy.Rational(parts[0])
    if kind == "sym":
        # Positive, so that roots and logarithms of unknowns simplify as in a textbook.
        return sympy.Symbol(parts[0], positive=True)
    if kind == "const":
        return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "inf": sympy.oo}[parts[0]]
    if kind == "call":
        name, *arguments = parts
        return functions(sympy)[name](*(build(sympy, argument) for argument in arguments))
    sides = [build(sympy, part) for part in parts]
    if kind == "neg":
        return -sides[0]
    if kind == "add":
        return sides[0] + sides[1]
    if kind == "mul":
        return sides[0] * sides[1]
    if kind == "div":
        return sides[0] / sides[1]
    if kind == "pow":
        return sides[0] ** sides[1]
    raise ValueError(f"unknown expression kind {kind!r}")


def functions(sympy: Any) -> dict[str, Any]:
    named = {
        name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp", "sqrt", "cbrt")
    }
    named |= {"asin": "asin", "acos": "acos", "atan": "atan", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}
    named |= {"ln": "log", "log": "log", "abs": "Abs", "factorial": "factorial", "binomial": "binomial"}
    named |= {"floor": "floor", "ceiling": "ceiling"}
    return {name: getattr(sympy, theirs) for name, theirs in named.items()}


if __name__ == "__main__":
    main()
