"""`harbor`: tests come after the agent, in a sandbox that it never touched, and a score is what they wrote or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.evaluators.evaluator_rig import MakeRig, Rig, a_task
from towline.evaluators.base import EvaluationError
from towline.sandboxes.base import Runtime


def folder_of(path: Path, script: str, **files: str) -> str:
    path.mkdir(parents=True)
    # Without the right to be run, as files are that came through an archive.
    (path / "test.sh").write_text(f"#!/bin/sh\n{script}\n")
    for name, text in files.items():
        (path / name).write_text(text)
    return str(path)


SCORE = """
echo "looking"
ls -A /app /logs/verifier
reward=0
[ "$(cat /app/out.txt)" = "$(cat /tests/expected)" ] && [ ! -e /logs/verifier/reward.json ] && reward=1
echo $reward >/logs/verifier/reward.txt
exit 7
"""


async def test_the_tests_come_after_the_agent_and_the_exit_code_means_nothing(rig: MakeRig, tmp_path: Path) -> None:
    spec = {"kind": "harbor", "tests": folder_of(tmp_path / "t", SCORE, expected="42")}
    made = rig(spec, environment={"workdir": "/app"})
    assert (await made.judge("test ! -e /tests && echo 42 >out.txt")).value == 1
    kept = (made.logs / "verifier" / "test-stdout.txt").read_text()
    assert "looking" in kept
    assert "out.txt" in kept
    assert (await made.judge("true")).value == 0
    # A score of the agent's own, tests of its own, a link in their place: none of it is there any more.
    forged = """
mkdir -p /logs/verifier /tests && echo 1 >/logs/verifier/reward.txt && echo '{"reward": 1}' >/logs/verifier/reward.json
printf '#!/bin/sh\\necho 1 >/logs/verifier/reward.txt\\n' >/tests/test.sh && ln -s /tests/expected /app/out.txt
"""
    assert (await made.judge(forged)).value == 0
    assert any("out.txt -> /tests/expected" in note for note in made.notes)
    assert any("/tests/test.sh" in note for note in made.notes)


async def test_in_the_agents_own_sandbox_if_the_task_says_so(rig: MakeRig, tmp_path: Path) -> None:
    """What is there stays there, but scores, tests and links from before are gone."""
    spec = {"kind": "harbor", "tests": folder_of(tmp_path / "t", SCORE, expected="42"), "environment_mode": "shared"}
    made = rig(spec, environment={"workdir": "/app"})
    assert made.evaluator.shared
    assert not made.evaluator.needs_sandbox
    forged = """
mkdir -p /elsewhere /logs && ln -s /elsewhere /logs/verifier && echo '{"reward": 1}' >/elsewhere/reward.json
ln -s /elsewhere /tests && echo 42 >/app/out.txt
"""
    assert (await made.judge(forged)).value == 1
    assert (await made.judge("echo 41 >/app/out.txt")).value == 0
    assert made.clean == 0


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 0", "neither"),
        (": >/logs/verifier/reward.txt", "empty"),
        ("echo nan >/logs/verifier/reward.txt", "finite"),
        ("echo '{' >/logs/verifier/reward.json; echo 1 >/logs/verifier/reward.txt", "not JSON"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "not a number"),
        ("mkdir /logs/verifier/reward.txt", "cannot be read"),
        ("echo broken; exit 3", "exited with code 3 and printed: broken"),
        ("sleep 60", "timed out after 1 seconds"),
    ],
)
async def test_no_score_is_an_error(rig: MakeRig, tmp_path: Path, script: str, reason: str) -> None:
    with pytest.raises(EvaluationError, match=reason):
        await rig({"kind": "harbor", "tests": folder_of(tmp_path / "t", script), "seconds": 1}).judge()


async def test_json_comes_first_and_its_other_numbers_are_parts(rig: MakeRig, tmp_path: Path) -> None:
    script = """
[ "$MODE" = strict ] && [ -e /data/kept ] && [ -e /logs/artifacts/left ] || exit 1
echo 0 >/logs/verifier/reward.txt; echo '{"reward": 0.5, "style": 2}' >/logs/verifier/reward.json
"""
    spec = {
        "kind": "harbor",
        "tests": folder_of(tmp_path / "t", script),
        "env": {"MODE": "strict"},
        "artifacts": ["/data/kept"],
    }
    reward = await rig(spec).judge("mkdir -p /data /logs/artifacts; touch /data/kept /logs/artifacts/left")
    assert (reward.value, reward.components) == (0.5, {"style": 2})


async def test_what_the_work_started_is_ended_before_the_score_is_read(rig: MakeRig, tmp_path: Path) -> None:
    script = "sh /work/program; echo 0 >/logs/verifier/reward.txt"
    made = rig({"kind": "harbor", "tests": folder_of(tmp_path / "t", script)})
    made.last_look = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
    assert (await made.judge("echo 'setsid sleep 54321 >/dev/null 2>&1 &' >program")).value == 0
    assert "cmdline" in made.seen
    assert "54321" not in made.seen


STEP = 'cat /tests/shared && [ -e /work/$(cat /tests/wants) ] && reward=1\necho "{\\"reward\\": ${reward:-0}}" >/logs/verifier/reward.json'


async def test_steps_stop_below_their_minimum(rig: MakeRig, tmp_path: Path) -> None:
    common = tmp_path / "common"
    common.mkdir()
    (common / "shared").write_text("s")
    steps: list[dict[str, Any]] = [
        {"name": name, "tests": folder_of(tmp_path / name, STEP, wants=name), "min_reward": least}
        for name, least in {"one": 1.0, "two": None, "three": {"reward": 0.5}}.items()
    ]
    spec = {"kind": "harbor", "tests": str(common), "steps": steps}
    made = rig(spec)
    assert (await made.judge("touch one two three")).value == 1
    assert made.clean == 3
    reward = await made.judge("touch one three")
    assert reward.value == pytest.approx(2 / 3)
    assert reward.components == {"step.one": 1, "step.two": 0, "step.three": 1}
    # Without the first step the others are not looked at.
    stopped = await made.judge("touch two three")
    assert (stopped.value, stopped.components) == (0, {"step.one": 0})
    final = rig({**spec, "strategy": "final"})
    assert (await final.judge("touch one three")).value == 1
    assert (await final.judge("touch one two")).value == 0


async def test_it_needs_a_root_of_its_own(process: Runtime, tmp_path: Path) -> None:
    task = a_task({"kind": "harbor", "tests": folder_of(tmp_path / "t", SCORE)})
    with pytest.raises(EvaluationError, match="root of its own"):
        await Rig(process, task, tmp_path).judge()
