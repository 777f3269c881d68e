"""Answers: where they stand, what equals what, and that nothing of them is ever run."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.evaluators.evaluator_rig import MakeRig
from towline.evaluators.answer import AnswerEvaluator, AnswerLocation, AnswerOptions, extract_answer
from towline.evaluators.answers import compare
from towline.evaluators.answers.compare import AnswerComparison, normalize
from towline.evaluators.answers.expressions import parse
from towline.evaluators.answers.values import value


def same(expected: str, given_answer: str, tolerance: float = 1e-6) -> bool:
    return AnswerComparison(tolerance, compare.SympyComparison(10)).equal(expected, given_answer)


@pytest.mark.parametrize(
    ("text", "found", "where"),
    [
        (r"so \boxed{3} no, \boxed{\frac{1}{\sqrt{2}}} is it", r"\frac{1}{\sqrt{2}}", AnswerLocation.BOXED),
        (r"\boxed 7", "7", AnswerLocation.BOXED),
        (r"$\boxed{\{1, 2\}}$", r"\{1, 2\}", AnswerLocation.BOXED),
        ("Thinking.\n**Answer:** 42 km\nBye.", "42 km", AnswerLocation.LABELLED),
        ("The final answer is: $x=5$.", "$x=5$", AnswerLocation.LABELLED),
        ("answer: 3\nlater, Final Answer: 4", "4", AnswerLocation.LABELLED),
        ("## Final answer:\n\n> -3", "-3", AnswerLocation.LABELLED),
        ("Let me see.\nIt comes to 17.\n\n", "It comes to 17", AnswerLocation.LAST_LINE),
        ("- 5", "5", AnswerLocation.LAST_LINE),
        ("3.", "3", AnswerLocation.LAST_LINE),
    ],
)
def test_where_the_answer_stands(text: str, found: str, where: AnswerLocation) -> None:
    assert extract_answer(text) == (found, where)


EQUAL = [
    # numbers as people write them
    ("1234567", "1,234,567"), ("1234.5", "$1,234.50"), ("12345", r"12\,345"), ("1{,}000", "1000"), ("1000", "1e3"),
    ("0.00012", r"1.2 \times 10^{-4}"), ("6.02e23", "6.02 × 10^23"), ("0.5", "1/2"), ("1/2", r"\frac12"), ("1/2", r"\dfrac{1}{2}"),
    ("2.5", r"2\frac{1}{2}"), ("2.5", "2 1/2"), ("2.5", "2½"), ("-3", "−3"), ("50%", "0.5"), ("50%", r"50\%"), ("50", "50 %"),
    ("0.333333333", "1/3"), ("42", "42."), ("42", "+42"), ("8", "2^3"), ("24", "4!"), ("10", r"\binom{5}{2}"), (".5", "0.50"),
    # irrational, complex, functions
    (r"\sqrt{2}", "1.41421356237"), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), (r"2\pi", "6.283185307"), ("π/4", r"\arctan(1)"),
    (r"\sqrt[3]{27}", "3"), (r"(-8)^{1/3}", "-2"), (r"\log_2 8", "3"), (r"\ln(e^2)", "2"), ("3+4i", "4i+3"), (r"|-3|", "3"),
    (r"\lfloor 3.7 \rfloor", "3"), (r"\sin\frac{\pi}{6}", "0.5"), (r"e^{i\pi}", "-1"), (r"\infty", "inf"), (r"\sqrt{50}", r"5\sqrt2"),
    # units
    ("5 m", "500 cm"), ("9.8 m/s^2", r"9.8\ \text{m}/\text{s}^2"), ("9.8 m/s^2", "9.8"), ("72 km/h", "20 m/s"), ("1.5 kJ", "1500 J"),
    ("3", "3 apples"), ("12 dollars", "$12"), ("30^\\circ", "30 degrees"), ("30", r"30^{\circ}"), ("1 N", "1 kg m s^-2"),
    ("8.314 J/(mol K)", "8.314 J mol^-1 K^-1"), ("2 hours", "120 min"), (r"10\,\mathrm{cm}", "0.1 m"), ("5 Ω", "5 ohm"),
    # collections
    ("(1, 2)", r"\left(1,2\right)"), (r"\{1, 2, 3\}", r"\{3,1,2\}"), ("1, -2", "-2, 1"), (r"\pm 2", "2, -2"), ("x = 2 or x = -2", "x = \\pm 2"),
    (r"[0, \infty)", "[0, inf)"), (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2)"), (r"x \in [0,1)", "[0, 1)"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"), (r"\frac{-1 \pm \sqrt5}{2}", "0.6180339887, -1.6180339887"),
    (r"\emptyset", r"\{\}"), ("(1/2, 0.25)", r"(\frac12, \frac14)"),
    # unknowns
    ("x^2+2x+1", "(x+1)^2"), (r"\frac{x}{2}", "x/2"), ("2xy", "2 y x"), (r"\sin^2 x + \cos^2 x + a", "1 + a"), ("y = 2x + 1", "2x+1"),
    ("2x + 3y = 6", "y = 2 - \\frac{2}{3}x"), (r"\sqrt{x^2 y}", r"x\sqrt y"), ("x > 3", "3 < x"), (r"x \ge 2", "2 <= x"), (r"e^{2\ln x}", "x^2"),
    (r"\theta_1", r"\theta_{1}"), ("a b^2 / c", r"\frac{ab^2}{c}"), (r"\ln 6 + x", r"\ln 2 + \ln 3 + x"),
    # words
    ("Yes", "yes."), ("(B)", "B"), ("B", "(B) 42"), ("C", "C. the third"), (r"\text{Tuesday}", "tuesday"),
]  # fmt: skip
DIFFERENT = [
    ("3", "4"), ("3", "3.1"), ("1/3", "0.333"), ("1000000", "1000001"), ("5 m", "5 cm"), ("5 m", "5 s"), ("5 apples", "5 pears"), ("(1, 2)", "(2, 1)"),
    ("[0, 1)", "(0, 1)"), (r"\{1, 2\}", r"\{1, 2, 3\}"), ("1, 1", "1"), ("x^2", "x^3"), ("x", "y"), ("x+1", "3"), ("50%", "5"), ("B", "C"), ("B", "Because"),
    ("yes", "no"), ("x > 3", "x < 3"), ("x > 3", "x >= 3"), ("x = 3", "x = 4"), ("-3", "3"), ("sin(x)", "cos(x)"), ("5x", "5"), ("5m", "5"), ("", ""), ("3", ""),
    ("1,2", "12"), ("12", "1, 2"), (r"\infty", r"-\infty"), ("2x + 3y = 6", "2x + 3y = 7"), ("3+4i", "3-4i"), (r"\begin{pmatrix}1&2\end{pmatrix}", "(1,2)"),
    ("30 degrees", "30 m"), ("0", "0.001"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "two"), EQUAL)
def test_the_same_answer_in_other_words(one: str, two: str) -> None:
    assert same(one, two)
    assert same(two, one) or one == "50%" or "B" in one or "C" in one


@pytest.mark.parametrize(("one", "two"), DIFFERENT)
def test_another_answer(one: str, two: str) -> None:
    assert not same(one, two)


def test_tolerance_is_relative_and_only_for_what_is_not_whole() -> None:
    assert not same("100", "101", tolerance=0.02)
    assert same("100.0", "101.5", tolerance=0.02) is (abs(100 - 101.5) <= 0.02 * 101.5)
    assert same("9.81 m/s^2", "9.8", tolerance=0.01)
    assert not same("9.81 m/s^2", "9.5", tolerance=0.01)


whole = st.integers(-(10**12), 10**12)


@given(whole, st.integers(1, 10**6))
def test_every_spelling_of_a_fraction_is_the_fraction(above: int, below: int) -> None:
    number = Fraction(above, below)
    sign, size = ("-" if above < 0 else ""), abs(above)
    plain = f"{above}/{below}"
    for spelled in (
        f"{sign}\\frac{{{size}}}{{{below}}}",
        f"\\boxed{{{plain}}}",
        f"({above})/({below})",
        f"$\\dfrac{{{above}}}{{{below}}}$",
    ):
        found = extract_answer(f"It is {spelled}" if "boxed" in spelled else f"Answer: {spelled}")
        assert found is not None
        assert same(plain, found[0])
    tree = parse(normalize(plain))
    assert tree is not None
    assert value(tree) == number
    assert not same(plain, f"{above + 1}/{below}")


@given(whole)
def test_thousands_are_one_number(number: int) -> None:
    assert same(str(number), f"{number:,}")
    assert same(f"{number:,}", str(number))
    assert same(str(number), f"${number:,}$")
    assert not same(str(number), f"{number + 1:,}")


@given(st.floats(min_value=1e-200, max_value=1e200), st.sampled_from(["", "-"]))
def test_scientific_notation(number: float, sign: str) -> None:
    mantissa, exponent = f"{number:.12e}".split("e")
    written = f"{sign}{mantissa} \\times 10^{{{int(exponent)}}}"
    assert same(f"{sign}{number!r}", written)
    assert same(f"{sign}{number!r}", f"{sign}{mantissa}e{exponent}")
    assert not same(f"{sign}{number!r}", f"{sign}{mantissa}e{int(exponent) + 1}")


@given(st.lists(whole, min_size=1, max_size=6), st.randoms())
def test_sets_have_no_order_and_tuples_have(numbers: list[int], random: object) -> None:
    shuffled = list(numbers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    def braces(items: list[int]) -> str:
        return r"\{" + ", ".join(map(str, items)) + r"\}"

    assert same(braces(numbers), braces(shuffled))
    if len(numbers) > 1:
        assert same(f"({', '.join(map(str, numbers))})", f"({', '.join(map(str, shuffled))})") is (numbers == shuffled)


@given(st.text(max_size=200), st.text(max_size=200))
def test_no_text_breaks_the_comparison(one: str, two: str) -> None:
    AnswerComparison(1e-6, lambda a, b: False).equal(one, two)
    evaluator = AnswerEvaluator(AnswerOptions(kind="answer", answer=["3"], symbolic=False))
    evaluator.score(one)


SYMBOLS = [
    *r"0123456789.,+-*/^_(){}[]|!%=<>\ xyzeiπ",
    r"\frac",
    r"\sqrt",
    r"\pm",
    r"\cup",
    "sin",
    "log",
    r"\left",
    r"\infty",
    "cm",
]


@given(st.lists(st.sampled_from(SYMBOLS), max_size=60).map("".join))
def test_no_mathematics_breaks_the_comparison(text: str) -> None:
    comparison = AnswerComparison(1e-6, lambda a, b: False)
    comparison.equal(text, "3")
    assert comparison.equal(text, text) is bool(normalize(text).replace(" ", "").strip(".\"'`"))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch /tmp/towline-was-here')",
        "().__class__.__bases__[0].__subclasses__()",
        "exec('1')",
        "9**9**9**9",
        "9^{9^{9^{9^9}}}",
        "(" * 5000 + "1" + ")" * 5000,
        "-" * 5000 + "1",
        "1e999999999",
        "100000!",
        r"\binom{1000000}{500000}",
        "1" * 100_000,
        "x^" * 300 + "x",
    ],
)
def test_nothing_is_evaluated_and_nothing_takes_long(text: str) -> None:
    assert not same("3", text)
    assert not same("x+3", text[:1500])


def test_the_process_of_sympy_is_ended() -> None:
    asked = compare.SympyComparison(1)
    assert not AnswerComparison(1e-6, asked).equal("(x+y+z+w)^{60} - (x-y)^{50} + \\sin^{40}(x)", "(x+2y+z+w)^{61}")
    assert asked.notes == ["sympy timed out after 1 seconds"]


async def test_without_sympy_it_is_said(rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "sympy_available", lambda: False)
    made = rig({"kind": "answer", "answer": "x^2 + 2x + 1"})
    assert (await made.judge(answer=r"\boxed{(x+1)^2}")).value == 0
    told = json.loads((made.logs / "answer.json").read_text())
    assert "towline[math]" in told["notes"][0]
    assert (await made.judge(answer=r"\boxed{x^2+2x+1}")).value == 1


async def test_the_answer_comes_from_the_reply_or_from_a_file(rig: MakeRig) -> None:
    made = rig({"kind": "answer", "answer": [7, "seven"]})
    assert (await made.judge(answer="After much thought, the total is 7.")).value == 1
    assert (await made.judge(answer="Seven")).value == 1
    reward = await made.judge(answer="8, not 7")
    assert (reward.value, reward.components) == (0, {"answered": 1})
    assert (await made.judge(answer="")).components == {"answered": 0}
    strict = rig({"kind": "answer", "answer": 7, "strict": True})
    assert (await strict.judge(answer="7")).value == 0
    assert (await strict.judge(answer="Answer: 7")).value == 1
    in_file = rig({"kind": "answer", "answer": 7, "file": "/work/answer.txt"})
    assert (await in_file.judge("echo 7 >answer.txt", answer="8")).value == 1
    assert (await in_file.judge("ln -s /etc/hostname answer.txt", answer="7")).value == 0
    assert (await in_file.judge("mkdir answer.txt", answer="7")).value == 0
    assert (await in_file.judge(answer="7")).value == 0
    assert made.clean == 0


def test_sympy_is_not_imported_here() -> None:
    code = (
        "import sys\n"
        "from towline.evaluators.answers.compare import AnswerComparison\n"
        "import towline.evaluators.registry\n"
        "assert 'sympy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
