"""`harbor`: the tests of a Harbor task folder, run as Harbor runs them.

Both reward files are deleted, `tests/` is put at `/tests` only now that the agent is gone, `/tests/test.sh` is run with its
output in `/logs/verifier`, and the score is what it wrote there: `reward.json` first, else `reward.txt`. The exit code means
nothing. A score that is missing, empty or not finite is an error.

The tests run in a clean sandbox that the working folder and the declared artifacts were carried to. Only a task that says
`environment_mode = "shared"` is judged in the agent's own. The steps of a task that has several are judged each at its end,
before the next one begins.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from towline.evaluators import carrying, rewards
from towline.evaluators.base import Bench, Carried, EvaluationError, Outcome
from towline.evaluators.inside import put_folder, read_regular
from towline.evaluators.options import Options, Seconds
from towline.sandboxes import archives
from towline.sandboxes.base import Sandbox, SandboxError, execute
from towline.schema import Reward, Task
from towline.schema.environment import InsidePath

TESTS = "/tests"
LOGS = "/logs/verifier"
ARTIFACTS = "/logs/artifacts"
"""What an agent leaves here is always carried."""
SOLUTION = "/solution"
OUTPUT = "test-stdout.txt"
_NO_ROOT = 77
_LOG_BYTES = 32 * 1024 * 1024


class Step(Options):
    """One step of a task that has several."""

    kind: str = "step"
    name: str
    tests: str = ""
    """Laid over the task's own tests."""
    min_reward: FiniteFloat | dict[str, FiniteFloat] | None = None
    """Below it, no further step counts."""
    seconds: Seconds = 600.0
    env: dict[str, str] = Field(default_factory=dict)
    artifacts: list[InsidePath] = Field(default_factory=list)

    def suffices(self, found: dict[str, float]) -> bool:
        wanted = self.min_reward if isinstance(self.min_reward, dict) else {"reward": self.min_reward}
        return all(least is None or found.get(name, float("-inf")) >= least for name, least in wanted.items())


class HarborOptions(Options):
    kind: Literal["harbor"]
    tests: str = ""
    """The folder on the node's machine; may be empty if every step has its own."""
    environment_mode: Literal["shared", "separate"] = "separate"
    env: dict[str, str] = Field(default_factory=dict)
    user: str = ""
    seconds: Seconds = 600.0
    artifacts: list[InsidePath] = Field(default_factory=list)
    secret: list[str] = Field(default_factory=list)
    """Folders on the node's machine whose files must not be in the agent's sandbox under any name."""
    steps: list[Step] = Field(default_factory=list)
    strategy: Literal["mean", "final"] = "mean"

    @model_validator(mode="after")
    def _there_are_tests(self) -> Self:
        wanted = [(f"steps.{step.name}", step.tests or self.tests) for step in self.steps] or [("tests", self.tests)]
        for name, tests in wanted:
            if not tests:
                raise ValueError(f"{name} needs a folder with test.sh")
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

    async def collect(self, sandbox: Sandbox, task: Task) -> Carried:
        if self.shared:
            return Carried()
        return await self._carried(sandbox, task, len(self.options.steps))

    async def _carried(self, sandbox: Sandbox, task: Task, steps: int) -> Carried:
        """What is judged after so many steps."""
        declared = [*self.options.artifacts, *(path for step in self.options.steps[:steps] for path in step.artifacts)]
        carried = await carrying.carry(sandbox, [task.environment.workdir, *declared])
        kept = await carrying.carry(sandbox, [ARTIFACTS])
        # The agent need not leave anything there, so there is nothing to tell if it did not.
        return Carried({**carried.archives, **kept.archives}, notes=carried.notes)

    async def evaluate(self, bench: Bench, outcome: Outcome, carried: Carried) -> Reward:
        options = self.options
        if not options.steps:
            found = await self._verify(bench, carried, [options.tests], options.env, options.seconds, bench.logs)
            return self._reward(found)
        results = [dict(found) for found in outcome.judged]
        given = len(options.steps) if outcome.steps_given is None else outcome.steps_given
        for step in options.steps[len(results) : given]:
            results.append(await self._verify_step(bench, carried, step))
            if not step.suffices(results[-1]):
                break
        reward = self._reward(_combined(results, options.strategy))
        named = {f"step.{s.name}": rewards.main_reward(r) for s, r in zip(options.steps, results, strict=False)}
        return reward.model_copy(update={"components": {**reward.components, **named}})

    async def judge_step(self, bench: Bench, index: int) -> tuple[dict[str, float], bool]:
        sandbox, step = bench.used(), self.options.steps[index]
        if sandbox is None:
            raise EvaluationError(f"step {step.name} cannot be judged: the agent's sandbox is gone")
        carried = Carried() if self.shared else await self._carried(sandbox, bench.task, index + 1)
        found = await self._verify_step(bench, carried, step)
        if self.shared:
            await self._clear(sandbox)
        return found, step.suffices(found)

    async def _verify_step(self, bench: Bench, carried: Carried, step: Step) -> dict[str, float]:
        folders = [folder for folder in (self.options.tests, step.tests) if folder]
        env = {**self.options.env, **step.env}
        return await self._verify(bench, carried, folders, env, step.seconds, bench.logs / step.name)

    async def _verify(
        self, bench: Bench, carried: Carried, tests: Sequence[str], env: dict[str, str], seconds: float, logs: Path
    ) -> dict[str, float]:
        async with contextlib.AsyncExitStack() as stack:
            if self.shared:
                used = bench.used()
                if used is None:
                    raise EvaluationError("the task is judged in the agent's own sandbox, which is gone")
                sandbox = used
            else:
                sandbox = await stack.enter_async_context(bench.sandbox())
            await self._clear(sandbox)
            if not self.shared:
                await carrying.bring(sandbox, carried)
            for folder in tests:
                await put_folder(sandbox, Path(folder), TESTS)
            script = f"chmod +x {TESTS}/test.sh && exec {TESTS}/test.sh >{LOGS}/{OUTPUT} 2>&1"
            user = self.options.user or None
            done = await execute(sandbox, ("sh", "-c", script), env=env, user=user, seconds=seconds)
            # What the agent's work may have started goes on no longer, least of all to write a score.
            await sandbox.kill()
            said = await self._keep_logs(sandbox, logs)
            if done.timed_out:
                raise EvaluationError(f"the tests did not end within {seconds:g} seconds")
            try:
                as_json = await read_regular(sandbox, f"{LOGS}/reward.json")
                return rewards.reward_files(as_json, await read_regular(sandbox, f"{LOGS}/reward.txt"))
            except EvaluationError as error:
                output = (said or done.text)[-500:].strip()
                raise EvaluationError(
                    f"{error}; test.sh ended with {done.code} and said: {output or 'nothing'}"
                ) from error

    async def _clear(self, sandbox: Sandbox) -> None:
        """No reward file, no tests and no link in their place from before; in the agent's own sandbox, nothing running."""
        # Where there is no root of its own, these would be folders of the host.
        script = f'[ -z "${{TOWLINE_ROOT-}}" ] || exit {_NO_ROOT}; rm -rf {TESTS} {LOGS} && mkdir -p {LOGS}'
        done = await execute(sandbox, ("sh", "-c", script), cwd="/")
        if done.code == _NO_ROOT:
            raise EvaluationError(
                f"the tests of a Harbor task write to {LOGS}, so they need a sandbox with a root of its own: "
                "use bubblewrap, docker or apptainer"
            )
        if not done.ok:
            raise EvaluationError(f"{TESTS} and {LOGS} cannot be made anew: {done.text.strip()[-500:]}")

    async def _keep_logs(self, sandbox: Sandbox, logs: Path) -> str:
        """Keep what the verifier wrote with the session; what the tests said."""
        await asyncio.to_thread(logs.mkdir, parents=True, exist_ok=True)
        try:
            archive = await sandbox.get(LOGS, most=_LOG_BYTES)
            await asyncio.to_thread(archives.unpack, archive, logs, most=_LOG_BYTES)
            return archives.read_file(archive, f"verifier/{OUTPUT}").decode("utf-8", "replace")
        except (SandboxError, archives.ArchiveError, OSError) as error:
            said = f"{error}\n".encode("utf-8", "backslashreplace")
            await asyncio.to_thread((logs / "not-kept.txt").write_bytes, said)
            return ""

    def _reward(self, found: dict[str, float]) -> Reward:
        others = {name: value for name, value in found.items() if name != "reward"}
        return Reward(value=rewards.main_reward(found), components=others, evaluator=self.kind)


def _combined(results: list[dict[str, float]], strategy: str) -> dict[str, float]:
    """Over the steps that were judged, as in Harbor: the last one's, or the mean of each name, which counts 0 where a step
    does not have it."""
    if strategy == "final":
        return results[-1]
    names = {name for result in results for name in result}
    return {name: sum(result.get(name, 0.0) for result in results) / len(results) for name in names}
