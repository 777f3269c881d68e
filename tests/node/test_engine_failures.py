"""What an engine fails is never a reward: which model calls make a session FAILED, and which do not.

The agent is a program whose calls fail and that then pretends, crashes, hangs, retries, or continues.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from support.node.node_rig import NodeRig, a_task, running_node, until
from towline.conversation import Request, ToolCall
from towline.dialects.chat import ChatDialect
from towline.engines.base import EngineUnreachable, PauseMode
from towline.engines.pool import EnginePool
from towline.engines.scripted import Say, Script, ScriptedEngine
from towline.errors import EngineError
from towline.gateway.model_routes import ModelRoute
from towline.gateway.session import GatewaySession as GatewaySession
from towline.node.breakers import ProbeBackoff
from towline.node.finished import FinishedSession
from towline.node.node import new_session
from towline.runs.run import run_group
from towline.schema import EndReason, FailureReason, SessionState
from towline.tokens.codec import ModelCodec
from towline.tokens.loading import load_codec

SCORED = {"kind": "completed"}
ANSWERED = "the GPU fell off the bus (HTTP 500)"
QUICK = ProbeBackoff(first=0.05, longest=0.1, probe=30.0)


@pytest.fixture(scope="module")
def codec(assets: Path) -> ModelCodec:
    return load_codec(assets / "tokenizers" / "qwen3")


def works(request: Request) -> Say:
    """One command, then an answer."""
    if request.messages[-1].role == "tool":
        return Say("It is done.")
    return Say("", "I look.", [ToolCall("", "bash", {"command": "echo here"})])


def failing(when: Callable[[Request, int], bool], how: Callable[[Request], Say] | None = None) -> Script:
    """`works`, except for the calls, by request and number from 1 on, that fail."""
    calls = 0

    def script(request: Request) -> Say:
        nonlocal calls
        calls += 1
        if not when(request, calls):
            return works(request)
        if how is not None:
            return how(request)
        raise EngineError(ANSWERED)

    return script


def second(request: Request, _: int) -> bool:
    return request.messages[-1].role != "user"


def stalls(_: Request) -> Say:
    return Say("Too late.", delay=600, silent=True)


@contextlib.asynccontextmanager
async def charged_from(rig: NodeRig, condition: Callable[[GatewaySession], bool]) -> AsyncIterator[None]:
    """Budgets stand still until the session is where the test wants it: a busy machine must not decide this."""
    holds = rig.gateway.routes.policy.holds
    holds.add("test")

    async def release() -> None:
        live = rig.gateway.sessions
        await until(lambda: any(condition(session) for session in live.values()), 120)
        holds.remove("test")

    waiting = asyncio.ensure_future(release())
    try:
        yield
    finally:
        await waiting


def on_turn(number: int) -> Callable[[GatewaySession], bool]:
    """Whether the session samples its turn of that number."""
    return lambda session: session.turns.started == number and bool(session.turns.stall_detectors)


async def one(rig: NodeRig, behaviour: str, **fields: Any) -> FinishedSession:
    fields = {"evaluator": SCORED, "max_attempts": 1, **fields}
    (finished,) = await asyncio.wait_for(run_group(rig.node, a_task(behaviour, program="shaken.py", **fields)), 240)
    return finished


def failed(finished: FinishedSession, reason: FailureReason, said: str) -> None:
    assert finished.session.state is SessionState.FAILED, finished.trajectory
    assert finished.session.failure is finished.trajectory.failure is reason
    assert said in (finished.session.error or "")
    assert any(said in note for note in finished.trajectory.metadata["notes"])
    assert finished.trajectory.reward is None or finished.trajectory.reward.score is None
    assert all(trace.reward is None for trace in finished.trajectory.traces)
    assert not finished.usable


def scored(finished: FinishedSession, end: EndReason, score: float | None = None) -> None:
    assert finished.session.state is SessionState.DONE, finished.session.error
    assert finished.session.failure is None
    assert finished.session.end_reason is end
    assert finished.trajectory.reward is not None
    assert finished.trajectory.reward.score is not None
    if score is not None:
        assert finished.trajectory.reward.score == score


@pytest.mark.parametrize("behaviour", ["pretend", "crash", "tell"])
@pytest.mark.parametrize("turn", [1, 2])
async def test_a_harness_that_ends_or_continues_after_a_failed_turn_has_failed(
    behaviour: str, turn: int, codec: ModelCodec, tmp_path: Path
) -> None:
    script = failing(lambda request, number: number == turn)
    async with running_node(codec, tmp_path, script) as rig:
        finished = await one(rig, behaviour)
        failed(finished, FailureReason.ENGINE, ANSWERED)
        assert len([turn for turn in finished.trajectory.turns if turn.finish == "stop"]) >= turn - 1


async def test_a_harness_that_hangs_after_a_failed_turn_until_its_time_is_up_has_failed(
    codec: ModelCodec, tmp_path: Path
) -> None:
    async with running_node(codec, tmp_path, failing(second)) as rig:
        async with charged_from(rig, lambda session: bool(session.calls.failed)):
            finished = await one(rig, "hang", timeouts={"run": 0.5})
        failed(finished, FailureReason.ENGINE, ANSWERED)
        assert finished.session.end_reason is EndReason.TIMEOUT


async def test_a_failed_turn_that_the_harness_repeats_until_it_is_answered_leaves_the_session_fine(
    codec: ModelCodec, tmp_path: Path
) -> None:
    script = failing(lambda request, number: number in (1, 3, 4))
    async with running_node(codec, tmp_path, script) as rig:
        scored(await one(rig, "retry"), EndReason.EXITED, 1.0)


async def test_a_failed_side_call_does_not_fail_the_session(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, failing(lambda request, _: not request.tools)) as rig:
        finished = await one(rig, "title")
        scored(finished, EndReason.EXITED, 1.0)
        assert len(finished.trajectory.turns) == 3


async def test_a_failed_sub_agent_fails_the_session_though_main_continues(codec: ModelCodec, tmp_path: Path) -> None:
    script = failing(lambda request, _: request.messages[0].role == "system")
    async with running_node(codec, tmp_path, script) as rig:
        failed(await one(rig, "delegate"), FailureReason.ENGINE, ANSWERED)


@pytest.mark.parametrize("behaviour", ["summary", "transcript"])
async def test_a_failed_summary_fails_the_session_though_main_continues(
    behaviour: str, codec: ModelCodec, tmp_path: Path
) -> None:
    script = failing(lambda request, _: "Summarise" in request.messages[-1].text)
    async with running_node(codec, tmp_path, script) as rig:
        failed(await one(rig, behaviour), FailureReason.ENGINE, ANSWERED)


async def test_a_harness_that_runs_out_of_time_before_its_first_call_is_not_scored(
    codec: ModelCodec, tmp_path: Path
) -> None:
    """The policy was never asked."""
    async with running_node(codec, tmp_path, works) as rig:
        finished = await one(rig, "mute", timeouts={"run": 0.5})
        assert finished.session.state is SessionState.FAILED
        assert finished.session.failure is FailureReason.HARNESS
        assert "timed out and made no model call" in (finished.session.error or "")
        assert finished.trajectory.reward is None or finished.trajectory.reward.score is None


@pytest.mark.parametrize("repeated", [False, True])
async def test_an_answer_that_the_gateway_cannot_write_fails_the_session(
    repeated: bool, codec: ModelCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, times = ChatDialect.write, 0

    def broken(self: ChatDialect, request: Request, answer: Any) -> Any:
        nonlocal times
        times += 1
        if times == 2:
            raise ZeroDivisionError("a defect of ours")
        return write(self, request, answer)

    monkeypatch.setattr(ChatDialect, "write", broken)
    async with running_node(codec, tmp_path, works) as rig:
        finished = await one(rig, "retry" if repeated else "pretend")
        if repeated:
            scored(finished, EndReason.EXITED, 1.0)
        else:
            failed(finished, FailureReason.INTERNAL, "a defect of ours")


async def test_a_failed_session_is_tried_again(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, failing(lambda request, number: number == 2)) as rig:
        finished = await one(rig, "pretend", max_attempts=3)
        scored(finished, EndReason.EXITED, 1.0)
        assert finished.session.attempt == 2


@pytest.mark.parametrize("behaviour", ["pretend", "crash"])
async def test_a_stalled_turn_is_ended_and_fails_the_session(behaviour: str, codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, failing(second, stalls), stall_seconds=1.0) as rig:
        finished = await one(rig, behaviour)
        failed(finished, FailureReason.STALL, "no token for 1 s")
        assert "refused: 503" in (finished.logs / "harness.log").read_text()


@pytest.mark.parametrize("behaviour", ["impatient", "hang"])
async def test_a_turn_that_is_still_silent_when_the_harness_ends_is_watched_until_it_stalls(
    behaviour: str, codec: ModelCodec, tmp_path: Path
) -> None:
    """The harness's own patience, or its time, ends before the stall limit does."""
    async with running_node(codec, tmp_path, failing(second, stalls), stall_seconds=4.0) as rig:
        async with charged_from(rig, on_turn(2)):
            finished = await one(rig, behaviour, timeouts={"run": 0.5 if behaviour == "hang" else 600.0})
        failed(finished, FailureReason.STALL, "no token for 4 s")


async def test_a_turn_that_still_produces_tokens_when_the_time_is_up_is_the_policys_doing(
    codec: ModelCodec, tmp_path: Path
) -> None:
    slow = failing(second, lambda request: Say("Slowly.", delay=600))
    async with running_node(codec, tmp_path, slow, stall_seconds=2.0) as rig:
        async with charged_from(rig, on_turn(2)):
            finished = await one(rig, "crash", timeouts={"run": 2.5})
        scored(finished, EndReason.TIMEOUT)
        assert finished.trajectory.report.trained_tokens > 0


async def test_slow_but_progressing_turns_are_answered_however_long_they_take(
    codec: ModelCodec, tmp_path: Path
) -> None:
    slow = failing(second, lambda request: Say("Slowly.", delay=3.0))
    async with running_node(codec, tmp_path, slow, stall_seconds=2.0) as rig:
        scored(await one(rig, "crash"), EndReason.EXITED, 1.0)


async def test_a_prompt_over_the_context_limit_is_the_policys_doing(codec: ModelCodec, tmp_path: Path) -> None:
    def verbose(request: Request) -> Say:
        return Say("", "I look.", [ToolCall("", "bash", {"command": "seq 1 999"})])

    async with running_node(codec, tmp_path, verbose) as rig:
        finished = await one(rig, "crash", settings={"limits": {"context": 1000}})
        assert "refused: 400" in (finished.logs / "harness.log").read_text()
        scored(finished, EndReason.ERROR, 0.0)


async def test_a_pause_is_neither_a_stall_nor_charged_to_the_run(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, works, stall_seconds=1.0) as rig:
        await rig.engine.pause(PauseMode.ABORT)
        holds = rig.gateway.routes.policy.holds
        async with charged_from(rig, lambda session: bool(session.turns.stall_detectors)):
            budgets = {"timeouts": {"run": 2.0}, "settings": {"limits": {"seconds": 2.0}}}
            work = asyncio.ensure_future(one(rig, "crash", **budgets))
        await asyncio.sleep(3.0)
        holds.add("test")
        await rig.engine.resume(3)
        scored(await work, EndReason.EXITED, 1.0)


async def test_a_harness_that_gives_up_during_a_pause_has_failed(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, works) as rig:
        await rig.engine.pause()
        finished = await one(rig, "impatient")
        failed(finished, FailureReason.ENGINE, "paused or unavailable")
        await rig.engine.resume()


async def test_a_frozen_engine_that_fails_the_main_conversation_fails_the_session(
    codec: ModelCodec, tmp_path: Path
) -> None:
    frozen = ScriptedEngine(codec, failing(second))
    others = {"frozen": ModelRoute(frozen, codec, "frozen")}
    async with running_node(codec, tmp_path, works, others=others) as rig:
        finished = await one(rig, "pretend", settings={"models": {"any": "frozen"}})
        failed(finished, FailureReason.ENGINE, ANSWERED)


async def test_a_cancelled_session_stays_cancelled_whatever_its_engine_did(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, failing(second)) as rig:
        work = asyncio.ensure_future(one(rig, "hang"))
        live = rig.gateway.sessions
        await until(lambda: any(session.calls.failed for session in live.values()), 120)
        rig.node.cancel_task("a-task-hang")
        finished = await work
        assert finished.session.state is SessionState.CANCELLED
        assert finished.session.failure is None


async def test_a_step_that_the_engine_failed_is_not_followed_by_another(codec: ModelCodec, tmp_path: Path) -> None:
    steps = [{"name": name, "instruction": f"Do {name}."} for name in ("a", "b", "c")]
    script = failing(lambda request, _: any("Do b" in message.text for message in request.messages))
    async with running_node(codec, tmp_path, script) as rig:
        finished = await one(rig, "pretend", steps=steps)
        failed(finished, FailureReason.ENGINE, ANSWERED)
        assert len(finished.trajectory.turns) == 3


class Outage(ScriptedEngine):
    """An engine that is away for a while: turns and probes fail."""

    away = False
    probes = 0
    """Probes that failed."""

    async def probe(self) -> None:
        if self.away:
            self.probes += 1
            raise EngineError("connection refused")

    async def sample(self, request: Any) -> Any:
        if self.away:
            raise EngineError("connection refused")
        return await super().sample(request)


async def test_an_outage_costs_no_attempt_and_no_task(codec: ModelCodec, tmp_path: Path) -> None:
    """Sixty tasks are queued; the engine goes away under the first of them and comes back."""
    engine = Outage(codec, works)
    tasks = [
        a_task("pretend", program="shaken.py", task_id=f"t{n}", evaluator=SCORED, max_attempts=1) for n in range(60)
    ]
    async with running_node(codec, tmp_path, engine=engine, backoff=QUICK, run_workers=8) as rig:
        told = []
        rig.node.on_breaker = told.append
        work = asyncio.gather(*(run_group(rig.node, task) for task in tasks))
        await until(lambda: any(session.state is SessionState.DONE for session in rig.changes), 240)
        engine.away = True
        await until(lambda: any(status.open for status in rig.node.breakers), 240)
        # Those that the outage catches in the middle fail; then the queue is held until a probe succeeds.
        await until(lambda: engine.probes >= 3, 240)
        lost = [s for s in rig.changes if s.state is SessionState.FAILED]
        assert len(lost) <= 16, "the queue is held"
        engine.away = False
        done = [finished for group in await work for finished in group]
        for finished in done:
            scored(finished, EndReason.EXITED, 1.0)
        assert [status.open for status in told if status.component == "engine:policy"][-1] is False
        assert all(s.failure is FailureReason.ENGINE for s in rig.changes if s.state is SessionState.FAILED)


async def test_an_engine_that_never_comes_back_ends_the_wait(codec: ModelCodec, tmp_path: Path) -> None:
    engine = Outage(codec, works)
    async with running_node(codec, tmp_path, engine=engine, backoff=QUICK, hold_seconds=1.0) as rig:
        engine.away = True
        problems = await rig.node.probe()
        assert problems == ["engine:policy: connection refused"]
        finished = await one(rig, "pretend", max_attempts=3)
        assert finished.session.state is SessionState.FAILED
        assert finished.session.failure is FailureReason.ENGINE
        assert "engine:policy is unavailable: connection refused" in (finished.session.error or "")
        assert finished.session.attempt == 1


async def test_sessions_behind_the_first_do_not_wait_as_long_again(codec: ModelCodec, tmp_path: Path) -> None:
    engine = Outage(codec, works)
    async with running_node(codec, tmp_path, engine=engine, backoff=QUICK, hold_seconds=5000.0) as rig:
        engine.away = True
        await rig.node.probe()
        rig.node._components.breakers["engine:policy"]._tripped_at -= 6000
        finished = await one(rig, "pretend")
        assert (finished.session.state, finished.session.failure) == (SessionState.FAILED, FailureReason.ENGINE)
        assert "engine:policy is unavailable" in (finished.session.error or "")
        waiting = rig.node.submit(a_task("pretend"), new_session(a_task("pretend"), 0, 1))
        await until(lambda: rig.changes[-1].state is SessionState.READY, 120)
        assert not waiting.done(), "a service holds its sessions"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize("behaviour", ["impatient", "hang"])
@pytest.mark.parametrize("freed", [False, True])
async def test_a_harness_that_ends_while_its_turn_waits_for_a_free_replica(
    freed: bool, behaviour: str, codec: ModelCodec, tmp_path: Path
) -> None:
    """The only slot is taken. If it becomes free and a token arrives, it was the harness that had no patience; if not, the
    policy had no chance."""

    def takes_the_slot(request: Request) -> Say:
        if not second(request, 0):
            pool.replicas[0].in_flight += 1
        return works(request)

    pool = EnginePool({"one": ScriptedEngine(codec, takes_the_slot)}, limit=1, max_limit=1)
    async with running_node(codec, tmp_path, engine=pool, stall_seconds=60.0 if freed else 3.0) as rig:
        async with charged_from(rig, on_turn(2)):
            work = asyncio.ensure_future(one(rig, behaviour, timeouts={"run": 0.5 if behaviour == "hang" else 600.0}))
        if freed:
            await asyncio.sleep(5.0)
            pool._dispatcher.release(pool.replicas[0])
            scored(await work, EndReason.TIMEOUT if behaviour == "hang" else EndReason.EXITED)
        else:
            failed(await work, FailureReason.STALL, "no replica was free")


class Replica(Outage):
    """A replica that goes away under the second turn, and then cannot be reached."""

    struck = False

    async def healthy(self) -> bool:
        return not self.away

    async def sample(self, request: Any) -> Any:
        if second(request.request, 0) and not self.struck:
            self.away = self.struck = True
        if self.away:
            raise EngineUnreachable("connection reset by peer")
        return await super().sample(request)


async def test_a_pool_without_replicas_holds_its_turns_and_charges_no_budget(codec: ModelCodec, tmp_path: Path) -> None:
    """The pool fails no turn for that: its turns wait, and so do budgets and queue."""
    replica = Replica(codec, works)
    pool = EnginePool({"one": replica}, interval=0.05)
    async with running_node(codec, tmp_path, engine=pool, backoff=QUICK, stall_seconds=1.0) as rig:
        async with charged_from(rig, lambda session: rig.node.breakers[0].open):
            work = asyncio.ensure_future(one(rig, "crash", timeouts={"run": 2.0}))
        await asyncio.sleep(3.0)
        assert rig.node.breakers[0].reason.startswith("no replica serves: one: connection reset by peer")
        rig.gateway.routes.policy.holds.add("test")
        replica.away = False
        scored(await work, EndReason.EXITED, 1.0)
        assert not rig.node.breakers[0].open
