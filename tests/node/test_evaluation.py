"""Who caused a failed evaluation: the table of causes and outcomes in docs/evaluators.md, one test for each of its rows.

Each row is an agent that does something to its own sandbox, scored by a real evaluator in real sandboxes. All of them run on
one node at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.node.node_rig import PROGRAM, NodeRig, ancestors, first_of, processes_named, running_node, until
from towline.conversation import Request, ToolCall
from towline.engines.scripted import Say
from towline.evaluators.command import CommandEvaluator
from towline.node.finished import FinishedSession
from towline.runs.run import run_group
from towline.sandboxes.base import SandboxError
from towline.sandboxes.pool import SandboxPool
from towline.schema import FailureReason, RewardStatus, SessionState, Task
from towline.tokens.codec import ModelCodec
from towline.tokens.loading import load_codec

DOC = Path(__file__).parents[2] / "docs" / "evaluators.md"
LOWEST, SCORED, BROKEN = "the lowest score", "scored", "FAILED (`evaluator`)"
HANG = 6.0
"""Seconds that a verifier may take where the agent makes it hang."""


@dataclass
class Case:
    """What an agent does, and how it is scored."""

    agent: str
    evaluator: dict[str, Any]
    said: str = ""
    """Is in the reward's cause, in the session's error, or in a note."""
    value: float = 0.0
    fields: dict[str, Any] = field(default_factory=dict)


def command(text: str, **options: Any) -> dict[str, Any]:
    return {"kind": "command", "command": text, **options}


def harbor(script: str, **options: Any) -> dict[str, Any]:
    """`tests` is a folder that the fixture makes with this script."""
    return {"kind": "harbor", "tests": {"script": script}, **options}


def patch(run: str, **options: Any) -> dict[str, Any]:
    return {"kind": "patch", "command": run, **options}


RUN = "[ ! -e tool ] || sh ./tool"
"""Runs a program of the agent's, if there is one."""
NAMED = "printf 'test_a ok\\n'; [ ! -e tool ] || exec sh ./tool; printf 'test_b F\\n'; exit 1"
"""Prints two tests' results as sympy does, the second one after a program of the agent's."""
REWARD = f"cd /work; {RUN}; [ -e /logs/verifier/reward.json ] || echo 0 >/logs/verifier/reward.txt"
TREE = {"workdir": "/work", "files": [{"target": "/work/lib.py", "text": "x = 1\n"}]}
GIT = "git init -q && git add -A && git -c user.name=a -c user.email=a@example.com commit -q -m base"
STUCK_GIT = "rm .git/config; mkfifo .git/config"
ONCE = """
calls = []
def once(answer):
    calls.append(answer)
    if len(calls) == 1:
        raise OSError("the judge was away")
    return 0.5
def number(files):
    return float(files.get("/work/out", b"0"))
"""

CASES: dict[str, dict[str, dict[str, Case]]] = {
    SCORED: {
        "the verifier gives a score": {
            "plain": Case("echo 1 >out", command("cat out", reward="number"), value=1.0),
            # The agent's own git is not asked.
            "git": Case(
                STUCK_GIT,
                patch("true"),
                value=1.0,
                fields={"environment": {**TREE, "setup": [GIT]}, "timeouts": {"build": HANG}},
            ),
            "unbuilt": Case(
                "true", patch("echo 'a.c:1:1: error: no'; exit 1", fail_to_pass=["TestAdd"], log_format="go"), value=0.0
            ),
        },
        "the verifier fails once and gives a score when it is repeated": {
            "python": Case("true", {"kind": "python", "function": "once"}, value=0.5),
        },
        "a path to carry is not there, or a link in it leads out: it is left out, with a note": {
            "missing": Case(
                "ln -s b a; ln -s a b; touch file",
                command("echo 0.25", reward="number", carry=["/work/a", "/work/file/x", "/work/none"]),
                "/work/none was not copied",
                0.25,
            ),
            "name": Case(
                "ln -s /etc/passwd \"$(printf '\\377\\376')\"", command("echo 0.25", reward="number"), "left out", 0.25
            ),
        },
    },
    LOWEST: {
        "something of the agent's is in the way of a verifier's file": {
            "folder": Case(
                "mkdir check.sh; touch check.sh/x",
                command("sh check.sh", files=[{"target": "/work/check.sh", "text": "exit 0"}]),
                "check.sh",
            ),
            "file": Case(
                "echo >check",
                command("sh check/run.sh", files=[{"target": "/work/check/run.sh", "text": "exit 0"}]),
                "/",
            ),
            "link": Case(
                "ln -s check check",
                command("sh check/run.sh", files=[{"target": "/work/check/run.sh", "text": "exit 0"}]),
                "/",
            ),
            "harbor": Case("rm -rf /logs /tests; echo >/logs", harbor(REWARD, environment_mode="shared"), "/logs"),
        },
        "the command ends with 126 or 127": {
            "127": Case("echo 'exit 127' >tool", command(RUN), "could not be run (exit code 127)"),
            "126": Case("echo 'exit 126' >tool", command(RUN), "could not be run (exit code 126)"),
            "patch": Case("echo 'exit 127' >tool", patch(RUN), "could not be run (exit code 127)"),
        },
        "the verifier does not end within its `seconds`": {
            "command": Case("echo 'sleep 600' >tool", command(RUN, seconds=HANG), "timed out after"),
            "patch": Case("echo 'sleep 600' >tool", patch(RUN, seconds=HANG), "timed out after"),
            "harbor": Case("echo 'sleep 600' >tool", harbor(REWARD, seconds=HANG), "timed out after"),
            "shared": Case(
                "echo 'setsid sleep 600 & wait' >tool",
                harbor(REWARD, seconds=HANG, environment_mode="shared"),
                "timed out after",
            ),
        },
        "the evaluation does not end within its budget": {
            "command": Case(
                "echo 'sleep 600' >tool", command(RUN), "timed out after", fields={"timeouts": {"evaluate": HANG}}
            ),
        },
        "the verifier prints more than is kept": {
            "number": Case(
                "echo 'head -c 18000000 /dev/zero' >tool", command(f"{RUN}; echo 1", reward="number"), "printed more"
            ),
        },
        "the verifier's output or reward file holds no score": {
            "bytes": Case(
                "echo \"printf '\\\\377\\\\376\\\\0'; exit 1\" >tool",
                command(f"{RUN} && echo 1", reward="number"),
                "contains no number",
            ),
            "json": Case(
                'echo \'echo "{\\"reward\\": NaN}"; kill $PPID\' >tool',
                command(f'{RUN}; echo "{{\\"reward\\": 1}}"', reward="json"),
                "not a finite number",
            ),
            "name": Case(
                'echo \'echo "{\\"reward\\": 1, \\"components\\": {\\"\\\\\\\\ud800\\": 1}}"; kill $PPID\' >tool',
                command(f'{RUN}; echo "{{\\"reward\\": 1}}"', reward="json"),
                "",
            ),
            "folder": Case("echo 'mkdir /logs/verifier/reward.json' >tool", harbor(REWARD), "reward.json"),
            "text": Case("echo 'echo much >/logs/verifier/reward.json' >tool", harbor(REWARD), "not JSON"),
            "link": Case(
                "echo 'ln -s /dev/zero /logs/verifier/reward.json; touch /logs/verifier/reward.json' >tool",
                harbor(REWARD),
                "reward.json",
            ),
        },
        "the verifier is killed by what it runs": {
            "harbor": Case("echo 'kill -9 $PPID' >tool", harbor(REWARD), "neither reward.json nor reward.txt"),
            "command": Case(
                "echo 'kill -9 -1' >tool", command(f"{RUN}; echo 1", reward="number"), "contains no number"
            ),
        },
        "the tests' log does not tell how a named test ended": {
            "nothing": Case("echo 'exit 0' >tool", patch(NAMED, fail_to_pass=["test_b"]), "no result for 'test_b'"),
            "other": Case(
                "echo 'echo 1..1; echo ok 1 - test_c' >tool",
                patch(NAMED, fail_to_pass=["test_b"], pass_to_pass=["test_a"]),
                "no result for 'test_b'",
            ),
        },
        "an evaluator's own function raises on what the agent left": {
            "python": Case(
                "echo much >out", {"kind": "python", "function": "number", "carry": ["/work/out"]}, "ValueError"
            ),
        },
        "what is judged cannot be taken out of the agent's sandbox: too large, too deep, a loop of links": {
            "large": Case("truncate -s 300M big", command("echo 1", reward="number"), "cannot be copied"),
            "deep": Case(
                "python3 -c \"import os\nfor i in range(3000): os.mkdir('d'); os.chdir('d')\"",
                harbor("echo 1 >/logs/verifier/reward.txt"),
                "cannot be copied",
            ),
            "loop": Case("ln -s loop loop", command("echo 1", reward="number", carry=["/work/loop/x"]), "/work/loop/x"),
            "file": Case(
                "head -c 2000000 /dev/zero >answer",
                {"kind": "answer", "answer": "5", "file": "/work/answer"},
                "cannot be copied",
            ),
        },
        "a step cannot be judged": {
            "text": Case("echo 'echo much >/logs/verifier/reward.json' >tool", harbor("", steps=REWARD), "not JSON"),
        },
        "the evaluator gives scores below 0 (`lowest`, or the score of the untouched environment)": {
            "declared": Case("echo 'exit 127' >tool", command(RUN, lowest=-1.0), "127", -1.0),
            "found": Case("echo much >out", command("cat out || echo -2", reward="number"), "contains no number", -2.0),
        },
    },
    BROKEN: {
        "the verifier cannot be run": {"command": Case("true", command("no-such-program"), "no-such-program")},
        "the verifier gives no score, whatever the agent does": {
            "command": Case("echo 1 >out", command("echo none", reward="number"), "contains no number"),
            "harbor": Case("true", harbor("true"), "neither reward.json nor reward.txt"),
        },
        "the format of the tests' log is not understood": {
            "patch": Case("echo 1 >out", patch("echo all good", fail_to_pass=["TestAdd"]), "in a known format"),
            "format": Case("true", patch(NAMED, fail_to_pass=["test_a"], log_format="go"), "in a known format"),
        },
        "what is judged cannot be carried from the untouched environment either": {
            "large": Case(
                "true",
                command("echo 1", reward="number"),
                "cannot be copied",
                fields={"environment": {"setup": ["truncate -s 300M big"]}},
            ),
        },
        "the verifier is too slow for its budget on the untouched environment too": {
            "command": Case("true", command("sleep 600", seconds=1.0), "timed out after 1 seconds"),
        },
        "`test_patch` does not apply to a clean repository": {
            "patch": Case(
                "true",
                patch("true", test_patch="diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+2\n"),
                "test_patch cannot be applied",
                fields={"environment": {**TREE, "setup": [GIT]}},
            ),
        },
    },
}
ROWS = [(outcome, cause) for outcome, causes in CASES.items() for cause in causes]
ALONE = {
    "a clean sandbox for the evaluation cannot be made": "FAILED (`sandbox`)",
    "the agent's sandbox is ended from outside before it is judged": "FAILED (`sandbox`)",
    "the sandbox of the evaluation is ended from outside": "FAILED (`sandbox`)",
}
"""Rows that need a node of their own."""


def obeys(request: Request) -> Say:
    last = request.messages[-1]
    if last.role == "tool":
        return Say("It is done.", "That was it.")
    return Say("", "I do it.", [ToolCall("", "bash", {"command": last.text.partition("RUN: ")[2]})])


def folder_of(folder: Path, script: str) -> str:
    folder.mkdir(parents=True)
    (folder / "test.sh").write_text(f"#!/bin/sh\n{script}\n")
    return str(folder)


def task_of(name: str, case: Case, out: Path) -> Task:
    evaluator, fields = dict(case.evaluator), dict(case.fields)
    instruction = f"RUN: {case.agent}"
    if evaluator["kind"] == "python":
        evaluator["function"] = f"{out / 'judge.py'}:{evaluator['function']}"
    if "steps" in evaluator:
        script = evaluator.pop("steps")
        evaluator["steps"] = [{"name": step, "tests": folder_of(out / name / step, script)} for step in ("one", "two")]
        fields["steps"] = [{"name": step, "instruction": instruction} for step in ("one", "two")]
        evaluator["tests"] = ""
    if isinstance(evaluator.get("tests"), dict):
        evaluator["tests"] = folder_of(out / name, evaluator["tests"]["script"])
    if "build" in fields.get("timeouts", {}):
        evaluator["base"] = "0" * 40
    values = {
        "task_id": name,
        "instruction": instruction,
        "harness": "shell",
        "harness_options": {"command": "python3 {program}/agent.py work", "folder": str(PROGRAM)},
        "evaluator": evaluator,
        "max_attempts": 1,
        "metadata": {"leak_audit": False},
    }
    return Task.model_validate(values | fields)


@pytest.fixture(scope="module")
def codec(assets: Path) -> ModelCodec:
    return load_codec(assets / "tokenizers" / "qwen3")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def verdicts(
    codec: ModelCodec, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, FinishedSession]]:
    """Every case's session, by `cause/variant`."""
    out = tmp_path_factory.mktemp("causes")
    (out / "judge.py").write_text(ONCE)
    tasks = [
        task_of(f"{number}-{variant}", case, out)
        for number, (outcome, cause) in enumerate(ROWS)
        for variant, case in CASES[outcome][cause].items()
    ]
    async with running_node(codec, out / "node", obeys, run_workers=3, evaluate_workers=6) as rig:
        groups = await asyncio.gather(*(run_group(rig.node, task) for task in tasks))
        yield {finished.session.task_id: finished for group in groups for finished in group}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("outcome", "cause"), ROWS, ids=[cause for _, cause in ROWS])
async def test_a_cause_has_its_outcome(outcome: str, cause: str, verdicts: dict[str, FinishedSession]) -> None:
    for variant, case in CASES[outcome][cause].items():
        finished = verdicts[f"{ROWS.index((outcome, cause))}-{variant}"]
        trajectory, about = finished.trajectory, f"{variant}: {finished}"
        reward = trajectory.reward
        assert reward is not None, about
        notes = "\n".join(trajectory.metadata["notes"])
        if outcome == BROKEN:
            assert trajectory.state is SessionState.FAILED, about
            assert finished.session.failure is FailureReason.EVALUATOR, about
            assert reward.status is RewardStatus.FAILED, about
            assert reward.score is None, about
            assert not finished.usable, about
            assert all(trace.reward is None for trace in trajectory.traces), about
            assert case.said in (trajectory.error or ""), about
            assert "control run" in (trajectory.error or ""), about
            continue
        assert trajectory.state is SessionState.DONE, about
        assert reward.status is RewardStatus.SCORED, about
        assert reward.score == case.value, about
        assert finished.usable, about
        if outcome == SCORED:
            assert reward.cause is None, about
            assert case.said in notes, about
        else:
            assert case.said in (reward.cause or ""), about
            assert reward.cause, about
            assert reward.cause in notes, about


def test_the_documented_causes_are_the_tested_ones() -> None:
    section = DOC.read_text("utf-8").partition("## Causes and outcomes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)[1:]
    assert rows == [(cause, outcome) for outcome, cause in ROWS] + list(ALONE.items())


async def finished_one(rig: NodeRig, out: Path, evaluator: dict[str, Any], **fields: Any) -> FinishedSession:
    case = Case("true", evaluator, fields=fields)
    (finished,) = await run_group(rig.node, task_of("alone", case, out))
    return finished


async def test_no_clean_sandbox_is_not_a_score(
    codec: ModelCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = SandboxPool.acquire

    async def refused(self: SandboxPool, spec: Any) -> Any:
        if spec.mounts:
            return await acquire(self, spec)
        raise SandboxError("no room")

    monkeypatch.setattr(SandboxPool, "acquire", refused)
    async with running_node(codec, tmp_path, obeys) as rig:
        finished = await finished_one(rig, tmp_path, command("true"), max_attempts=2)
    assert finished.session.attempt == 2
    assert finished.session.state is SessionState.FAILED
    assert finished.session.failure is FailureReason.SANDBOX
    assert "no room" in (finished.trajectory.error or "")
    assert finished.trajectory.reward is not None
    assert finished.trajectory.reward.score is None


async def test_a_sandbox_ended_from_outside_is_not_a_score(
    codec: ModelCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read from it would otherwise be left out, and the rest be scored."""
    collect = CommandEvaluator.collect

    async def ended(self: CommandEvaluator, sandbox: Any, task: Task) -> Any:
        await sandbox.destroy()
        return await collect(self, sandbox, task)

    monkeypatch.setattr(CommandEvaluator, "collect", ended)
    async with running_node(codec, tmp_path, obeys) as rig:
        finished = await finished_one(rig, tmp_path, command("true"))
    assert finished.session.state is SessionState.FAILED
    assert finished.session.failure is FailureReason.SANDBOX
    assert finished.trajectory.reward is not None
    assert finished.trajectory.reward.score is None


@pytest.mark.parametrize("slow", [False, True])
async def test_an_evaluation_that_got_no_clean_sandbox_at_first_is_not_the_agents_failure(
    slow: bool, codec: ModelCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime is in trouble, the repetition fails too, and the control run works again: no reward of 0."""
    acquire, calls = SandboxPool.acquire, 0

    async def refused(self: SandboxPool, spec: Any) -> Any:
        nonlocal calls
        calls += not spec.mounts
        if spec.mounts or calls > 1:
            return await acquire(self, spec)
        if slow:
            await asyncio.sleep(600)
        raise SandboxError("no room")

    monkeypatch.setattr(SandboxPool, "acquire", refused)
    async with running_node(codec, tmp_path, obeys) as rig:
        case = Case("echo 'exit 127' >tool", command(RUN), fields={"timeouts": {"init": 20.0}})
        (finished,) = await run_group(rig.node, task_of("alone", case, tmp_path))
    assert finished.session.state is SessionState.FAILED
    assert finished.session.failure is FailureReason.SANDBOX
    assert ("not ready within 20 s" if slow else "no room") in (finished.trajectory.error or "")


SLEEPS = f"sleep {3_000_000 + os.getpid()}"
"""Recognizable among the processes of this machine."""


@pytest.mark.parametrize(
    "evaluator",
    [
        command(SLEEPS),
        command(f"echo 0.25; {SLEEPS}; echo 1", reward="number"),
        patch(SLEEPS, repository="/work"),
    ],
    ids=["exit code", "number", "patch"],
)
async def test_a_sandbox_of_the_evaluation_ended_from_outside_is_not_a_score(
    evaluator: dict[str, Any], codec: ModelCodec, tmp_path: Path
) -> None:
    """Its command has an exit code, and perhaps half its output: neither may become a reward."""

    async def kill() -> None:
        while True:
            for pid in processes_named(SLEEPS.replace(" ", "\0")):
                with contextlib.suppress(OSError, AssertionError):
                    if os.getpid() in ancestors(pid):
                        os.kill(first_of(pid), signal.SIGKILL)
            await asyncio.sleep(0.1)

    killing = asyncio.ensure_future(kill())
    try:
        async with running_node(codec, tmp_path, obeys) as rig:
            finished = await finished_one(rig, tmp_path, evaluator, environment=TREE)
    finally:
        killing.cancel()
    assert finished.session.state is SessionState.FAILED
    assert finished.session.failure is FailureReason.SANDBOX
    assert "killed from outside" in (finished.trajectory.error or "")
    assert finished.trajectory.reward is not None
    assert finished.trajectory.reward.score is None


async def test_sessions_that_fail_together_share_a_control_run(codec: ModelCodec, tmp_path: Path) -> None:
    """And a later failure has its own: one from before would say nothing of the infrastructure as it is now."""
    (tmp_path / "judge.py").write_text(
        f"import os\nPATH = {str(tmp_path / 'runs')!r}\n"
        "def number(files):\n"
        "    with open(PATH, 'a') as file:\n"
        "        print('agent' if '/work/out' in files else 'control', file=file)\n"
        "    if os.path.exists(PATH + '.broken'):\n"
        "        raise OSError('the disk is full')\n"
        "    return float(files.get('/work/out', b'0'))\n"
    )
    evaluator = {"kind": "python", "function": "number", "carry": ["/work/out"]}
    task = task_of("shared", Case("echo much >out", evaluator, fields={"num_samples": 3}), tmp_path)
    async with running_node(codec, tmp_path / "node", obeys, evaluate_workers=3) as rig:
        group = await run_group(rig.node, task)
        assert [one.trajectory.reward.score for one in group if one.trajectory.reward] == [0.0] * 3
        runs = (tmp_path / "runs").read_text().split()
        assert runs.count("agent") == 6
        assert 1 <= runs.count("control") <= 3
        (tmp_path / "runs.broken").touch()
        group = await run_group(rig.node, task)
    assert {one.session.state for one in group} == {SessionState.FAILED}
    assert all("the disk is full" in (one.trajectory.error or "") for one in group)


async def test_cancelling_during_a_control_run_ends_it(codec: ModelCodec, tmp_path: Path) -> None:
    task = task_of("cancelled", Case("echo 'exit 127' >tool", command(f"[ -e tool ] || sleep 600; {RUN}")), tmp_path)
    async with running_node(codec, tmp_path / "node", obeys) as rig:
        work = asyncio.ensure_future(run_group(rig.node, task))
        await until(lambda: bool(list((tmp_path / "node").glob("sessions/*/control"))))
        rig.node.cancel_task("cancelled")
        (finished,) = await asyncio.wait_for(work, 60)
    assert finished.session.state is SessionState.CANCELLED
    assert json.loads(finished.trajectory.to_json())["reward"]["status"] == "missing"
