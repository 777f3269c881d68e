"""`patch`: what the agent changed, scored by tests that it cannot change; with git and without."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.evaluators.evaluator_rig import MakeRig, Rig, a_task, a_trajectory
from towline.evaluators import repository_changes, testlogs
from towline.evaluators.base import EvalInputs, EvaluationError, RunOutcome
from towline.evaluators.repository_changes import TEST_PATTERNS, TestFileMatcher
from towline.evaluators.testlogs import CaseResult
from towline.sandboxes.base import Runtime
from towline.tasks.loading import load_tasks

BROKEN = "def add(a, b):\n    return a - b\n"
FIXED = BROKEN.replace("-", "+")
OLD_TEST = (
    "import unittest, lib\nclass T(unittest.TestCase):\n    def test_zero(self):\n        assert lib.add(3, 0) == 3\n"
)
TEST_PATCH = """diff --git a/tests/test_lib.py b/tests/test_lib.py
--- a/tests/test_lib.py
+++ b/tests/test_lib.py
@@ -2,3 +2,5 @@
 class T(unittest.TestCase):
     def test_zero(self):
         assert lib.add(3, 0) == 3
+    def test_sum(self):
+        assert lib.add(1, 2) == 3
"""
COMMAND = "python3 -B -m unittest -v tests.test_lib"
GIT = "git -c user.name=a -c user.email=a@example.com"
FILES = [
    {"target": "/repo/lib.py", "text": BROKEN},
    {"target": "/repo/tests/test_lib.py", "text": OLD_TEST},
    {"target": "/repo/tests/__init__.py", "text": ""},
    {"target": "/repo/.gitignore", "text": "*.log\n__pycache__/\n"},
    {"target": "/repo/data.bin", "base64": "AP8A/w=="},
]
ENVIRONMENT = {"workdir": "/repo", "files": FILES}
DATE = "GIT_AUTHOR_DATE='2024-01-01T00:00:00Z' GIT_COMMITTER_DATE='2024-01-01T00:00:00Z'"
WITH_GIT = {**ENVIRONMENT, "setup": [f"git init -q -b main && git add -A && {DATE} {GIT} commit -q -m base"]}
SPEC = {"kind": "patch", "command": COMMAND, "test_patch": TEST_PATCH}
FIX = "sed -i 's/-/+/' lib.py"


def base_commit(tmp_path: Path) -> str:
    """The hash of the commit that the set-up makes: the same everywhere."""
    repo = tmp_path / "same"
    for file in FILES:
        path = repo / file["target"].removeprefix("/repo/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file["text"].encode() if "text" in file else b"\x00\xff\x00\xff")
    subprocess.run(["sh", "-c", WITH_GIT["setup"][0]], cwd=repo, check=True)
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repo, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.parametrize("how", ["base known", "git", "plain"])
async def test_a_fix_scores_and_no_trick_does(how: str, rig: MakeRig, tmp_path: Path) -> None:
    spec: dict[str, Any] = dict(SPEC)
    if how == "base known":
        spec["base"] = base_commit(tmp_path)
    made = rig(spec, environment=ENVIRONMENT if how == "plain" else WITH_GIT)
    commit = "" if how == "plain" else f" && git add -A && {GIT} commit -q -m fix"
    assert (await made.judge("true")).value == 0
    assert (await made.judge(FIX)).value == 1
    # Committed, with a new file, one deleted, a binary one changed and a mode: all of it is carried.
    whole = f"printf 'from new import add\\n' >lib.py; printf '{FIXED}' >new.py; rm .gitignore; printf '\\000\\001' >data.bin; chmod +x new.py"
    reward = await made.judge(whole.replace("\n", "\\n") + commit)
    assert (reward.value, reward.components["applied"]) == (1, 1)
    shown = (made.logs / "agent.patch").read_text(errors="replace")
    assert "new.py" in shown
    assert ".gitignore" in shown
    # Tests, and what stands in for tests, are not the agent's to change.
    for trick in (
        "echo 'import unittest' >tests/test_lib.py",
        "rm -rf tests",
        "rm -r tests && echo x >tests",
        "mkdir -p /elsewhere && rm -r tests && ln -s /elsewhere tests",
        "printf 'import os; os._exit(0)' >sitecustomize.py",
        "rm tests/test_lib.py && mkdir tests/test_lib.py && touch tests/test_lib.py/x",
    ):
        assert (await made.judge(trick)).value == 0, trick
        assert (await made.judge(f"{trick}; {FIX}")).value == 1, trick
    assert (made.logs / "left-out.txt").read_text().strip()


async def test_a_repository_that_the_agent_ruined(rig: MakeRig, tmp_path: Path) -> None:
    """Whatever became of the agent's .git, its work counts; and what its git says is only what it hands in."""
    made = rig({**SPEC, "base": base_commit(tmp_path)}, environment=WITH_GIT)
    assert (await made.judge(f"{FIX}; rm -rf .git")).value == 1
    assert (await made.judge(f"{FIX}; rm -rf .git; git init -q && git add -A && {GIT} commit -q -m mine")).value == 1
    hooked = "git config core.fsmonitor 'touch /work/was-run'; git config diff.external /bin/false"
    assert (await made.judge(f"{FIX}; {hooked}")).value == 1
    replaced = f"git checkout -q -b other && echo x >lib.py && {GIT} commit -qam x && git replace main other && git checkout -q main"
    assert (
        await made.judge(f"{replaced}; git checkout -q main -- . ; printf '{FIXED}' >lib.py".replace("\n", "\\n"))
    ).value == 1
    garbage = b"diff --git a/lib.py b/lib.py\n--- a/lib.py\n+++ b/lib.py\n@@ -1 +1 @@\n-nothing like it\n+x\n"
    outcome = RunOutcome(0, "exited", "", a_trajectory())
    reward = await made.evaluator.evaluate(made, outcome, EvalInputs(patch=garbage))
    assert (reward.value, reward.components) == (0, {"applied": 0})


async def test_swe_bench_rows(bubblewrap: Runtime, tmp_path: Path) -> None:
    """A published row's fields, with the repository from files: the gold patch solves it, half of a fix does not."""
    gold = "diff --git a/lib.py b/lib.py\n--- a/lib.py\n+++ b/lib.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
    row = {
        "instance_id": "org__lib-1",
        "repo": "org/lib",
        "base_commit": base_commit(tmp_path),
        "problem_statement": "add subtracts",
        "patch": gold,
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": json.dumps(["test_sum (tests.test_lib.T)"]),
        "PASS_TO_PASS": ["test_zero (tests.test_lib.T.test_zero)"],
        "version": "1.0",
        "test_cmd": COMMAND,
        "environment": WITH_GIT,
    }
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    (task,) = load_tasks([file], harness="codex")
    made = Rig(bubblewrap, task, tmp_path)
    assert (await made.judge(f"cat >fix <<'E'\n{gold}\nE\ngit apply fix && rm fix")).value == 1
    reward = await made.judge(
        "printf 'def add(a, b):\\n    return 3\\n' >lib.py && sed -i 's/3$/b+a if b else 4/' lib.py"
    )
    assert reward.value == 0
    assert reward.components == {"applied": 1, "fail_to_pass": 1, "pass_to_pass": 0}


@pytest.mark.parametrize("environment", [ENVIRONMENT, WITH_GIT])
async def test_names_that_are_not_text(rig: MakeRig, environment: dict[str, Any]) -> None:
    """Files of any name are scored, reported and left out like others."""
    odd = "; ".join(f"echo x >\"{folder}$(printf '\\377')\"" for folder in ("", "tests/"))
    made = rig(SPEC, environment=environment)
    assert (await made.judge(f"{FIX}; {odd}")).value == 1
    assert (await made.judge(odd)).value == 0
    assert "tests/" in (made.logs / "left-out.txt").read_text()


@pytest.mark.parametrize("log_format", [{"log_parser": "parse_log_tap"}, {}])
async def test_a_row_of_another_language(bubblewrap: Runtime, tmp_path: Path, log_format: dict[str, str]) -> None:
    """A right patch scores 1 by a log that no Python program prints, a wrong one 0, and an unreadable log is no score."""
    test = """#!/bin/sh
. ./lib.sh
echo 1..2
[ "$(gaps a)" = 0 ] && echo "ok 1 - no gap" || echo "not ok 1 - no gap"
[ "$(gaps 'a b')" = 1 ] && echo "ok 2 - one gap" || echo "not ok 2 - one gap"
"""
    row = {
        "instance_id": "org__gaps-1",
        "language": "shell",
        "base_commit": "0" * 40,
        "problem_statement": "gaps are not counted",
        "FAIL_TO_PASS": ["- one gap"],
        "PASS_TO_PASS": ["- no gap"],
        "test_cmd": "sh t/gaps.sh",
        "environment": {"workdir": "/repo", "files": [{"target": "/repo/lib.sh", "text": "gaps() { echo 0; }\n"}]},
        "evaluator": {"files": [{"target": "/repo/t/gaps.sh", "text": test}]},
        "metadata": {"leak_audit": False},
        **log_format,
    }
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    (task,) = load_tasks([file], harness="codex")
    made = Rig(bubblewrap, task, tmp_path)
    gold = "echo 'gaps() { echo $(($# ? $(set -- $1; echo $#) - 1 : 0)); }' >lib.sh"
    assert (await made.judge(gold)).components == {"applied": 1, "fail_to_pass": 1, "pass_to_pass": 1}
    assert (await made.judge()).components == {"applied": 1, "fail_to_pass": 0, "pass_to_pass": 1}
    with pytest.raises(EvaluationError, match="no result"):
        await made.judge("echo 'exit 0' >lib.sh")


async def test_what_is_the_tasks_fault_is_an_error(rig: MakeRig) -> None:
    with pytest.raises(EvaluationError, match="test_patch cannot be applied"):
        await rig({**SPEC, "test_patch": TEST_PATCH.replace("3, 0", "9, 9")}, environment=WITH_GIT).judge()
    with pytest.raises(EvaluationError, match="could not be run"):
        await rig({**SPEC, "command": "no-such-runner"}, environment=WITH_GIT).judge()
    endless = {**SPEC, "seconds": 0.5, "command": "sleep 50"}
    with pytest.raises(EvaluationError, match=r"timed out after 0\.5 seconds"):
        await rig(endless, environment=WITH_GIT).judge(FIX)
    at_once = rig({**endless, "on_timeout": "zero"}, environment=WITH_GIT)
    assert (await at_once.judge(FIX)).components == {"applied": 1, "timed_out": 1}


async def test_without_isolation(process: Runtime, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    made = Rig(process, a_task(SPEC, environment=WITH_GIT), logs)
    assert (await made.judge(FIX)).value == 1
    assert (await made.judge("rm tests/test_lib.py")).value == 0


def test_a_diff_is_taken_apart_by_its_hunks() -> None:
    diff = (
        b"diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1,2 @@\n x\n+diff --git a/tests/t.py b/tests/t.py\n"
        b'diff --git "a/t\\303\\244st s.py" "b/t\\303\\244st s.py"\nnew file mode 100644\n--- /dev/null\n+++ "b/t\\303\\244st s.py"\n@@ -0,0 +1 @@\n+1\n'
        b"diff --git a/old name.py b/tests/new name.py\nsimilarity index 100%\nrename from old name.py\nrename to tests/new name.py\n"
        b"diff --git a/link b/link\nnew file mode 120000\n--- /dev/null\n+++ b/link\n@@ -0,0 +1 @@\n+../etc/passwd\n\\ No newline at end of file\n"
        b"diff --git a/x.bin b/x.bin\nnew file mode 100644\nindex 0..1\nGIT binary patch\nliteral 2\nJcmZQzU|?Vd00961\n\n"
        b"diff --git a/../out b/../out\n--- a/../out\n+++ b/../out\n@@ -1 +1 @@\n-1\n+2\n"
    )
    found = repository_changes.diff_sections(diff)
    assert [section.paths for section in found] == [
        ("a.py",),
        ("täst s.py",),
        ("old name.py", "tests/new name.py"),
        ("link",),
        ("x.bin",),
        (),
    ]
    assert b"".join(section.data for section in found) == diff
    kept, left_out = repository_changes.without_files(diff, TestFileMatcher(TEST_PATTERNS))
    assert [section.paths[0] for section in repository_changes.diff_sections(kept)] == ["a.py", "täst s.py", "x.bin"]
    assert left_out == ["tests/new name.py", "link", "a file with an ambiguous name"]


@given(
    st.binary(max_size=400),
    st.lists(
        st.sampled_from(
            [
                b"diff --git ",
                b"a/x b/x\n",
                b"@@ -1 +1 @@\n",
                b"-a\n",
                b"+b\n",
                b"--- a/x\n",
                b"+++ b/tests/x\n",
                b"rename to tests/y\n",
            ]
        ),
        max_size=30,
    ),
)
def test_no_diff_breaks_and_no_test_file_stays(noise: bytes, lines: list[bytes]) -> None:
    is_test = TestFileMatcher(TEST_PATTERNS)
    for diff in (noise, b"".join(lines)):
        kept, _ = repository_changes.without_files(diff, is_test)
        assert not any(is_test(path) for section in repository_changes.diff_sections(kept) for path in section.paths)


def test_files_that_the_verifier_brings_are_its_own() -> None:
    is_test = TestFileMatcher(["check/*"], ["spec/a.txt"])
    for path in (
        "check/x",
        "check",
        "spec/a.txt",
        "spec",
        "spec/a.txt/b",
        "./spec/a.txt",
        "src/x.pyc",
        "a/__pycache__/b",
    ):
        assert is_test(path), path
    for path in ("spec/b.txt", "source/check.py", "checks", "src/tests.py"):
        assert not is_test(path), path
    default = TestFileMatcher(TEST_PATTERNS)
    for path in (
        "tests/a",
        "a/tests/b.c",
        "test_x.py",
        "a/test_x.py",
        "a/x_test.py",
        "conftest.py",
        "web/a.test.ts",
        "tests",
    ):
        assert default(path), path
    for path in ("src/contest.py", "latest/x", "testing.py", "src/attests/x.py", "protest.py"):
        assert not default(path), path


def test_results_of_single_tests() -> None:
    pytest_output = """
tests/test_a.py::test_one PASSED                [ 10%]
tests/test_a.py::test_two[a b-1] FAILED         [ 20%]
tests/test_a.py::test_retried FAILED            [ 20%]
tests/test_a.py::test_retried PASSED            [ 20%]
\x1b[32mPASSED\x1b[0m tests/test_b.py::test_three[x - y]
FAILED tests/test_b.py::test_four - AssertionError: PASSED tests/test_b.py::test_five
ERROR tests/test_b.py::test_six - fixture
XFAIL tests/test_b.py::test_seven - known
SKIPPED [1] tests/test_b.py:3: no
tests/test_b.py::test_eight SKIPPED (why not)   [ 99%]
"""
    found = testlogs.read_test_log(pytest_output).results
    good = ["tests/test_a.py::test_one", "tests/test_b.py::test_seven", "tests/test_b.py::test_three[x - y]"]
    assert testlogs.share(found, good) == 1
    for bad in (
        "tests/test_a.py::test_two[a b-1]",
        "tests/test_a.py::test_retried",
        "tests/test_b.py::test_four",
        "tests/test_b.py::test_five",
        "tests/test_b.py::test_six",
        "tests/test_b.py::test_eight",
        "never",
    ):
        assert not testlogs.passed(found, bad), bad
    unittest_output = """
test_a (mod.T.test_a) ... ok
test_b (mod.T) ... FAIL
test_c (mod.T.test_c)
It does what it says. ... ok
test_d (mod.T) ... skipped 'later'
test_e (mod.T) ... warning printed here
ok
test_f (mod.T) ... expected failure
FAIL: test_g (mod.T)
"""
    found = testlogs.read_test_log(unittest_output).results
    assert (
        testlogs.share(
            found,
            ["test_a (mod.T)", "test_a (mod.T.test_a)", "test_c (mod.T)", "It does what it says.", "test_f (mod.T)"],
        )
        == 1
    )
    for bad in ("test_b (mod.T)", "test_d (mod.T)", "test_g (mod.T)", "test_x (mod.T)"):
        assert not testlogs.passed(found, bad), bad
    assert testlogs.read_test_log("test_sympy ok\ntest_other F\n").results == {
        "test_sympy": CaseResult.PASSED,
        "test_other": CaseResult.FAILED,
    }
    assert testlogs.share({}, []) == 1
    # What the code under test prints to keep the reader busy.
    for noise in (
        "a::b" + " PASSED (" * 500_000,
        "x" + " ... " * 500_000,
        "PASSED a::b" + " - " * 500_000,
        "\n".join(["a::b" + " PASSED (" * 200] * 2000),
    ):
        testlogs.read_test_log(noise)
    assert testlogs.share({}, ["a"]) == 0
