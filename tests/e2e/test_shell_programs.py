"""Programs that no preset knows, each from one line of configuration: plain Python, OpenAI's SDK, Anthropic's, and the
example's.

They run in a sandbox whose only network is the gateway. The SDKs are installed beside an interpreter of their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from support.gateway.gateway_rig import assert_one_chain
from support.harnesses.harness_rig import INSTALLS, Bench, assert_exact, assert_journey, bench
from support.harnesses.harness_scripts import ANSWER
from towline.harnesses.shell import HARNESS, PROGRAM
from towline.sandboxes.base import execute
from towline.schema import Task

FOLDER = str(Path(__file__).parents[1] / "support" / "harnesses" / "programs")
ODD = "Please leave your marks; \"$HOME\" & `id` is $(text), and so is 'this' {key}.\n- é日"
LINES: dict[str, dict[str, Any]] = {
    "chat": {"command": "python3 {program}/stdlib.py {instruction}", "folder": FOLDER, "resumes": True},
    "responses": {
        "command": "{python} {program}/openai_sdk.py",
        "folder": FOLDER,
        "packages": ["openai==3.49.0"],
        "env": {"TASK": "{instruction}"},
    },
    "messages": {
        "command": ["{python}", "{program}/anthropic_sdk.py", "{home}/settings.json"],
        "folder": FOLDER,
        "packages": ["anthropic==2.8.0"],
        "files": {"settings.json": '{"model": {model:json}, "task": {instruction:json}}'},
    },
}
"""What a task holds under `harness_options`, by the dialect that the program speaks."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_harness"


@pytest.mark.parametrize("dialect", LINES)
async def test_a_program_runs_from_one_line(dialect: str, tmp_path: Path) -> None:
    options = LINES[dialect]
    harness = HARNESS.configured(options)
    if harness.install is not None:
        await INSTALLS.ensure(harness)
    async with bench("shell", tmp_path, options=options) as program:
        assert await program.say(ODD) == ANSWER + "\n"
        rounds = 1
        if harness.resumes:
            assert await program.say("And now once more, please.") == ANSWER + "\n"
            rounds = 2
        await assert_journey(program, rounds)
        await assert_read_only(program)
        trajectory = await program.seal()
    assert_exact(program, trajectory)
    assert_one_chain(trajectory, 3 * rounds)
    assert {turn.dialect for turn in trajectory.turns} == {dialect}
    assert trajectory.turns[0].messages[-1]["text"] == ODD


async def test_the_example_runs_as_its_task_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task.model_validate_json((EXAMPLE / "task.jsonl").read_text())
    monkeypatch.chdir(EXAMPLE)
    async with bench(task.harness, tmp_path, options=task.harness_options) as program:
        assert await program.say(task.instruction) == ANSWER + "\n"
        await assert_journey(program, 1)
        trajectory = await program.seal()
    assert_exact(program, trajectory)
    assert_one_chain(trajectory, 3)


async def assert_read_only(program: Bench) -> None:
    """The program's folder cannot be changed by what runs in a session."""
    done = await execute(program.sandbox, ["sh", "-c", f"ls {PROGRAM}/stdlib.py && touch {PROGRAM}/new"])
    assert done.stdout, done
    assert not done.ok
    assert "Read-only file system" in done.text or "Permission denied" in done.text, done
    assert "new" not in os.listdir(FOLDER)
