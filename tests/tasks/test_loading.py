"""Tasks from files: every format as it is published, and errors that name the file, the line and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.common import swebench_package
from towline.evaluators.registry import make_evaluator
from towline.schema import Network, Task
from towline.schema.trust import Grant
from towline.tasks.fields import TaskError
from towline.tasks.harbor_toml import MissingVariable, expand
from towline.tasks.loading import load_tasks
from towline.tasks.oracle import oracle_task

ENV = [Grant.ENV]


def lines(tmp_path: Path, *rows: Any, name: str = "rows.jsonl") -> Path:
    file = tmp_path / name
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return file


def harbor(folder: Path, toml: str = "", **files: str) -> Path:
    """A Harbor folder; names of files have `__` for `/`."""
    given = {
        "task.toml": toml,
        "instruction.md": "Do it.\n",
        "environment__Dockerfile": "FROM debian\nWORKDIR /srv\nWORKDIR app\n",
        "tests__test.sh": "#!/bin/bash\n",
        "solution__solve.sh": "#!/bin/bash\ntrue\n",
    } | files
    for name, text in given.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_text(text)
    return folder


FULL = """
version = "1.0"
artifacts = ["/app/out", { source = "/var/log/app.log", destination = "logs" }]
[task]
name = "org/full"
version = "2.1"
keywords = ["a"]
[metadata]
difficulty = "hard"
[agent]
timeout_sec = 120.5
user = 1000
[verifier]
timeout_sec = 30
env = { LEVEL = "${TOWLINE_TEST_LEVEL:-high}" }
user = "root"
environment_mode = "shared"
[environment]
docker_image = "registry/image:1"
build_timeout_sec = 99
cpus = 2
memory = "2G"
storage_mb = 512
env = { WHO = "${TOWLINE_TEST_WHO}", PLAIN = "$HOME" }
workdir = "/code"
network_mode = "allowlist"
allowed_hosts = ["example.com"]
future_key = 1
[environment.healthcheck]
command = "test -e /ready"
retries = 2
[solution]
env = { HINT = "yes" }
"""


def test_a_harbor_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOWLINE_TEST_WHO", "me")
    folder = harbor(tmp_path / "full", FULL)
    (task,) = load_tasks([folder], harness="codex", samples=3, harness_options={"dialect": "responses"}, trust=ENV)
    environment = task.environment
    assert (task.task_id, task.instruction, task.harness, task.num_samples) == ("org/full", "Do it.\n", "codex", 3)
    assert task.harness_options == {"dialect": "responses"}
    assert (environment.root, environment.build, environment.workdir, environment.user) == (
        "docker.io/registry/image:1",
        "",
        "/code",
        "1000",
    )
    assert environment.env == {"WHO": "me", "PLAIN": "$HOME"}
    assert environment.resources.model_dump() == {"cpus": 2, "memory_mb": 2048, "disk_mb": 512, "pids": None}
    assert environment.network is Network.GATEWAY
    assert environment.artifacts == ["/app/out", "/var/log/app.log"]
    assert "test -e /ready" in environment.setup[1]
    assert (task.timeouts.init, task.timeouts.run, task.timeouts.evaluate) == (99, 120.5, 90)
    (trusted,) = load_tasks([folder], harness="codex", trust=[*ENV, Grant.NETWORK])
    assert (trusted.environment.network, trusted.environment.allowed_hosts) == (Network.OPEN, ["example.com"])
    evaluator = make_evaluator(task.evaluator)
    assert evaluator is not None
    assert evaluator.shared
    assert task.evaluator["env"] == {"LEVEL": "high"}
    assert task.evaluator["secret"] == [str(folder / "tests"), str(folder / "solution")]
    assert task.metadata["difficulty"] == "hard"
    assert task.metadata["harbor"]["notes"] == [
        "ignored in task.toml: artifacts.destination, environment.future_key",
        "only the gateway is reachable, not example.com; to allow them: --trust network",
    ]
    # A task survives the way to a server and back.
    assert Task.model_validate_json(task.model_dump_json()) == task


def test_the_least_of_a_harbor_folder(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "least")
    (task,) = load_tasks([folder / "task.toml"], harness="pi")
    assert (task.task_id, task.environment.workdir, task.environment.build) == (
        "least",
        "/srv/app",
        str(folder / "environment"),
    )
    assert (task.environment.network, task.timeouts.run) == (Network.GATEWAY, None)
    evaluator = make_evaluator(task.evaluator)
    assert evaluator is not None
    assert evaluator.needs_sandbox
    assert evaluator.leaks() == ("/tests", "/solution")
    public = harbor(
        tmp_path / "public", '[environment]\nnetwork_mode = "public"\n', environment__Dockerfile="FROM debian\n"
    )
    (task,) = load_tasks([public], harness="pi", trust=[Grant.NETWORK])
    assert (task.environment.network, task.environment.workdir) == (Network.OPEN, "/app")


def test_steps_and_the_oracle(tmp_path: Path) -> None:
    toml = """
multi_step_reward_strategy = "final"
[agent]
timeout_sec = 10
[[steps]]
name = "one"
min_reward = 0.5
[steps.verifier]
timeout_sec = 7
[[steps]]
name = "two"
[steps.agent]
timeout_sec = 20
[steps.healthcheck]
command = "test -f ready"
"""
    files = {
        f"steps__{name}__{part}": f"#!/bin/{shell}\n{name}"
        for name, shell in {"one": "bash", "two": "sh"}.items()
        for part in ("instruction.md", "tests__test.sh", "solution__solve.sh")
    }
    files["steps__two__workdir__setup.sh"] = "#!/bin/bash\ntouch ready"
    (task,) = load_tasks([harbor(tmp_path / "steps", toml, **files)], harness="pi")
    assert task.instruction == "# Step 1 of 2\n\n#!/bin/bash\none\n\n# Step 2 of 2\n\n#!/bin/sh\ntwo\n"
    assert [step.instruction for step in task.steps] == ["#!/bin/bash\none", "#!/bin/sh\ntwo"]
    assert [step.seconds for step in task.steps] == [None, 20]
    (brought,) = task.steps[1].files
    assert (brought.target, brought.source) == ("/srv/app", str(tmp_path / "steps/steps/two/workdir"))
    assert task.steps[1].setup[0] == "bash ./setup.sh"
    assert "ready" in task.steps[1].setup[1]
    assert (task.steps[0].files, task.steps[0].setup) == ([], [])
    assert (task.timeouts.run, task.timeouts.evaluate) == (10, 7 + 600 + 60)
    assert [step["name"] for step in task.evaluator["steps"]] == ["one", "two"]
    assert make_evaluator(task.evaluator) is not None
    solved = oracle_task(task)
    assert solved.harness == "oracle"
    assert list(solved.harness_options.values()) == [
        'rm -rf /solution && cp -R "/solutions/$TOWLINE_STEP" /solution && bash /solution/solve.sh'
    ]
    assert [file.target for file in solved.environment.files] == ["/solutions/one", "/solutions/two"]
    evaluator = make_evaluator(solved.evaluator)
    assert evaluator is not None
    assert evaluator.leaks() == ("/tests",)
    assert task.environment.files == []


def test_rows_of_every_kind(tmp_path: Path) -> None:
    file = lines(
        tmp_path,
        {
            "task_id": "own",
            "instruction": "Do.",
            "harness": "codex",
            "evaluator": {"kind": "completed"},
            "num_samples": 8,
            "min_samples": 6,
        },
        {"instruction": "Bare."},
        "",
        {"problem": "1+1?", "answer": "2", "level": 3},
        {
            "id": 7,
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
            "answer": [4, "four"],
            "evaluator": {"tolerance": 0.1},
        },
        {"prompt": "Add.", "tests": ["assert add(1, 2) == 3"], "entry_point": "add"},
        {"prompt": "Echo.", "tests": {"inputs": ["a\n"], "outputs": ["a\n"]}, "environment": {"env": {"A": "b"}}},
        {
            "responses_create_params": {
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "3+3?"}]}],
                "instructions": "Think.",
            },
            "expected_answer": "6",
            "uuid": "u-1",
        },
        {
            "instance_id": "django__django-1",
            "repo": "django/django",
            "base_commit": "a" * 40,
            "problem_statement": "Broken.",
            "patch": "diff --git a/x b/x\n",
            "test_patch": "diff --git a/tests/q/test_a.py b/tests/q/test_a.py\n",
            "FAIL_TO_PASS": '["test_x (q.test_a.T)"]',
            "PASS_TO_PASS": "[]",
        },
    )
    tasks = load_tasks([file], harness="pi")
    own, bare, problem, prompt, code, echo, gym, swe = tasks
    assert (own.harness, own.num_samples) == ("codex", 8)
    assert (bare.task_id, bare.harness) == ("rows-2", "pi")
    assert problem.evaluator == {"kind": "answer", "answer": "2"}
    assert (problem.task_id, problem.metadata) == ("rows-4", {"level": 3})
    assert problem.instruction.startswith("1+1?\n\n")
    assert r"\boxed{}" in problem.instruction
    assert (prompt.task_id, prompt.instruction) == ("7", "Be brief.\n\n2+2?")
    assert prompt.evaluator == {"kind": "answer", "answer": [4, "four"], "tolerance": 0.1}
    assert "/work/solution.py" in code.instruction
    assert json.loads(code.evaluator["files"][1]["text"])["entry_point"] == "add"
    assert echo.environment.env == {"A": "b"}
    assert (gym.task_id, gym.instruction) == ("u-1", "Think.\n\n3+3?")
    assert gym.metadata["nemo_gym"]["expected_answer"] == "6"
    assert swe.environment.root == "docker.io/swebench/sweb.eval.x86_64.django_1776_django-1:latest"
    assert swe.evaluator["command"][2].endswith("--parallel 1 q.test_a")
    assert oracle_task(swe).harness_options == {"command": "git apply /solution/solution.patch"}
    for task in tasks:
        assert bool(make_evaluator(task.evaluator)) == bool(task.evaluator)
        assert Task.model_validate_json(task.model_dump_json()) == task
    with pytest.raises(TaskError, match="has no solution"):
        oracle_task(problem)
    fewer = load_tasks([file], harness="pi", samples=4)
    assert {(task.num_samples, task.min_samples) for task in fewer} == {(4, 4), (4, 0)}


SWE = {"instance_id": "a", "base_commit": "b" * 40, "problem_statement": "c", "FAIL_TO_PASS": ["TestAdd"]}


def test_rows_bring_their_own_test_command_and_log_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other languages than Python there is no default."""
    monkeypatch.setattr(swebench_package, "parsers", frozenset)
    rebench = {"test_cmd": ["npm ci", "npx jest --verbose"], "log_parser": "parse_log_jest"}
    python = {"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest_v2"}
    patch = "diff --git a/tests/test_a.py b/tests/test_a.py\n"
    file = lines(
        tmp_path,
        {
            **SWE,
            "instance_id": "go",
            "language": "go",
            "test_cmd": "go test -v ./...",
            "log_parser": "parse_log_gotest",
        },
        {**SWE, "instance_id": "js", "language": "js", "install_config": rebench},
        {**SWE, "instance_id": "py", "install_config": python, "test_patch": patch},
        {**SWE, "instance_id": "own", "evaluator": {"command": "make check", "log_format": "tap"}},
        {**SWE, "instance_id": "unknown", "test_cmd": "./run-tests"},
    )
    go, js, py, own, unknown = (task.evaluator for task in load_tasks([file], harness="pi"))
    assert (go["command"][-1].rpartition("; ")[2], go["log_format"]) == ("go test -v ./...", "go")
    assert (js["command"][-1].rpartition("; ")[2], js["log_format"]) == ("npm ci\nnpx jest --verbose", "jest")
    assert (py["command"][-1].rpartition("; ")[2], py["log_format"]) == ("pytest -rA tests/test_a.py", "pytest")
    assert (own["command"], own["log_format"]) == ("make check", "tap")
    assert "log_format" not in unknown
    for spec in (go, js, py, own, unknown):
        assert make_evaluator(spec) is not None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", r"rows\.jsonl:2: not JSON"),
        ("[1]", r"rows\.jsonl:2: a task is a JSON object"),
        ({"question_text": "?"}, r"rows\.jsonl:2: not a task.*question_text"),
        ({"prompt": "?"}, r"rows\.jsonl:2: answer: missing"),
        ({"prompt": 3, "answer": "4"}, r"rows\.jsonl:2: prompt: must be text"),
        ({"prompt": " ", "answer": "4"}, "prompt: is empty"),
        ({"prompt": "?", "answer": True}, "answer: must be"),
        ({"prompt": [{"role": "assistant", "content": "x"}], "answer": "4"}, r"prompt\.0\.role: .*'assistant'"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "4"},
            r"prompt\.0\.content\.0: only text",
        ),
        ({"instruction": "x", "num_samples": 0}, "num_samples: "),
        ({"instruction": "x", "enviroment": {}}, "enviroment: "),
        ({"instruction": "x", "environment": {"workdir": "here"}}, r"environment\.workdir: "),
        ({"prompt": "?", "answer": 1, "environment": []}, "environment: must be an object"),
        ({"prompt": "?", "tests": []}, "tests: "),
        ({"prompt": "?", "tests": [{"input": "a"}]}, r"tests\.0: "),
        ({"prompt": "?", "tests": {"inputs": ["a"], "outputs": []}}, "1 inputs for 0 outputs"),
        ({"prompt": "?", "tests": "assert 1", "file": "x.py"}, "file: must be an absolute path"),
        ({"responses_create_params": {}}, "responses_create_params: "),
        ({"instance_id": "a", "base_commit": "b"}, "problem_statement: "),
        ({"instance_id": "a", "base_commit": "b", "problem_statement": "c"}, "FAIL_TO_PASS: "),
        ({"instance_id": "a", "base_commit": "b", "problem_statement": "c", "FAIL_TO_PASS": "x"}, "FAIL_TO_PASS: "),
        (SWE, r"test_cmd: missing; 'TestAdd' is not a pytest test id"),
        ({**SWE, "language": "Go"}, r"test_cmd: missing; the tests are not Python \(Go\)"),
        ({**SWE, "repo_language": "js"}, r"the tests are not Python \(js\)"),
        ({**SWE, "eval_script": "npx jest"}, "eval_script: does not mark the end of the tests"),
        ({**SWE, "test_cmd": "x", "eval_type": "maybe"}, "eval_type: must be"),
        ({**SWE, "test_patch": "diff --git a/a_test.go b/a_test.go\n"}, r"the tests are not Python \(a_test\.go\)"),
        ({**SWE, "FAIL_TO_PASS": ["src/a.rs::adds"]}, r"the tests are not Python \(src/a\.rs\)"),
        ({**SWE, "log_parser": "parse_log_cargo"}, r"the tests are not Python \(cargo\)"),
        ({**SWE, "test_cmd": "x", "log_parser": "parse_log_karma"}, "log_parser: 'parse_log_karma' reads an unknown"),
        ({**SWE, "install_config": {"log_parser": "parse_log_js_4"}}, "log_parser: 'parse_log_js_4' reads an unknown"),
        ({**SWE, "test_cmd": "go test ./..."}, "test_cmd: .* add `-v`"),
        (
            {"task_id": "first", "instruction": "again"},
            r"rows\.jsonl:2: the task id 'first' is already used by .*rows\.jsonl:1",
        ),
    ],
)
def test_a_wrong_row_names_its_place(tmp_path: Path, row: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swebench_package, "parsers", frozenset)
    file = lines(tmp_path, {"task_id": "first", "instruction": "fine"}, row)
    with pytest.raises(TaskError, match=reason):
        load_tasks([file], harness="pi")


@pytest.mark.parametrize(
    ("toml", "files", "reason"),
    [
        ("[agent", {}, r"task\.toml: "),
        ("[agent]\ntimeout_sec = -1", {}, r"agent\.timeout_sec: "),
        ("[environment]\nnetwork_mode = 'lan'", {}, r"environment\.network_mode: "),
        ("[environment]\ngpus = 1", {}, r"environment\.gpus: "),
        ("[environment]\nos = 'windows'", {}, r"environment\.os: "),
        ("[environment]\nmemory = 'lots'", {}, "memory must be a size"),
        ("[environment]\nworkdir = 'here'", {}, r"environment\.workdir: "),
        ("[environment]\nenv = { A = '${TOWLINE_NOT_SET}' }", {}, "TOWLINE_NOT_SET is not set"),
        ("[[environment.mcp_servers]]\nname = 'x'", {}, "mcp_servers"),
        (
            "",
            {"environment__docker-compose.yaml": "services: {}"},
            r"docker-compose\.yaml: not supported; a task runs in one sandbox",
        ),
        ("", {"instruction.md": " \n"}, r"instruction\.md: is empty"),
        ("[[steps]]\nname = 'one'", {}, r"steps/one/instruction\.md: missing"),
        ("[verifier.environment]\ncpus = 1", {}, r"verifier\.environment: "),
        ("[[verifier.collect]]\ncommand = 'x'", {}, r"verifier\.collect: "),
        ("[[steps]]\nname = '../x'", {}, r"steps\.0\.name: "),
        ("[[steps]]\nname = 'a'\n[[steps]]\nname = 'a'", {}, "same name"),
    ],
)
def test_a_wrong_harbor_folder_names_its_place(tmp_path: Path, toml: str, files: dict[str, str], reason: str) -> None:
    with pytest.raises(TaskError, match=reason):
        load_tasks([harbor(tmp_path / "t", toml, **files)], harness="pi", trust=ENV)


def test_missing_parts_and_places(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "t")
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(TaskError, match=r"test\.sh: missing"):
        load_tasks([folder], harness="pi")
    with pytest.raises(TaskError, match="does not exist"):
        load_tasks([tmp_path / "nowhere"], harness="pi")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match="no task found"):
        load_tasks([tmp_path / "empty"], harness="pi")
    with pytest.raises(TaskError, match="contains no task"):
        load_tasks([lines(tmp_path, name="none.jsonl")], harness="pi")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(TaskError, match="not UTF-8"):
        load_tasks([tmp_path / "binary.jsonl"], harness="pi")


def test_a_folder_of_tasks(tmp_path: Path) -> None:
    harbor(tmp_path / "b")
    harbor(tmp_path / "a")
    lines(tmp_path, {"instruction": "x"}, name="c.jsonl")
    (tmp_path / "README.md").write_text("not a task")
    assert [task.task_id for task in load_tasks([tmp_path], harness="pi")] == ["a", "b", "c-1"]


words = st.text("abc_$ {}-:", max_size=20)


@given(words, words, st.sampled_from(["", "x"]))
def test_variables(before: str, default: str, value: str) -> None:
    default = default.replace("}", "")
    assert expand(f"<${{V:-{default}}}>", {"V": value}) == f"<{value or default}>"
    assert expand("<${V}>", {"V": value}) == f"<{value}>"
    with pytest.raises(MissingVariable, match="V is not set"):
        expand("${V}", {})
    plain = before.replace("{", "(")
    assert expand(plain, {}) == plain
