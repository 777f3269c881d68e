"""Evaluators by kind: a task names one with `{"kind": name, …options}`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from towline.errors import ConfigError
from towline.evaluators.answer import AnswerEvaluator, AnswerOptions
from towline.evaluators.base import Evaluator, EvaluatorOptions
from towline.evaluators.command import CommandEvaluator, CommandOptions
from towline.evaluators.completed import CompletedEvaluator, CompletedOptions
from towline.evaluators.harbor import HarborEvaluator, HarborOptions
from towline.evaluators.patch import PatchEvaluator, PatchOptions
from towline.evaluators.python import PythonEvaluator, PythonOptions

O = TypeVar("O", bound=EvaluatorOptions)  # noqa: E741  the options of one kind
Maker = Callable[[Mapping[str, Any]], Evaluator]


def _maker(options: type[O], evaluator: Callable[[O], Evaluator]) -> Maker:
    return lambda spec: evaluator(options.model_validate(dict(spec)))


KINDS: dict[str, Maker] = {
    "answer": _maker(AnswerOptions, AnswerEvaluator),
    "command": _maker(CommandOptions, CommandEvaluator),
    "completed": _maker(CompletedOptions, CompletedEvaluator),
    "harbor": _maker(HarborOptions, HarborEvaluator),
    "patch": _maker(PatchOptions, PatchEvaluator),
    "python": _maker(PythonOptions, PythonEvaluator),
}


def make_evaluator(spec: Mapping[str, Any]) -> Evaluator | None:
    """The evaluator of a spec; `None` for an empty spec; `ConfigError` naming the field if the spec is invalid."""
    if not spec:
        return None
    kind = spec.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"evaluator.kind: unknown kind {kind!r}; known kinds: {', '.join(sorted(KINDS))}")
    try:
        return KINDS[kind](spec)
    except ValidationError as error:
        found = [f"evaluator.{'.'.join(map(str, e['loc'])) or kind}: {e['msg']}" for e in error.errors()]
        raise ConfigError("; ".join(found[:3])) from error
