"""`command`: run a command in a clean sandbox beside what the agent made; its exit code or its output is the score.

The command, and the files that only it may see, come after the agent is gone. What the agent made is data to it, unless
it runs that: then only an exit code that the command itself decides, or a JSON line that it prints last, can be believed.
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from towline.evaluators import carrying, rewards
from towline.evaluators.base import Bench, Carried, EvaluationError, Outcome
from towline.evaluators.inside import put_files, run
from towline.evaluators.options import Options, Seconds
from towline.sandboxes.base import Done, Sandbox
from towline.schema import File, Reward, Task
from towline.schema.environment import InsidePath

TRAJECTORY = "/towline/trajectory.json"
ANSWER = "/towline/answer.txt"


class CommandOptions(Options):
    kind: Literal["command"]
    command: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)]
    """A text is run by `sh -c`."""
    files: list[File] = Field(default_factory=list)
    """What only the command sees."""
    carry: list[InsidePath] | None = None
    """What is taken from the agent's sandbox: the working folder if nothing is said."""
    hidden: list[InsidePath] = Field(default_factory=list)
    """Paths that must not exist while the agent runs, besides those of `files`."""
    reward: Literal["exit_code", "number", "json", "regex"] = "exit_code"
    """`exit_code`: 1 for 0, else 0. `number`: the last one printed. `json`: the object that is printed last, with `reward`
    and perhaps `components` and `per_turn`. `regex`: what `pattern` matches last."""
    pattern: str = ""
    trajectory: bool = False
    """Give the command the trajectory and the agent's last words, as files: `TOWLINE_TRAJECTORY` and `TOWLINE_ANSWER`."""
    env: dict[str, str] = Field(default_factory=dict)
    cwd: InsidePath | None = None
    """The working folder if nothing is said."""
    user: str = ""
    seconds: Seconds = 600.0
    on_timeout: Literal["error", "zero"] = "error"
    """`zero` scores a command that does not end at once, without repeating it and without a control run."""

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return pattern

    @model_validator(mode="after")
    def _pattern_where_it_is_needed(self) -> Self:
        if (self.reward == "regex") != bool(self.pattern):
            raise ValueError("`pattern` belongs to the reward `regex`, and that needs one")
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

    async def collect(self, sandbox: Sandbox, task: Task) -> Carried:
        paths = [task.environment.workdir] if self.options.carry is None else self.options.carry
        return await carrying.carry(sandbox, paths)

    async def evaluate(self, bench: Bench, outcome: Outcome, carried: Carried) -> Reward:
        options = self.options
        env = dict(options.env)
        async with bench.sandbox() as sandbox:
            await carrying.bring(sandbox, carried)
            files = list(options.files)
            if options.trajectory:
                files.append(File(target=TRAJECTORY, text=outcome.trajectory.to_json().decode()))
                files.append(File(target=ANSWER, text=outcome.answer))
                env |= {"TOWLINE_TRAJECTORY": TRAJECTORY, "TOWLINE_ANSWER": ANSWER}
            await put_files(sandbox, files)
            command = ["sh", "-c", options.command] if isinstance(options.command, str) else options.command
            done = await run(
                sandbox,
                command,
                log=bench.logs / "command.log",
                env=env,
                cwd=options.cwd,
                user=options.user,
                seconds=options.seconds,
            )
        if done.timed_out:
            if options.on_timeout == "zero":
                return Reward(value=self.lowest, components={"timed_out": 1.0}, evaluator=self.kind)
            raise EvaluationError(f"the command did not end within {options.seconds:g} seconds")
        return await asyncio.to_thread(self._score, done, outcome)

    def _score(self, done: Done, outcome: Outcome) -> Reward:
        if self.options.reward == "exit_code":
            # The shell's own words for a command that is not there: the task's fault, not the agent's.
            if done.code in (126, 127):
                raise EvaluationError(f"the command could not be run ({done.code}): {done.text[-500:].strip()}")
            return Reward(value=float(done.code == 0), evaluator=self.kind)
        output = done.stdout.decode("utf-8", "replace")
        if done.truncated:
            raise EvaluationError("the command printed more than is kept, so its last words are not known")
        try:
            if self.options.reward == "json":
                return rewards.reward_of(rewards.last_object(output), self.kind, outcome.trajectory)
            if self.options.reward == "regex":
                return Reward(value=rewards.matched(output, self.options.pattern), evaluator=self.kind)
            return Reward(value=rewards.last_number(output), evaluator=self.kind)
        except EvaluationError as error:
            raise EvaluationError(f"{error} (exit code {done.code}; it said: {done.text[-500:].strip()})") from error
