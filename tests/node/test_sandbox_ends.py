"""Who ended the sandbox: something outside (FAILED), its own memory limit (end reason `memory`), or the agent itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.node.node_rig import NodeRig, a_task, ancestors, first_of, processes_named, running_node, until
from towline.conversation import Request, ToolCall
from towline.engines.scripted import Say
from towline.errors import TowlineError
from towline.node.breakers import ProbeBackoff
from towline.node.finished import FinishedSession
from towline.runs.run import run_group
from towline.sandboxes.base import SandboxError
from towline.schema import EndReason, FailureReason, SandboxKind, SessionState
from towline.tokens.codec import ModelCodec
from towline.tokens.loading import load_codec

SCORED = {"kind": "completed"}


@pytest.fixture(scope="module")
def codec(assets: Path) -> ModelCodec:
    return load_codec(assets / "tokenizers" / "qwen3")


def works(request: Request) -> Say:
    if request.messages[-1].role == "tool":
        return Say("It is done.")
    return Say("", "I look.", [ToolCall("", "bash", {"command": "echo here"})])


async def one(rig: NodeRig, behaviour: str, **fields: Any) -> FinishedSession:
    fields = {"evaluator": SCORED, "max_attempts": 1, **fields}
    (finished,) = await asyncio.wait_for(run_group(rig.node, a_task(behaviour, program="shaken.py", **fields)), 240)
    return finished


def children(of: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{of}/task/{of}/children").read_text().split()]


def init(rig: NodeRig, harness: int) -> int:
    return first_of(harness)


def spawner(rig: NodeRig, harness: int) -> int:
    """The process outside that starts the sandbox's commands: the harness's parent, or its parent's."""
    parent = harness
    while os.readlink(f"/proc/{parent}/ns/pid") != os.readlink("/proc/self/ns/pid"):
        parent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
    return parent


def supervisor(rig: NodeRig, harness: int) -> int:
    runtime, _ = rig.node._runtimes._open[SandboxKind.BUBBLEWRAP]
    return int(runtime._supervisor.pid)  # type: ignore[attr-defined]


@pytest.mark.parametrize("victim", [init, spawner, supervisor])
async def test_a_sandbox_that_is_killed_from_outside_fails_the_session(
    victim: Callable[[NodeRig, int], int], codec: ModelCodec, tmp_path: Path
) -> None:
    async with running_node(codec, tmp_path, works) as rig:
        work = asyncio.ensure_future(one(rig, "linger"))
        live = rig.gateway.sessions
        await until(
            lambda: any(session.turns.started == 1 and not session.turns.tasks for session in live.values()), 120
        )
        await until(lambda: bool(harnesses()), 60)
        os.kill(victim(rig, harnesses()[0]), signal.SIGKILL)
        finished = await work
        assert finished.session.state is SessionState.FAILED, finished.trajectory.end_reason
        assert finished.session.failure is FailureReason.SANDBOX
        assert "killed from outside" in (finished.session.error or "")
        assert finished.trajectory.reward is None or finished.trajectory.reward.score is None


async def test_a_sandbox_that_is_killed_before_its_harness_starts_fails_the_session(
    codec: ModelCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its listener is closed then: that is the sandbox's end, and no failure of the node's disk."""
    async with running_node(codec, tmp_path, works) as rig:
        create = rig.gateway.create

        async def killed_meanwhile(fields: Any) -> Any:
            opened = await create(fields)
            runtime, _ = rig.node._runtimes._open[SandboxKind.BUBBLEWRAP]
            os.kill(supervisor(rig, 0), signal.SIGKILL)
            await until(lambda: runtime._channel.closed, 60)  # type: ignore[attr-defined]
            return opened

        monkeypatch.setattr(rig.gateway, "create", killed_meanwhile)
        finished = await one(rig, "linger")
        assert finished.session.state is SessionState.FAILED
        assert finished.session.failure is FailureReason.SANDBOX, finished.session.error
        assert "ended before its harness started" in (finished.session.error or "")


def harnesses() -> list[int]:
    """The harnesses that this process started; other test runs on the machine have their own."""
    return [
        pid
        for pid in processes_named("shaken.py linger")
        if b"python3" in Path(f"/proc/{pid}/cmdline").read_bytes() and os.getpid() in ancestors(pid)
    ]


async def test_a_killed_sandbox_is_tried_again(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, works) as rig:
        task = a_task("linger", program="shaken.py", evaluator=SCORED, max_attempts=2, timeouts={"run": 600.0})
        work = asyncio.ensure_future(run_group(rig.node, task))
        await until(lambda: bool(harnesses()), 120)
        (before,) = {session.session_id for session in rig.changes}
        os.kill(supervisor(rig, 0), signal.SIGKILL)
        await until(lambda: len({session.session_id for session in rig.changes}) == 2, 120)
        rig.node.cancel_task(task.task_id)
        (finished,) = await work
        assert finished.session.session_id != before
        assert finished.session.attempt == 2


async def test_the_memory_limit_is_the_agents_own_end(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, works) as rig:
        limited = {"resources": {"memory_mb": 128}}
        finished = await one(rig, "explode", environment=limited)
        assert finished.session.state is SessionState.DONE, finished.session.error
        assert finished.session.end_reason is EndReason.MEMORY
        assert finished.session.failure is None
        assert finished.trajectory.reward is not None
        assert finished.trajectory.reward.score == 0.0
        assert any("memory limit of 128 MB" in note for note in finished.trajectory.metadata["notes"])
        assert finished.trajectory.report.trained_tokens > 0


async def test_a_child_that_dies_of_the_memory_limit_is_a_note(codec: ModelCodec, tmp_path: Path) -> None:
    def wasteful(request: Request) -> Say:
        if request.messages[-1].role == "tool":
            return Say("It is done.")
        command = "python3 -c 'x = [bytearray(1 << 24) for _ in range(1000)]'"
        return Say("", "I look.", [ToolCall("", "bash", {"command": command})])

    async with running_node(codec, tmp_path, wasteful) as rig:
        finished = await one(rig, "crash", environment={"resources": {"memory_mb": 128}})
        assert finished.session.end_reason is EndReason.EXITED
        assert any("memory limit of 128 MB" in note for note in finished.trajectory.metadata["notes"])


async def test_a_harness_that_ends_by_a_signal_of_its_own_is_scored_as_before(
    codec: ModelCodec, tmp_path: Path
) -> None:
    async with running_node(codec, tmp_path, works) as rig:
        finished = await one(rig, "term")
        assert finished.session.state is SessionState.DONE, finished.session.error
        assert finished.session.end_reason is EndReason.ERROR
        assert finished.trajectory.metadata["exit_code"] == 137
        assert finished.trajectory.reward is not None
        assert finished.trajectory.reward.score == 0.0


@pytest.mark.parametrize("left", ["touch /work", "ln -s /none/such /work", "mkdir /work; chmod 0 /work /"])
async def test_a_harness_that_the_agent_kills_is_scored_whatever_it_did_to_its_files(
    left: str, codec: ModelCodec, tmp_path: Path
) -> None:
    """A SIGKILL from inside must not pass for one from outside: the session would be retried and never scored."""

    def kills(request: Request) -> Say:
        return Say("", "Now.", [ToolCall("", "bash", {"command": f"cd /; rm -rf /work; {left}; kill -9 $PPID"})])

    async with running_node(codec, tmp_path, kills) as rig:
        task = a_task("work", evaluator=SCORED, max_attempts=1, environment={"workdir": "/work"})
        (finished,) = await asyncio.wait_for(run_group(rig.node, task), 240)
    assert finished.session.state is SessionState.DONE, finished.session.error
    assert finished.session.end_reason is EndReason.ERROR
    assert finished.trajectory.reward is not None
    assert finished.trajectory.reward.score == 0.0


async def test_a_runtime_that_makes_no_sandboxes_holds_the_queue_and_costs_no_attempt(
    codec: ModelCodec, tmp_path: Path
) -> None:
    backoff = ProbeBackoff(first=0.05, longest=0.1, probe=60.0)
    async with running_node(codec, tmp_path, works, backoff=backoff, warm=0, run_workers=2) as rig:
        runtime, _ = await rig.node._runtimes.get(SandboxKind.BUBBLEWRAP)
        create, broken, refused = runtime.create, True, 0

        async def failing(spec: Any) -> Any:
            nonlocal refused
            if broken:
                refused += 1
                raise SandboxError("no space left on device")
            return await create(spec)

        runtime.create = failing  # type: ignore[method-assign]
        tasks = [
            a_task("crash", program="shaken.py", task_id=f"t{n}", evaluator=SCORED, max_attempts=1) for n in range(8)
        ]
        work = asyncio.gather(*(run_group(rig.node, task) for task in tasks))
        await until(lambda: any(status.open for status in rig.node.breakers), 120)
        opened_at = refused
        # While the queue is held, only probes create sandboxes.
        await until(lambda: refused >= opened_at + 5, 120)
        failed = [session for session in rig.changes if session.state is SessionState.FAILED]
        assert len(failed) <= 8, "one attempt at most of each sample, and then they wait"
        assert all(session.failure is FailureReason.SANDBOX for session in failed)
        (status,) = [status for status in rig.node.breakers if status.open]
        assert status.component == "sandbox:bubblewrap"
        assert status.reason == "no space left on device"
        broken = False
        for (finished,) in await work:
            assert finished.session.state is SessionState.DONE, finished.session.error


async def test_a_runtime_that_cannot_work_here_fails_with_its_reason(
    codec: ModelCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_node(codec, tmp_path, works) as rig:

        async def missing(kind: SandboxKind) -> Any:
            raise SandboxError("bubblewrap is not installed: install the package `bubblewrap`")

        monkeypatch.setattr(rig.node._runtimes, "get", missing)
        assert await rig.node.probe() == [
            "sandbox:bubblewrap: bubblewrap is not installed: install the package `bubblewrap`"
        ]
        monkeypatch.setattr(rig.node.settings.__class__, "hold_seconds", 0.5, raising=False)
        object.__setattr__(rig.node.settings, "hold_seconds", 0.5)
        finished = await one(rig, "crash", max_attempts=3)
        assert finished.session.state is SessionState.FAILED
        assert finished.session.failure is FailureReason.SANDBOX
        assert "not installed" in (finished.session.error or "")
        assert finished.session.attempt == 1


def test_every_failure_of_towlines_own_is_a_known_reason() -> None:
    """The class attribute is text, since the errors know nothing of the schema."""

    def below(kind: type[TowlineError]) -> list[type[TowlineError]]:
        return [kind, *(each for sub in kind.__subclasses__() for each in below(sub))]

    for kind in below(TowlineError):
        assert kind.failure in set(FailureReason), kind
