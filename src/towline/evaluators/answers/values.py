"""What a tree without unknowns is worth: a fraction where that is exact, else a float or complex number.

Every step is bounded, so that no answer, however written, costs more than microseconds.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from fractions import Fraction

from towline.evaluators.answers.expressions import Tree

Number = Fraction | float | complex

_BITS = 20_000
"""Size of the numerators and denominators that are kept exact."""
_MOST_FACTORIAL = 1000
_CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e, "i": 1j, "inf": math.inf}
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "cot": lambda x: 1 / cmath.tan(x),
    "sec": lambda x: 1 / cmath.cos(x), "csc": lambda x: 1 / cmath.sin(x), "arcsin": cmath.asin, "arccos": cmath.acos,
    "arctan": cmath.atan, "asin": cmath.asin, "acos": cmath.acos, "atan": cmath.atan, "sinh": cmath.sinh,
    "cosh": cmath.cosh, "tanh": cmath.tanh, "ln": cmath.log, "log": cmath.log, "exp": cmath.exp, "sqrt": cmath.sqrt,
}  # fmt: skip


class _Unknown(ArithmeticError):
    """The tree has no value: a symbol, a collection, or arithmetic that is out of bounds."""


def value(tree: Tree) -> Number | None:
    """The value of a tree; `None` if it has an unknown, is a collection, or is out of bounds."""
    try:
        return _real(_value(tree))
    except (ArithmeticError, ValueError, TypeError):
        return None


def symbols(tree: Tree) -> set[str]:
    """The unknowns of a tree."""
    if tree and tree[0] == "sym":
        return {str(tree[1])}
    return {name for part in tree if isinstance(part, tuple) for name in symbols(part)}


def _value(tree: Tree) -> Number:
    match tree:
        case ("num", text):
            return _literal(str(text))
        case ("const", name):
            return _CONSTANTS[str(name)]
        case ("neg", a):
            return -_value(a)
        case ("add", a, b):
            return _bounded(_both(lambda x, y: x + y, _value(a), _value(b)))
        case ("mul", a, b):
            return _bounded(_both(lambda x, y: x * y, _value(a), _value(b)))
        case ("div", a, b):
            return _bounded(_both(lambda x, y: x / y, _value(a), _value(b)))
        case ("pow", a, b):
            return _power(_value(a), _value(b))
        case ("call", name, *arguments):
            return _call(str(name), [_value(argument) for argument in arguments])
    raise _Unknown


def _literal(text: str) -> Number:
    """A number as it is written. A decimal is not exact: whoever wrote it may have rounded."""
    exponent = text.lower().partition("e")[2]
    if len(text) > 500 or (exponent and abs(int(exponent)) > 400):
        raise _Unknown
    return float(text) if "." in text or exponent.startswith("-") else Fraction(text)


def _both(operation: Callable[[Number, Number], Number], a: Number, b: Number) -> Number:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return operation(a, b)
    return operation(*(float(x) if isinstance(x, Fraction) else x for x in (a, b)))


def _bounded(number: Number) -> Number:
    if isinstance(number, Fraction) and max(number.numerator.bit_length(), number.denominator.bit_length()) > _BITS:
        return float(number)
    return number


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        size = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent.numerator)
        if size <= _BITS:
            return Fraction(base) ** int(exponent)
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and base < 0 and exponent.denominator % 2:
        # Of a negative number the odd root that is real is meant.
        sign = -1.0 if exponent.numerator % 2 else 1.0
        return sign * math.pow(-base, exponent)
    return complex(base) ** complex(exponent)


def _call(name: str, arguments: list[Number]) -> Number:
    a = arguments[0]
    if name == "abs":
        return abs(a) if isinstance(a, Fraction) else float(abs(a))
    if name in ("factorial", "binomial"):
        whole = [
            int(x) for x in arguments if isinstance(x, Fraction) and x.denominator == 1 and 0 <= x <= _MOST_FACTORIAL
        ]
        if len(whole) != len(arguments):
            raise _Unknown
        return Fraction(math.factorial(whole[0]) if name == "factorial" else math.comb(whole[0], whole[1]))
    real = _real(a)
    if name in ("floor", "ceiling"):
        if isinstance(real, complex):
            raise _Unknown
        return Fraction(math.floor(real) if name == "floor" else math.ceil(real))
    if name == "cbrt":
        return _power(a, Fraction(1, 3))
    if name == "sqrt" and isinstance(real, Fraction) and real >= 0:
        roots = [math.isqrt(real.numerator), math.isqrt(real.denominator)]
        if roots[0] ** 2 == real.numerator and roots[1] ** 2 == real.denominator:
            return Fraction(roots[0], roots[1])
    if name in _FUNCTIONS:
        return _FUNCTIONS[name](complex(a))
    raise _Unknown


def _real(number: Number) -> Number:
    """A complex number without an imaginary part worth the name is a real one."""
    if isinstance(number, complex):
        if cmath.isnan(number):
            raise _Unknown
        if abs(number.imag) <= 1e-12 * max(1.0, abs(number.real)):
            return number.real
    elif isinstance(number, float) and math.isnan(number):
        raise _Unknown
    return number
