"""Checks that a harness works: one run in a sandbox against a scripted model, with every call accounted for.

The gateway is the sandbox's only network and every request is counted, so no model call can be missed: each is a recorded
turn, or a refusal that the result lists. A harness that made no call fails the check, whatever its exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from towline.common.progress import OnProgress
from towline.config import GatewaySettings
from towline.conversation import Request, ToolCall
from towline.engines.scripted import Say, ScriptedEngine, example_arguments, shell_like
from towline.gateway.app import ProviderApp
from towline.gateway.gateway import Gateway
from towline.gateway.server import RunningGateway, serve_gateway
from towline.harnesses.base import HOME, Harness, LaunchContext
from towline.harnesses.install import Installs, check_libc, install_mount, sandbox_path
from towline.node.environment import write_files
from towline.node.harness_run import PATH
from towline.sandboxes.base import (
    GATEWAY_PORT,
    CommandResult,
    Mount,
    Runtime,
    Sandbox,
    SandboxSpec,
    execute,
    live_listener,
)
from towline.schema import Network, Trajectory
from towline.tokens.codec import ModelCodec

INSTRUCTION = "Run the commands that you think of, then tell that you are done."
SECONDS = 300.0
_TURNS = 24
"""More than any harness needs for the script; ends a harness that loops."""
_ENDS = ("finish", "submit", "complete", "attempt_completion")
_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command that ends harnesses without a tool for it."""
_QUOTED = 600


@dataclass(frozen=True, slots=True)
class HarnessCheckResult:
    """The result of one run of a harness."""

    harness: str
    version: str
    problems: tuple[str, ...] = ()
    """All problems, one line each; empty if the harness works."""
    dialect: str = ""
    turns: int = 0
    """Number of recorded model calls."""
    refused: tuple[str, ...] = ()
    """Refused model calls, as method, path and status."""
    chains: int = 0
    forks: Mapping[str, int] = field(default_factory=dict)
    """Number of forks by reason."""
    tools_ran: bool = False
    """Whether the output of a command that the model called was returned to it."""
    exit_code: int | None = None
    seconds: float = 0.0
    """Duration of the run."""
    output: str = ""
    """The end of its output."""

    @property
    def ok(self) -> bool:
        return not self.problems


async def check_harness(
    harness: Harness,
    *,
    installs: Installs,
    runtime: Runtime,
    codec: ModelCodec,
    data: Path,
    options: Mapping[str, Any] | None = None,
    root: str = "",
    seconds: float = SECONDS,
    progress: OnProgress | None = None,
) -> HarnessCheckResult:
    """Install the harness if necessary, run it once and account for its calls.

    `runtime` must be open and isolating; `data` is an empty folder. Problems of the harness are in the result; problems of
    the machine are raised (`InstallError`, `SandboxError`).
    """
    harness = harness.configured(options or {})
    mounts = [Mount(folder, target) for target, folder in harness.mounts.items()]
    if harness.install is not None:
        mounts.append(install_mount(harness, await installs.ensure(harness, progress)))
    spec = SandboxSpec(root=root, mounts=tuple(mounts), network=Network.GATEWAY)
    await runtime.prepare(spec)
    engine = ScriptedEngine(codec, CheckScript())
    gateway = Gateway(engine, codec, GatewaySettings(port=0, control_port=0, data=data))
    async with serve_gateway(gateway, secrets.token_urlsafe()) as running, _sandbox(runtime, spec) as sandbox:
        if harness.install is not None:
            await check_libc(sandbox, harness, sandbox_path(harness))
        counting = _CountingApp(running.provider)
        running.provider = counting
        began = time.perf_counter()
        done, trajectory = await _run(harness, gateway, running, sandbox, options or {}, seconds)
        return _result(harness, done, trajectory, counting.refused, len(engine.requests), time.perf_counter() - began)


async def _run(
    harness: Harness,
    gateway: Gateway,
    running: RunningGateway,
    sandbox: Sandbox,
    options: Mapping[str, Any],
    seconds: float,
) -> tuple[CommandResult, Trajectory]:
    settings = {**harness.settings, "limits": {"turns": _TURNS}}
    opened = await gateway.create({"instruction": INSTRUCTION, "settings": settings})
    base_url, listener = running.base_url, None
    if (inside := live_listener(sandbox)) is not None:
        base_url = f"http://127.0.0.1:{GATEWAY_PORT}"
        listener = await running.serve_session(inside, opened.session.id)
    try:
        place = LaunchContext(
            base_url=base_url,
            key=opened.key,
            model=gateway.model,
            instruction=INSTRUCTION,
            install=sandbox_path(harness),
            context=gateway.engine.info.context,
            session=opened.session.id,
            options=options,
        )
        launch = harness.launch(harness.resolve(place))
        await write_files(sandbox, launch.files)
        env = {"PATH": PATH, "HOME": HOME, "TERM": "dumb", **launch.env}
        done = await execute(
            sandbox,
            launch.command,
            stdin=launch.stdin.encode(),
            env=env,
            cwd=launch.cwd or None,
            seconds=seconds,
        )
        await sandbox.kill()
    finally:
        if listener is not None:
            await listener.close()
    return done, await gateway.seal(opened.session.id)


def _result(
    harness: Harness, done: CommandResult, trajectory: Trajectory, refused: Sequence[str], sampled: int, seconds: float
) -> HarnessCheckResult:
    turns = trajectory.turns
    output = " ".join(done.text.split())[-_QUOTED:]
    last = f"; its last output: {output}" if output else "; it printed nothing"
    problems = []
    if done.timed_out:
        problems.append(f"it timed out after {seconds:.0f} s{last}")
    elif done.code not in harness.success:
        problems.append(f"it exited with code {done.code}{last}")
    if not turns and harness.calls_model:
        problems.append(f"it made no model call that reached the gateway{last}")
    problems += [f"a model call was refused: {call}" for call in dict.fromkeys(refused)]
    if len(turns) != sampled:
        problems.append(f"{sampled} calls were sampled and {len(turns)} recorded")
    if lost := sum(not turn.delivered for turn in turns):
        problems.append(f"{lost} replies were not received")
    if turns and not trajectory.traces:
        problems.append("none of its calls yields a training row")
    if len(turns) >= _TURNS:
        problems.append(f"it did not end after an answer, but continued for {len(turns)} calls")
    return HarnessCheckResult(
        harness=harness.name,
        version=harness.version,
        problems=tuple(problems),
        dialect=turns[0].dialect if turns else "",
        turns=len(turns),
        refused=tuple(refused),
        chains=trajectory.report.chains,
        forks={str(reason): count for reason, count in trajectory.report.forks.items()},
        tools_ran=any("towline-0-0" in str(message) for turn in turns[1:] for message in turn.messages),
        exit_code=done.code,
        seconds=seconds,
        output=done.text[-4 * _QUOTED :],
    )


class CheckScript:
    """One call, two parallel calls, then the end in the harness's own way: a tool for it, an answer, or a command.

    Steps are counted by the model's messages, because some harnesses add a note of their own after every result.
    """

    def __init__(self) -> None:
        self.answered = False

    def __call__(self, request: Request) -> Say:
        taken = [message for message in request.messages if message.role == "assistant"]
        tool = shell_like(request.tools)
        if tool is None:
            return Say("A short title.")
        if len(taken) < 2:
            calls = [
                ToolCall("", tool.name, example_arguments(tool, _command(len(taken), n))) for n in range(len(taken) + 1)
            ]
            return Say("", f"Step {len(taken)}: I need {tool.name}.", calls)
        ends = next((tool for tool in request.tools if tool.name.lower() in _ENDS), None)
        if ends is not None:
            return Say("", "I am done.", [ToolCall("", ends.name, example_arguments(ends, "All is done."))])
        if not self.answered:
            self.answered = True
            return Say("All is done.", "I can answer.")
        # The answer did not end it: some harnesses end only on a command.
        return Say("", "I must say so by a command.", [ToolCall("", tool.name, example_arguments(tool, _SUBMIT))])


def _command(step: int, number: int) -> str:
    return f"echo towline-{step}-{number}"


class _CountingApp(ProviderApp):
    """The provider routes, recording every refused model call."""

    def __init__(self, app: ProviderApp):
        self.__dict__.update(vars(app))
        self.refused: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(event: Message) -> None:
            # Requests other than POST are optional probes.
            if event["type"] == "http.response.start" and event["status"] >= 400 and scope["method"] == "POST":
                self.refused.append(f"POST {scope['path']} {event['status']}")
            await send(event)

        await super().__call__(scope, receive, watched)


@contextlib.asynccontextmanager
async def _sandbox(runtime: Runtime, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    sandbox = await runtime.create(spec)
    try:
        yield sandbox
    finally:
        await asyncio.shield(sandbox.destroy())
