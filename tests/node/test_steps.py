"""Tasks of several steps: each is given, done and scored before the next one begins, in one sandbox and one session."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support.node.node_rig import PROGRAM, NodeRig, running_node
from towline.conversation import Request, ToolCall
from towline.engines.scripted import Say
from towline.node.finished import FinishedSession
from towline.runs.run import run_group
from towline.schema import EndReason, RewardStatus, SessionState, Task, TurnRole
from towline.tokens.codec import ModelCodec
from towline.tokens.loading import load_codec

PROGRAMS = Path(__file__).parents[1] / "support" / "harnesses" / "programs"
AGENTS: dict[str, dict[str, Any]] = {
    "resumes": {
        "command": "python3 {program}/stdlib.py {instruction}",
        "folder": str(PROGRAMS),
        "resumes": True,
    },
    "starts again": {"command": "python3 {program}/agent.py work", "folder": str(PROGRAM)},
}
LOOK = "ls -d /tests /logs/verifier/* later.txt 2>&1 | grep -v 'cannot access'; cat one.txt"
"""What an agent sees that it must not, or that an earlier step left."""


@pytest.fixture(scope="module")
def codec(assets: Path) -> ModelCodec:
    return load_codec(assets / "tokenizers" / "qwen3")


def obeys(request: Request) -> Say:
    """The command that the last user message asks for, then an answer."""
    last = request.messages[-1]
    if last.role == "tool":
        return Say("It is done.", "That was it.")
    return Say("", "I do it.", [ToolCall("", request.tools[0].name, {"command": last.text.partition("RUN: ")[2]})])


def folder_of(folder: Path, script: str) -> str:
    folder.mkdir(parents=True)
    (folder / "test.sh").write_text(f"#!/bin/sh\n{script}\n")
    return str(folder)


def a_task(tmp_path: Path, agent: str, first: str, *, mode: str = "separate", **evaluator: Any) -> Task:
    """Two steps; the first must score 1 for the second to begin. Each is worth what its file says."""
    scores = {
        "one": "[ ! -e later.txt ] && cp one.txt /logs/verifier/reward.txt",
        "two": "[ -e later.txt ] && cp two.txt /logs/verifier/reward.txt",
    }
    steps: list[Mapping[str, Any]] = [
        {"name": name, "tests": folder_of(tmp_path / name, script), "min_reward": 1.0 if name == "one" else None}
        for name, script in scores.items()
    ]
    brought = {"target": "/work/later.txt", "text": "comes with the second step\n"}
    second = f"RUN: {LOOK}; cat later.txt ready.txt; printf 0.5 > two.txt"
    return Task.model_validate(
        {
            "task_id": "two-steps",
            "instruction": "Two steps.",
            "steps": [
                {"name": "one", "instruction": f"RUN: {LOOK}; {first}"},
                {"name": "two", "instruction": second, "files": [brought], "setup": ["echo ready > ready.txt"]},
            ],
            "harness": "shell",
            "harness_options": AGENTS[agent],
            "evaluator": {"kind": "harbor", "environment_mode": mode, "steps": steps, **evaluator},
            "max_attempts": 1,
        }
    )


async def done(rig: NodeRig, task: Task) -> FinishedSession:
    (finished,) = await run_group(rig.node, task)
    assert rig.gateway.sessions == {}
    return finished


@pytest.mark.parametrize("mode", ["separate", "shared"])
@pytest.mark.parametrize("agent", AGENTS)
async def test_steps_come_one_after_the_other(codec: ModelCodec, tmp_path: Path, agent: str, mode: str) -> None:
    task = a_task(tmp_path / "tests", agent, "printf 1 > one.txt", mode=mode)
    async with running_node(codec, tmp_path / "out", obeys) as rig:
        finished = await done(rig, task)
    trajectory = finished.trajectory
    assert finished.session.state is SessionState.DONE, trajectory.error
    assert trajectory.reward is not None
    assert trajectory.reward.score == 0.75, trajectory.reward
    assert trajectory.reward.components == {"step.one": 1, "step.two": 0.5}
    assert [turn.reply["text"] for turn in trajectory.turns] == ["", "It is done."] * 2
    # The second step brings its file and sees what the first left, and nothing of the verifier that came between.
    assert "No such file" in trajectory.turns[1].messages[-1]["text"]
    assert "later" not in trajectory.turns[1].messages[-1]["text"]
    assert trajectory.turns[3].messages[-1]["text"].splitlines() == [
        "later.txt",
        "1comes with the second step",
        "ready",
    ]
    if agent == "resumes":
        assert trajectory.report.chains == 1
        assert {turn.role for turn in trajectory.turns} == {TurnRole.MAIN}
    else:
        assert [turn.parent is None for turn in trajectory.turns] == [True, False, True, False]
        assert trajectory.turns[0].role is TurnRole.MAIN
    assert trajectory.report.trained_tokens == sum(len(turn.sampled) for turn in trajectory.turns)
    log = (finished.logs / "harness.log").read_text()
    assert log.count("It is done.") == 2


async def test_a_step_below_its_minimum_is_the_last(codec: ModelCodec, tmp_path: Path) -> None:
    task = a_task(tmp_path / "tests", "resumes", "printf 0.5 > one.txt", strategy="final")
    async with running_node(codec, tmp_path / "out", obeys) as rig:
        finished = await done(rig, task)
    assert finished.session.state is SessionState.DONE
    assert finished.trajectory.end_reason is EndReason.EXITED
    assert finished.trajectory.reward is not None
    assert finished.trajectory.reward.score == 0.5
    assert finished.trajectory.reward.components == {"step.one": 0.5}
    assert len(finished.trajectory.turns) == 2


async def test_a_step_that_cannot_be_scored_is_the_last(codec: ModelCodec, tmp_path: Path) -> None:
    task = a_task(tmp_path / "tests", "resumes", "printf nonsense > one.txt")
    async with running_node(codec, tmp_path / "out", obeys) as rig:
        finished = await done(rig, task)
    # These tests give no score for the untouched environment either.
    assert finished.session.state is SessionState.FAILED
    assert finished.trajectory.reward is not None
    assert finished.trajectory.reward.status is RewardStatus.FAILED
    assert "nonsense" in (finished.trajectory.reward.error or "")
    assert len(finished.trajectory.turns) == 2


async def test_a_step_that_times_out_is_scored_and_followed(codec: ModelCodec, tmp_path: Path) -> None:
    task = a_task(tmp_path / "tests", "starts again", "printf 1 > one.txt; sleep 300")
    hurried = task.steps[0].model_copy(update={"seconds": 4.0})
    task = Task.model_validate(task.__dict__ | {"steps": [hurried, task.steps[1]]})
    async with running_node(codec, tmp_path / "out", obeys) as rig:
        finished = await done(rig, task)
    assert finished.trajectory.end_reason is EndReason.EXITED
    assert finished.trajectory.metadata["notes"] == ["step one timed out"]
    assert finished.trajectory.reward is not None
    assert finished.trajectory.reward.components == {"step.one": 1, "step.two": 0.5}
