"""`command`: runs a command in a clean sandbox with the agent's work; its exit code or output is the score.

The command, and the files that only it may see, arrive after the agent is gone. The agent's work is data to the command,
unless the command runs it: then only an exit code that the command itself decides, or a JSON line that it prints last, can
be trusted.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
from collections.abc import Callable
from typing import Annotated, Literal, ParamSpec, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from towline.common.untrusted import workers
from towline.common.untrusted.patterns import compile_pattern
from towline.common.untrusted.workers import LimitExceeded
from towline.evaluators import eval_inputs, rewards
from towline.evaluators.base import (
    AgentCaused,
    EvalContext,
    EvalInputs,
    EvaluationError,
    EvaluatorOptions,
    RunOutcome,
    Seconds,
)
from towline.evaluators.hostile import score_text
from towline.evaluators.sandbox_io import put_files
from towline.evaluators.verifier_run import VerifierRun, run_verifier
from towline.sandboxes.base import Sandbox
from towline.schema import File, Reward, Task
from towline.schema.entities import InsidePath

P = ParamSpec("P")
T = TypeVar("T")

_NOT_RUN = re.compile(r"([^\s:]{1,300}): (?:not found|No such file or directory|Permission denied|cannot execute)")
TRAJECTORY = "/towline/trajectory.json"
ANSWER = "/towline/answer.txt"


class CommandOptions(EvaluatorOptions):
    kind: Literal["command"]
    command: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)]
    """A string is run by `sh -c`."""
    files: list[File] = Field(default_factory=list)
    """Files that only the command sees."""
    carry: list[InsidePath] | None = None
    """Paths taken from the agent's sandbox; the working folder by default."""
    hidden: list[InsidePath] = Field(default_factory=list)
    """Paths that must not exist while the agent runs, besides those of `files`."""
    reward: Literal["exit_code", "number", "json", "regex"] = "exit_code"
    """`exit_code`: 1 for exit code 0, else 0. `number`: the last number printed. `json`: the JSON object printed last, with
    `reward` and optionally `components` and `per_turn`. `regex`: the last match of `pattern`."""
    pattern: str = ""
    """A regular expression in RE2's syntax: matching takes time linear in the output."""
    trajectory: bool = False
    """Give the command the trajectory and the agent's last message as files: `TOWLINE_TRAJECTORY`, `TOWLINE_ANSWER`."""
    env: dict[str, str] = Field(default_factory=dict)
    cwd: InsidePath | None = None
    """The working folder by default."""
    user: str = ""
    seconds: Seconds = 600.0
    on_timeout: Literal["error", "zero"] = "error"
    """`zero` scores a command that times out with `lowest` at once, without a retry and without a control run."""
    keep_git: bool = False
    """Carry git's configuration and hooks too, for tasks about them: the verifier's git then runs the agent's programs."""

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        compile_pattern(pattern)
        return pattern

    @model_validator(mode="after")
    def _pattern_belongs_to_regex(self) -> Self:
        if (self.reward == "regex") != bool(self.pattern):
            raise ValueError("`pattern` is required with the reward `regex`, and only allowed there")
        return self


class CommandEvaluator:
    kind = "command"
    shared = False
    needs_sandbox = True

    def __init__(self, options: CommandOptions):
        self.options = options
        self.lowest = options.lowest

    def leaks(self) -> tuple[str, ...]:
        return (*self.options.hidden, *(file.target for file in self.options.files))

    async def collect(self, sandbox: Sandbox, task: Task) -> EvalInputs:
        paths = [task.environment.workdir] if self.options.carry is None else self.options.carry
        brought = await asyncio.to_thread(self._brought)
        return await eval_inputs.collect_inputs(sandbox, paths, brought=brought, keep_git=self.options.keep_git)

    def _brought(self) -> list[str]:
        given = [TRAJECTORY, ANSWER] if self.options.trajectory else []
        return [*eval_inputs.brought_paths(self.options.files), *given]

    async def evaluate(self, context: EvalContext, outcome: RunOutcome, inputs: EvalInputs) -> Reward:
        options = self.options
        env = dict(options.env)
        eval_inputs.check_obstruction(inputs)
        async with context.sandbox() as sandbox:
            await eval_inputs.place_inputs(sandbox, inputs)
            files = list(options.files)
            if options.trajectory:
                files.append(File(target=TRAJECTORY, text=outcome.trajectory.to_json().decode()))
                files.append(File(target=ANSWER, text=outcome.answer))
                env |= {"TOWLINE_TRAJECTORY": TRAJECTORY, "TOWLINE_ANSWER": ANSWER}
            await put_files(sandbox, files)
            command = ["sh", "-c", options.command] if isinstance(options.command, str) else options.command
            run = await run_verifier(
                sandbox,
                command,
                inputs=inputs,
                brought=await asyncio.to_thread(self._brought),
                log=context.logs / "command.log",
                env=env,
                cwd=options.cwd,
                user=options.user,
                seconds=options.seconds,
            )
        inputs.findings += run.findings
        if run.result.timed_out:
            if options.on_timeout == "zero":
                return Reward(value=self.lowest, components={"timed_out": 1.0}, evaluator=self.kind)
            raise EvaluationError(f"the command timed out after {options.seconds:g} seconds")
        return await self._score(run, outcome, inputs)

    async def _score(self, run: VerifierRun, outcome: RunOutcome, inputs: EvalInputs) -> Reward:
        done = run.result
        if self.options.reward == "exit_code":
            # The shell's exit codes for a missing command: the task's fault, not the agent's.
            if done.code in (126, 127):
                if missing := self._missing(done.text, inputs):
                    raise AgentCaused(f"the agent left no program that can be run at {missing}")
                raise EvaluationError(
                    f"the command could not be run (exit code {done.code}): {done.text[-500:].strip()}"
                )
            return Reward(value=float(done.code == 0), evaluator=self.kind)
        output = done.stdout.decode("utf-8", "replace")
        if done.truncated:
            raise EvaluationError("the command printed more than is kept, so the end of its output is unknown")
        if run.cut:
            inputs.findings.append(("forged_output", run.cut))
            raise AgentCaused(f"the output is not the verifier's own: {run.cut}")
        try:
            if self.options.reward == "json":
                return await self._json_reward(output, outcome, inputs)
            if self.options.reward == "regex":
                found = await _in_worker(score_text.matched_number, output, self.options.pattern)
                return Reward(value=found, evaluator=self.kind)
            return Reward(value=await _in_worker(score_text.last_number, output), evaluator=self.kind)
        except LimitExceeded as error:
            inputs.findings.append(("hostile_text", f"the verifier's output: {error}"))
            raise AgentCaused(f"the verifier's output cannot be read: {error}") from error
        except EvaluationError as error:
            raise EvaluationError(f"{error} (exit code {done.code}; output: {done.text[-500:].strip()})") from error

    def _missing(self, said: str, inputs: EvalInputs) -> str:
        """The program in a carried folder that the shell could not run, by the last line of its output."""
        lines = said.strip().splitlines()
        found = _NOT_RUN.search(lines[-1][-1000:]) if lines else None
        if found is None:
            return ""
        start = self.options.cwd or next(iter(inputs.archives), "/")
        path = posixpath.normpath(posixpath.join(start, found[1]))
        carried = "/" in found[1] and any(path == one or path.startswith(f"{one}/") for one in inputs.archives)
        return path if carried else ""

    async def _json_reward(self, output: str, outcome: RunOutcome, inputs: EvalInputs) -> Reward:
        """The object printed last. A verifier prints one: if others give another reward, the lowest counts."""
        found, given = await _in_worker(score_text.json_rewards, output)
        reward = rewards.to_reward(found, self.kind, outcome.trajectory)
        if len(given) > 1:
            inputs.findings.append(("forged_output", f"the output gives {len(given)} different rewards"))
        if given and given[0] < reward.value:
            return Reward(value=given[0], evaluator=self.kind)
        return reward


async def _in_worker(function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    return await workers.run_async(workers.DEFAULT_LIMITS, function, *arguments, **keywords)
