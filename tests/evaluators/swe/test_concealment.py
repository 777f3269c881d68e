"""Images that hold the answer: the agent's sandbox does not, the evaluation gets the image as it is, and a fix still counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.evaluators.evaluator_rig import MakeRig, Rig
from towline.evaluators.base import EvaluationError
from towline.sandboxes.base import Runtime, SandboxError
from towline.schema import Task
from towline.tasks.loading import load_tasks
from towline.tasks.oracle import oracle_task

GIT = "git -c user.name=a -c user.email=a@example.com"
BROKEN, FIXED = "def one():\n    return 2\n", "def one():\n    return 1\n"
TEST = (
    "import unittest, core\nclass T(unittest.TestCase):\n    def test_one(self):\n        assert core.one() == 1\n"
    "    def test_kind(self):\n        assert isinstance(core.one(), int)\n"
)
FILES = [
    {"target": "/testbed/core.py", "text": BROKEN},
    {"target": "/testbed/setup.cfg", "text": "[metadata]\n"},
    {"target": "/testbed/tests/__init__.py", "text": ""},
]
HISTORY = [
    f"git init -q -b main && git add -A && {GIT} commit -q -m base && git rev-parse HEAD >/base",
    # The fix is on the branch, under a tag, in a stash, in another branch's reflog and at a remote.
    f"printf '{FIXED}' >core.py && {GIT} commit -qam 'the fix' && git tag -a v2 -m two 2>/dev/null || {GIT} tag -a v2 -m two",
    "git update-ref refs/remotes/origin/main HEAD && git symbolic-ref refs/remotes/origin/HEAD refs/remotes/origin/main",
    "git remote add origin https://example.invalid/x.git && git checkout -q -b next && echo 1 >next.txt",
    f"git add -A && {GIT} commit -qm next && echo 2 >>core.py && {GIT} stash -q && git checkout -q $(cat /base) && rm /base",
    "git branch -q -D next && git update-ref refs/notes/hint main",
    # What the image's own build left behind: a tracked file that is changed, and one that git does not know.
    "echo '[tool]' >>setup.cfg && echo built >build-stamp",
]  # fmt: skip
LEAKING = {"workdir": "/testbed", "files": FILES, "setup": [line.replace("\n", "\\n") for line in HISTORY]}
SPEC = {
    "kind": "patch",
    "command": "python3 -B -m unittest -v tests.test_core",
    "files": [{"target": "/testbed/tests/test_core.py", "text": TEST}],
    "fail_to_pass": ["test_one (tests.test_core.T)"],
    "pass_to_pass": ["test_kind (tests.test_core.T)"],
}
FIX = "sed -i s/2/1/ core.py"
SEARCH = (
    "for o in $(git cat-file --batch-all-objects --batch-check='%(objectname) %(objecttype)' | grep ' blob' | cut -d' ' -f1); "
    "do git cat-file blob $o | grep -q 'return 1' && git cat-file blob $o >core.py; done; true"
)
"""A cheat that looks at every object of the repository."""


async def test_history_beyond_the_start_is_out_of_reach(rig: MakeRig) -> None:
    made = rig({**SPEC, "conceal": "beyond"}, environment=LEAKING)
    assert await made.problems() == []
    assert (await made.judge()).value == 0
    assert (await made.judge(FIX)).value == 1
    assert b"setup.cfg" not in (made.logs / "agent.patch").read_bytes()
    assert b"build-stamp" not in (made.logs / "agent.patch").read_bytes()
    for cheat in (
        "git checkout -q main -- core.py || true",
        "git show v2:core.py >core.py || git checkout core.py",
        "git stash pop || true",
        "git checkout -q origin/main -- core.py || true",
        "git reflog | head -1 | grep -q . && git checkout -q HEAD@{1} -- core.py || true",
        SEARCH,
    ):
        assert (await made.judge(cheat)).value == 0, cheat
    # Committed work is measured from the start too, and what the image changed stays as it was.
    assert (await made.judge(f"{FIX}; git add -A; {GIT} commit -qm fix; echo more >>build-stamp")).value == 1


async def test_without_concealment_the_audit_refuses_such_an_image(rig: MakeRig) -> None:
    made = rig(SPEC, environment=LEAKING)
    assert any("is ahead of HEAD" in problem for problem in await made.problems())
    assert (await made.judge(SEARCH, audited=False)).value == 1, "the cheat works where the history is left"


def load(tmp_path: Path, row: dict[str, Any], environment: dict[str, Any]) -> Task:
    """The task of a row, in an environment of the test's own instead of a published image."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    (task,) = load_tasks([file], harness="shell")
    fields = task.model_dump(mode="json")
    own = {"sandbox": None, "root": "", "files": [*environment["files"], *fields["environment"]["files"]]}
    own["setup"] = [*environment["setup"], *fields["environment"]["setup"]]
    return Task.model_validate(fields | {"environment": fields["environment"] | own})


async def judged(task: Task, script: str, bubblewrap: Runtime, tmp_path: Path) -> float:
    logs = tmp_path / "logs"
    logs.mkdir(exist_ok=True)
    return (await Rig(bubblewrap, task, logs).judge(script)).value


async def test_a_swe_smith_row_from_its_bug_to_its_fix(bubblewrap: Runtime, tmp_path: Path) -> None:
    bug = "diff --git a/core.py b/core.py\n--- a/core.py\n+++ b/core.py\n@@ -1,2 +1,2 @@\n def one():\n-    return 1\n+    return 2\n"
    row = {
        "instance_id": "org__core.12345678.func_pm__1",
        "repo": "swesmith/org__core.12345678",
        "patch": bug,
        "problem_statement": "one() is two",
        "FAIL_TO_PASS": ["test_one (tests.test_core.T.test_one)"],
        "PASS_TO_PASS": ["test_kind (tests.test_core.T.test_kind)"],
        "test_cmd": SPEC["command"],
        "log_parser": "parse_log_django",
    }
    files = [{"target": "/testbed/core.py", "text": FIXED}, *FILES[1:]]
    files.append({"target": "/testbed/tests/test_core.py", "text": TEST})
    setup = [f"git init -q -b main && git add -A && {GIT} commit -q -m initial"]
    task = load(tmp_path, row, {"files": files, "setup": setup})
    task = Task.model_validate(
        task.__dict__ | {"evaluator": {**task.evaluator, "command": ["sh", "-c", SPEC["command"]]}}
    )
    assert await judged(task, "true", bubblewrap, tmp_path) == 0
    assert await judged(task, FIX, bubblewrap, tmp_path) == 1
    # The commit before the bug would be the answer.
    assert await judged(task, "git checkout -q HEAD~1 -- core.py || true", bubblewrap, tmp_path) == 0
    assert await judged(task, SEARCH, bubblewrap, tmp_path) == 0
    assert (
        await judged(task, "test ! -e /towline-bug.patch && rm -rf .git && sed -i s/2/1/ core.py", bubblewrap, tmp_path)
        == 1
    )
    assert await judged(task, "sed -i 's/== 1/== 2/' tests/test_core.py", bubblewrap, tmp_path) == 0
    oracle = oracle_task(task)
    assert await judged(oracle, oracle.harness_options["command"], bubblewrap, tmp_path) == 1


R2E_TESTS = """import sys; sys.path.insert(0, ".")
import core
print("=================== short test summary info ===================")
print("PASSED r2e_tests/test_1.py::TestCore::test_one" if core.one() == 1 else "FAILED r2e_tests/test_1.py::TestCore::test_one - no")
print("FAILED r2e_tests/test_1.py::TestCore::test_odd - as before")
"""
"""Stands in for pytest, whose summary it prints."""


async def test_an_r2e_row_whose_tests_are_in_the_image(bubblewrap: Runtime, tmp_path: Path) -> None:
    row = {
        "repo_name": "core",
        "docker_image": "namanjain12/core_final:1",
        "commit_hash": "1" * 40,
        "expected_output_json": json.dumps({"TestCore.test_one": "PASSED", "TestCore.test_odd": "FAILED"}),
        "problem_statement": "one() is two",
    }
    files = [
        *FILES,
        {"target": "/r2e_tests/test_1.py", "text": R2E_TESTS},
        {"target": "/testbed/run_tests.sh", "text": "python3 -B r2e_tests/test_1.py\n"},
    ]
    task = load(tmp_path, row, {"files": files, "setup": LEAKING["setup"]})
    assert await judged(task, "test ! -e /r2e_tests && test ! -e run_tests.sh", bubblewrap, tmp_path) == 0
    assert await judged(task, FIX, bubblewrap, tmp_path) == 1
    assert await judged(task, SEARCH, bubblewrap, tmp_path) == 0
    forged = "mkdir -p r2e_tests && echo 'print(1)' >r2e_tests/test_1.py && echo true >run_tests.sh"
    assert await judged(task, forged, bubblewrap, tmp_path) == 0
    assert await judged(task, f"{forged}; {FIX}", bubblewrap, tmp_path) == 1


async def test_an_evaluation_script_applies_the_tests_itself(bubblewrap: Runtime, tmp_path: Path) -> None:
    patch = (
        "diff --git a/tests/test_core.py b/tests/test_core.py\nnew file mode 100644\n--- /dev/null\n+++ b/tests/test_core.py\n"
        f"@@ -0,0 +1,{TEST.count(chr(10))} @@\n" + "".join(f"+{line}\n" for line in TEST.splitlines())
    )
    script = (
        f"#!/bin/bash\nset -uxo pipefail\ncd /testbed\ngit apply -v - <<'EOF_1'\n{patch}EOF_1\n"
        f": '>>>>> Start Test Output'\n{SPEC['command']}\n: '>>>>> End Test Output'\ngit checkout setup.cfg\n"
    )
    row = {
        "instance_id": "org__core-1",
        "repo": "org/core",
        "version": "1",
        "image": "swebench/sweb.eval.x86_64.org_1776_core-1",
        "base_commit": "0" * 40,
        "problem_statement": "one() is two",
        "test_patch": patch,
        "eval_script": script,
        "log_parser": "parse_log_django",
        "eval_type": "pass_and_fail",
        "FAIL_TO_PASS": SPEC["fail_to_pass"],
        "PASS_TO_PASS": SPEC["pass_to_pass"],
    }
    task = load(tmp_path, row, {"files": FILES, "setup": LEAKING["setup"]})
    named = {"fail_to_pass": ["test_one (tests.test_core.T.test_one)"]}
    named["pass_to_pass"] = ["test_kind (tests.test_core.T.test_kind)"]
    task = Task.model_validate(task.__dict__ | {"evaluator": {**task.evaluator, **named, "base": ""}})
    assert task.evaluator["swebench"]["log_parser"] == "parse_log_django"
    assert await judged(task, "true", bubblewrap, tmp_path) == 0
    assert await judged(task, FIX, bubblewrap, tmp_path) == 1
    mine = "printf 'import unittest\\n' >tests/test_core.py"
    assert await judged(task, mine, bubblewrap, tmp_path) == 0
    assert await judged(task, f"{mine}; {FIX}", bubblewrap, tmp_path) == 1


@pytest.mark.parametrize("conceal", ["beyond", "single"])
async def test_a_folder_without_a_repository_is_an_error(rig: MakeRig, conceal: str) -> None:
    made = rig({**SPEC, "conceal": conceal}, environment={"workdir": "/testbed", "files": FILES})
    with pytest.raises(SandboxError, match="the git history of /testbed cannot be concealed"):
        await made.problems()


async def test_a_start_that_differs_from_base_is_never_a_0(rig: MakeRig) -> None:
    """Files that an image's own build changed would be in every agent's diff, and keep it from applying."""
    setup = [
        f"git init -q -b main && git add -A && GIT_AUTHOR_DATE=2024-01-01T00:00:00Z GIT_COMMITTER_DATE=2024-01-01T00:00:00Z {GIT} commit -q -m base",
        "echo '[tool]' >>setup.cfg",
    ]
    dirty = {"workdir": "/testbed", "files": FILES, "setup": setup}
    assert (await rig(SPEC, environment=dirty).judge(FIX)).value == 1
    base = "GIT_DIR=.git git rev-parse HEAD"
    made = rig(SPEC, environment=dirty)
    made.last_look = base
    await made.judge(FIX)
    known = rig({**SPEC, "base": made.seen.strip()}, environment=dirty)
    with pytest.raises(EvaluationError, match=r"differs from base .*set `conceal`"):
        await known.judge(FIX)
    assert (
        await rig({**SPEC, "base": made.seen.strip(), "conceal": "beyond"}, environment=dirty).judge(FIX)
    ).value == 1
