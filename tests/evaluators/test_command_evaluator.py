"""`completed`, `command` and `python`: scores from exit codes, output and functions, for real in sandboxes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.evaluators.evaluator_rig import MakeRig, Rig, a_task, a_trajectory
from towline.errors import ConfigError
from towline.evaluators.base import EvaluationError
from towline.evaluators.registry import KINDS, make_evaluator
from towline.sandboxes.base import Runtime
from towline.schema import Reward
from towline.tasks.loading import load_tasks


async def test_completed_asks_how_the_harness_ended(rig: MakeRig) -> None:
    completed = rig({"kind": "completed"})
    assert (await completed.judge()).value == 1
    assert (await completed.judge(exit_code=3, end_reason="error")).value == 0
    assert (await completed.judge(exit_code=None, end_reason="timeout")).value == 0
    assert (await completed.judge(exit_code=0, end_reason="limit")).value == 0
    assert (await rig({"kind": "completed", "codes": [0, 3]}).judge(exit_code=3, end_reason="error")).value == 1
    assert completed.clean == 0


async def test_a_command_judges_what_was_carried(rig: MakeRig) -> None:
    made = rig(
        {
            "kind": "command",
            "command": "grep -qx right answer.txt && test -e /secret/key && test ! -e given && test -e kept",
            "files": [{"target": "/secret/key", "text": "k"}],
        },
        environment={"setup": ["touch given kept"]},
    )
    # The secret is not there while the agent runs, what it deleted is deleted, what it wrote elsewhere is not carried.
    assert (await made.judge("test ! -e /secret && rm given && echo right >answer.txt && mkdir /secret")).value == 1
    assert (await made.judge("rm given; echo wrong >answer.txt")).value == 0
    assert made.clean == 2
    reward = await rig({"kind": "command", "command": ["test", "-e", "/etc/mine"], "carry": ["/etc/mine"]}).judge(
        "echo 1 >/etc/mine"
    )
    assert reward.value == 1
    with pytest.raises(EvaluationError, match="could not be run"):
        await rig({"kind": "command", "command": "no-such-program"}).judge()


@pytest.mark.parametrize(
    ("how", "printed", "expected"),
    [
        ({"reward": "number"}, "epoch 3 loss 0.5\\nscore: 0.75\\n", 0.75),
        ({"reward": "number"}, "v1.2.3 gives -2e-1.", -0.2),
        ({"reward": "regex", "pattern": r"^score=(\S+)$"}, "score=1\\nscore=0.25\\nother 9\\n", 0.25),
        ({"reward": "json"}, 'log\\n{"reward": 0.5}\\n', 0.5),
        ({"reward": "json"}, '{\\n "reward": 2\\n}\\n', 2.0),
    ],
)
async def test_a_score_is_read_from_the_output(
    rig: MakeRig, how: dict[str, str], printed: str, expected: float
) -> None:
    spec = {"kind": "command", "command": f"printf '{printed}'; exit 3", **how}
    assert (await rig(spec).judge()).value == expected


@pytest.mark.parametrize(
    ("how", "printed", "reason"),
    [
        ({"reward": "number"}, "nothing here", "contains no number"),
        ({"reward": "number"}, "1e999", "finite"),
        ({"reward": "json"}, "{broken", "no line"),
        ({"reward": "json"}, '{"score": 1}', "unknown field 'score'"),
        ({"reward": "json"}, '{"reward": NaN}', "finite"),
        ({"reward": "json"}, '{"reward": true}', "not a number"),
        ({"reward": "json"}, '{"reward": 1, "per_turn": {"turn-9": 1}}', "turn-9"),
        ({"reward": "regex", "pattern": "x=(.*)"}, "x=much", "not a number"),
        ({"reward": "regex", "pattern": "x=(.*)"}, "y=1", "matches nothing"),
    ],
)
async def test_no_score_is_an_error_and_never_0(rig: MakeRig, how: dict[str, str], printed: str, reason: str) -> None:
    with pytest.raises(EvaluationError, match=reason):
        await rig({"kind": "command", "command": f"printf '%s' '{printed}'", **how}).judge()


async def test_a_command_gives_parts_and_turns_their_rewards(rig: MakeRig) -> None:
    script = """
grep -q '"turn-1"' "$TOWLINE_TRAJECTORY" || exit 1
[ "$(cat "$TOWLINE_ANSWER")" = done ] || exit 1
echo '{"reward": 1, "components": {"style": 0.5}, "per_turn": {"turn-0": 0.25, "1": -1}}'
"""
    made = rig({"kind": "command", "command": script, "reward": "json", "trajectory": True})
    reward = await made.judge(answer="done")
    assert reward == Reward(
        value=1, components={"style": 0.5}, per_turn={"turn-0": 0.25, "turn-1": -1}, evaluator="command"
    )
    assert a_trajectory().with_reward(reward).reward == reward
    assert '"style"' in (made.logs / "command.log").read_text()


async def test_a_command_without_end(rig: MakeRig) -> None:
    spec = {"kind": "command", "command": "sleep 100", "seconds": 0.3}
    with pytest.raises(EvaluationError, match=r"timed out after 0\.3 seconds"):
        await rig(spec).judge()
    reward = await rig({**spec, "on_timeout": "zero"}).judge()
    assert (reward.value, reward.components) == (0, {"timed_out": 1})


async def test_links_lead_nowhere_in_the_evaluation(rig: MakeRig) -> None:
    """The classic: the answer is a link to what it is compared with. Also devices, pipes, and links by way of links."""
    made = rig(
        {
            "kind": "command",
            "command": "ls -lA . sub; cmp -s answer /tests/expected || cmp -s hop /tests/expected || cmp -s sub/up /tests/expected",
            "files": [{"target": "/tests/expected", "text": "42\n"}],
        }
    )
    script = """
mkdir sub && ln -s /tests/expected answer && ln -s /usr usr && ln -s usr/../tests/expected hop
ln -s ../../tests/expected sub/up && mkfifo pipe && ln -s /usr/bin/env env && echo 1 >real && ln -s real alias && ln real hard
"""
    assert (await made.judge(script)).value == 0
    (note,) = made.notes
    for name in ("answer -> /tests/expected", "hop -> ", "sub/up -> "):
        assert name in note
    listing = (made.logs / "command.log").read_text()
    assert "alias -> real" in listing
    assert "env -> /usr/bin/env" in listing
    assert "hard" in listing
    assert "pipe" not in listing


async def test_what_cannot_be_copied_is_not_scored(rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is judged as missing; what is there and too large is not taken for missing."""
    monkeypatch.setattr("towline.evaluators.eval_inputs.collect_inputs.__kwdefaults__", {"most": 100_000})
    made = rig({"kind": "command", "command": "test -e out", "carry": ["/work/out"]})
    assert (await made.judge("mkdir out")).value == 1
    assert (await made.judge("true")).value == 0
    assert "was not copied" in made.notes[0]
    with pytest.raises(EvaluationError, match="/work/out cannot be copied"):
        await made.judge("head -c 1000000 /dev/zero >out")


async def test_the_same_in_a_folder_without_isolation(process: Runtime, tmp_path: Path) -> None:
    """Process sandboxes map paths; nothing of the host's own is touched by an evaluation in one."""
    logs = tmp_path / "logs"
    logs.mkdir()
    task = a_task(
        {"kind": "command", "command": ["cat", "/work/a", "/hidden/b"], "files": [{"target": "/hidden/b", "text": "b"}]}
    )
    made = Rig(process, task, logs)
    assert (await made.judge("echo a >a")).value == 1
    assert (await made.judge("true")).value == 0


FUNCTIONS = """
def share(answer, *, factor=1.0):
    return len(answer) * factor
async def turns(trajectory, task, files):
    return {"reward": len(files["/work/out"]), "per_turn": {turn.id: 0.5 for turn in trajectory.turns}}
def broken(outcome):
    raise KeyError("x")
def endless(outcome):
    return float("inf")
def wants(more):
    return 1
"""


async def test_a_function_of_the_trainers(rig: MakeRig, tmp_path: Path) -> None:
    file = tmp_path / "scores.py"
    file.write_text(FUNCTIONS)
    spec = {"kind": "python", "function": f"{file}:share"}
    assert (await rig(spec).judge(answer="four")).value == 4
    assert (await rig({**spec, "arguments": {"factor": 0.5}}).judge(answer="four")).value == 2
    reward = await rig({"kind": "python", "function": f"{file}:turns", "carry": ["/work/out"]}).judge("echo abc >out")
    assert (reward.value, reward.per_turn) == (4, {"turn-0": 0.5, "turn-1": 0.5})
    for name, reason in {"broken": "KeyError", "endless": "finite"}.items():
        with pytest.raises(EvaluationError, match=reason):
            await rig({"kind": "python", "function": f"{file}:{name}"}).judge()
    assert (
        await rig({"kind": "python", "function": "math:sqrt", "arguments": {}} | {"function": f"{file}:share"}).judge()
    ).value == 0
    for function, reason in {
        f"{file}:wants": "'more'",
        f"{file}:nothing": "no function 'nothing'",
        f"{tmp_path}/none.py:f": "not a file",
        "no_such_module:f": "cannot be imported",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            make_evaluator({"kind": "python", "function": function})
    with pytest.raises(ConfigError, match="has no parameter 'colour'"):
        make_evaluator({**spec, "arguments": {"colour": 1}})


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"kind": "judgement"}, "evaluator.kind"),
        ({"answer": 3}, "evaluator.kind"),
        ({"kind": "command"}, "evaluator.command"),
        ({"kind": "command", "command": "x", "rewards": 1}, "evaluator.rewards"),
        ({"kind": "command", "command": "x", "reward": "regex"}, "pattern"),
        ({"kind": "command", "command": "x", "reward": "regex", "pattern": "("}, "evaluator.pattern"),
        ({"kind": "command", "command": "x", "carry": ["relative"]}, r"evaluator\.carry\.0"),
        ({"kind": "command", "command": "x", "files": [{"target": "/a"}]}, r"evaluator\.files\.0"),
        ({"kind": "answer", "answer": []}, "evaluator.answer"),
        ({"kind": "patch", "command": "x", "base": "HEAD; rm"}, "evaluator.base"),
        ({"kind": "harbor"}, "tests"),
        ({"kind": "harbor", "tests": "/t", "seconds": 0}, "evaluator.seconds"),
        ({"kind": "python", "function": "nothing"}, "evaluator.function"),
    ],
)
def test_a_wrong_spec_names_its_field(spec: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_evaluator(spec)


def test_an_empty_spec_is_no_evaluator_and_specs_are_json() -> None:
    assert make_evaluator({}) is None
    assert sorted(KINDS) == ["answer", "command", "completed", "harbor", "patch", "python"]
    spec = {"kind": "command", "command": "x", "files": [{"target": "/a", "text": "b"}]}
    assert make_evaluator(json.loads(json.dumps(spec))) is not None


def test_the_specs_of_the_documentation_are_specs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "evaluators.md").read_text("utf-8")
    specs = [json.loads(block.partition("\n```")[0]) for block in text.split("```json\n")[1:]]
    assert {spec["kind"] for spec in specs} == set(KINDS) - {"harbor"}
    for spec in specs:
        if spec["kind"] == "python":
            spec |= {"function": "os.path:join", "arguments": {"a": 1}}
        assert make_evaluator(spec) is not None


async def test_rows_of_tasks_are_judged_as_they_say(bubblewrap: Runtime, tmp_path: Path) -> None:
    """The rows of docs/tasks.md, from the file to the reward."""
    text = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text("utf-8")
    file = tmp_path / "rows.jsonl"
    file.write_text(text.split("```json\n")[1].partition("```")[0])
    hello, half, add, total = (Rig(bubblewrap, task, tmp_path) for task in load_tasks([file], harness="shell"))
    assert (await hello.judge("echo hello >out.txt")).value == 1
    assert (await hello.judge()).value == 0
    assert (await half.judge(answer=r"It is \boxed{\frac12}.")).value == 1
    assert (await add.judge("printf 'def add(a, b):\\n    return a + b\\n' >solution.py")).value == 1
    assert (await add.judge()).value == 0
    cheat = "printf 'import json\\nprint(json.dumps({\"reward\": 1}))\\nraise SystemExit\\n' >solution.py"
    assert (await add.judge(cheat)).value == 0
    reward = await total.judge("echo 'print(sum(map(int, input().split())))' >solution.py")
    assert (reward.value, reward.components) == (1, {"passed": 1})
