"""A session without a model: an agent that is a shell script, in a real sandbox, judged by a real evaluator in another."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from towline.evaluators import leak_audit
from towline.evaluators.base import EvalInputs, Evaluator, RunOutcome, StepEvaluator
from towline.evaluators.registry import make_evaluator
from towline.evaluators.sandbox_io import put_files
from towline.sandboxes.base import Runtime, Sandbox, SandboxSpec, execute
from towline.schema import Network, Reward, SessionState, Task, Trajectory, Turn


def a_task(evaluator: Mapping[str, Any], **fields: Any) -> Task:
    values = {"task_id": "t", "instruction": "do it", "harness": "shell", "evaluator": dict(evaluator)}
    return Task.model_validate(values | fields)


def a_trajectory(turns: int = 2) -> Trajectory:
    made = [
        Turn(
            id=f"turn-{index}",
            index=index,
            prompt_length=1,
            suffix=[7],
            sampled=[8],
            logprobs=[-0.5],
            versions=[0],
            finish="stop",
            reply={"text": f"reply {index}"},
        )
        for index in range(turns)
    ]
    return Trajectory(session_id="s", group_id="t", state=SessionState.BUILDING, turns=made)


class Rig:
    """The node's part: makes and furnishes sandboxes, runs the agent, and lends an evaluation what it needs."""

    def __init__(self, runtime: Runtime, task: Task, logs: Path, *, layers: tuple[Path, ...] = ()):
        self.runtime = runtime
        self.task = task
        self.logs = logs
        self.layers = layers
        self.lent: Sandbox | None = None
        self.notes: list[str] = []
        self.findings: list[tuple[str, str]] = []
        self.inputs = EvalInputs()
        self.clean = 0
        """How many clean sandboxes the evaluation has taken."""
        self.last_look = ""
        """A command that is run in a clean sandbox when the evaluation is done with it; `seen` is what it said."""
        self.seen = ""
        evaluator = make_evaluator(task.evaluator)
        assert evaluator is not None
        self.evaluator: Evaluator = evaluator

    @contextlib.asynccontextmanager
    async def furnished(self) -> AsyncIterator[Sandbox]:
        environment = self.task.environment
        network = Network.NONE if self.runtime.facts.isolated else Network.OPEN
        spec = SandboxSpec(
            root=environment.root,
            layers=self.layers,
            network=network,
            workdir=environment.workdir,
            env=tuple(sorted(environment.env.items())),
        )
        sandbox = await self.runtime.create(spec)
        try:
            await put_files(sandbox, environment.files)
            for command in environment.setup:
                done = await execute(sandbox, ("sh", "-c", command))
                assert done.ok, done.text
            yield sandbox
        finally:
            await sandbox.destroy()

    @contextlib.asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        self.clean += 1
        async with self.furnished() as sandbox:
            yield sandbox
            if self.last_look:
                self.seen = (await execute(sandbox, ("sh", "-c", self.last_look))).text

    def agent_sandbox(self) -> Sandbox | None:
        return self.lent

    async def problems(self) -> list[str]:
        """What the audit says of the prepared sandbox."""
        async with self.furnished() as sandbox:
            return await leak_audit.audit_before_run(sandbox, self.task, self.evaluator)

    async def judge(
        self,
        script: str = "true",
        *,
        answer: str = "",
        exit_code: int | None = 0,
        end_reason: str = "exited",
        trajectory: Trajectory | None = None,
        audited: bool = True,
    ) -> Reward:
        """The reward of an agent that runs the script and then says the answer."""
        async with self.furnished() as sandbox:
            if audited:
                assert await leak_audit.audit_before_run(sandbox, self.task, self.evaluator) == []
            judged: list[Mapping[str, float]] = []
            for index in range(max(1, len(self.task.steps))):
                if index:
                    self.lent = sandbox
                    assert isinstance(self.evaluator, StepEvaluator)
                    found, follows = await self.evaluator.evaluate_step(self, index - 1)
                    self.lent = None
                    judged.append(found)
                    if not follows:
                        break
                await self._act(sandbox, script, index)
                given = index + 1
            carried: EvalInputs = await self.evaluator.collect(sandbox, self.task)
            self.inputs = carried
            self.notes = carried.notes + await leak_audit.audit_after_run(sandbox, self.task, self.evaluator)
            steps_given = given if self.task.steps else None
            outcome = RunOutcome(exit_code, end_reason, answer, trajectory or a_trajectory(), steps_given, judged)
            if self.evaluator.shared:
                self.lent = sandbox
                return await self.evaluator.evaluate(self, outcome, carried)
        return await self.evaluator.evaluate(self, outcome, carried)

    async def _act(self, sandbox: Sandbox, script: str, index: int) -> None:
        """The agent's part, of one step if there are any; then nothing of it lives."""
        env = {}
        if self.task.steps:
            step = self.task.steps[index]
            env["TOWLINE_STEP"] = step.name
            await put_files(sandbox, step.files)
            for command in step.setup:
                assert (await execute(sandbox, ("sh", "-c", command))).ok
        done = await execute(sandbox, ("sh", "-c", script), env=env, seconds=60)
        assert done.ok, done.text
        await sandbox.kill()


MakeRig = Callable[..., Rig]
"""What the fixture `rig` is: an evaluator's spec and fields of its task make a rig."""
