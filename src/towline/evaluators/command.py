"""`command`: runs a command in a clean sandbox with the agent's work; its exit code or output is the score.

The command, and the files that only it may see, arrive after the agent is gone. The agent's work is data to the command,
unless the command runs it: then only an exit code that the command itself decides, or a JSON line that it prints last, can
be trusted.
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from towline.evaluators import eval_inputs, rewards
from towline.evaluators.base import EvalContext, EvalInputs, EvaluationError, EvaluatorOptions, RunOutcome, Seconds
from towline.evaluators.sandbox_io import put_files, run_logged
from towline.sandboxes.base import CommandResult, Sandbox
from towline.schema import File, Reward, Task
from towline.schema.entities import InsidePath

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
    trajectory: bool = False
    """Give the command the trajectory and the agent's last message as files: `TOWLINE_TRAJECTORY`, `TOWLINE_ANSWER`."""
    env: dict[str, str] = Field(default_factory=dict)
    cwd: InsidePath | None = None
    """The working folder by default."""
    user: str = ""
    seconds: Seconds = 600.0
    on_timeout: Literal["error", "zero"] = "error"
    """`zero` scores a command that times out with `lowest` at once, without a retry and without a control run."""

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
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
        return await eval_inputs.collect_inputs(sandbox, paths)

    async def evaluate(self, context: EvalContext, outcome: RunOutcome, inputs: EvalInputs) -> Reward:
        options = self.options
        env = dict(options.env)
        async with context.sandbox() as sandbox:
            await eval_inputs.place_inputs(sandbox, inputs)
            files = list(options.files)
            if options.trajectory:
                files.append(File(target=TRAJECTORY, text=outcome.trajectory.to_json().decode()))
                files.append(File(target=ANSWER, text=outcome.answer))
                env |= {"TOWLINE_TRAJECTORY": TRAJECTORY, "TOWLINE_ANSWER": ANSWER}
            await put_files(sandbox, files)
            command = ["sh", "-c", options.command] if isinstance(options.command, str) else options.command
            done = await run_logged(
                sandbox,
                command,
                log=context.logs / "command.log",
                env=env,
                cwd=options.cwd,
                user=options.user,
                seconds=options.seconds,
            )
        if done.timed_out:
            if options.on_timeout == "zero":
                return Reward(value=self.lowest, components={"timed_out": 1.0}, evaluator=self.kind)
            raise EvaluationError(f"the command timed out after {options.seconds:g} seconds")
        return await asyncio.to_thread(self._score, done, outcome)

    def _score(self, done: CommandResult, outcome: RunOutcome) -> Reward:
        if self.options.reward == "exit_code":
            # The shell's exit codes for a missing command: the task's fault, not the agent's.
            if done.code in (126, 127):
                raise EvaluationError(
                    f"the command could not be run (exit code {done.code}): {done.text[-500:].strip()}"
                )
            return Reward(value=float(done.code == 0), evaluator=self.kind)
        output = done.stdout.decode("utf-8", "replace")
        if done.truncated:
            raise EvaluationError("the command printed more than is kept, so the end of its output is unknown")
        try:
            if self.options.reward == "json":
                return rewards.to_reward(rewards.last_object(output), self.kind, outcome.trajectory)
            if self.options.reward == "regex":
                return Reward(value=rewards.matched_number(output, self.options.pattern), evaluator=self.kind)
            return Reward(value=rewards.last_number(output), evaluator=self.kind)
        except EvaluationError as error:
            raise EvaluationError(f"{error} (exit code {done.code}; output: {done.text[-500:].strip()})") from error
