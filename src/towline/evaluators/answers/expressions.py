"""A small grammar of mathematics, LaTeX and plain, into trees of tuples. Text goes in, data comes out, nothing is run.

A tree is `("num", "3/4")`, `("sym", "x")`, `("const", "pi")`, `("neg", a)`, `("add" | "mul" | "div" | "pow", a, b)`,
`("call", name, a, …)`, `("rel", sign, a, b)`, or one of the collections `("list" | "set" | "union", …)`,
`("tuple", open, close, …)`, `("matrix", row, …)`. Length and depth are bounded.
"""

from __future__ import annotations

from typing import Any

from towline.evaluators.answers.tokens import CONSTANTS, FUNCTIONS, GREEK, NotMathematics, tokens

Tree = tuple[Any, ...]

MOST_DEPTH = 60
_OPEN = {"(": ")", "[": "]", "\\lbrace": "\\rbrace", "\\lvert": "\\rvert", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_RELATIONS = {"=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", "\\in": "in"}


def parse(text: str) -> Tree | None:
    """The tree of a cleaned text; `None` if it is not mathematics."""
    try:
        return _Parser(text).whole()
    except NotMathematics:
        return None


class _Parser:
    def __init__(self, text: str):
        self.tokens = tokens(text)
        self.at = 0
        self.depth = 0
        self.bars = 0

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def take(self, wanted: str = "") -> str:
        token = self.peek()
        if not token or (wanted and token != wanted):
            raise NotMathematics
        self.at += 1
        return token

    def whole(self) -> Tree:
        """Everything, to the end: one thing, or a list of them."""
        items = [self.relation()]
        while self.peek() in (",", ";", "\\lor", "\\land"):
            self.take()
            items.append(self.relation())
        if self.peek():
            raise NotMathematics
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
        if self.depth > MOST_DEPTH:
            raise NotMathematics
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
            if self.depth > MOST_DEPTH:
                raise NotMathematics
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
                raise NotMathematics
        return value

    def argument(self) -> Tree:
        """What follows `^`, `_`, `\\frac` or `\\sqrt`: a group, or one token; of a number, one digit in LaTeX."""
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
        if self.depth > MOST_DEPTH:
            raise NotMathematics
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
        raise NotMathematics

    def _number(self, token: str) -> Tree:
        value = ("num", token.rstrip(".") if not token.rstrip(".").endswith("e") else token)
        if token.isdigit():
            # A whole number right before a fraction of whole numbers is a mixed number.
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
                raise NotMathematics
            return ("set", *found)
        if opening in ("\\lvert", "\\lfloor", "\\lceil"):
            if end != closing or len(found) != 1:
                raise NotMathematics
            return ("call", {"\\lvert": "abs", "\\lfloor": "floor", "\\lceil": "ceiling"}[opening], found[0])
        if end not in (")", "]"):
            raise NotMathematics
        if len(found) == 1 and (opening, end) in (("(", ")"), ("[", "]")):
            return found[0]
        return ("tuple", opening, end, *found)

    def _matrix(self) -> Tree:
        name = self._environment()
        if name not in ("matrix", "pmatrix", "bmatrix", "vmatrix"):
            raise NotMathematics
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
                raise NotMathematics

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
    raise NotMathematics
