"""Why an evaluation has no score."""

from __future__ import annotations

from towline.errors import TowlineError


class EvaluationError(TowlineError):
    """The evaluator could not determine a score."""

    failure = "evaluator"


class AgentCaused(EvaluationError):
    """What the agent left made its own evaluation fail, beyond doubt: the lowest score, without a retry or a control run."""
