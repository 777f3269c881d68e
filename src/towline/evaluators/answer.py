"""`answer`: what the agent said last, or wrote to a file, compared with the expected answer. Needs no sandbox.

For mathematics and science: numbers with units, fractions, percent, scientific notation and thousands separators; sets,
tuples, intervals and matrices; expressions with unknowns by sympy, if the extra `math` is installed. The rules are in
`towline.evaluators.answers.compare`. Nothing that the agent writes is ever evaluated as code.
"""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from towline.evaluators import carrying
from towline.evaluators.answers.compare import Comparison
from towline.evaluators.answers.extract import MOST, Where, extract, shorter
from towline.evaluators.answers.symbolic import Symbolic
from towline.evaluators.base import Bench, Carried, Outcome
from towline.evaluators.options import Options, Seconds
from towline.evaluators.trees import contents
from towline.sandboxes.base import Sandbox
from towline.schema import Reward, Task
from towline.schema.environment import InsidePath


def _texts(value: Any) -> Any:
    """One or several accepted answers, as texts; numbers as they are written."""
    many = value if isinstance(value, list | tuple) else [value]
    return [repr(one) if isinstance(one, int | float) and not isinstance(one, bool) else one for one in many]


Expected = Annotated[str, Field(min_length=1, max_length=MOST)]


class AnswerOptions(Options):
    kind: Literal["answer"]
    answer: Annotated[list[Expected], BeforeValidator(_texts), Field(min_length=1)]
    """What is expected: a text, a number, or a list of which any will do."""
    file: InsidePath | None = None
    """Where the agent was told to write its answer; what it said last if nothing is given."""
    tolerance: float = Field(default=1e-6, ge=0, lt=1)
    """Relative, where a side is a decimal or irrational."""
    strict: bool = False
    """Only a boxed or labelled answer counts, not the last line."""
    symbolic: bool = True
    seconds: Seconds = 10.0
    """Of processor time, for each question that sympy is asked."""


class AnswerEvaluator:
    kind = "answer"
    shared = False
    needs_sandbox = False

    def __init__(self, options: AnswerOptions):
        self.options = options
        self.lowest = options.lowest

    def leaks(self) -> tuple[str, ...]:
        return ()

    async def collect(self, sandbox: Sandbox, task: Task) -> Carried:
        return await carrying.carry(sandbox, [self.options.file], most=1024 * 1024) if self.options.file else Carried()

    async def evaluate(self, bench: Bench, outcome: Outcome, carried: Carried) -> Reward:
        text = outcome.answer
        if self.options.file:
            archive = carried.archives.get(self.options.file)
            files = contents(archive, self.options.file) if archive is not None else {}
            text = files.get(self.options.file, b"").decode("utf-8", "replace")
        right, told = await asyncio.to_thread(self.judge, text)
        await asyncio.to_thread((bench.logs / "answer.json").write_text, json.dumps(told, indent=1) + "\n")
        components = {"answered": float(told["found"] is not None)}
        return Reward(value=float(right), components=components, evaluator=self.kind)

    def judge(self, text: str) -> tuple[bool, dict[str, Any]]:
        """Whether the text gives an expected answer, and how that was found out."""
        symbolic = Symbolic(self.options.seconds)
        compare = Comparison(self.options.tolerance, symbolic if self.options.symbolic else lambda one, two: False)
        found = extract(text)
        told: dict[str, Any] = {"expected": self.options.answer, "found": None, "where": None, "notes": symbolic.notes}
        if found is None or (self.options.strict and found[1] is Where.LAST_LINE):
            return False, told
        candidates = [found[0]]
        if found[1] is not Where.BOXED:
            candidates += shorter(found[0])
        told |= {"found": found[0], "where": found[1].value}
        for candidate in candidates:
            for expected in self.options.answer:
                if compare.equal(_boxless(expected), candidate):
                    return True, told
        return False, told


def _boxless(expected: str) -> str:
    """The expected answer of a row may itself be a box."""
    found = extract(expected) if "boxed" in expected else None
    return found[0] if found else expected
