"""The words of mathematics: numbers, names, LaTeX commands and signs, in the spelling that the grammar knows."""

from __future__ import annotations

import re

MOST_TOKENS = 600
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


class NotMathematics(ValueError):
    """The text is not in the grammar."""


def tokens(text: str) -> list[str]:
    """The tokens of a text. `xy` is x and y; a longer word that names nothing makes the text no mathematics."""
    found = [match[1] for match in _TOKEN.finditer(text) if match[1].strip()]
    if not found or len(found) > MOST_TOKENS:
        raise NotMathematics
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
            raise NotMathematics
    return spelled
