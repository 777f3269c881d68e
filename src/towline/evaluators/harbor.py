"""`harbor`: the tests of a Harbor task folder, run as Harbor runs them.

Both reward files are deleted, `tests/` is placed at `/tests` only after the agent is gone, `/tests/test.sh` runs with its
output in `/logs/verifier`, and the score is what it wrote there: `reward.json` first, else `reward.txt`. The exit code is
ignored. A score that is missing, empty or not finite is an error.

The tests run in a clean sandbox with a copy of the working folder and the declared artifacts. Only a task with
`environment_mode = "shared"` is evaluated in the agent's own sandbox. The steps of a multi-step task are evaluated one by
one, each before the next begins.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from towline.common.untrusted import workers
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
from towline.evaluators.sandbox_io import put_folder, read_regular_file
from towline.evaluators.verifier_run import run_verifier
from towline.sandboxes.base import Sandbox, SandboxError, execute
from towline.sandboxes.files import archives
from towline.schema import Reward, Task
from towline.schema.entities import InsidePath

TESTS = "/tests"
LOGS = "/logs/verifier"
ARTIFACTS = "/logs/artifacts"
"""Files that the agent leaves here are always copied to the evaluation."""
SOLUTION = "/solution"
BROUGHT = (TESTS, LOGS, SOLUTION)
PRELOAD = "/etc/ld.so.preload"
OUTPUT = "test-stdout.txt"
_NO_ROOT = 77
_LOG_BYTES = 32 * 1024 * 1024


class HarborStep(EvaluatorOptions):
    """One step of a multi-step task."""

    kind: str = "step"
    name: str
    tests: str = ""
    """Merged over the task's own tests."""
    min_reward: FiniteFloat | dict[str, FiniteFloat] | None = None
    """With a lower reward, no further step is evaluated."""
    seconds: Seconds = 600.0
    env: dict[str, str] = Field(default_factory=dict)
    artifacts: list[InsidePath] = Field(default_factory=list)

    def suffices(self, found: dict[str, float]) -> bool:
        wanted = self.min_reward if isinstance(self.min_reward, dict) else {"reward": self.min_reward}
        return all(least is None or found.get(name, float("-inf")) >= least for name, least in wanted.items())


class HarborOptions(EvaluatorOptions):
    kind: Literal["harbor"]
    tests: str = ""
    """The folder on the node; may be empty if every step has its own."""
    environment_mode: Literal["shared", "separate"] = "separate"
    env: dict[str, str] = Field(default_factory=dict)
    user: str = ""
    seconds: Seconds = 600.0
    artifacts: list[InsidePath] = Field(default_factory=list)
    secret: list[str] = Field(default_factory=list)
    """Folders on the node whose files must not be in the agent's sandbox under any name."""
    steps: list[HarborStep] = Field(default_factory=list)
    strategy: Literal["mean", "final"] = "mean"
    keep_git: bool = False
    """Carry git's configuration and hooks too, for tasks about them: the verifier's git then runs the agent's programs."""

    @model_validator(mode="after")
    def _tests_are_set(self) -> Self:
        wanted = [(f"steps.{step.name}", step.tests or self.tests) for step in self.steps] or [("tests", self.tests)]
        for name, tests in wanted:
            if not tests:
                raise ValueError(f"{name}: set a folder with test.sh")
        return self


class HarborEvaluator:
    kind = "harbor"

    def __init__(self, options: HarborOptions):
        self.options = options
        self.lowest = options.lowest

    @property
    def shared(self) -> bool:
        return self.options.environment_mode == "shared"

    @property
    def needs_sandbox(self) -> bool:
        return not self.shared

    def leaks(self) -> tuple[str, ...]:
        return (TESTS,) if self.options.oracle else (TESTS, SOLUTION)

    def secrets(self) -> tuple[Path, ...]:
        return () if self.options.oracle else tuple(map(Path, self.options.secret))

    async def collect(self, sandbox: Sandbox, task: Task) -> EvalInputs:
        if self.shared:
            return EvalInputs()
        return await self._collect(sandbox, task, len(self.options.steps))

    async def _collect(self, sandbox: Sandbox, task: Task, steps: int) -> EvalInputs:
        """What is scored after the first `steps` steps."""
        declared = [*self.options.artifacts, *(path for step in self.options.steps[:steps] for path in step.artifacts)]
        keep_git = self.options.keep_git
        paths = [task.environment.workdir, *declared]
        inputs = await eval_inputs.collect_inputs(sandbox, paths, brought=BROUGHT, keep_git=keep_git)
        artifacts = await eval_inputs.collect_inputs(sandbox, [ARTIFACTS], brought=BROUGHT, keep_git=keep_git)
        inputs.archives = {**inputs.archives, **artifacts.archives}
        inputs.findings += artifacts.findings
        inputs.loaded += artifacts.loaded
        # Artifacts are optional: a missing folder is not worth a note.
        return inputs

    async def evaluate(self, context: EvalContext, outcome: RunOutcome, inputs: EvalInputs) -> Reward:
        options = self.options
        if not options.steps:
            found = await self._verify(context, inputs, [options.tests], options.env, options.seconds, context.logs)
            return self._reward(found)
        results = [dict(found) for found in outcome.judged]
        given = len(options.steps) if outcome.steps_given is None else outcome.steps_given
        for step in options.steps[len(results) : given]:
            results.append(await self._verify_step(context, inputs, step))
            if not step.suffices(results[-1]):
                break
        reward = self._reward(_combined(results, options.strategy))
        named = {f"step.{s.name}": rewards.main_reward(r) for s, r in zip(options.steps, results, strict=False)}
        return reward.model_copy(update={"components": {**reward.components, **named}})

    async def evaluate_step(self, context: EvalContext, index: int) -> tuple[dict[str, float], bool]:
        sandbox, step = context.agent_sandbox(), self.options.steps[index]
        if sandbox is None:
            raise EvaluationError(f"step {step.name} cannot be evaluated: the agent's sandbox is gone")
        inputs = EvalInputs() if self.shared else await self._collect(sandbox, context.task, index + 1)
        found = await self._verify_step(context, inputs, step)
        context.findings.extend(inputs.findings)
        if self.shared:
            await self._clear(sandbox)
        return found, step.suffices(found)

    async def _verify_step(self, context: EvalContext, inputs: EvalInputs, step: HarborStep) -> dict[str, float]:
        folders = [folder for folder in (self.options.tests, step.tests) if folder]
        env = {**self.options.env, **step.env}
        return await self._verify(context, inputs, folders, env, step.seconds, context.logs / step.name)

    async def _verify(
        self,
        context: EvalContext,
        inputs: EvalInputs,
        tests: Sequence[str],
        env: dict[str, str],
        seconds: float,
        logs: Path,
    ) -> dict[str, float]:
        async with contextlib.AsyncExitStack() as stack:
            if self.shared:
                used = context.agent_sandbox()
                if used is None:
                    raise EvaluationError("the task is evaluated in the agent's own sandbox, which is gone")
                sandbox = used
                await self._disarm(sandbox, inputs)
            else:
                sandbox = await stack.enter_async_context(context.sandbox())
            await self._clear(sandbox)
            if not self.shared:
                await eval_inputs.place_inputs(sandbox, inputs)
            for folder in tests:
                await put_folder(sandbox, Path(folder), TESTS)
            script = f"chmod +x {TESTS}/test.sh && exec {TESTS}/test.sh >{LOGS}/{OUTPUT} 2>&1"
            run = await run_verifier(
                sandbox,
                ("sh", "-c", script),
                inputs=inputs,
                brought=BROUGHT,
                env=env,
                user=self.options.user,
                seconds=seconds,
                shared=[context.task.environment.workdir] if self.shared else (),
            )
            done = run.result
            inputs.findings += run.findings
            # Processes that the agent's work started must not keep running, and must not write a score.
            await sandbox.kill()
            said = await self._keep_logs(sandbox, logs)
            if done.timed_out:
                raise EvaluationError(f"the tests timed out after {seconds:g} seconds")
            try:
                as_json = await read_regular_file(sandbox, f"{LOGS}/reward.json")
                as_text = await read_regular_file(sandbox, f"{LOGS}/reward.txt")
                return await workers.run_async(workers.DEFAULT_LIMITS, score_text.reward_files, as_json, as_text)
            except LimitExceeded as error:
                inputs.findings.append(("hostile_text", f"the reward file: {error}"))
                raise AgentCaused(f"the reward file cannot be read: {error}") from error
            except EvaluationError as error:
                output = (said or done.text)[-500:].strip()
                raise EvaluationError(
                    f"{error}; test.sh exited with code {done.code} and printed: {output or 'nothing'}"
                ) from error

    async def _disarm(self, sandbox: Sandbox, inputs: EvalInputs) -> None:
        """In the agent's own sandbox: no library is loaded into every program, and the report says what remains."""
        inputs.findings.append(("shared_sandbox", "programs, libraries and caches are as the agent left them"))
        with contextlib.suppress(SandboxError, archives.ArchiveError):
            archive = await sandbox.get(PRELOAD, max_bytes=1024 * 1024)
            if archives.read_file(archive, "").strip():
                inputs.findings.append(("loader_preload", PRELOAD))
            await sandbox.put(archives.pack({PRELOAD.lstrip("/"): b""}), "/")

    async def _clear(self, sandbox: Sandbox) -> None:
        """Remove earlier reward files and tests, and links in their place, before the verifier writes its own."""
        # Without a root of its own, these would be folders of the host.
        script = f'[ -z "${{TOWLINE_ROOT-}}" ] || exit {_NO_ROOT}; rm -rf {TESTS} {LOGS} && mkdir -p {LOGS}'
        done = await execute(sandbox, ("sh", "-c", script), cwd="/")
        if done.code == _NO_ROOT:
            raise EvaluationError(
                f"the tests of a Harbor task write to {LOGS} and need a sandbox with a root of its own: "
                "use bubblewrap, docker or apptainer"
            )
        if not done.ok:
            raise EvaluationError(f"{TESTS} and {LOGS} cannot be recreated: {done.text.strip()[-500:]}")

    async def _keep_logs(self, sandbox: Sandbox, logs: Path) -> str:
        """Copy the verifier's logs to the session's folder; returns the output of the tests."""
        await asyncio.to_thread(logs.mkdir, parents=True, exist_ok=True)
        try:
            archive = await sandbox.get(LOGS, max_bytes=_LOG_BYTES)
            await eval_inputs.check_archive(archive)
            await asyncio.to_thread(archives.unpack, archive, logs, max_bytes=_LOG_BYTES)
            return archives.read_file(archive, f"verifier/{OUTPUT}").decode("utf-8", "replace")
        except (SandboxError, archives.ArchiveError, OSError) as error:
            said = f"{error}\n".encode("utf-8", "backslashreplace")
            await asyncio.to_thread((logs / "not-kept.txt").write_bytes, said)
            return ""

    def _reward(self, found: dict[str, float]) -> Reward:
        others = {name: value for name, value in found.items() if name != "reward"}
        return Reward(value=rewards.main_reward(found), components=others, evaluator=self.kind)


def _combined(results: list[dict[str, float]], strategy: str) -> dict[str, float]:
    """The reward over the evaluated steps, as in Harbor: that of the last step, or the mean per name, with 0 for a step
    that lacks the name."""
    if strategy == "final":
        return results[-1]
    names = {name for result in results for name in result}
    return {name: sum(result.get(name, 0.0) for result in results) / len(results) for name in names}
