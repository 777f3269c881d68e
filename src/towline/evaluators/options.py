"""What the options of every evaluator share: unknown ones are refused, by name."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    kind: str
    oracle: bool = False
    """The session is the task's own solution, whose files may therefore be in the agent's sandbox."""
    lowest: FiniteFloat = 0.0
    """The lowest score this evaluator gives: the score of an agent that makes its own evaluation fail."""
