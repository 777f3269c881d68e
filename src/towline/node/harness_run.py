"""The RUN stage: the harness from its start to its end, its log, and loop detection.

The harness runs until it exits, is cancelled, exhausts a limit or its time, or repeats itself; then its processes are
killed. Its time limit starts with its run and is paused while an engine of the session is on hold. A model call that failed
because of infrastructure and was never answered fails the session, whatever the harness made of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from towline.common.budget import Budget
from towline.common.private_files import private_opener
from towline.common.redaction import StreamRedactor
from towline.config import NodeSettings
from towline.conversation import Message, ToolCall
from towline.errors import TowlineError
from towline.evaluators.base import StepEvaluator
from towline.gateway.calls import FailedCall
from towline.gateway.gateway import Gateway, OpenedSession
from towline.gateway.server import RunningGateway
from towline.gateway.session import GatewaySession
from towline.harnesses.base import HOME, Launch, LaunchContext
from towline.node.active_session import ActiveSession
from towline.node.breakers import CircuitBreakers
from towline.node.environment import PreparedTask, setup_environment, write_files
from towline.node.evaluation import SessionEvaluation
from towline.sandboxes.base import GATEWAY_PORT, Sandbox, SandboxError, SandboxProcess, live_listener, sandbox_health
from towline.schema import EndReason, Step
from towline.tokens.graph import fingerprint
from towline.tokens.graph.graph import GraphNode
from towline.tokens.graph.lineage import request_messages
from towline.tokens.graph.tool_results import bare_id

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KILLED = 128 + signal.SIGKILL
_GRACE = 5.0
"""Seconds that a harness has to exit by itself once the gateway refuses further turns."""
_PRECEDENCE = (EndReason.CANCELLED, EndReason.LIMIT, EndReason.LOOPING, EndReason.TIMEOUT)
"""Which reason counts if several apply."""
_MAY_CONTINUE = (EndReason.EXITED, EndReason.ERROR, EndReason.TIMEOUT, EndReason.MEMORY)
"""End reasons after which the next step may start."""
_TAIL = 4096


class ModelCallFailed(TowlineError):
    """The harness ended, gave up or continued after a model call that failed because of infrastructure."""

    def __init__(self, call: FailedCall):
        super().__init__(call.text)
        self.failure = call.failure
        self.call = call


class NoModelCalls(TowlineError):
    """The harness ended without a model call that reached the gateway."""

    failure = "harness"


@dataclass(slots=True)
class HarnessRunner:
    """Runs harnesses in their sandboxes."""

    gateway: Gateway
    running: RunningGateway
    settings: NodeSettings
    breakers: CircuitBreakers
    evaluation: SessionEvaluation

    async def run(self, active: ActiveSession, prepared: PreparedTask, seconds: float) -> None:
        """Run the harness to its end or to the end of its time limit; then all its processes are dead."""
        sandbox = active.require_sandbox()
        opened = await self.gateway.create(
            {
                "id": active.session.session_id,
                "group": active.task.task_id,
                # The instruction that the main conversation begins with.
                "instruction": active.task.steps[0].instruction if active.task.steps else active.task.instruction,
                "later_instructions": [step.instruction for step in active.task.steps[1:]],
                "metadata": {"attempt": active.session.attempt, "sample": active.session.sample},
                "settings": {**prepared.harness.settings, **active.task.settings},
            }
        )
        active.gateway_id = opened.session.id
        active.memory_kills = (await sandbox_health(sandbox, killed=False)).oom_kills
        listener = None
        base_url = self.running.base_url
        if (inside := live_listener(sandbox)) is not None:
            listener = await self.running.serve_session(inside, opened.session.id)
            base_url = f"http://127.0.0.1:{GATEWAY_PORT}"
        try:
            if active.task.steps:
                await self._run_steps(active, prepared, opened, base_url, seconds)
            else:
                launch = self._launch(active, prepared, base_url, opened.key)
                await self._run_once(active, prepared, launch, opened.session, seconds)
        finally:
            try:
                if not active.sandbox_ended:
                    await asyncio.shield(sandbox.kill())
            finally:
                if listener is not None:
                    await listener.close()

    async def _run_steps(
        self, active: ActiveSession, prepared: PreparedTask, opened: OpenedSession, base_url: str, seconds: float
    ) -> None:
        """Run the task's steps in order in the same sandbox, until one ends in a way that no step may follow.

        A harness that can resume its conversation does; any other starts a new one with each step.
        """
        sandbox = active.require_sandbox()
        for index, step in enumerate(active.task.steps):
            setup = setup_environment(sandbox, step, active.logs / "setup.log")
            await active.within(setup, self.settings.seconds.init, f"the set-up of step {step.name}")
            active.steps_given = index + 1
            resume = prepared.harness.resumes and bool(opened.session.graph.nodes)
            launch = self._launch(active, prepared, base_url, opened.key, step, resume=resume)
            await self._run_once(active, prepared, launch, opened.session, step.seconds or seconds, step)
            if (
                active.end_reason not in _MAY_CONTINUE
                or active.sandbox_ended
                or not await self._may_follow(active, prepared, index)
            ):
                return
            if active.end_reason is EndReason.TIMEOUT:
                active.notes.append(f"step {step.name} timed out")

    async def _may_follow(self, active: ActiveSession, prepared: PreparedTask, index: int) -> bool:
        """Whether there is a next step, and this one's score lets it begin. The last one is evaluated with the session."""
        if index + 1 == len(active.task.steps):
            return False
        if not isinstance(prepared.evaluator, StepEvaluator):
            return True
        seconds = active.task.timeouts.evaluate or self.settings.seconds.evaluate
        with active.timed("judge_steps"):
            return await self.evaluation.evaluate_step(active, prepared, index, seconds)

    def _launch(
        self,
        active: ActiveSession,
        prepared: PreparedTask,
        base_url: str,
        key: str,
        step: Step | None = None,
        *,
        resume: bool = False,
    ) -> Launch:
        harness = prepared.harness
        launch_context = LaunchContext(
            base_url=base_url,
            key=key,
            model=self.gateway.model,
            instruction=step.instruction if step is not None else active.task.instruction,
            install=prepared.install,
            workdir=prepared.environment.workdir,
            context=self.gateway.engine.info.context,
            max_tokens=self.gateway.defaults.sampling.max_tokens,
            session=active.session.session_id,
            options=active.task.harness_options,
            resume=resume,
        )
        return harness.launch(harness.resolve(launch_context))

    async def _run_once(
        self,
        active: ActiveSession,
        prepared: PreparedTask,
        launch: Launch,
        session: GatewaySession,
        seconds: float,
        step: Step | None = None,
    ) -> None:
        sandbox = active.require_sandbox()
        looping = asyncio.Event()
        if self.settings.looping:
            session.turns.watchers.append(_loop_watcher(looping, self.settings.looping))
        await write_files(sandbox, launch.files)
        env = {"PATH": PATH, "HOME": HOME, "TERM": "dumb", **prepared.environment.env, **launch.env}
        if step is not None:
            env["TOWLINE_STEP"] = step.name
        process = await sandbox.start(launch.command, env=env, cwd=launch.cwd or None)
        log = HarnessLog(active.logs / "harness.log", self.settings.log_bytes)
        following = asyncio.ensure_future(_converse(process, launch.stdin, log))
        ended = asyncio.ensure_future(process.wait())
        budget = Budget(seconds)
        release = session.hold(budget)
        watches = {
            EndReason.TIMEOUT: asyncio.ensure_future(budget.used_up()),
            EndReason.CANCELLED: asyncio.ensure_future(active.cancelled.wait()),
            EndReason.LIMIT: asyncio.ensure_future(session.exhausted.wait()),
            EndReason.LOOPING: asyncio.ensure_future(looping.wait()),
        }
        held = asyncio.ensure_future(self.breakers.lasting(active.engines, self.settings.hold_seconds))
        try:
            await asyncio.wait({ended, held, *watches.values()}, return_when=asyncio.FIRST_COMPLETED)
            cut = next((reason for reason in _PRECEDENCE if watches[reason].done()), None)
            if not ended.done() and cut is EndReason.LIMIT:
                await asyncio.wait({ended}, timeout=_GRACE)
            if held.done() and not ended.done() and cut is None:
                raise held.result()
            if ended.done() or cut is None:
                active.exit_code = ended.result()
                well = active.exit_code in prepared.harness.success
                active.end_reason = cut if cut is EndReason.LIMIT else EndReason.EXITED if well else EndReason.ERROR
            else:
                active.end_reason = cut
            if active.end_reason is not EndReason.CANCELLED:
                await self._check_sandbox(active, sandbox)
            if not active.sandbox_ended:
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
        if active.end_reason is not EndReason.CANCELLED:
            await self._check_calls(active, session)
        silent = not session.graph.nodes and prepared.harness.calls_model
        if silent and session.usage.refused:
            # Its calls reached the gateway and exceeded the session's budgets: its own doing.
            active.notes.append("every model call exceeded a budget of the session")
            active.end_reason = EndReason.LIMIT if active.end_reason in _MAY_CONTINUE else active.end_reason
        elif silent and active.end_reason in _MAY_CONTINUE:
            timed_out = active.end_reason is EndReason.TIMEOUT
            how = "timed out" if timed_out else f"exited with code {active.exit_code}"
            raise NoModelCalls(
                f"harness {prepared.harness.name} {how} and made no model call that "
                f"reached the gateway; its last output: {log.tail()[-1000:] or 'none'}"
            )

    async def _check_sandbox(self, active: ActiveSession, sandbox: Sandbox) -> None:
        """Raise if the sandbox was ended by anything but the agent or its memory limit."""
        killed = active.exit_code == _KILLED and active.end_reason in (EndReason.ERROR, EndReason.EXITED)
        health = await sandbox_health(sandbox, killed=killed)
        fresh = health.oom_kills - active.memory_kills
        active.memory_kills, active.sandbox_ended = health.oom_kills, health.ended
        if fresh > 0:
            most = sandbox.spec.resources.memory_mb
            victim = "the harness" if killed or health.ended else "processes of the agent"
            active.notes.append(f"the sandbox's memory limit of {most} MB killed {victim}")
            if killed or health.ended:
                active.end_reason = EndReason.MEMORY
        elif health.other_kills:
            raise SandboxError(
                "the sandboxes of this node together used up their memory, and processes of this session were killed: "
                "lower node.run_workers or memory_mb, or raise node.total_memory_mb"
            )
        elif health.ended:
            raise SandboxError(
                f"sandbox {sandbox.id} was killed from outside while the harness ran; see the host's log for the cause"
            )

    async def _check_calls(self, active: ActiveSession, session: GatewaySession) -> None:
        """Raise if the infrastructure failed a model call that was never answered."""
        gave_up = active.end_reason in (EndReason.EXITED, EndReason.ERROR, EndReason.MEMORY)
        await active.within(session.turns.end_inflight(stopped=not gave_up), None, "waiting")
        if (call := session.failure) is not None:
            failure = ModelCallFailed(call)
            active.notes.append(str(failure))
            raise failure


def _loop_watcher(found: asyncio.Event, times: int) -> Callable[[GraphNode], None]:
    def watch(node: GraphNode) -> None:
        if count_repetitions(node) >= times:
            found.set()

    return watch


async def _converse(process: SandboxProcess, stdin: str, log: HarnessLog) -> None:
    """Write the process's input, and keep its output."""
    with contextlib.suppress(ConnectionError, OSError):
        if stdin:
            process.stdin.write(stdin.encode())
            await process.stdin.drain()
        process.stdin.close()
    await log.follow(process)


class HarnessLog:
    """What a harness prints, in a file of bounded size: its beginning and, more important, its end.

    Both streams of the process, interleaved as they arrive, without the keys of sessions. Only its owner may read it.
    """

    def __init__(self, path: Path, most: int):
        self.path = path
        self.most = most
        # Unbuffered, so that output before a crash is in the file.
        self._file = open(path, "ab", buffering=0, opener=private_opener)  # noqa: SIM115  closed by `close`
        self._written = self._file.tell()
        self._end_chunks: deque[bytes] = deque()
        self._tail_size = 0
        self._omitted = 0

    def write(self, data: bytes) -> None:
        half = self.most // 2
        room = max(0, half - self._written)
        if room:
            self._file.write(data[:room])
            self._written += len(data[:room])
            data = data[room:]
        if data:
            self._end_chunks.append(data)
            self._tail_size += len(data)
            while self._tail_size - len(self._end_chunks[0]) > half:
                dropped = self._end_chunks.popleft()
                self._tail_size -= len(dropped)
                self._omitted += len(dropped)

    async def follow(self, process: SandboxProcess) -> None:
        """Keep what the process prints until it closes its streams."""
        await asyncio.gather(self._copy(process.stdout), self._copy(process.stderr))

    async def _copy(self, stream: asyncio.StreamReader) -> None:
        redactor = StreamRedactor()
        try:
            with contextlib.suppress(ConnectionError):
                while data := await stream.read(65_536):
                    self.write(redactor.feed(data))
        finally:
            self.write(redactor.close())

    def close(self) -> None:
        if self._omitted:
            self._file.write(f"\n… {self._omitted} bytes omitted …\n".encode())
        for data in self._end_chunks:
            self._file.write(data)
        self._end_chunks.clear()
        self._file.close()

    def tail(self) -> str:
        """The end of the output, for an error message."""
        if not self._file.closed:
            self._file.flush()
        data = b"".join(self._end_chunks)[-_TAIL:]
        if len(data) < _TAIL:
            with open(self.path, "rb") as file:
                file.seek(0, 2)
                file.seek(max(0, file.tell() - (_TAIL - len(data))))
                data = file.read() + data if not self._file.closed else file.read()
        return data[-_TAIL:].decode("utf-8", "replace").strip()


_Step = tuple[tuple[str, bytes, str], ...]
"""The calls of one message, each with its result, without their ids."""


def count_repetitions(node: GraphNode) -> int:
    """How many times in a row, up to this turn, the same calls had the same results; 0 if the last step had no call.

    The larger of two counts: along the turns, each step as it was first sent, and within this request's own history. Calls
    and results are compared, not the structure of the graph: a harness that edits its history makes every turn a root, and
    may repeat itself all the same.
    """
    return max(_along(_as_happened(node)), _along(_steps(request_messages(node))))


def _along(steps: Iterator[_Step | None]) -> int:
    first = next(steps, None)
    if not first:
        return 0
    # A harness may merge equal calls of several turns into one message: each counts.
    unit = first[:1] if len(set(first)) == 1 else first
    alike = takewhile(lambda step: bool(step) and set(step or ()) == set(unit), steps)
    return sum(len(step) if len(unit) == 1 else 1 for step in (first, *alike) if step)


def _as_happened(node: GraphNode) -> Iterator[_Step | None]:
    """The steps that led to this turn and to its predecessors, last first."""
    turn: GraphNode | None = node
    while turn is not None:
        before = turn.parent or turn.origin
        replied = before is not None and (turn.parent is not None or len(turn.new) < turn.message_count)
        reply = [before.reply_message()] if replied and before is not None and before.reply is not None else []
        yield next(_steps([*reply, *turn.new]), None)
        turn = before


def _steps(messages: Sequence[Message]) -> Iterator[_Step | None]:
    """The steps of a history, last first."""
    end = len(messages)
    for place in range(len(messages) - 1, -1, -1):
        message = messages[place]
        if message.role == "assistant":
            yield _step(message.tool_calls, messages[place + 1 : end])
            end = place


def _step(calls: Sequence[ToolCall], after: Sequence[Message]) -> _Step | None:
    """The calls with their results; `None` without a call."""
    if not calls:
        return None
    results = [message for message in after if message.role == "tool"]
    by_id = {bare_id(message.tool_call_id): message.text for message in results}
    # If ids were altered beyond recognition, results are in the order of the calls.
    in_order = [*(message.text for message in results), *("" for _ in calls)]
    return tuple(
        (call.name, fingerprint.canonical(call.arguments), by_id.get(bare_id(call.id), in_order[place]))
        for place, call in enumerate(calls)
    )
