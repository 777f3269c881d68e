"""`answer`: compares the agent's last message, or a file it wrote, with the expected answer. Needs no sandbox.

The answer is the last box, else what follows the last `answer:`, else the last line. Comparison covers mathematics and
science: numbers with units, fractions, percent, scientific notation and thousands separators; sets, tuples, intervals and
matrices; expressions with unknowns by sympy, if the extra `math` is installed. The rules are in
`towline.evaluators.answers.compare`. Nothing that the agent writes is ever evaluated as code.
"""

from __future__ import annotations

import asyncio
import json
import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from towline.evaluators import eval_inputs
from towline.evaluators.answers.compare import AnswerComparison, SympyComparison
from towline.evaluators.base import EvalContext, EvalInputs, EvaluatorOptions, RunOutcome, Seconds
from towline.evaluators.eval_inputs import regular_files
from towline.sandboxes.base import Sandbox
from towline.schema import Reward, Task
from towline.schema.entities import InsidePath

MAX_ANSWER_CHARS = 2000
"""Longest answer, in characters."""
_BOXES = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=[^\s{]))")
_LABEL = re.compile(
    r"(?:(?:the\s+)?(?:final|correct)\s+answer|(?<![\w])answer)\s*(?:is\b|[:=])\s*[:=]?\s*", re.IGNORECASE
)
_MARKS = re.compile(r"^(?:[\s>*_#`]|[-+]\s)+|[\s*_`]+$")


class AnswerLocation(StrEnum):
    """Where in a message the answer was found."""

    BOXED = "boxed"
    """In the last `\\boxed{}`."""
    LABELLED = "labelled"
    """After the last `answer:` or `the final answer is`."""
    LAST_LINE = "last_line"
    """In the last line."""


def extract_answer(text: str) -> tuple[str, AnswerLocation] | None:
    """The answer and its location; `None` if there is no text at all."""
    if (boxed := _last_box(text)) is not None:
        return boxed.strip()[:MAX_ANSWER_CHARS], AnswerLocation.BOXED
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    labels = list(_LABEL.finditer(text))
    if labels:
        rest = text[labels[-1].end() :]
        # Markup may separate the label from the answer, which may also be on the next line.
        line = next((line for line in rest.splitlines() if line.strip(" *_`#>-")), "")
        if line:
            return _plain(line)[:MAX_ANSWER_CHARS], AnswerLocation.LABELLED
    return _plain(lines[-1])[:MAX_ANSWER_CHARS], AnswerLocation.LAST_LINE


def shorter_candidates(line: str) -> list[str]:
    """Candidates for the answer in a sentence, most likely first: after its last `=` or `is`, its only number."""
    found = []
    for mark in ("=", " is ", " are ", ": "):
        _, there, after = line.rpartition(mark)
        if there and after.strip():
            found.append(_plain(after))
    numbers = re.findall(r"(?<![\w.])[-+]?\$?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?%?", line)
    if len(numbers) == 1:
        found.append(numbers[0].rstrip(","))
    return found


def _last_box(text: str) -> str | None:
    boxes = list(_BOXES.finditer(text))
    if not boxes:
        return None
    last = boxes[-1]
    if not last[0].endswith("{"):
        return text[last.end() : last.end() + 1]
    depth = 1
    for index in range(last.end(), min(len(text), last.end() + 4 * MAX_ANSWER_CHARS)):
        character = text[index]
        if text[index - 1] == "\\" and character in "{}":
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[last.end() : index]
    return None


def _plain(line: str) -> str:
    """A line without markup for emphasis, quotes and lists, and without a final full stop."""
    line = _MARKS.sub("", line).strip()
    return re.sub(r"(?<=[^.])\.$", "", line).strip()


def _texts(value: Any) -> Any:
    """One or several accepted answers, as texts."""
    many = value if isinstance(value, list | tuple) else [value]
    return [repr(one) if isinstance(one, int | float) and not isinstance(one, bool) else one for one in many]


Expected = Annotated[str, Field(min_length=1, max_length=MAX_ANSWER_CHARS)]


class AnswerOptions(EvaluatorOptions):
    kind: Literal["answer"]
    answer: Annotated[list[Expected], BeforeValidator(_texts), Field(min_length=1)]
    """The expected answer: a text, a number, or a list of accepted ones."""
    file: InsidePath | None = None
    """The file that the agent writes its answer to; its last message by default."""
    tolerance: float = Field(default=1e-6, ge=0, lt=1)
    """Relative tolerance, used where a side is a decimal or irrational."""
    strict: bool = False
    """Accept only a boxed or labelled answer, not the last line."""
    symbolic: bool = True
    seconds: Seconds = 10.0
    """CPU seconds per comparison by sympy."""


class AnswerEvaluator:
    kind = "answer"
    shared = False
    needs_sandbox = False

    def __init__(self, options: AnswerOptions):
        self.options = options
        self.lowest = options.lowest

    def leaks(self) -> tuple[str, ...]:
        return ()

    async def collect(self, sandbox: Sandbox, task: Task) -> EvalInputs:
        return (
            await eval_inputs.collect_inputs(sandbox, [self.options.file], most=1024 * 1024)
            if self.options.file
            else EvalInputs()
        )

    async def evaluate(self, context: EvalContext, outcome: RunOutcome, inputs: EvalInputs) -> Reward:
        text = outcome.answer
        if self.options.file:
            archive = inputs.archives.get(self.options.file)
            files = regular_files(archive, self.options.file) if archive is not None else {}
            text = files.get(self.options.file, b"").decode("utf-8", "replace")
        right, details = await asyncio.to_thread(self.score, text)
        await asyncio.to_thread((context.logs / "answer.json").write_text, json.dumps(details, indent=1) + "\n")
        components = {"answered": float(details["found"] is not None)}
        return Reward(value=float(right), components=components, evaluator=self.kind)

    def score(self, text: str) -> tuple[bool, dict[str, Any]]:
        """Whether the text gives an expected answer, and the details for the log."""
        symbolic = SympyComparison(self.options.seconds)
        compare = AnswerComparison(
            self.options.tolerance, symbolic if self.options.symbolic else lambda one, two: False
        )
        found = extract_answer(text)
        details: dict[str, Any] = {
            "expected": self.options.answer,
            "found": None,
            "where": None,
            "notes": symbolic.notes,
        }
        if found is None or (self.options.strict and found[1] is AnswerLocation.LAST_LINE):
            return False, details
        candidates = [found[0]]
        if found[1] is not AnswerLocation.BOXED:
            candidates += shorter_candidates(found[0])
        details |= {"found": found[0], "where": found[1].value}
        for candidate in candidates:
            for expected in self.options.answer:
                if compare.equal(_boxless(expected), candidate):
                    return True, details
        return False, details


def _boxless(expected: str) -> str:
    """An expected answer without the `\\boxed{}` that some rows wrap it in."""
    found = extract_answer(expected) if "boxed" in expected else None
    return found[0] if found else expected
