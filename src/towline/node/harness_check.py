"""Does a harness work here? One run of it, in a sandbox, against a scripted model, with every call accounted for.

The sandbox has the gateway as its only network and the door counts what comes through, so no model call can be missed:
each is a recorded turn, or a refusal that the result names. A harness that made no call is a failure, whatever its exit
code says.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from towline.config import GatewaySettings
from towline.conversation import Request, ToolCall
from towline.engines.scripted import Say, ScriptedEngine, example_arguments, shell_like
from towline.gateway.app import ProviderApp
from towline.gateway.gateway import Gateway
from towline.gateway.server import Running, serving
from towline.harnesses.base import HOME, Harness, Place
from towline.harnesses.install import Installs, check_libc, inside, mount
from towline.node.furnish import write_files
from towline.node.lifecycle import PATH
from towline.sandboxes.base import GATEWAY_PORT, Done, Mount, Runtime, Sandbox, Spec, execute
from towline.schema import Network, Trajectory
from towline.tokens.codec import Codec

INSTRUCTION = "Run the commands that you think of, then tell that you are done."
SECONDS = 300.0
_TURNS = 24
"""More than any harness needs for the script; one that goes round in circles ends there."""
_ENDS = ("finish", "submit", "complete", "attempt_completion")
_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How programs without a tool for it are told the end."""
_SAID = 600

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one run of a harness showed."""

    harness: str
    version: str
    problems: tuple[str, ...] = ()
    """Everything that is wrong, each in one line; empty if the harness works."""
    dialect: str = ""
    turns: int = 0
    """Model calls that were recorded."""
    refused: tuple[str, ...] = ()
    """Model calls that were not answered, as method, path and status."""
    chains: int = 0
    forks: Mapping[str, int] = field(default_factory=dict)
    """Why conversations forked, and how often."""
    tools_ran: bool = False
    """Whether the output of a command that the model asked for came back to it."""
    exit_code: int | None = None
    seconds: float = 0.0
    """From the start of the harness to its end."""
    output: str = ""
    """The end of what it printed."""

    @property
    def ok(self) -> bool:
        return not self.problems


async def check(
    harness: Harness,
    *,
    installs: Installs,
    runtime: Runtime,
    codec: Codec,
    data: Path,
    options: Mapping[str, Any] | None = None,
    root: str = "",
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> CheckResult:
    """Install the harness if need be, run it once and account for its calls.

    `runtime` must be open and isolate; `data` is an empty folder of the caller's. What is wrong with the harness is in the
    result; what is wrong with the machine is raised (`InstallError`, `SandboxError`).
    """
    harness = harness.configured(options or {})
    mounts = [Mount(folder, target) for target, folder in harness.mounts.items()]
    if harness.install is not None:
        mounts.append(mount(harness, await installs.ensure(harness, progress)))
    spec = Spec(root=root, mounts=tuple(mounts), network=Network.GATEWAY)
    await runtime.prepare(spec)
    engine = ScriptedEngine(codec, Script())
    gateway = Gateway(engine, codec, GatewaySettings(port=0, control_port=0, data=data))
    async with serving(gateway, secrets.token_urlsafe()) as running, _sandbox(runtime, spec) as sandbox:
        if harness.install is not None:
            await check_libc(sandbox, harness, inside(harness))
        witness = _Witness(running.provider)
        running.provider = witness
        began = time.perf_counter()
        done, trajectory = await _run(harness, gateway, running, sandbox, options or {}, seconds)
        return _judge(harness, done, trajectory, witness.refused, len(engine.requests), time.perf_counter() - began)


async def _run(
    harness: Harness,
    gateway: Gateway,
    running: Running,
    sandbox: Sandbox,
    options: Mapping[str, Any],
    seconds: float,
) -> tuple[Done, Trajectory]:
    settings = {**harness.settings, "limits": {"turns": _TURNS}}
    opened = await gateway.create({"instruction": INSTRUCTION, "settings": settings})
    base_url, door = running.base_url, None
    if sandbox.listener is not None:
        base_url = f"http://127.0.0.1:{GATEWAY_PORT}"
        door = await running.admit(sandbox.listener, opened.session.id)
    try:
        place = Place(
            base_url=base_url,
            key=opened.key,
            model=gateway.model,
            instruction=INSTRUCTION,
            install=inside(harness),
            context=gateway.engine.info.context,
            session=opened.session.id,
            options=options,
        )
        launch = harness.launch(harness.place(place))
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
        if door is not None:
            await door.close()
    return done, await gateway.seal(opened.session.id)


def _judge(
    harness: Harness, done: Done, trajectory: Trajectory, refused: Sequence[str], sampled: int, seconds: float
) -> CheckResult:
    turns = trajectory.turns
    said = " ".join(done.text.split())[-_SAID:]
    told = f"; it last said: {said}" if said else "; it said nothing"
    problems = []
    if done.timed_out:
        problems.append(f"it did not end within {seconds:.0f} s{told}")
    elif done.code not in harness.success:
        problems.append(f"it ended with exit code {done.code}{told}")
    if not turns and harness.calls_model:
        problems.append(f"it made no model call that reached the gateway{told}")
    problems += [f"a call of it was not answered: {call}" for call in dict.fromkeys(refused)]
    if len(turns) != sampled:
        problems.append(f"{sampled} calls were sampled and {len(turns)} recorded")
    if lost := sum(not turn.delivered for turn in turns):
        problems.append(f"{lost} replies were never received")
    if turns and not trajectory.traces:
        problems.append("none of its calls gives a training row")
    if len(turns) >= _TURNS:
        problems.append(f"it did not end after an answer, but went on for {len(turns)} calls")
    return CheckResult(
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
        output=done.text[-4 * _SAID :],
    )


class Script:
    """One call, two calls at once, then the end in the harness's own way: a tool for it, an answer, or a command that
    means it. Steps are counted by what the model said, since some harnesses put a note of their own after every result."""

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
        # The answer did not end it: some programs end on a command only.
        return Say("", "I must say so by a command.", [ToolCall("", tool.name, example_arguments(tool, _SUBMIT))])


def _command(step: int, number: int) -> str:
    return f"echo towline-{step}-{number}"


class _Witness(ProviderApp):
    """The provider routes, with a note of every model call that was refused."""

    def __init__(self, app: ProviderApp):
        self.__dict__.update(vars(app))
        self.refused: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(event: Message) -> None:
            # What is not posted is a probe for this or that, which a harness does without.
            if event["type"] == "http.response.start" and event["status"] >= 400 and scope["method"] == "POST":
                self.refused.append(f"POST {scope['path']} {event['status']}")
            await send(event)

        await super().__call__(scope, receive, noting)


@contextlib.asynccontextmanager
async def _sandbox(runtime: Runtime, spec: Spec) -> AsyncIterator[Sandbox]:
    sandbox = await runtime.create(spec)
    try:
        yield sandbox
    finally:
        await asyncio.shield(sandbox.destroy())
