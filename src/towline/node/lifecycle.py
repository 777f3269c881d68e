"""The stages of one session: INIT, RUN, BUILD, EVALUATE.

Each is a function of a flight that leaves it ready for the next. Whatever happens, three things hold: the processes of the
agent are dead before anything is judged; the turns that finished are in the trajectory; a failure of the machinery is
never a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from towline.config import NodeSettings
from towline.errors import TowlineError
from towline.evaluators import leaks
from towline.evaluators.base import Evaluator, JudgesSteps
from towline.gateway.budget import Budget
from towline.gateway.calls import FailedCall
from towline.gateway.gateway import Gateway, Opened
from towline.gateway.server import Door, Running
from towline.gateway.session import Session as GatewaySession
from towline.harnesses.base import HOME, Launch, Place
from towline.harnesses.install import check_libc
from towline.node.breakers import Breakers
from towline.node.flight import Cancelled, Flight
from towline.node.furnish import furnish, write_files
from towline.node.judging import Judging
from towline.node.logs import Log
from towline.node.looping import repetitions
from towline.node.preparing import Prepared
from towline.sandboxes import archives
from towline.sandboxes.base import GATEWAY_PORT, Process, Sandbox, SandboxError, Spec, fate_of
from towline.schema import EndReason, Reward, Step, Trajectory
from towline.tokens.graph import Node as TurnNode

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KILLED = 128 + signal.SIGKILL
_GRACE = 5.0
"""Seconds that a harness has to end by itself once the gateway refuses it more."""


_FIRST = (EndReason.CANCELLED, EndReason.LIMIT, EndReason.LOOPING, EndReason.TIMEOUT)
"""Of several reasons at once, the one that counts."""
_FOLLOWED = (EndReason.EXITED, EndReason.ERROR, EndReason.TIMEOUT, EndReason.MEMORY)
"""How a step may end for the next to begin."""


class TurnFailed(TowlineError):
    """The harness ended, gave up or went on after a model call that the infrastructure failed."""

    def __init__(self, call: FailedCall):
        super().__init__(call.text)
        self.failure = call.failure
        self.call = call


class NothingCaptured(TowlineError):
    """The harness ended without a model call that the gateway saw."""

    failure = "harness"


@dataclass(slots=True)
class Lifecycle:
    gateway: Gateway
    running: Running
    settings: NodeSettings
    breakers: Breakers
    starts: set[Spec] = field(default_factory=set)
    """Specs in whose sandboxes their harness's interpreter was seen to start."""
    judging: Judging = field(init=False)

    def __post_init__(self) -> None:
        self.judging = Judging(self.settings)

    # INIT

    async def init(self, flight: Flight, prepared: Prepared) -> None:
        """A furnished sandbox with the harness's install in it, checked for what would give the answer away."""
        sandbox = await prepared.pool.acquire(prepared.run)
        flight.sandbox = sandbox
        await furnish(sandbox, prepared.environment, flight.logs / "setup.log")
        if prepared.install and prepared.run not in self.starts:
            await check_libc(sandbox, prepared.harness, prepared.install)
            self.starts.add(prepared.run)
        if prepared.evaluator is not None:
            problems = await leaks.before_run(sandbox, flight.task, prepared.evaluator)
            if problems:
                raise SandboxError("the environment gives the answer away: " + "; ".join(problems))
            if prepared.evaluator.needs_sandbox:
                prepared.pool.warm(prepared.evaluate, 1)

    # RUN

    async def run(self, flight: Flight, prepared: Prepared, seconds: float) -> None:
        """The harness, from its start to its end or to that of its budget; then nothing of it lives."""
        sandbox = _in(flight)
        opened = await self.gateway.create(
            {
                "id": flight.session.session_id,
                "group": flight.task.task_id,
                # What the main conversation begins with.
                "instruction": flight.task.steps[0].instruction if flight.task.steps else flight.task.instruction,
                "later_instructions": [step.instruction for step in flight.task.steps[1:]],
                "metadata": {"attempt": flight.session.attempt, "sample": flight.session.sample},
                "settings": {**prepared.harness.settings, **flight.task.settings},
            }
        )
        flight.gateway_id = opened.session.id
        flight.memory_kills = (await fate_of(sandbox, killed=False)).memory_kills
        door: Door | None = None
        base_url = self.running.base_url
        if sandbox.listener is not None:
            door = await self.running.admit(sandbox.listener, opened.session.id)
            base_url = f"http://127.0.0.1:{GATEWAY_PORT}"
        try:
            if flight.task.steps:
                await self._through_steps(flight, prepared, opened, base_url, seconds)
            else:
                launch = self._launch(flight, prepared, base_url, opened.key)
                await self._until_end(flight, prepared, launch, opened.session, seconds)
        finally:
            try:
                if not flight.sandbox_ended:
                    await asyncio.shield(sandbox.kill())
            finally:
                if door is not None:
                    await door.close()

    async def _through_steps(
        self, flight: Flight, prepared: Prepared, opened: Opened, base_url: str, seconds: float
    ) -> None:
        """The task's steps in order, each a run of the harness in the same sandbox, until one may not be followed.

        A harness that can go on with its conversation does; any other begins a new one with each step.
        """
        sandbox = _in(flight)
        for index, step in enumerate(flight.task.steps):
            furnishing = furnish(sandbox, step, flight.logs / "setup.log")
            await flight.within(furnishing, self.settings.seconds.init, f"the set-up of step {step.name}")
            flight.steps_given = index + 1
            resume = prepared.harness.resumes and bool(opened.session.graph.nodes)
            launch = self._launch(flight, prepared, base_url, opened.key, step, resume=resume)
            await self._until_end(flight, prepared, launch, opened.session, step.seconds or seconds, step)
            if (
                flight.end_reason not in _FOLLOWED
                or flight.sandbox_ended
                or not await self._may_follow(flight, prepared, index)
            ):
                return
            if flight.end_reason is EndReason.TIMEOUT:
                flight.notes.append(f"step {step.name} ran out of time")

    async def _may_follow(self, flight: Flight, prepared: Prepared, index: int) -> bool:
        """Whether there is a next step, and this one's score lets it begin. The last one is judged with the session."""
        if index + 1 == len(flight.task.steps):
            return False
        if not isinstance(prepared.evaluator, JudgesSteps):
            return True
        seconds = flight.task.timeouts.evaluate or self.settings.seconds.evaluate
        with flight.timed("judge_steps"):
            return await self.judging.judge_step(flight, prepared, index, seconds)

    def _launch(
        self,
        flight: Flight,
        prepared: Prepared,
        base_url: str,
        key: str,
        step: Step | None = None,
        *,
        resume: bool = False,
    ) -> Launch:
        harness = prepared.harness
        place = Place(
            base_url=base_url,
            key=key,
            model=self.gateway.model,
            instruction=step.instruction if step is not None else flight.task.instruction,
            install=prepared.install,
            workdir=prepared.environment.workdir,
            context=self.gateway.engine.info.context,
            max_tokens=self.gateway.defaults.sampling.max_tokens,
            session=flight.session.session_id,
            options=flight.task.harness_options,
            resume=resume,
        )
        return harness.launch(harness.place(place))

    async def _until_end(
        self,
        flight: Flight,
        prepared: Prepared,
        launch: Launch,
        session: GatewaySession,
        seconds: float,
        step: Step | None = None,
    ) -> None:
        sandbox = _in(flight)
        looping = asyncio.Event()
        if self.settings.looping:
            session.watchers.append(_loop_watch(looping, self.settings.looping))
        await write_files(sandbox, launch.files)
        env = {"PATH": PATH, "HOME": HOME, "TERM": "dumb", **prepared.environment.env, **launch.env}
        if step is not None:
            env["TOWLINE_STEP"] = step.name
        process = await sandbox.start(launch.command, env=env, cwd=launch.cwd or None)
        log = Log(flight.logs / "harness.log", self.settings.log_bytes)
        following = asyncio.ensure_future(_converse(process, launch.stdin, log))
        ended = asyncio.ensure_future(process.wait())
        budget = Budget(seconds)
        release = session.hold(budget)
        watches = {
            EndReason.TIMEOUT: asyncio.ensure_future(budget.used_up()),
            EndReason.CANCELLED: asyncio.ensure_future(flight.cancelled.wait()),
            EndReason.LIMIT: asyncio.ensure_future(session.exhausted.wait()),
            EndReason.LOOPING: asyncio.ensure_future(looping.wait()),
        }
        held = asyncio.ensure_future(self.breakers.lasting(flight.engines, self.settings.hold_seconds))
        try:
            await asyncio.wait({ended, held, *watches.values()}, return_when=asyncio.FIRST_COMPLETED)
            cut = next((reason for reason in _FIRST if watches[reason].done()), None)
            if not ended.done() and cut is EndReason.LIMIT:
                await asyncio.wait({ended}, timeout=_GRACE)
            if held.done() and not ended.done() and cut is None:
                raise held.result()
            if ended.done() or cut is None:
                flight.exit_code = ended.result()
                well = flight.exit_code in prepared.harness.success
                flight.end_reason = cut if cut is EndReason.LIMIT else EndReason.EXITED if well else EndReason.ERROR
            else:
                flight.end_reason = cut
            if flight.end_reason is not EndReason.CANCELLED:
                await self._check_sandbox(flight, sandbox)
            if not flight.sandbox_ended:
                await sandbox.kill()
            # The streams end with the processes.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(following), _GRACE)
        finally:
            release()
            for pending in (following, ended, held, *watches.values()):
                pending.cancel()
            await asyncio.gather(following, ended, held, *watches.values(), return_exceptions=True)
            log.close()
        if flight.end_reason is not EndReason.CANCELLED:
            await self._check_calls(flight, session)
        nobody_called = not session.graph.nodes and prepared.harness.calls_model
        if nobody_called and flight.end_reason in _FOLLOWED:
            timed_out = flight.end_reason is EndReason.TIMEOUT
            how = "ran out of time" if timed_out else f"ended with exit code {flight.exit_code}"
            raise NothingCaptured(
                f"harness {prepared.harness.name} {how} and made no model call that "
                f"reached the gateway; it last said: {log.tail()[-1000:] or 'nothing'}"
            )

    async def _check_sandbox(self, flight: Flight, sandbox: Sandbox) -> None:
        """Whether anything but the agent, or its memory limit, has ended what ran inside."""
        killed = flight.exit_code == _KILLED and flight.end_reason in (EndReason.ERROR, EndReason.EXITED)
        fate = await fate_of(sandbox, killed=killed)
        fresh = fate.memory_kills - flight.memory_kills
        flight.memory_kills, flight.sandbox_ended = fate.memory_kills, fate.ended
        if fresh > 0:
            most = sandbox.spec.resources.memory_mb
            whose = "the harness" if killed or fate.ended else "processes of the agent"
            flight.notes.append(f"the sandbox's memory limit of {most} MB has ended {whose}")
            if killed or fate.ended:
                flight.end_reason = EndReason.MEMORY
        elif fate.ended:
            raise SandboxError(f"sandbox {sandbox.id} was ended from outside while the harness ran")

    async def _check_calls(self, flight: Flight, session: GatewaySession) -> None:
        """Raise if a model call that the infrastructure failed has led to where the session is."""
        gave_up = flight.end_reason in (EndReason.EXITED, EndReason.ERROR, EndReason.MEMORY)
        await flight.within(session.settle(patient=not gave_up), None, "waiting")
        if (call := session.failure) is not None:
            failure = TurnFailed(call)
            flight.notes.append(str(failure))
            raise failure

    # BUILD

    async def build(self, flight: Flight, prepared: Prepared, seconds: float) -> None:
        """Seal the session, take out of the sandbox what is judged and what is kept, and let go of it.

        What the agent left cannot make this fail: what cannot be kept is a note, what cannot be judged is its own doing.
        """
        sandbox = flight.sandbox
        if flight.gateway_id:
            sealing = self.gateway.seal(flight.gateway_id, flight.end_reason or EndReason.ERROR)
            flight.trajectory = await flight.within(sealing, seconds, "building")
        if sandbox is None:
            return
        evaluator = prepared.evaluator
        if flight.sandbox_ended:
            if evaluator is not None and evaluator.needs_sandbox:
                flight.failures = [SandboxError("the sandbox has ended at its memory limit, with all that is judged")]
            flight.sandbox = None
            return await flight.within(sandbox.destroy(), seconds, "building")
        if evaluator is not None:
            await self.judging.collect(flight, prepared, sandbox, seconds)
        await self._noted(flight, self._keep_artifacts(flight, prepared, sandbox), seconds, "keeping the artifacts")
        if evaluator is not None:
            audit = self._audit(flight, sandbox, evaluator)
            await self._noted(flight, audit, seconds, "looking for changes that the verifier relies on")
        if evaluator is None or not evaluator.shared:
            flight.sandbox = None
            await flight.within(sandbox.destroy(), seconds, "building")

    async def _noted(self, flight: Flight, work: Coroutine[Any, Any, None], seconds: float, what: str) -> None:
        """Do what may fail without harm to the score: a failure is a note."""
        try:
            await flight.within(work, seconds, what)
        except Cancelled:
            raise
        except (TowlineError, OSError, ValueError) as error:
            flight.notes.append(f"{what} failed: {error}")

    async def _audit(self, flight: Flight, sandbox: Sandbox, evaluator: Evaluator) -> None:
        flight.notes += await leaks.after_run(sandbox, flight.task, evaluator)

    async def _keep_artifacts(self, flight: Flight, prepared: Prepared, sandbox: Sandbox) -> None:
        for path in prepared.environment.artifacts:
            folder = flight.logs / "artifacts"
            folder.mkdir(exist_ok=True)
            try:
                archive = await sandbox.get(path, most=self.settings.artifact_bytes)
                await asyncio.to_thread(archives.unpack, archive, folder, most=self.settings.artifact_bytes)
            except (SandboxError, archives.ArchiveError) as error:
                flight.notes.append(f"artifact {path} was not kept: {error}")

    # EVALUATE

    async def evaluate(self, flight: Flight, prepared: Prepared, trajectory: Trajectory, seconds: float) -> Reward:
        """The reward. A failed evaluation is the agent's doing, and scored, or raises `EvaluationFailed`."""
        return await self.judging.evaluate(flight, prepared, trajectory, seconds)


def _in(flight: Flight) -> Sandbox:
    if flight.sandbox is None:
        raise SandboxError(f"session {flight.session.session_id} has no sandbox")
    return flight.sandbox


def _loop_watch(found: asyncio.Event, times: int) -> Any:
    def watch(node: TurnNode) -> None:
        if repetitions(node) >= times:
            found.set()

    return watch


async def _converse(process: Process, stdin: str, log: Log) -> None:
    """Give the process what it reads, and keep what it prints."""
    with contextlib.suppress(ConnectionError, OSError):
        if stdin:
            process.stdin.write(stdin.encode())
            await process.stdin.drain()
        process.stdin.close()
    await log.follow(process)
