"""A real harness in a real sandbox against the scripted engine: launch it once or more, seal, look at the trajectory.

Nothing is installed here: `towline harness install NAME` does that, once a machine. The sandbox is bubblewrap with the
gateway as its only network, so that a program that needs anything else shows it.
"""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from support.gateway.gateway_rig import CONTROL_KEY, logged_errors
from support.harnesses.harness_scripts import STEPS, journey, marks
from towline import assets
from towline.config import GatewaySettings
from towline.engines.scripted import Script, ScriptedEngine
from towline.gateway.gateway import Gateway, OpenedSession
from towline.gateway.server import RunningGateway, serve_gateway
from towline.harnesses.base import HOME, Harness, LaunchContext
from towline.harnesses.install import Installs, cache_folder, check_libc, install_mount, sandbox_path
from towline.harnesses.registry import find_harness
from towline.sandboxes.base import GATEWAY_PORT, CommandResult, Mount, Sandbox, SandboxSpec, execute
from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime
from towline.sandboxes.files.archives import pack
from towline.schema import ForkReason, Network, Trajectory, Turn, TurnRole
from towline.schema.vocabulary import TRAINED_ROLES
from towline.tokens.codec import ModelCodec
from towline.tokens.loading import load_codec

INSTALLS = Installs(cache_folder())
"""Found while tests are collected, before the user's cache folder is out of sight."""
MODEL = "Qwen/Qwen3-4B"
"""A name with a slash, as most have."""
SECONDS = 240.0
"""After which a harness is taken to hang."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Bench:
    """A session of a harness that can be given one user turn after the other."""

    harness: Harness
    gateway: Gateway
    engine: ScriptedEngine
    sandbox: Sandbox
    opened: OpenedSession
    base_url: str
    options: Mapping[str, Any]
    context: int
    runs: list[CommandResult] = field(default_factory=list)

    async def say(self, instruction: str, **more: Any) -> str:
        """Launch the harness with an instruction, going on with the conversation if there is one; what it printed.

        It must end by itself and well.
        """
        resume = bool(self.runs)
        place = LaunchContext(
            base_url=self.base_url,
            key=self.opened.key,
            model=self.gateway.model,
            instruction=instruction,
            install=sandbox_path(self.harness),
            context=self.context,
            session=self.opened.session.id,
            options=self.options,
            resume=resume,
            **more,
        )
        launch = self.harness.launch(self.harness.resolve(place))
        if launch.files:
            files = {path.lstrip("/"): text.encode() for path, text in launch.files.items()}
            await self.sandbox.put(pack(files), "/")
        env = {"PATH": PATH, "HOME": HOME, "TERM": "dumb", **launch.env}
        done = await execute(
            self.sandbox,
            launch.command,
            stdin=launch.stdin.encode(),
            env=env,
            cwd=launch.cwd or None,
            seconds=SECONDS,
        )
        self.runs.append(done)
        assert not done.timed_out, f"{self.harness.name} hangs; it said: {done.text[-3000:]}"
        assert done.code in self.harness.success, f"{self.harness.name} ended with {done.code}: {done.text[-3000:]}"
        return done.text

    async def seal(self) -> Trajectory:
        """End the session; its trajectory as it was written, checked by the contract's own invariants."""
        return await self.gateway.seal(self.opened.session.id)

    async def file(self, path: str) -> str:
        """A file inside."""
        with tarfile.open(fileobj=io.BytesIO(await self.sandbox.get(path))) as archive:
            member = archive.extractfile(archive.getmembers()[0])
            assert member is not None
            return member.read().decode()


@cache
def qwen3() -> ModelCodec:
    return load_codec(assets.folder() / "tokenizers" / "qwen3")


@contextlib.asynccontextmanager
async def bench(
    name: str,
    data: Path,
    script: Script = journey,
    *,
    context: int = 131_072,
    settings: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    instruction: str = "",
    root: str = "",
    engine: Any = None,
) -> AsyncIterator[Bench]:
    """A gateway, an installed harness and a sandbox. An error in a log fails the test, as in the gateway's own tests."""
    harness = find_harness(name).configured(options or {})
    assert INSTALLS.ready(harness), f"{name} is not installed in {INSTALLS.folder}; run: towline harness install {name}"
    codec = qwen3()
    engine = engine or ScriptedEngine(codec, script, context=context)
    gateway = Gateway(engine, codec, GatewaySettings(port=0, control_port=0, data=data / "gateway"), model=MODEL)
    mounts = [Mount(folder, target) for target, folder in harness.mounts.items()]
    if harness.install is not None:
        mounts.append(install_mount(harness, INSTALLS.path(harness)))
    spec = SandboxSpec(root=root, mounts=tuple(mounts), network=Network.GATEWAY)
    with logged_errors() as errors:
        async with serve_gateway(gateway, CONTROL_KEY) as running, sandbox_of(spec, data) as sandbox:
            opened = await gateway.create(
                {"instruction": instruction, "settings": {**harness.settings, **(settings or {})}}
            )
            if harness.install is not None:
                await check_libc(sandbox, harness, sandbox_path(harness))
            async with admitted(running, sandbox, opened) as base_url:
                yield Bench(harness, gateway, engine, sandbox, opened, base_url, options or {}, context)
    assert not errors, "\n".join(errors)


@contextlib.asynccontextmanager
async def sandbox_of(spec: SandboxSpec, data: Path) -> AsyncIterator[Sandbox]:
    runtime = BubblewrapRuntime(data / "sandboxes")
    await runtime.open()
    try:
        await runtime.prepare(spec)
        sandbox = await runtime.create(spec)
        try:
            yield sandbox
        finally:
            await sandbox.destroy()
    finally:
        await runtime.close()


@contextlib.asynccontextmanager
async def admitted(running: RunningGateway, sandbox: Sandbox, opened: OpenedSession) -> AsyncIterator[str]:
    """The gateway at the sandbox's own listener; how the harness reaches it."""
    assert sandbox.listener is not None, "the sandbox has no listener of its own"
    door = await running.serve_session(sandbox.listener, opened.session.id)
    try:
        yield f"http://127.0.0.1:{GATEWAY_PORT}"
    finally:
        await door.close()


def assert_exact(bench: Bench, trajectory: Trajectory) -> None:
    """The trajectory holds every call that reached the engine, token for token, and trains each sampled token once."""
    seen = sorted(request.prompt.tolist() for request in bench.engine.requests)
    assert sorted(trajectory.prompt(turn.id).tolist() for turn in trajectory.turns) == seen
    assert seen, "no call reached the engine"
    assert all(turn.delivered for turn in trajectory.turns)
    trained = sum(len(turn.sampled) for turn in trajectory.turns if turn.role in TRAINED_ROLES)
    assert sum(trace.trained_tokens for trace in trajectory.traces) == trained > 0
    assert trajectory.report.malformed_calls == 0
    gone_on_from: set[str | None] = {None}
    for turn in trajectory.turns[1:]:
        # A turn goes on from the end of a conversation, or says why it does not.
        forks = turn.parent in gone_on_from
        assert turn.reason is not None or not forks, f"turn {turn.index} forked without a reason"
        gone_on_from.add(turn.parent)


def assert_main_chain(trajectory: Trajectory, turns: int) -> list[Turn]:
    """The main conversation is one chain of so many turns in one row; its turns."""
    main = [turn for turn in trajectory.turns if turn.role is TurnRole.MAIN]
    assert [turn.parent for turn in main] == [None, *(turn.id for turn in main[:-1])], trajectory.report
    assert len(main) == turns
    (trace,) = (trace for trace in trajectory.traces if trace.role is TurnRole.MAIN)
    assert trace.trained_tokens == sum(len(turn.sampled) for turn in main)
    return main


def reasons(trajectory: Trajectory) -> dict[ForkReason, int]:
    """How often conversations forked, and why."""
    return dict(Counter(turn.reason for turn in trajectory.turns if turn.reason is not None))


async def assert_journey(bench: Bench, rounds: int) -> None:
    """The commands of so many user turns really ran, and what they printed reached the model."""
    assert sorted((await bench.file(STEPS)).split()) == marks(rounds)
    told = " ".join(m.text for r in bench.engine.requests if r.request for m in r.request.messages if m.role == "tool")
    assert [mark for mark in marks(rounds) if mark not in told] == []
