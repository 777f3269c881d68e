"""`answer`: compares the agent's last message, or a file it wrote, with the expected answer. Needs no sandbox.

The answer is the last box, else what follows the last `answer:`, else the last line. Comparison covers mathematics and
science: numbers with units, fractions, percent, scientific notation and thousands separators; sets, tuples, intervals and
matrices; expressions with unknowns by sympy, if the extra `math` is installed. The rules are in
`towline.evaluators.answers.compare`. Nothing that the agent writes is ever evaluated as code.
"""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from towline.common.untrusted import workers
from towline.common.untrusted.workers import LimitExceeded
from towline.evaluators import eval_inputs
from towline.evaluators.answers.compare import SympyComparison
from towline.evaluators.answers.extraction import (
    MAX_ANSWER_CHARS,
    AnswerLocation,
    extract_answer,
    judge_answer,
    shorter_candidates,
)
from towline.evaluators.base import AgentCaused, EvalContext, EvalInputs, EvaluatorOptions, RunOutcome, Seconds
from towline.evaluators.eval_inputs import regular_files
from towline.sandboxes.base import Sandbox
from towline.schema import Reward, Task
from towline.schema.entities import InsidePath

__all__ = [
    "MAX_ANSWER_CHARS",
    "AnswerEvaluator",
    "AnswerLocation",
    "AnswerOptions",
    "extract_answer",
    "shorter_candidates",
]

MAX_MESSAGE_CHARS = 1_000_000
"""Characters at the end of a message in which the answer is looked for."""
_MOST_ROUNDS = 8
_MOST_PAIRS = 16
"""Comparisons by sympy per answer."""


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
    lenient: bool = False
    """Also accept the only number of a sentence that denies or hedges it: `not 5` then is 5. Never for training."""
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
            files = await regular_files(archive, self.options.file) if archive is not None else {}
            text = files.get(self.options.file, b"").decode("utf-8", "replace")
        try:
            right, details = await workers.in_thread(self.score, text)
        except LimitExceeded as error:
            inputs.findings.append(("hostile_text", f"the answer: {error}"))
            raise AgentCaused(f"the answer cannot be read: {error}") from error
        if details["hedged"]:
            inputs.findings.append(("hedged_answer", str(details["found"])))
        await asyncio.to_thread((context.logs / "answer.json").write_text, json.dumps(details, indent=1) + "\n")
        components = {"answered": float(details["found"] is not None)}
        return Reward(value=float(right), components=components, evaluator=self.kind)

    def score(self, text: str) -> tuple[bool, dict[str, Any]]:
        """Whether the text gives an expected answer, and the details for the log.

        The text is read in a worker, which never sees sympy; sympy compares trees in a process of its own.
        """
        options = self.options
        symbolic = SympyComparison(options.seconds)
        decided: dict[tuple[Any, Any], bool] = {}
        for _ in range(_MOST_ROUNDS):
            right, found, where, pairs, hedges = workers.run(
                judge_answer,
                text[-MAX_MESSAGE_CHARS:],
                options.answer,
                options.tolerance,
                options.strict,
                options.lenient,
                list(decided.items()),
            )
            if right or not pairs or not options.symbolic or symbolic.asked >= _MOST_PAIRS:
                break
            for pair in pairs[:_MOST_PAIRS]:
                decided[pair] = symbolic(*pair)
        details = {
            "expected": options.answer,
            "found": found,
            "where": where,
            "notes": symbolic.notes,
            "hedged": hedges,
        }
        return right, details
