"""Whether an answer is the expected one: the same words, number, quantity, expression or collection.

LaTeX and typography are first normalized to one spelling. Integers and fractions are compared exactly; as soon as one side
is a decimal or irrational, within a relative tolerance. A unit that one side omits is not counted against it; two different
units are converted, or differ.

Expressions with unknowns are compared by sympy, which the extra `math` installs, in a child process that is killed at its
time limit. It never sees text: the child builds sympy objects from a tree, node by node. Without sympy, or after a timeout,
expressions that are not written the same are not equal, and a note says why.
"""

from __future__ import annotations

import cmath
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from pathlib import Path

from towline.evaluators.answers.expressions import Tree, parse
from towline.evaluators.answers.values import Number, Quantity, quantity, symbols, value

# ruff: noqa: RUF001  this file maps characters that look alike


_SIGNS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "⁄": "/", "∕": "/", "√": "\\sqrt ",
        "π": "\\pi ", "∞": "\\infty ", "≤": "<=", "≥": ">=", "≠": "!=", "±": "\\pm ", "∪": "\\cup ", "∩": "\\cap ",
        "∈": "\\in ", "∅": "\\emptyset ", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "λ": "\\lambda ", "φ": "\\phi ",
        "⟨": "(", "⟩": ")", "’": "'", "′": "'", "“": '"', "”": '"', "\u00a0": " ", "\u202f": " ", "\u2009": " ", "，": ",",
        "（": "(", "）": ")", "％": "%", "µ": "u", "μ": "u", "Ω": "ohm", "Å": "angstrom",
    }
)  # fmt: skip
_RAISED = {"⁰": "0", "¹": "1", "²": "2", "³": "3", "⁴": "4", "⁵": "5", "⁶": "6", "⁷": "7", "⁸": "8", "⁹": "9", "⁻": "-"}
_HALVES = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅛": "1/8"}
_EMPTY = re.compile(
    r"\\(?:left|right|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr|displaystyle|textstyle|limits|,|;|:|!|quad|qquad)(?![A-Za-z])\.?"
)
_WRAPPED = re.compile(
    r"\\(?:mathrm|mathbf|mathit|mathsf|mathbb|boldsymbol|operatorname|mbox|textbf|textit|textrm|text|rm)\s*\{([^{}]*)\}"
)
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:,|\{,\}|\\,|\\ | )\d{3})+)(?![\d,])")
_PAIRS = ("$", "\\(", "\\)", "\\[", "\\]")


def normalize(text: str) -> str:
    """A text in one spelling, with `\\text{cm}` as ` cm `."""
    text = re.sub(r"\\\\", r" \\cr ", text) if "\\begin" in text else text.replace("\\\\", "\\")
    for mark in _PAIRS[1:]:
        text = text.replace(mark, " ")
    # A dollar sign before a number is money, otherwise it delimits a formula.
    text = re.sub(r"\\\$|\$(?=\s*\d[\d,.]*\s*$)", " ", text).replace("$", " ")
    text = re.sub("[" + "".join(_RAISED) + "]+", lambda m: "^{" + "".join(_RAISED[c] for c in m[0]) + "}", text)
    text = re.sub(
        "(\\d?)([" + "".join(_HALVES) + "])",
        lambda m: f"({m[1]}+{_HALVES[m[2]]})" if m[1] else f"({_HALVES[m[2]]})",
        text,
    )
    text = text.translate(_SIGNS)
    text = _numbers_joined(text)
    text = _EMPTY.sub(" ", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°", " degree ", text)
    for written, plain in (("\\%", "%"), ("\\{", "\\lbrace "), ("\\}", "\\rbrace "), ("\\ ", " "), ("~", " ")):
        text = text.replace(written, plain)
    text = re.sub(r"\\(?:times|cdot|ast)(?![A-Za-z])", " * ", text)
    text = re.sub(r"\\div(?![A-Za-z])", " / ", text)
    text = re.sub(r"\\(?:leq?|leqslant)(?![A-Za-z])", " <= ", text)
    text = re.sub(r"\\(?:geq?|geqslant)(?![A-Za-z])", " >= ", text)
    text = re.sub(r"\\neq?(?![A-Za-z])", " != ", text)
    text = re.sub(r"\\lt(?![A-Za-z])", " < ", text)
    text = re.sub(r"\\gt(?![A-Za-z])", " > ", text)
    for _ in range(3):
        text = _WRAPPED.sub(r" \1 ", text)
    return " ".join(text.split())


def same_text(one: str, two: str) -> bool:
    """Whether two answers are the same text, ignoring case, spaces, a full stop and brackets around a single letter."""
    return _folded(one) == _folded(two) != ""


def _folded(text: str) -> str:
    folded = re.sub(r"\s+", "", normalize(text)).casefold().rstrip(".").strip("\"'`")
    letter = re.fullmatch(r"\(?([a-z])[).:]?", folded)
    return letter[1] if letter else folded


def _numbers_joined(text: str) -> str:
    """Join `1,234,567`, `1{,}234` and `12 345` into one number where no list can be meant: outside of brackets."""
    if re.search(r"[(\[]|\\lbrace|\\\{", text) and not re.search(r"\{,\}|\\,", text):
        return text

    def joined(match: re.Match[str]) -> str:
        # One separator throughout; a comma followed by a space separates list items.
        separators = set(re.findall(r",|\{,\}|\\,|\\ | ", match[2]))
        return match[1] + re.sub(r"\D", "", match[2]) if len(separators) == 1 else match[0]

    return _THOUSANDS.sub(joined, text)


Undecided = Callable[[Tree, Tree], bool]
"""Decides whether two expressions with unknowns are equal."""
_ALTERNATIVES = 16
_LOOSE = ("list", "set", "union")
"""Unordered collections."""
_ASSIGNED = re.compile(
    r"^\s*(?:[A-Za-z](?:_\w|_\{\w+\})?|[A-Za-z]\([A-Za-z]\)|\\[a-z]+)\s*(?:=|\\in(?![a-z])|\\approx)\s*(?=\S)"
)
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


class AnswerComparison:
    def __init__(self, tolerance: float, undecided: Undecided):
        self.tolerance = tolerance
        self.undecided = undecided

    def equal(self, expected: str, given: str) -> bool:
        if same_text(expected, given):
            return True
        one, two = normalize(expected), normalize(given)
        if _choice(one, two):
            return True
        for left, right in product(_readings(one), _readings(two)):
            if same_text(left, right):
                return True
            quantities = quantity(left), quantity(right)
            if quantities[0] is not None and quantities[1] is not None:
                if self.same_quantity(quantities[0], quantities[1]):
                    return True
                continue
            trees = parse(left), parse(right)
            if trees[0] is not None and trees[1] is not None and self.same_tree(trees[0], trees[1]):
                return True
        return False

    def same_quantity(self, expected: Quantity, given: Quantity) -> bool:
        one, two = expected.dimension[6] == "%", given.dimension[6] == "%"
        if one != two and (expected.bare or given.bare):
            # Either the percent sign was omitted, or the number is a fraction.
            both = [_scaled(q.number, Fraction(1, 100 if q.dimension[6] == "%" else 1)) for q in (expected, given)]
            return self.same_number(expected.number, given.number) or self.same_number(both[0], both[1])
        if expected.bare or given.bare:
            return self.same_number(expected.number, given.number)
        if expected.dimension != given.dimension:
            return False
        if expected.factor == given.factor:
            return self.same_number(expected.number, given.number)
        return self.same_number(_scaled(expected.number, expected.factor), _scaled(given.number, given.factor))

    def same_number(self, expected: Number, given: Number) -> bool:
        if isinstance(expected, Fraction) and isinstance(given, Fraction):
            return expected == given
        try:
            one, two = complex(expected), complex(given)
        except OverflowError:
            return False
        if cmath.isinf(one) or cmath.isinf(two):
            return one == two
        return abs(one - two) <= self.tolerance * max(abs(one), abs(two))

    def same_tree(self, expected: Tree, given: Tree) -> bool:
        expected, given = _unassigned(expected, given), _unassigned(given, expected)
        kinds = expected[0], given[0]
        if kinds == ("tuple", "tuple"):
            return expected[1:3] == given[1:3] and self._ordered(expected[3:], given[3:])
        if kinds == ("matrix", "matrix"):
            return len(expected) == len(given) and all(map(self._ordered, expected[1:], given[1:]))
        one, two = (_spread(tree[1:] if tree[0] in _LOOSE else (tree,)) for tree in (expected, given))
        if kinds[0] in _LOOSE or kinds[1] in _LOOSE or len(one) > 1 or len(two) > 1:
            return self._unordered(one, two)
        if "tuple" in kinds or "matrix" in kinds:
            return False
        if kinds == ("rel", "rel"):
            return self._same_relation(expected, given)
        return "rel" not in kinds and self._same_scalar(expected, given)

    def _same_scalar(self, expected: Tree, given: Tree) -> bool:
        one, two = value(expected), value(given)
        if one is not None and two is not None:
            return self.same_number(one, two)
        if expected == given:
            return True
        # A side without unknowns and without a value is out of bounds; names are only compared as such.
        names = symbols(expected), symbols(given)
        if (one is None and not names[0]) or (two is None and not names[1]) or expected[0] == given[0] == "sym":
            return False
        return self.undecided(expected, given)

    def _same_relation(self, expected: Tree, given: Tree) -> bool:
        _, sign, a, b = expected
        _, other, c, d = given
        if sign == other and self.same_tree(a, c) and self.same_tree(b, d):
            return True
        if _MIRRORED.get(sign) == other and self.same_tree(a, d) and self.same_tree(b, c):
            return True
        return sign == other == "=" and self.undecided(expected, given)

    def _ordered(self, expected: Sequence[Tree], given: Sequence[Tree]) -> bool:
        return len(expected) == len(given) and all(map(self.same_tree, expected, given))

    def _unordered(self, expected: Sequence[Tree], given: Sequence[Tree]) -> bool:
        if len(expected) != len(given) or len(expected) > _ALTERNATIVES * 4:
            return False
        left = list(given)
        for tree in expected:
            match = next((index for index, other in enumerate(left) if self.same_tree(tree, other)), None)
            if match is None:
                return False
            del left[match]
        return True


def _readings(text: str) -> list[str]:
    """A text, and the value it assigns: `x = 5` also reads 5."""
    shorter = _ASSIGNED.sub("", text)
    return [text] if shorter == text else [text, shorter]


def _unassigned(tree: Tree, other: Tree) -> Tree:
    """The value in `x = 5`, if the other side is not an assignment."""
    if tree[0] == "rel" and tree[1] == "=" and tree[2][0] == "sym" and other[0] != "rel":
        return tree[3]  # type: ignore[no-any-return]
    return tree


def _choice(expected: str, given: str) -> bool:
    """Whether one side is `B` and the other `(B) 42` or `B. 42`."""
    letter = re.fullmatch(r"\(?([A-Z])\)?\.?", expected)
    if letter is None or re.match(rf"\(?{letter[1]}[).:](?:\s|$)", given) is None:
        return False
    # Another choice after the first is no answer.
    return re.search(r"(?:^|\s)(?:\([A-Z]\)|[A-Z][).](?:\s|$)|(?:or|not|and)\s)", given[2:]) is None


def _scaled(number: Number, factor: float | Fraction) -> Number:
    if isinstance(number, Fraction) and isinstance(factor, Fraction):
        return number * factor
    return (float(number) if isinstance(number, Fraction) else number) * float(factor)


def _spread(trees: Sequence[Tree]) -> list[Tree]:
    return [one for tree in trees for one in _alternatives(tree)]


def _alternatives(tree: Tree) -> list[Tree]:
    """The trees that a tree with `±` stands for."""
    if tree[0] == "list":
        return _spread(tree[1:])
    if tree[0] in ("num", "sym", "const", "tuple", "matrix", "set", "union"):
        return [tree]
    parts = [_alternatives(part) if isinstance(part, tuple) else [part] for part in tree]
    number = 1
    for part in parts:
        number *= len(part)
    return [tree] if number > _ALTERNATIVES else list(product(*parts))


SYMPY_CHILD = Path(__file__).with_name("symbolic_child.py")
_START = 60.0
"""Additional wall-clock seconds for the process, for busy machines."""


def sympy_available() -> bool:
    return importlib.util.find_spec("sympy") is not None


class SympyComparison:
    """Compares two trees, and notes why it could not decide."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.notes: list[str] = []
        self.asked = 0

    def __call__(self, expected: Tree, given: Tree) -> bool:
        self.asked += 1
        if not sympy_available():
            self._note(
                "sympy is not installed (pip install 'towline[math]'): expressions with unknowns compared as text"
            )
            return False
        try:
            done = subprocess.run(
                # Isolated mode: nothing is imported from the working folder.
                [sys.executable, "-I", str(SYMPY_CHILD), str(self.seconds)],
                input=json.dumps([expected, given]).encode(),
                capture_output=True,
                timeout=self.seconds + _START,
                cwd="/",
                env={name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ},
                check=False,
            )
        except subprocess.TimeoutExpired:
            self._note(f"sympy timed out after {self.seconds:g} seconds")
            return False
        if done.stdout.strip() in (b"equal", b"different"):
            return done.stdout.strip() == b"equal"
        if done.returncode == -signal.SIGPROF:
            self._note(f"sympy timed out after {self.seconds:g} seconds")
            return False
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        self._note(f"sympy did not decide: {said[-1][:200] if said else f'its process ended with {done.returncode}'}")
        return False

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
