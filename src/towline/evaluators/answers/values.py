"""Values of trees without unknowns, and numbers with units (`9.8 m/s^2`, `1.5e3 J`, `20 km/h`).

A value is a fraction where that is exact, else a float or complex number. Every step is bounded, so that no answer,
however written, costs more than microseconds. Known units are converted to SI, so that 500 cm is 5 m. A unit is a product of
powers of named ones; a name is a unit's symbol, optionally with an SI prefix. Temperatures in Celsius and Fahrenheit are not
differences, and only equal their own kind.
"""

from __future__ import annotations

import cmath
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from towline.evaluators.answers.expressions import Tree, parse

Number = Fraction | float | complex

_BITS = 20_000
"""Largest numerators and denominators, in bits, that are kept exact."""
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
    """A literal number. A decimal is not exact, because it may have been rounded."""
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
        # The odd root of a negative number means the real one.
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
    """Drop an imaginary part that is only rounding error."""
    if isinstance(number, complex):
        if cmath.isnan(number):
            raise _Unknown
        if abs(number.imag) <= 1e-12 * max(1.0, abs(number.real)):
            return number.real
    elif isinstance(number, float) and math.isnan(number):
        raise _Unknown
    return number


Dimension = tuple[int, int, int, int, int, int, str]
"""Exponents of metre, kilogram, second, ampere, kelvin and mole; and the name of a unit outside of SI."""
_NONE: Dimension = (0, 0, 0, 0, 0, 0, "")

_PREFIXES = {
    "f": 1e-15, "p": 1e-12, "n": 1e-9, "u": 1e-6, "m": 1e-3, "c": 1e-2, "d": 1e-1, "h": 1e2, "k": 1e3, "M": 1e6, "G": 1e9,
    "T": 1e12, "milli": 1e-3, "micro": 1e-6, "nano": 1e-9, "kilo": 1e3, "mega": 1e6, "centi": 1e-2, "giga": 1e9,
}  # fmt: skip


Unit = tuple[float, Dimension]
"""The factor to SI units, and the dimension."""


def _unit(factor: float, m: int = 0, kg: int = 0, s: int = 0, a: int = 0, k: int = 0, mol: int = 0) -> Unit:
    return factor, (m, kg, s, a, k, mol, "")


_PREFIXED = {
    "m": _unit(1, 1), "meter": _unit(1, 1), "metre": _unit(1, 1), "g": _unit(1e-3, 0, 1), "gram": _unit(1e-3, 0, 1),
    "s": _unit(1, s=1), "second": _unit(1, s=1), "sec": _unit(1, s=1), "A": _unit(1, a=1), "amp": _unit(1, a=1),
    "ampere": _unit(1, a=1), "K": _unit(1, k=1), "kelvin": _unit(1, k=1), "mol": _unit(1, mol=1), "mole": _unit(1, mol=1),
    "N": _unit(1, 1, 1, -2), "newton": _unit(1, 1, 1, -2), "J": _unit(1, 2, 1, -2), "joule": _unit(1, 2, 1, -2),
    "W": _unit(1, 2, 1, -3), "watt": _unit(1, 2, 1, -3), "Pa": _unit(1, -1, 1, -2), "pascal": _unit(1, -1, 1, -2),
    "Hz": _unit(1, s=-1), "hertz": _unit(1, s=-1), "C": _unit(1, s=1, a=1), "coulomb": _unit(1, s=1, a=1),
    "V": _unit(1, 2, 1, -3, -1), "volt": _unit(1, 2, 1, -3, -1), "ohm": _unit(1, 2, 1, -3, -2),
    "F": _unit(1, -2, -1, 4, 2), "farad": _unit(1, -2, -1, 4, 2),
    "T": _unit(1, 0, 1, -2, -1), "tesla": _unit(1, 0, 1, -2, -1),
    "Wb": _unit(1, 2, 1, -2, -1), "H": _unit(1, 2, 1, -2, -2), "eV": _unit(1.602176634e-19, 2, 1, -2), "L": _unit(1e-3, 3),
    "l": _unit(1e-3, 3), "liter": _unit(1e-3, 3), "litre": _unit(1e-3, 3), "bar": _unit(1e5, -1, 1, -2),
    "cal": _unit(4.184, 2, 1, -2), "Wh": _unit(3600, 2, 1, -2),
}  # fmt: skip
_PLAIN = {
    "min": _unit(60, s=1), "minute": _unit(60, s=1), "h": _unit(3600, s=1), "hr": _unit(3600, s=1), "hour": _unit(3600, s=1),
    "day": _unit(86400, s=1), "week": _unit(604800, s=1), "rad": (1.0, _NONE), "radian": (1.0, _NONE),
    "atm": _unit(101325, -1, 1, -2), "inch": _unit(0.0254, 1), "ft": _unit(0.3048, 1), "foot": _unit(0.3048, 1),
    "feet": _unit(0.3048, 1), "mile": _unit(1609.344, 1), "mi": _unit(1609.344, 1), "lb": _unit(0.45359237, 0, 1),
    "pound": _unit(0.45359237, 0, 1), "angstrom": _unit(1e-10, 1), "M": _unit(1000, -3, mol=1),
    "mph": _unit(0.44704, 1, 0, -1),
    "percent": (1.0, (0, 0, 0, 0, 0, 0, "%")), "%": (1.0, (0, 0, 0, 0, 0, 0, "%")),
}  # fmt: skip
_FACTOR = re.compile(r"([A-Za-z%]+)\s*(?:(?:\^|\*\*)\s*\{?\s*([-+]?\d)\s*\}?|([-+]?\d))?")
_NUMBER = (
    r"[-+]?\s*(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?:\s*(?:\*|x)\s*10\s*(?:\^|\*\*)\s*(?:\{\s*[-+]?\d+\s*\}|\(\s*[-+]?\d+\s*\)|[-+]?\d+))?"
    r"|[-+]?\s*10\s*(?:\^|\*\*)\s*(?:\{\s*[-+]?\d+\s*\}|[-+]?\d+)|[-+]?\s*\\frac\s*\{[^{}]*\}\s*\{[^{}]*\}|[-+]?\s*\d+\s*/\s*\d+"
)
_QUANTITY = re.compile(rf"({_NUMBER})(\s*)(.*)", re.DOTALL)
_WORDS = re.compile(r"[A-Za-z]{2,30}(?:[ -][A-Za-z]{1,30}){0,3}")
_NO_UNIT = {
    "is", "are", "was", "be", "not", "no", "nor", "or", "and", "but", "if", "then", "than", "wrong", "false", "incorrect",
    "unless", "maybe", "perhaps", "either", "neither", "never",
}  # fmt: skip
"""Words that make a sentence of what follows a number."""


@dataclass(frozen=True, slots=True)
class Quantity:
    number: Number
    """The number as written, without its unit."""
    factor: float = 1.0
    dimension: Dimension = _NONE

    @property
    def bare(self) -> bool:
        return self.dimension == _NONE and self.factor == 1.0


def quantity(text: str) -> Quantity | None:
    """A number with or without a unit; `None` for anything else."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        return None
    tree = parse(match[1].replace("x", "*"))
    number = value(tree) if tree is not None else None
    if number is None:
        return None
    unit = match[3].strip().rstrip(".")
    if not unit:
        return Quantity(number)
    # 5m may be five times m; 5 m, 5cm and 5% are quantities.
    if not match[2] and len(unit) == 1 and unit != "%":
        return None
    found = _parsed(unit)
    if found is None:
        words = set(re.split("[ -]", unit.lower()))
        if not _WORDS.fullmatch(unit) or words & _NO_UNIT or (parse(unit) is not None and len(unit) <= 3):
            return None
        found = 1.0, (0, 0, 0, 0, 0, 0, _singular(unit))
    return Quantity(number, *found)


def _parsed(text: str) -> Unit | None:
    """Factor and dimension of `kg m^2/s^2`, `J/(mol K)`, `m s^-1`."""
    factor, exponents, word = 1.0, [0] * 6, ""
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/(\2)", text)
    text = re.sub(r"\bper\b", "/", text).replace("\\", " ")
    sign, below, at = 1, False, 0
    while at < len(text):
        character = text[at]
        if character in " *.-{}":
            at += 1
        elif character == "/":
            sign, at = -1, at + 1
        elif character == "(":
            below, at = True, at + 1
        elif character == ")":
            below, sign, at = False, 1, at + 1
        else:
            match = _FACTOR.match(text, at)
            if match is None:
                return None
            one = _named(match[1])
            if one is None:
                return None
            power = sign * int(match[2] or match[3] or 1)
            factor *= one[0] ** power
            exponents = [e + power * int(x) for e, x in zip(exponents, one[1][:6], strict=True)]
            word = word or str(one[1][6])
            at = match.end()
            # After a slash only the next factor is in the denominator, unless brackets group more.
            sign = sign if below else 1
    m, kg, s, a, k, mol = exponents
    return factor, (m, kg, s, a, k, mol, word)


def _named(name: str) -> Unit | None:
    singular = name[:-1] if name.endswith("s") and len(name) > 3 else name
    for spelled in (name, singular):
        if spelled in _PLAIN:
            return _PLAIN[spelled]
        if spelled in _PREFIXED:
            return _PREFIXED[spelled]
        for prefix, by in _PREFIXES.items():
            rest = spelled.removeprefix(prefix)
            if rest != spelled and rest in _PREFIXED:
                factor, dimension = _PREFIXED[rest]
                return by * factor, dimension
    return None


def _singular(word: str) -> str:
    return " ".join(part[:-1] if part.endswith("s") and len(part) > 3 else part for part in word.casefold().split())
