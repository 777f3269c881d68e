"""Whether an answer is the expected one: the same words, the same number or quantity, the same expression or collection.

Whole numbers and fractions are compared exactly; as soon as one side is a decimal or irrational, within a relative
tolerance. A unit that one side leaves out is not held against it; two different units are converted, or differ.
"""

from __future__ import annotations

import cmath
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product

from towline.evaluators.answers.cleaning import clean, same_text
from towline.evaluators.answers.expressions import Tree, parse
from towline.evaluators.answers.quantities import Quantity, quantity
from towline.evaluators.answers.values import Number, symbols, value

Undecided = Callable[[Tree, Tree], bool]
"""Decides about two expressions with unknowns."""
_ALTERNATIVES = 16
_LOOSE = ("list", "set", "union")
"""Collections without an order."""
_ASSIGNED = re.compile(
    r"^\s*(?:[A-Za-z](?:_\w|_\{\w+\})?|[A-Za-z]\([A-Za-z]\)|\\[a-z]+)\s*(?:=|\\in(?![a-z])|\\approx)\s*(?=\S)"
)
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


class Comparison:
    def __init__(self, tolerance: float, undecided: Undecided):
        self.tolerance = tolerance
        self.undecided = undecided

    def equal(self, expected: str, given: str) -> bool:
        if same_text(expected, given):
            return True
        one, two = clean(expected), clean(given)
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
            # Either the sign was left out, or the number was written without it.
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
        # A side without unknowns and without a value is out of bounds; two names are the same or not.
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
    """A text, and what it assigns: `x = 5` also reads 5."""
    shorter = _ASSIGNED.sub("", text)
    return [text] if shorter == text else [text, shorter]


def _unassigned(tree: Tree, other: Tree) -> Tree:
    """What `x = 5` gives x, where the other side does not say what it is of."""
    if tree[0] == "rel" and tree[1] == "=" and tree[2][0] == "sym" and other[0] != "rel":
        return tree[3]  # type: ignore[no-any-return]
    return tree


def _choice(expected: str, given: str) -> bool:
    """`B`, where the answer is `(B) 42` or `B. 42`."""
    letter = re.fullmatch(r"\(?([A-Z])\)?\.?", expected)
    return letter is not None and re.match(rf"\(?{letter[1]}[).:](?:\s|$)", given) is not None


def _scaled(number: Number, factor: float | Fraction) -> Number:
    if isinstance(number, Fraction) and isinstance(factor, Fraction):
        return number * factor
    return (float(number) if isinstance(number, Fraction) else number) * float(factor)


def _spread(trees: Sequence[Tree]) -> list[Tree]:
    return [one for tree in trees for one in _alternatives(tree)]


def _alternatives(tree: Tree) -> list[Tree]:
    """A tree with `±` in it as the trees that it stands for."""
    if tree[0] == "list":
        return _spread(tree[1:])
    if tree[0] in ("num", "sym", "const", "tuple", "matrix", "set", "union"):
        return [tree]
    parts = [_alternatives(part) if isinstance(part, tuple) else [part] for part in tree]
    number = 1
    for part in parts:
        number *= len(part)
    return [tree] if number > _ALTERNATIVES else list(product(*parts))
