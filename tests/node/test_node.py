"""Sessions through their stages, with the real gateway, sandboxes and evaluators: whatever happens, the finished turns are
kept, a failure is never a reward, and nothing is left behind."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from support.node.node_rig import NodeRig, a_task, processes_named, running_node, until
from towline.conversation import Request, ToolCall
from towline.engines.scripted import Say
from towline.node.node import new_session
from towline.runs.run import run_group, run_tasks
from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime
from towline.schema import EndReason, RewardStatus, SessionState, Trajectory
from towline.tokens.codec import ModelCodec
from towline.tokens.loading import load_codec

CHECK = {"kind": "command", "command": 'test "$(cat hello.txt)" = hello'}
LIFE = ["queued", "init", "ready", "running", "building", "evaluating", "done"]


@pytest.fixture(scope="module")
def codec(assets: Path) -> ModelCodec:
    return load_codec(assets / "tokenizers" / "qwen3")


def writes_hello(request: Request) -> Say:
    """One command, then an answer."""
    if request.messages[-1].role == "tool":
        return Say("It is written.", "The file is there.")
    return Say("", "I write it.", [ToolCall("", "bash", {"command": "printf hello > hello.txt; echo done"})])


def never_ends(request: Request) -> Say:
    return Say("", "Again.", [ToolCall("", "bash", {"command": "echo same"})])


async def one(rig: NodeRig, behaviour: str = "work", **fields: Any) -> Any:
    (finished,) = await run_group(rig.node, a_task(behaviour, **fields))
    assert rig.node.active == {}
    return finished


async def test_a_group_runs_is_built_and_scored(codec: ModelCodec, tmp_path: Path) -> None:
    environment = {
        "files": [{"target": "/work/given.txt", "text": "given\n"}],
        "setup": ["test -f given.txt && echo ready > prepared.txt"],
        "artifacts": ["/work/hello.txt", "/work/missing.txt"],
    }
    task = a_task(num_samples=3, evaluator=CHECK, environment=environment)
    async with running_node(codec, tmp_path, writes_hello, run_workers=2) as rig:
        done = await run_group(rig.node, task)
        assert [each.session.sample for each in done] == [0, 1, 2]
        for each in done:
            assert [state.value for state in rig.states(each.session.session_id)] == LIFE
            trajectory = each.trajectory
            assert trajectory.state is SessionState.DONE
            assert trajectory.end_reason is EndReason.EXITED
            assert trajectory.reward is not None
            assert trajectory.reward.score == 1.0
            assert [turn.reply["text"] for turn in trajectory.turns] == ["", "It is written."]
            assert trajectory.report.chains == 1
            assert {"init", "run", "build", "evaluate", "total"} <= set(trajectory.timings)
            assert trajectory.metadata["exit_code"] == 0
            assert [note for note in trajectory.metadata["notes"] if "missing.txt" in note]
            assert "answer: It is written." in (each.logs / "harness.log").read_text()
            assert (each.logs / "artifacts" / "hello.txt").read_text() == "hello"
            stored = Trajectory.read(rig.gateway.trajectories / f"{each.session.session_id}.arrow")
            assert stored == trajectory
            assert each.usable
        assert rig.most_at_once(SessionState.RUNNING) <= 2
        assert rig.gateway.sessions == {}
    assert not list((tmp_path / "sandboxes").rglob("root*/work/hello.txt"))


async def test_a_trajectory_that_the_caller_stores_is_in_the_journal_until_then(
    codec: ModelCodec, tmp_path: Path
) -> None:
    async with running_node(codec, tmp_path, writes_hello, stores_trajectories=False) as rig:
        finished = [await one(rig, task_id=f"task-{number}") for number in range(3)]
        ids = [each.session.session_id for each in finished]
        assert list(rig.gateway.trajectories.iterdir()) == []
        await rig.node.discard(ids[0])
    async with running_node(codec, tmp_path, writes_hello, stores_trajectories=False) as rig:
        found = [trajectory async for trajectory in rig.node.recover({ids[0], ids[1]})]
        (again,) = found
        assert again.session_id == ids[1]
        assert [turn.sampled.tolist() for turn in again.turns] == [
            turn.sampled.tolist() for turn in finished[1].trajectory.turns
        ]
    async with running_node(codec, tmp_path, writes_hello, stores_trajectories=False) as rig:
        assert [one.session_id async for one in rig.node.recover(set(ids))] == [ids[1]]
        await rig.node.discard(ids[1])
        assert list(rig.gateway.trajectories.iterdir()) == []
    async with running_node(codec, tmp_path, writes_hello) as rig:
        assert rig.gateway.sessions == {}


async def test_a_link_out_of_an_artifact_is_skipped_and_named(codec: ModelCodec, tmp_path: Path) -> None:
    environment = {
        "setup": ["mkdir out && echo kept > out/kept.txt && ln -s /etc/passwd out/leak"],
        "artifacts": ["/work/out"],
    }
    async with running_node(codec, tmp_path, writes_hello) as rig:
        finished = await one(rig, environment=environment)
        kept = finished.logs / "artifacts" / "out"
        assert [path.name for path in kept.iterdir()] == ["kept.txt"]
        (note,) = [note for note in finished.trajectory.metadata["notes"] if "/work/out" in note]
        assert "1 skipped" in note
        assert "out/leak" in note


async def test_a_timed_out_run_is_still_scored(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, writes_hello) as rig:
        finished = await one(rig, "hang", evaluator=CHECK, timeouts={"run": 3.0})
        assert finished.session.state is SessionState.DONE
        assert finished.trajectory.end_reason is EndReason.TIMEOUT
        assert len(finished.trajectory.turns) == 2
        assert finished.trajectory.reward.score == 1.0


async def test_an_exit_code_is_the_agents_own_matter(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, writes_hello) as rig:
        finished = await one(rig, "fail", evaluator={"kind": "completed"})
        assert finished.session.state is SessionState.DONE
        assert finished.trajectory.end_reason is EndReason.ERROR
        assert finished.trajectory.metadata["exit_code"] == 3
        assert finished.trajectory.reward.score == 0.0


async def test_a_loop_ends_the_run(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, never_ends, looping=4) as rig:
        finished = await one(rig)
        assert finished.trajectory.end_reason is EndReason.LOOPING
        # It is ended from outside, and runs until then.
        assert 5 <= len(finished.trajectory.turns) < 100


async def test_the_looping_guard_needs_no_parents(codec: ModelCodec, tmp_path: Path) -> None:
    """A harness that edits its history makes every turn a root, and loops all the same."""
    async with running_node(codec, tmp_path, never_ends, looping=4) as rig:
        finished = await one(rig, "edit")
        assert finished.trajectory.end_reason is EndReason.LOOPING
        assert {turn.parent for turn in finished.trajectory.turns} == {None}


@pytest.mark.parametrize("behaviour", ["edit", "handoff"])
async def test_the_answer_is_that_of_the_conversation_that_continues_main(
    behaviour: str, codec: ModelCodec, tmp_path: Path
) -> None:
    async with running_node(codec, tmp_path, writes_hello) as rig:
        finished = await one(rig, behaviour, evaluator={"kind": "answer", "answer": "It is written."})
        assert finished.trajectory.reward.score == 1.0
        assert [str(turn.role) for turn in finished.trajectory.turns] == ["main", "main"]


async def test_an_exhausted_limit_ends_the_run(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, never_ends, looping=0) as rig:
        finished = await one(rig, settings={"limits": {"turns": 3}})
        assert finished.trajectory.end_reason is EndReason.LIMIT
        assert len(finished.trajectory.turns) == 3


async def test_a_harness_that_calls_no_model_is_a_failure(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, writes_hello) as rig:
        finished = await one(rig, "silent", evaluator={"kind": "completed"})
        assert finished.session.state is SessionState.FAILED
        assert "made no model call" in (finished.trajectory.error or "")
        assert "I have nothing to ask" in (finished.trajectory.error or "")
        assert finished.trajectory.reward.status is RewardStatus.MISSING
        assert not finished.usable
        # It would be the same again.
        assert finished.session.attempt == 1


async def test_a_set_up_that_fails_says_what_it_said(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, writes_hello) as rig:
        finished = await one(rig, environment={"setup": ["echo the disk is wet >&2; exit 9"]})
        assert finished.session.state is SessionState.FAILED
        assert "the disk is wet" in (finished.trajectory.error or "")


async def test_a_stage_that_times_out_is_retried_and_then_fails(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, writes_hello) as rig:
        finished = await one(
            rig, environment={"setup": ["sleep 30"]}, timeouts={"init": 0.5}, max_attempts=2, evaluator=CHECK
        )
        assert finished.session.state is SessionState.FAILED
        assert finished.session.attempt == 2
        assert "INIT timed out after 0.5 seconds" in (finished.trajectory.error or "")


@pytest.mark.parametrize(
    "evaluator",
    [{"kind": "command", "command": "sleep 30"}, {"kind": "command", "command": "echo", "reward": "number"}],
)
async def test_a_broken_evaluation_is_no_score(evaluator: dict[str, Any], codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, writes_hello) as rig:
        finished = await one(rig, evaluator=evaluator, timeouts={"evaluate": 2.0}, max_attempts=2)
        assert finished.session.state is SessionState.FAILED
        assert finished.session.attempt == 2
        assert finished.trajectory.reward.status is RewardStatus.FAILED
        assert finished.trajectory.reward.score is None
        assert all(trace.reward is None for trace in finished.trajectory.traces)
        assert len(finished.trajectory.turns) == 2
        assert not finished.usable


@pytest.mark.parametrize(
    "state", [SessionState.QUEUED, SessionState.INIT, SessionState.RUNNING, SessionState.EVALUATING]
)
async def test_cancelling_at_any_stage_keeps_the_finished_turns(
    state: SessionState, codec: ModelCodec, tmp_path: Path
) -> None:
    async with running_node(codec, tmp_path, writes_hello) as rig:
        fields: dict[str, Any] = {"evaluator": {"kind": "command", "command": "sleep 30"}}
        if state is SessionState.INIT:
            fields["environment"] = {"setup": ["sleep 30"]}
        task = a_task("hang" if state is SessionState.RUNNING else "work", **fields)
        session = new_session(task)
        work = rig.node.submit(task, session)
        await until(lambda: rig.states(session.session_id)[-1] is state)
        if state is SessionState.RUNNING:
            live = rig.gateway.sessions
            await until(lambda: session.session_id in live and len(live[session.session_id].graph.nodes) == 2)
            await until(lambda: not live[session.session_id].turns.tasks)
        rig.node.cancel(session.session_id)
        finished = await asyncio.wait_for(work, 20)
        assert finished.session.state is SessionState.CANCELLED
        assert finished.trajectory.state is SessionState.CANCELLED
        assert len(finished.trajectory.turns) == (2 if state in (SessionState.RUNNING, SessionState.EVALUATING) else 0)
        assert finished.trajectory.reward is None or finished.trajectory.reward.score is None
        assert rig.gateway.sessions == {}


async def test_a_group_stops_when_enough_are_usable(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, writes_hello, run_workers=2) as rig:
        done = await run_group(rig.node, a_task("work", num_samples=6, min_samples=2, evaluator=CHECK))
        assert len(done) == 6
        states = [each.session.state for each in done]
        assert states.count(SessionState.DONE) >= 2
        assert states.count(SessionState.CANCELLED) >= 1
        assert sum(each.usable for each in done) >= 2
        assert all(each.cut for each in done if each.session.state is SessionState.CANCELLED)


@pytest.mark.parametrize(("grace", "delay"), [(0.3, 3600), (3600.0, 1)])
async def test_a_group_has_a_grace_period(codec: ModelCodec, tmp_path: Path, grace: float, delay: int) -> None:
    """Slow sessions that end in the grace period are finished; when it is over, they are cut, unscored, and reported."""
    sessions = itertools.count()

    def slow_after_two(request: Request) -> Say:
        if request.messages[-1].role == "tool":
            return writes_hello(request)
        wait = f"sleep {delay}; " if next(sessions) >= 2 else ""
        return Say("", "I write it.", [ToolCall("", "bash", {"command": f"{wait}printf hello > hello.txt"})])

    task = a_task("work", num_samples=4, min_samples=2, grace_seconds=grace, evaluator=CHECK)
    async with running_node(codec, tmp_path, slow_after_two, run_workers=4, init_workers=4) as rig:
        results = await run_tasks(rig.node, [task], tmp_path)
    report, summary = results.early_stop(), json.loads((tmp_path / "summary.json").read_text())
    if delay == 1:
        assert report is None
        assert (summary["usable"], summary["early_stop"]) == (4, None)
        return
    cut = [each for each in results.finished if each.cut]
    assert len(cut) == 2
    for each in cut:
        assert each.trajectory.state is SessionState.CANCELLED
        assert each.trajectory.end_reason is EndReason.EARLY_STOP
        assert each.trajectory.reward is not None
        assert each.trajectory.reward.score is None
        assert len(each.trajectory.turns) == 1
    assert report is not None
    assert (report.cut, report.finished.sessions, report.so_far.turns) == (2, 2, 1)
    assert summary["early_stop"] == report.model_dump(mode="json")
    assert summary["failures"] == {}
    assert summary["tasks"][task.task_id]["cut"] == 2


async def test_a_node_never_starts_more_sandboxes_than_its_limit(
    codec: ModelCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions, warm sandboxes, evaluations and the probe share one limit."""
    create, creating, peaks = BubblewrapRuntime.create, 0, [0]

    async def counted(self: BubblewrapRuntime, spec: Any) -> Any:
        nonlocal creating
        creating += 1
        peaks.append(creating)
        try:
            return await create(self, spec)
        finally:
            creating -= 1

    monkeypatch.setattr(BubblewrapRuntime, "create", counted)
    workers = {"init_workers": 6, "run_workers": 6, "evaluate_workers": 6, "warm": 3, "start_limit": 2}
    async with running_node(codec, tmp_path, writes_hello, **workers) as rig:
        tasks = [a_task("work", task_id=name, num_samples=3, evaluator=CHECK) for name in ("a", "b")]
        groups = await asyncio.gather(*(run_group(rig.node, task) for task in tasks), rig.node.probe())
        assert [each.usable for group in groups[:2] for each in group] == [True] * 6
        status = rig.node.status()["starts"]
        assert (status["limit"], status["failed"]) == (2, 0)
        assert status["started"] >= 13  # one to run and one to evaluate each session, and the probe's
    assert max(peaks) == 2


async def test_stages_overlap(codec: ModelCodec, tmp_path: Path) -> None:
    environment = {"setup": ["sleep 0.3"]}
    evaluator = {"kind": "command", "command": "sleep 0.3"}
    async with running_node(codec, tmp_path, writes_hello, run_workers=1, init_workers=1, evaluate_workers=1) as rig:
        await run_group(rig.node, a_task("patient", num_samples=4, environment=environment, evaluator=evaluator))
        assert rig.together(SessionState.INIT, SessionState.RUNNING)
        assert rig.together(SessionState.RUNNING, SessionState.EVALUATING)
        assert rig.most_at_once(SessionState.RUNNING) == 1
        assert rig.most_at_once(SessionState.INIT) == 1


async def test_no_process_of_a_harness_survives(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, writes_hello) as rig:
        finished = await one(rig, "daemon")
        assert finished.trajectory.end_reason is EndReason.EXITED
        assert processes_named("98765") == []


async def test_a_task_that_cannot_be_is_refused_with_its_field(codec: ModelCodec, tmp_path: Path) -> None:
    async with running_node(codec, tmp_path, writes_hello) as rig:
        for fields, said in [
            ({"harness": "no-such"}, "unknown harness 'no-such'"),
            ({"evaluator": {"kind": "guess"}}, "evaluator.kind"),
            ({"harness_options": {"colour": 1}}, "no option 'colour'"),
        ]:
            finished = await one(rig, **fields)
            assert finished.session.state is SessionState.FAILED
            assert said in (finished.trajectory.error or "")
            assert finished.session.attempt == 1


async def test_what_cannot_be_written_is_a_failure_with_its_reason_and_keeps_its_turns(
    codec: ModelCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full from the moment that the scored trajectory is to be written."""
    writing = Trajectory.write

    def write(trajectory: Trajectory, path: Path | str) -> None:
        if trajectory.reward is not None:
            raise OSError(28, "No space left on device", str(path))
        writing(trajectory, path)

    monkeypatch.setattr(Trajectory, "write", write)
    async with running_node(codec, tmp_path, writes_hello) as rig:
        finished = await one(rig, evaluator=CHECK, max_attempts=1)
    assert finished.session.state is SessionState.FAILED
    assert "No space left on device" in (finished.trajectory.error or "")
    assert len(finished.trajectory.turns) == 2
    assert not finished.usable
