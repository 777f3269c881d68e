"""Software-engineering rows in every published layout: the right image, folder and test command, or a refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from towline.common import swebench_package
from towline.common.image_references import parse_image
from towline.evaluators.registry import make_evaluator
from towline.schema import SandboxKind, Task
from towline.tasks.fields import TaskError
from towline.tasks.loading import load_tasks
from towline.tasks.oracle import oracle_task

SHA = "0123456789abcdef0123456789abcdef01234567"
TEST_PATCH = """diff --git a/tests/test_core.py b/tests/test_core.py
--- a/tests/test_core.py
+++ b/tests/test_core.py
@@ -1 +1,2 @@
 import core
+def test_new(): assert core.one() == 1
diff --git a/tests/test_gone.py b/tests/test_gone.py
deleted file mode 100644
--- a/tests/test_gone.py
+++ /dev/null
@@ -1 +0,0 @@
-import core
"""
GOLD = "diff --git a/core.py b/core.py\n--- a/core.py\n+++ b/core.py\n@@ -1 +1 @@\n-def one(): return 2\n+def one(): return 1\n"
SCRIPT = """#!/bin/bash
set -uxo pipefail
cd /testbed
git checkout 0123456 x_test.go
git apply -v - <<'EOF_1'
diff --git a/x_test.go b/x_test.go
EOF_1
: '>>>>> Start Test Output'
go test -v ./x
: '>>>>> End Test Output'
git checkout 0123456 x_test.go
"""
BENCH = {
    "repo": "psf/requests",
    "instance_id": "psf__requests-1142",
    "base_commit": SHA,
    "patch": GOLD,
    "test_patch": TEST_PATCH,
    "problem_statement": "one() is two.",
    "hints_text": "",
    "created_at": "2013-01-25T05:19:16Z",
    "version": "1.1",
    "FAIL_TO_PASS": '["tests/test_core.py::test_new"]',
    "PASS_TO_PASS": '["tests/test_core.py::test_old"]',
    "environment_setup_commit": SHA,
}
SMITH = {
    "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
    "repo": "swesmith/oauthlib__oauthlib.1fd52536",
    "patch": GOLD,
    "FAIL_TO_PASS": ["tests/test_core.py::test_new"],
    "PASS_TO_PASS": ["tests/test_core.py::test_old", "tests/test_other.py::T::test_x"],
    "created_at": "2025-04-01",
    "image_name": "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536",
    "problem_statement": "one() is two.",
}
R2E = {
    "repo_name": "aiohttp",
    "docker_image": "namanjain12/aiohttp_final:f0d74880deec8fcd982bce639c93c5e130d41198",
    "commit_hash": "f0d74880deec8fcd982bce639c93c5e130d41198",
    "parsed_commit_content": json.dumps(
        {
            "file_diffs": [
                {
                    "header": {"file": {"path": "core.py"}, "misc_line": None},
                    "old_file_content": "def one(): return 2\n",
                    "new_file_content": "def one(): return 1\n",
                },
                {
                    "header": {"file": {"path": "tests/test_core.py"}, "misc_line": None},
                    "old_file_content": "",
                    "new_file_content": "import core\n",
                },
            ]
        }
    ),
    "expected_output_json": json.dumps({"TestCore.test_new": "PASSED", "TestCore.test_odd": "FAILED"}),
    "problem_statement": "[ISSUE]\none() is two.\n[/ISSUE]",
}
MULTI = {
    "org": "Cli",
    "repo": "CLI",
    "number": 10388,
    "state": "closed",
    "title": "fix",
    "body": "",
    "base": {"label": "cli:trunk", "ref": "trunk", "sha": SHA},
    "resolved_issues": [{"number": 1, "title": "one() is two", "body": "It should be one."}],
    "fix_patch": GOLD,
    "test_patch": TEST_PATCH,
    "fixed_tests": {"TestNew": {"run": "NONE", "test": "FAIL", "fix": "PASS"}},
    "p2p_tests": {"TestOld": {"run": "PASS", "test": "PASS", "fix": "PASS"}},
    "f2p_tests": {},
    "s2p_tests": {},
    "n2p_tests": {},
    "lang": "go",
}
REBENCH1 = {
    **BENCH,
    "repo": "0b01001001/spectree",
    "instance_id": "0b01001001__spectree-64",
    "install_config": {
        "log_parser": "parse_log_pytest",
        "test_cmd": "pytest --no-header -rA --tb=line --color=no -p no:cacheprovider",
        "python": "3.9",
        "install": "pip install -e .",
    },
    "environment": "name: spectree\nchannels:\n  - defaults\n",
    "requirements": "attrs==25.1.0\n",
}
REBENCH2 = {
    **BENCH,
    "repo": "Org/tool-box",
    "instance_id": "org__tool-box-12",
    "image_name": "swerebenchv2/org-tool-box:12-0123456",
    "language": "go",
    "interface": "",
    "pr_description": "",
    "test_patch": "diff --git a/a_test.go b/a_test.go\n--- a/a_test.go\n+++ b/a_test.go\n@@ -1 +1 @@\n-a\n+b\n",
    "FAIL_TO_PASS": ["TestNew"],
    "PASS_TO_PASS": [],
    "install_config": {
        "test_cmd": ["go test -v ./..."],
        "log_parser": "parse_log_gotest",
        "base_image_name": "go_1.19",
    },
}
FIVE = {
    **BENCH,
    "repo": "gin-gonic/gin",
    "instance_id": "gin-gonic__gin-1805",
    "image": "swebench/sweb.eval.x86_64.gin-gonic_1776_gin-1805:latest",
    "eval_script": SCRIPT,
    "log_parser": "parse_log_gotest",
    "eval_type": "pass_and_fail",
    "FAIL_TO_PASS": ["TestNew"],
    "PASS_TO_PASS": [],
}
GYM = {**BENCH, "repo": "getmoto/moto", "instance_id": "getmoto__moto-7365"}
MYPY = {
    **BENCH,
    "repo": "python/mypy",
    "instance_id": "python__mypy-15131",
    "test_patch": "diff --git a/test-data/unit/check-a.test b/test-data/unit/check-a.test\n--- a/x\n+++ b/x\n",
    "FAIL_TO_PASS": ["mypy/test/testcheck.py::TypeCheckSuite::check-a.test::testOne"],
    "PASS_TO_PASS": ["mypy/test/testcheck.py::TypeCheckSuite::check-a.test::testTwo"],
}
NEMO = {
    "responses_create_params": {
        "input": [],
        "metadata": {
            "instance_id": "getmoto__moto-7365",
            "dataset_name": "SWE-Gym/SWE-Gym",
            "split": "train",
            "problem_statement": "one() is two.",
            "instance_dict": json.dumps(GYM),
        },
    },
    "agent_ref": {"name": "swe_agents"},
}
PYTEST = "python -m pytest -rA -p no:cacheprovider --color=no"

TABLE = [
    # data set, row, image, folder, end of the command, log format, history
    ("SWE-bench", BENCH, "swebench/sweb.eval.x86_64.psf_1776_requests-1142:latest", "/testbed", f"{PYTEST} tests/test_core.py", "pytest", "beyond"),
    ("SWE-bench 5", FIVE, FIVE["image"], "/testbed", "bash /eval.sh 2>&1", "go", "beyond"),
    ("SWE-Gym", GYM, "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-7365:latest", "/testbed", f"{PYTEST} tests/test_core.py", "pytest", "beyond"),
    ("SWE-Gym mypy", MYPY, "xingyaoww/sweb.eval.x86_64.python_s_mypy-15131:latest", "/testbed", f"{PYTEST} -n0 mypy/test/testcheck.py -k 'testOne or testTwo'", "pytest", "beyond"),
    ("SWE-smith", SMITH, SMITH["image_name"], "/testbed", f"{PYTEST} tests/test_core.py tests/test_other.py", "pytest", "single"),
    ("SWE-smith named", {**SMITH, "image_name": ""}, "swebench/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536:latest", "/testbed", "tests/test_other.py", "pytest", "single"),
    ("SWE-rebench V1", REBENCH1, "swerebench/sweb.eval.x86_64.0b01001001_1776_spectree-64:latest", "/testbed", "-p no:cacheprovider tests/test_core.py", "pytest", "beyond"),
    ("SWE-rebench V1 image", {**REBENCH1, "docker_image": "swerebench/x:1"}, "swerebench/x:1", "/testbed", "tests/test_core.py", "pytest", "beyond"),
    ("SWE-rebench V2", REBENCH2, REBENCH2["image_name"], "/tool-box", "go test -v ./...", "go", "beyond"),
    ("R2E-Gym", R2E, R2E["docker_image"], "/testbed", "PATH=/testbed/.venv/bin:$PATH bash run_tests.sh", None, "beyond"),
    ("Multi-SWE", MULTI, "mswebench/cli_m_cli:pr-10388", "/home/CLI", "bash /home/run.sh", "go", "beyond"),
    ("NeMo Gym", NEMO, "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-7365:latest", "/testbed", "tests/test_core.py", "pytest", "beyond"),
]  # fmt: skip


def load(tmp_path: Path, row: dict[str, Any]) -> Task:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (task,) = load_tasks([file], harness="pi")
    return task


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swebench_package, "parsers", frozenset)


@pytest.mark.parametrize(
    ("row", "image", "folder", "command", "log_format", "history"),
    [case[1:] for case in TABLE],
    ids=[case[0] for case in TABLE],
)
def test_each_data_set(
    row: dict[str, Any],
    image: str,
    folder: str,
    command: str,
    log_format: str | None,
    history: str,
    tmp_path: Path,
    no_package: None,
) -> None:
    task = load(tmp_path, row)
    environment = task.environment
    image = str(parse_image(image))
    assert (environment.sandbox, environment.root, environment.workdir) == (SandboxKind.DOCKER, image, folder)
    assert task.evaluator["command"][-1].endswith(command)
    assert "test_gone" not in task.evaluator["command"][-1]
    assert task.evaluator.get("log_format") == log_format
    assert task.evaluator["conceal"] == history
    assert task.instruction.startswith("one() is two")
    assert make_evaluator(task.evaluator) is not None
    # A reference solution is in every one of these rows; the agent's sandbox gets it from the oracle alone.
    assert task.metadata["solution_patch"].strip() == GOLD.strip()
    assert GOLD not in json.dumps([file.text for file in task.environment.files]) or task.metadata["solution_reversed"]
    assert oracle_task(task).harness == "oracle"
    assert Task.model_validate_json(task.model_dump_json()) == task


def test_what_each_image_must_not_show(tmp_path: Path, no_package: None) -> None:
    assert "/r2e_tests" in load(tmp_path, R2E).evaluator["withheld"]
    assert load(tmp_path, MULTI).evaluator["withheld"] == [
        f"/home/{name}" for name in ("fix.patch", "test.patch", "fix-run.sh", "test-run.sh")
    ]
    smith = load(tmp_path, SMITH)
    assert smith.environment.files[0].text == GOLD
    assert "rm /towline-bug.patch" in smith.environment.setup[0]
    assert oracle_task(smith).harness_options == {"command": "git apply -R /solution/solution.patch"}
    assert load(tmp_path, NEMO).metadata["nemo_gym"] == NEMO


def test_an_evaluation_script_records_the_exit_code_of_the_tests(tmp_path: Path, no_package: None) -> None:
    spec = load(tmp_path, FIVE).evaluator
    lines = spec["files"][0]["text"].splitlines()
    at = lines.index(": '>>>>> End Test Output'")
    assert lines[at - 2 : at] == ["go test -v ./x", "SWEBENCH_TEST_EXIT_CODE=$?"]
    assert lines[at + 1] == 'echo ">>>>> Test Exit Code: $SWEBENCH_TEST_EXIT_CODE"'
    assert spec["command_applies_tests"]


def test_the_package_grades_where_it_is_installed(tmp_path: Path) -> None:
    assert len(swebench_package.parsers()) == 57, "the development environment has swebench 5.0.2"
    five = load(tmp_path, FIVE).evaluator
    assert five["swebench"] == {
        "instance_id": "gin-gonic__gin-1805",
        "log_parser": "parse_log_gotest",
        "eval_type": "pass_and_fail",
        "repo": "gin-gonic/gin",
        "version": "1.1",
    }
    assert "log_format" not in five
    # A row from before rows named their parser has that of its repository; one of another data set is read by us.
    assert load(tmp_path, BENCH).evaluator["swebench"]["log_parser"] == "parse_log_requests"
    assert load(tmp_path, GYM).evaluator["log_format"] == "pytest"
    assert load(tmp_path, {**FIVE, "log_parser": "parse_log_eslint", "eval_type": "fail_only"}).evaluator["swebench"]
    for row in (FIVE, BENCH):
        assert make_evaluator(load(tmp_path, row).evaluator) is not None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**FIVE, "log_parser": "parse_log_eslint"}, "log_parser: 'parse_log_eslint' reads an unknown log format"),
        ({**FIVE, "eval_type": "fail_only"}, r"eval_type: `fail_only` .*towline\[swebench\]"),
        ({**REBENCH2, "install_config": {}}, r"test_cmd: missing; the tests are not Python \(go\)"),
        ({**SMITH, "problem_statement": ""}, "problem_statement: must be non-empty"),
        ({**SMITH, "patch": "x"}, "patch: must be the text of a diff"),
        ({**SMITH, "FAIL_TO_PASS": []}, "FAIL_TO_PASS: names no test"),
        ({**SMITH, "FAIL_TO_PASS": ["TestA"], "PASS_TO_PASS": []}, "test_cmd: missing"),
        ({**R2E, "expected_output_json": "{"}, "expected_output_json: not JSON"),
        ({**R2E, "expected_output_json": {}}, "expected_output_json: must be an object with"),
        ({**R2E, "docker_image": ""}, "docker_image: "),
        ({**MULTI, "base": {}}, r"base\.sha: "),
        ({**MULTI, "fixed_tests": {}}, "fixed_tests: names no test"),
        ({**MULTI, "resolved_issues": [], "title": ""}, "resolved_issues: has no text"),
        ({**MULTI, "p2p_tests": 3}, "p2p_tests: "),
        ({"responses_create_params": {"input": [], "metadata": {"instance_dict": "{"}}}, "instance_dict: not JSON"),
        ({"responses_create_params": {"input": [], "metadata": {"instance_dict": "{}a"}}}, "instance_dict: not JSON"),
        (
            {"responses_create_params": {"input": [], "metadata": {"instance_dict": '{"a": 1}'}}},
            "instance_dict: not a row of a known data set; found: a",
        ),
    ],
)
def test_what_cannot_be_graded_is_refused_at_load(
    row: dict[str, Any], reason: str, tmp_path: Path, no_package: None
) -> None:
    with pytest.raises(TaskError, match=reason):
        load(tmp_path, row)
