"""LaTeX and typography brought to one spelling, so that equal answers mostly read equal, and the grammar stays small."""

# ruff: noqa: RUF001  characters that look alike are what this file is about

from __future__ import annotations

import re

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


def clean(text: str) -> str:
    """One spelling of a text, with `\\text{cm}` as ` cm `."""
    text = re.sub(r"\\\\", r" \\cr ", text) if "\\begin" in text else text.replace("\\\\", "\\")
    for mark in _PAIRS[1:]:
        text = text.replace(mark, " ")
    # A dollar sign is money before a number, and otherwise the edge of a formula.
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
    """Whether two answers are the same words: no case, no blanks, no full stop, no brackets around a single letter."""
    return _folded(one) == _folded(two) != ""


def _folded(text: str) -> str:
    folded = re.sub(r"\s+", "", clean(text)).casefold().rstrip(".").strip("\"'`")
    letter = re.fullmatch(r"\(?([a-z])[).:]?", folded)
    return letter[1] if letter else folded


def _numbers_joined(text: str) -> str:
    """`1,234,567`, `1{,}234` and `12 345` as one number, where no list can be meant: outside of brackets."""
    if re.search(r"[(\[]|\\lbrace|\\\{", text) and not re.search(r"\{,\}|\\,", text):
        return text

    def joined(match: re.Match[str]) -> str:
        # One separator throughout; a comma followed by a blank is a list's.
        separators = set(re.findall(r",|\{,\}|\\,|\\ | ", match[2]))
        return match[1] + re.sub(r"\D", "", match[2]) if len(separators) == 1 else match[0]

    return _THOUSANDS.sub(joined, text)
