"""`completed`: whether the harness exited by itself with success. Says nothing about what it did."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from towline.evaluators.base import EvalContext, EvalInputs, EvaluatorOptions, RunOutcome
from towline.sandboxes.base import Sandbox
from towline.schema import EndReason, Reward, Task


class CompletedOptions(EvaluatorOptions):
    kind: Literal["completed"]
    codes: tuple[int, ...] = Field(default=(0,), min_length=1)
    """Exit codes that count as success."""


class CompletedEvaluator:
    kind = "completed"
    shared = False
    needs_sandbox = False

    def __init__(self, options: CompletedOptions):
        self.options = options
        self.lowest = options.lowest

    def leaks(self) -> tuple[str, ...]:
        return ()

    async def collect(self, sandbox: Sandbox, task: Task) -> EvalInputs:
        return EvalInputs()

    async def evaluate(self, context: EvalContext, outcome: RunOutcome, inputs: EvalInputs) -> Reward:
        # A harness that was stopped did not exit by itself, whatever its code; a timeout has no code at all.
        by_itself = outcome.end_reason in (EndReason.EXITED, EndReason.ERROR)
        return Reward(value=float(by_itself and outcome.exit_code in self.options.codes), evaluator=self.kind)
