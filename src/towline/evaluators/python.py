"""`python`: calls a function of the trainer's own in the node's process. It is fully trusted; nothing confines it.

`function` is `module:name` or `path/to/file.py:name`. It gets, by the names of its parameters, any of `outcome`,
`trajectory`, `answer`, `task`, `files` (the regular files under `carry`: content by path inside the sandbox) and the
`arguments` of the spec; it returns a number, a `Reward`, or `{"reward": …, "components": …, "per_turn": …}`. It may be
async.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from towline.errors import ConfigError, TowlineError
from towline.evaluators import eval_inputs, rewards
from towline.evaluators.base import EvalContext, EvalInputs, EvaluationError, EvaluatorOptions, RunOutcome, Seconds
from towline.evaluators.eval_inputs import regular_files
from towline.sandboxes.base import Sandbox
from towline.schema import Reward, Task
from towline.schema.entities import InsidePath

GIVEN = ("outcome", "trajectory", "answer", "task", "files")
_ALIASES = {"towline.tiny.tasks": "towline.demo.registry"}
"""Modules that task files and stores may name by another path."""


class PythonOptions(EvaluatorOptions):
    kind: Literal["python"]
    function: str = Field(pattern=r"^[^:]+:[A-Za-z_]\w*$")
    arguments: dict[str, Any] = Field(default_factory=dict)
    carry: list[InsidePath] = Field(default_factory=list)
    seconds: Seconds = 600.0


class PythonEvaluator:
    kind = "python"
    shared = False
    needs_sandbox = False

    def __init__(self, options: PythonOptions):
        self.options = options
        self.lowest = options.lowest
        self.function = _function(options.function)
        self._parameters = _wanted(self.function, options)

    def leaks(self) -> tuple[str, ...]:
        return ()

    async def collect(self, sandbox: Sandbox, task: Task) -> EvalInputs:
        return await eval_inputs.collect_inputs(sandbox, self.options.carry)

    async def evaluate(self, context: EvalContext, outcome: RunOutcome, inputs: EvalInputs) -> Reward:
        given: dict[str, Any] = {
            "outcome": outcome,
            "trajectory": outcome.trajectory,
            "answer": outcome.answer,
            "task": context.task,
        }
        if "files" in self._parameters:
            given["files"] = {}
            for base, archive in inputs.archives.items():
                given["files"] |= await regular_files(archive, base)
        arguments = {name: given[name] for name in self._parameters if name in given} | self.options.arguments
        try:
            if inspect.iscoroutinefunction(self.function):
                work = self.function(**arguments)
            else:
                work = asyncio.to_thread(self.function, **arguments)
            value = await asyncio.wait_for(work, self.options.seconds)
        except TimeoutError as error:
            raise EvaluationError(
                f"{self.options.function} timed out after {self.options.seconds:g} seconds"
            ) from error
        except TowlineError:
            raise
        except Exception as error:  # whatever the function raises is a failed evaluation, never a reward
            raise EvaluationError(f"{self.options.function} raised {type(error).__name__}: {error}") from error
        return rewards.to_reward(value, self.kind, outcome.trajectory)


def _function(where: str) -> Callable[..., Any]:
    source, _, name = where.rpartition(":")
    try:
        module = (
            _file(Path(source)) if source.endswith(".py") else importlib.import_module(_ALIASES.get(source, source))
        )
    except Exception as error:  # importing runs the module, which may raise anything
        raise ConfigError(
            f"evaluator.function: {source} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"evaluator.function: {source} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _file(path: Path) -> Any:
    """The module of a file. Loaded once, under a unique name, so that its classes keep their identity."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    known = f"_towline_evaluator_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if known in sys.modules:
        return sys.modules[known]
    spec = importlib.util.spec_from_file_location(known, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[known]
        raise
    return module


def _wanted(function: Callable[..., Any], options: PythonOptions) -> frozenset[str]:
    """The parameters of the function that can be filled; `ConfigError` for one that cannot."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"evaluator.function: the signature of {options.function} cannot be inspected") from error
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    required = {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    missing = required - set(GIVEN) - set(options.arguments)
    if missing:
        raise ConfigError(
            f"evaluator.function: {options.function} requires {min(missing)!r}; available: {', '.join(GIVEN)}, `arguments`"
        )
    unknown = set(options.arguments) - names
    if unknown and not rest:
        raise ConfigError(f"evaluator.arguments: {options.function} has no parameter {min(unknown)!r}")
    return frozenset(GIVEN) if rest else frozenset(names & set(GIVEN))
