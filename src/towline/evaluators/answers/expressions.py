"""A small grammar of mathematics, LaTeX and plain, parsed into trees of tuples. No text is ever executed.

A tree is `("num", "3/4")`, `("sym", "x")`, `("const", "pi")`, `("neg", a)`, `("add" | "mul" | "div" | "pow", a, b)`,
`("call", name, a, …)`, `("rel", sign, a, b)`, or one of the collections `("list" | "set" | "union", …)`,
`("tuple", open, close, …)`, `("matrix", row, …)`. Length and depth are bounded.
"""

from __future__ import annotations

import re
from typing import Any

MAX_TOKENS = 600
_TOKEN = re.compile(
    r"\s*(\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|\\[A-Za-z]+|[A-Za-z]+|<=|>=|!=|\*\*|.)", re.DOTALL
)
FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "asin", "acos", "atan", "sinh", "cosh", "tanh",
    "log", "ln", "exp", "sqrt", "abs", "cbrt", "factorial",
}  # fmt: skip
CONSTANTS = {"pi": "pi", "e": "e", "i": "i", "infty": "inf", "inf": "inf", "infinity": "inf"}
GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "theta", "lambda", "mu", "nu", "xi", "rho", "sigma", "tau",
    "phi", "varphi", "omega", "psi", "chi", "eta", "zeta", "kappa",
}  # fmt: skip


class _NotMath(ValueError):
    """The text does not match the grammar."""


def tokenize(text: str) -> list[str]:
    """The tokens of a text. `xy` is x times y; a longer unknown word means that the text is not mathematics."""
    found = [match[1] for match in _TOKEN.finditer(text) if match[1].strip()]
    if not found or len(found) > MAX_TOKENS:
        raise _NotMath
    spelled: list[str] = []
    for token in found:
        if not token[0].isalpha() or len(token) == 1 or spelled[-2:] in (["\\begin", "{"], ["\\end", "{"]):
            spelled.append(token)
        elif token in ("and", "or"):
            spelled.append(",")
        elif token.lower() in FUNCTIONS or token.lower() in CONSTANTS or token in GREEK or token == "frac":
            spelled.append(f"\\{token.lower()}")
        elif len(token) <= 3:
            spelled += list(token)
        else:
            raise _NotMath
    return spelled


Tree = tuple[Any, ...]

MAX_DEPTH = 60
_OPEN = {"(": ")", "[": "]", "\\lbrace": "\\rbrace", "\\lvert": "\\rvert", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_RELATIONS = {"=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", "\\in": "in"}


def parse(text: str) -> Tree | None:
    """The tree of a normalized text; `None` if it is not mathematics."""
    try:
        return _Parser(text).whole()
    except _NotMath:
        return None


class _Parser:
    def __init__(self, text: str):
        self.tokens = tokenize(text)
        self.at = 0
        self.depth = 0
        self.bars = 0

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def take(self, wanted: str = "") -> str:
        token = self.peek()
        if not token or (wanted and token != wanted):
            raise _NotMath
        self.at += 1
        return token

    def whole(self) -> Tree:
        """The whole text: one expression, or a list of them."""
        items = [self.relation()]
        while self.peek() in (",", ";", "\\lor", "\\land"):
            self.take()
            items.append(self.relation())
        if self.peek():
            raise _NotMath
        return items[0] if len(items) == 1 else ("list", *items)

    def relation(self) -> Tree:
        left = self.union()
        while self.peek() in _RELATIONS:
            sign = _RELATIONS[self.take()]
            left = ("rel", sign, left, self.union())
        return left

    def union(self) -> Tree:
        parts = [self.sum()]
        while self.peek() == "\\cup":
            self.take()
            parts.append(self.sum())
        return parts[0] if len(parts) == 1 else ("union", *parts)

    def sum(self) -> Tree:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _NotMath
        left = self.term()
        while self.peek() in ("+", "-", "\\pm"):
            sign = self.take()
            right = self.term()
            if sign == "\\pm":
                left = ("list", ("add", left, right), ("add", left, ("neg", right)))
            else:
                left = ("add", left, right if sign == "+" else ("neg", right))
        self.depth -= 1
        return left

    def term(self) -> Tree:
        if self.peek() == "\\pm":
            self.take()
            value = self.term()
            return ("list", value, ("neg", value))
        left = self.signed()
        while True:
            if self.peek() in ("*", "/"):
                sign = self.take()
                left = ("mul" if sign == "*" else "div", left, self.signed())
            elif self._starts_a_factor():
                left = ("mul", left, self.power())
            else:
                return left

    def _starts_a_factor(self) -> bool:
        token = self.peek()
        if not token or token in (
            "\\rbrace",
            "\\rvert",
            "\\rfloor",
            "\\rceil",
            "\\cup",
            "\\cap",
            "\\in",
            "\\lor",
            "\\land",
        ):
            return False
        if token in ("\\pm", "\\end", "\\cr"):
            return False
        if token == "|":
            return self.bars == 0
        return token[0].isalpha() or token[0] == "\\" or token in ("(", "[") or token == "{" or token[0].isdigit()

    def signed(self) -> Tree:
        if self.peek() in ("+", "-"):
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise _NotMath
            sign = self.take()
            value = self.signed()
            self.depth -= 1
            return ("neg", value) if sign == "-" else value
        return self.power()

    def power(self) -> Tree:
        base = self.postfix()
        if self.peek() in ("^", "**"):
            self.take()
            return ("pow", base, self.argument() if self.peek() not in ("+", "-") else self.signed())
        return base

    def postfix(self) -> Tree:
        value = self.atom()
        while self.peek() in ("!", "%", "_", "'"):
            mark = self.take()
            if mark == "!":
                value = ("call", "factorial", value)
            elif mark == "%":
                value = ("div", value, ("num", "100"))
            elif value[0] == "sym":
                below = "'" if mark == "'" else f"_{_spelled(self.argument())}"
                value = ("sym", f"{value[1]}{below}")
            else:
                raise _NotMath
        return value

    def argument(self) -> Tree:
        """The argument of `^`, `_`, `\\frac` or `\\sqrt`: a group, or one token; in LaTeX, one digit of a number."""
        if self.peek() == "{":
            return self.group()
        return self.atom()

    def group(self) -> Tree:
        self.take("{")
        value = self.sum()
        self.take("}")
        return value

    def digit(self) -> Tree:
        """An argument of `\\frac`, where `\\frac12` is one half."""
        token = self.peek()
        if token and token[0].isdigit() and len(token) > 1 and token.isdigit():
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        return self.argument()

    def atom(self) -> Tree:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _NotMath
        try:
            return self._atom()
        finally:
            self.depth -= 1

    def _atom(self) -> Tree:
        token = self.take()
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return self._number(token)
        if token == "{":
            self.at -= 1
            return self.group()
        if token == "|":
            self.bars += 1
            value = self.sum()
            self.take("|")
            self.bars -= 1
            return ("call", "abs", value)
        if token in _OPEN:
            return self._bracketed(token)
        name = token.removeprefix("\\")
        if token in ("\\frac", "\\cfrac"):
            above = self.digit()
            return ("div", above, self.digit())
        if token == "\\binom":
            above = self.digit()
            return ("call", "binomial", above, self.digit())
        if token == "\\begin":
            return self._matrix()
        if token == "\\emptyset" or token == "\\varnothing":
            return ("set",)
        if name in FUNCTIONS and token != name:
            return self._call(name)
        if name in CONSTANTS and (token != name or len(name) == 1):
            return ("const", CONSTANTS[name])
        if (len(token) == 1 and token.isalpha()) or (token != name and name in GREEK):
            return ("sym", name)
        raise _NotMath

    def _number(self, token: str) -> Tree:
        value = ("num", token.rstrip(".") if not token.rstrip(".").endswith("e") else token)
        if token.isdigit():
            # An integer right before a fraction of integers is a mixed number.
            if self.peek() == "\\frac":
                start = self.at
                part = self.atom()
                if part[0] == "div" and all(side[0] == "num" and str(side[1]).isdigit() for side in part[1:]):
                    return ("add", value, part)
                self.at = start
            elif self.peek().isdigit() and self.peek(1) == "/" and self.peek(2).isdigit():
                above, _, below = self.take(), self.take(), self.take()
                return ("add", value, ("div", ("num", above), ("num", below)))
        return value

    def _call(self, name: str) -> Tree:
        root: Tree | None = None
        if name == "sqrt" and self.peek() == "[":
            self.take()
            root = self.sum()
            self.take("]")
        base: Tree | None = None
        if name == "log" and self.peek() == "_":
            self.take()
            base = self.digit()
        raised: Tree | None = None
        if self.peek() == "^":
            self.take()
            raised = self.argument()
        if self.peek() in ("(", "{") or name in ("sqrt", "cbrt"):
            value = self.atom() if self.peek() != "{" else self.group()
            value = value[3] if value[0] == "tuple" and len(value) == 4 else value
        else:
            value = self.power()
            # sin 2x is the sine of the whole product.
            while self.peek() and (self.peek()[0].isalnum() or self.peek() in ("\\pi",)):
                value = ("mul", value, self.power())
        made: Tree = ("call", name, value)
        if root is not None:
            made = ("pow", value, ("div", ("num", "1"), root))
        if base is not None:
            made = ("div", ("call", "ln", value), ("call", "ln", base))
        return ("pow", made, raised) if raised is not None else made

    def _bracketed(self, opening: str) -> Tree:
        closing = _OPEN[opening]
        if opening == "\\lbrace" and self.peek() == "\\rbrace":
            self.take()
            return ("set",)
        bars, self.bars = self.bars, 0
        found = [self.relation()]
        while self.peek() in (",", ";"):
            self.take()
            found.append(self.relation())
        self.bars = bars
        end = self.take()
        if opening == "\\lbrace":
            if end != closing:
                raise _NotMath
            return ("set", *found)
        if opening in ("\\lvert", "\\lfloor", "\\lceil"):
            if end != closing or len(found) != 1:
                raise _NotMath
            return ("call", {"\\lvert": "abs", "\\lfloor": "floor", "\\lceil": "ceiling"}[opening], found[0])
        if end not in (")", "]"):
            raise _NotMath
        if len(found) == 1 and (opening, end) in (("(", ")"), ("[", "]")):
            return found[0]
        return ("tuple", opening, end, *found)

    def _matrix(self) -> Tree:
        name = self._environment()
        if name not in ("matrix", "pmatrix", "bmatrix", "vmatrix"):
            raise _NotMath
        rows: list[Tree] = []
        row: list[Tree] = [self.sum()]
        while True:
            token = self.take()
            if token == "&":
                row.append(self.sum())
            elif token == "\\cr":
                rows.append(tuple(row))
                if self.peek() == "\\end":
                    row = []
                    continue
                row = [self.sum()]
            elif token == "\\end":
                self._environment()
                return ("matrix", *rows, *([tuple(row)] if row else []))
            else:
                raise _NotMath

    def _environment(self) -> str:
        self.take("{")
        name = ""
        while self.peek() != "}":
            name += self.take()
        self.take("}")
        return name


def _spelled(tree: Tree) -> str:
    if tree[0] in ("num", "sym", "const"):
        return str(tree[1])
    raise _NotMath
