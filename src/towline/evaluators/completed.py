"""`completed`: the harness ended by itself, and well. Says nothing of what it did."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from towline.evaluators.base import Bench, Carried, Outcome
from towline.evaluators.options import Options
from towline.sandboxes.base import Sandbox
from towline.schema import EndReason, Reward, Task


class CompletedOptions(Options):
    kind: Literal["completed"]
    codes: tuple[int, ...] = Field(default=(0,), min_length=1)
    """Exit codes that count as well."""


class CompletedEvaluator:
    kind = "completed"
    shared = False
    needs_sandbox = False

    def __init__(self, options: CompletedOptions):
        self.options = options
        self.lowest = options.lowest

    def leaks(self) -> tuple[str, ...]:
        return ()

    async def collect(self, sandbox: Sandbox, task: Task) -> Carried:
        return Carried()

    async def evaluate(self, bench: Bench, outcome: Outcome, carried: Carried) -> Reward:
        # A code of its own that means success may still be no end "by itself": a timeout has no code at all.
        by_itself = outcome.end_reason in (EndReason.EXITED, EndReason.ERROR)
        return Reward(value=float(by_itself and outcome.exit_code in self.options.codes), evaluator=self.kind)
