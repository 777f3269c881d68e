"""Rows 5 and 6: a data set that someone else wrote uses the machine of the user who runs it."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from support.security.attack import attack, without
from support.security.host_reach import SECRET, evil_module, host_reach
from towline.common.untrusted import data_files
from towline.errors import ConfigError
from towline.schema import Task
from towline.schema.trust import EVERYTHING, Grant
from towline.tasks.loading import load_tasks
from towline.tasks.oracle import oracle_task

OPEN_DOOR = without(
    ("towline.schema.trust.is_granted", lambda *_: True),
    ("towline.schema.untrusted.is_granted", lambda *_: True),
    ("towline.tasks.fields.DATA_FILES", EVERYTHING),
    ("towline.tasks.fields.NOTHING", EVERYTHING),
    ("towline.tasks.fields.TaskDefaults.folder", lambda self, path: data_files.DataFolder(path, links=True)),
    ("towline.tasks.fields.TaskDefaults._resolve", lambda self, folder, path: str(folder / Path(path).expanduser())),
)
"""The grants, and the files that are opened without following links."""
_NAMES = (f"evil_file_{number}" for number in itertools.count())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home with secrets, and a downloaded data set in `data/`, in which commands are run."""
    for name in ("secrets", "data", "data/inner"):
        (tmp_path / name).mkdir()
    for name in ("secrets/key", "secrets/Dockerfile", "secrets/solve.sh", "secrets/test.sh", "secrets/task.jsonl"):
        (tmp_path / name).write_text(SECRET)
    (tmp_path / "data" / "link").symlink_to(tmp_path / "secrets")
    (tmp_path / "data" / "inner" / "up").symlink_to("..")
    (tmp_path / "data" / f"upload:{'a' * 64}").symlink_to(tmp_path / "secrets")
    monkeypatch.chdir(tmp_path / "data")
    monkeypatch.setenv("HOME", str(tmp_path / "secrets"))
    monkeypatch.setenv("API_KEY", SECRET)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def row(**fields: Any) -> dict[str, Any]:
    return {"task_id": "t", "instruction": "x", "harness": "nothing", **fields}


def loaded(path: Path, **options: Any) -> list[Task]:
    try:
        return load_tasks([path], harness="nothing", **options)
    except ConfigError:
        return []


def run_file(home: Path, **fields: Any) -> list[str]:
    """What a JSONL file with this row reaches when the user runs it."""
    file = home / "data" / "tasks.jsonl"
    file.write_text(json.dumps(row(**fields)) + "\n")
    return [reached for task in loaded(file) for reached in host_reach(task)]


PATHS = {
    "absolute": "{home}/secrets/key",
    "traversal": "../secrets/key",
    "inner traversal": "inner/../../secrets/key",
    "ends in dots": "inner/../..",
    "dots alone": "..",
    "home": "~/key",
    "home folder": "~",
    "link to a folder": "link/key",
    "link itself": "link",
    "link with a slash": "link/",
    "link with a dot": "./link/.",
    "link upwards": "inner/up/link/key",
    "an upload": f"upload:{'a' * 64}",
}
PLACES: dict[str, Any] = {
    "environment.files": lambda path: {"environment": {"files": [{"target": "/x", "source": path}]}},
    "steps.files": lambda path: {
        "steps": [{"name": "s", "instruction": "x", "files": [{"target": "/x", "source": path}]}]
    },
    "evaluator.files": lambda path: {
        "evaluator": {"kind": "command", "command": "true", "files": [{"target": "/x", "source": path}]}
    },
    "harbor tests": lambda path: {"evaluator": {"kind": "harbor", "tests": path}},
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
@attack("5", "6", guard=OPEN_DOOR)
def test_paths_in_a_row(home: Path, path: str, place: Any) -> list[str]:
    return run_file(home, **place(path.format(home=home)))


@pytest.mark.parametrize(
    "root", ["../secrets", "./link", "inner/../../secrets", "~", "{home}/secrets", "inner/../link/."]
)
@attack("5", "6", guard=OPEN_DOOR)
def test_roots_in_a_row(home: Path, root: str) -> list[str]:
    return run_file(home, environment={"root": root.format(home=home)})


SPELLINGS = {
    "scheme": "file://{home}/secrets/key",
    "scheme without slashes": "file:{home}/secrets/key",
    "backslashes": "..\\secrets\\key",
    "full-width dots": "\uff0e\uff0e/secrets/key",
    "one dot leaders": "\u2024\u2024/secrets/key",
    "full-width slash": "..\uff0fsecrets\uff0fkey",
    "zero-width space": "..\u200b/secrets/key",
    "right-to-left": "\u202e../secrets/key",
    "soft hyphen": ".\u00ad./secrets/key",
    "no-break space": "..\u00a0/secrets/key",
    "null": "inner\x00/../../secrets/key",
    "newline": "inner\n/../../secrets/key",
    "space after dots": ".. /secrets/key",
    "empty parts": ".//..//secrets//key",
    "long": "a/" * 3000 + "key",
}


@pytest.mark.parametrize("path", SPELLINGS.values(), ids=SPELLINGS.keys())
@attack(
    "5",
    "6",
    guard=without(("towline.common.untrusted.data_files._is_hidden", None), ("towline.schema.trust.plain_parts", len)),
)
def test_spellings_that_look_like_paths(home: Path, path: str) -> str | None:
    """Refused as what they look like: nobody who reads the file would know what they name."""
    from towline.schema.trust import Admission
    from towline.schema.untrusted import UntrustedTask

    task = Task.model_validate(row(environment={"files": [{"target": "/x", "source": path.format(home=home)}]}))
    try:
        UntrustedTask.read(task, Admission())
    except ConfigError:
        return None
    return "a path that cannot be read as one"


CODE: dict[str, Any] = {
    "process": lambda name: {"environment": {"sandbox": "process", "setup": ["id"]}},
    "network": lambda name: {"environment": {"network": "open"}},
    "harness": lambda name: {"harness": f"{name}:HARNESS"},
    "evaluator": lambda name: {"evaluator": {"kind": "python", "function": f"{name}:reward"}},
    "evaluator file": lambda name: {"evaluator": {"kind": "python", "function": f"../{name}.py:reward"}},
    "packages": lambda name: {"harness": "shell", "harness_options": {"command": "true", "packages": ["evil==1"]}},
    "folder": lambda name: {"harness": "shell", "harness_options": {"command": "true", "folder": "../secrets"}},
    "build": lambda name: {"environment": {"build": "../secrets"}},
    "linked build": lambda name: {"environment": {"build": "link"}},
    "pattern": lambda name: {"settings": {"noise": [r"(a+)+\1"]}},
}


@pytest.mark.parametrize("fields", CODE.values(), ids=CODE.keys())
@attack("5", guard=OPEN_DOOR)
def test_a_data_set_is_not_code(home: Path, fields: Any) -> list[str]:
    name = next(_NAMES)
    evil_module(home, name)
    try:
        return run_file(home, **fields(name))
    finally:
        sys.modules.pop(name, None)


@attack("5", "6", guard=OPEN_DOOR)
def test_a_build_whose_dockerfile_is_a_link(home: Path) -> list[str]:
    (home / "data" / "inner" / "Dockerfile").symlink_to("../../secrets/Dockerfile")
    file = home / "data" / "tasks.jsonl"
    file.write_text(json.dumps(row(environment={"build": "inner"})) + "\n")
    texts = [(Path(task.environment.build) / "Dockerfile").read_text() for task in loaded(file)]
    return [text for text in texts if SECRET in text]


@pytest.mark.parametrize("kind", ["math", "coding", "nemo gym", "swe"])
@attack("5", guard=OPEN_DOOR)
def test_rows_of_other_kinds_are_no_way_around(home: Path, kind: str) -> list[str]:
    own: dict[str, dict[str, Any]] = {
        "math": {"problem": "1+1", "answer": "2"},
        "coding": {"prompt": "x", "tests": ["assert True"]},
        "nemo gym": {"responses_create_params": {"input": "x"}, "expected_answer": "2"},
        "swe": {
            "instance_id": "a__b-1",
            "base_commit": "0" * 40,
            "problem_statement": "x",
            "FAIL_TO_PASS": ["t.py::t"],
            "test_patch": "",
        },
    }
    file = home / "data" / "tasks.jsonl"
    reaching = {"environment": {"sandbox": "process", "files": [{"target": "/x", "source": "../secrets/key"}]}}
    file.write_text(json.dumps(own[kind] | reaching) + "\n")
    return [reached for task in loaded(file) for reached in host_reach(task)]


@attack("6", guard=without(("towline.tasks.fields.HARBOR_KEY", "unreserved")))
def test_a_row_that_says_it_is_a_harbor_folder(home: Path) -> list[str]:
    """`--oracle` copies the solution of the folder that the metadata names into the sandbox."""
    file = home / "data" / "tasks.jsonl"
    about = {"folder": str(home), "solution_env": {}}
    (home / "secrets").rename(home / "solution")
    file.write_text(json.dumps(row(metadata={"harbor": about})) + "\n")
    return [reached for task in loaded(file) for reached in host_reach(oracle_task(task))]


# Harbor folders


def harbor(home: Path, toml: str = "", **links: str) -> Path:
    """A Harbor folder; `links` are symbolic links in place of files (`__` for `/`)."""
    folder = home / "data" / "task"
    for name, text in {
        "task.toml": toml,
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": "FROM debian\n",
        "tests/test.sh": "true\n",
        "solution/solve.sh": "true\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name, target in links.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        if path.is_dir():
            path.rename(folder / "moved")
        elif path.exists():
            path.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target.format(home=home))
    return folder


LINKS = {
    "instruction": {"instruction_dot_md": "{home}/secrets/key"},
    "relative instruction": {"instruction_dot_md": "../../secrets/key"},
    "tests": {"tests": "{home}/secrets"},
    "solution": {"solution": "{home}/secrets"},
    "environment": {"environment": "{home}/secrets"},
    "Dockerfile": {"environment__Dockerfile": "{home}/secrets/Dockerfile"},
    "task.toml": {"task_dot_toml": "../moved.toml"},
    "link to a link": {"instruction_dot_md": "../link/key"},
}


@pytest.mark.parametrize("links", LINKS.values(), ids=LINKS.keys())
@attack("6", guard=OPEN_DOOR)
def test_links_in_a_harbor_folder(home: Path, links: dict[str, str]) -> list[str]:
    (home / "data" / "moved.toml").write_text('[metadata]\nwhere = "another file"\n')
    found = []
    for task in loaded(harbor(home, "", **links)):
        if SECRET in task.instruction:
            found.append("the instruction is the secret")
        if task.metadata.get("where"):
            found.append("settings of another file")
        found += host_reach(task)
        if "solution" in links:
            found += host_reach(oracle_task(task, EVERYTHING))
        if "environment__Dockerfile" in links:
            found += [SECRET] * (SECRET in (Path(task.environment.build) / "Dockerfile").read_text())
    return found


@pytest.mark.parametrize("name", ["task", "tasks.jsonl"])
@attack("6", guard=OPEN_DOOR)
def test_links_among_the_tasks_of_a_folder(home: Path, name: str) -> list[str]:
    """A folder of tasks is data; only what the user names himself may be a link."""
    folder = harbor(home)
    (folder / "instruction.md").write_text(SECRET)
    folder.rename(home / "private")
    (home / "private" / "rows.jsonl").write_text(json.dumps(row(instruction=SECRET)) + "\n")
    target = home / "private" / ("rows.jsonl" if name.endswith("jsonl") else ".")
    (home / "sets").mkdir()
    (home / "sets" / name).symlink_to(target)
    return [task.task_id for task in loaded(home / "sets") if SECRET in task.instruction]


VARIABLES = {
    "environment": "[environment]\nenv = { A = '${API_KEY}' }",
    "default": "[environment]\nenv = { A = '${API_KEY:-none}' }",
    "inside text": "[environment]\nenv = { A = 'x${API_KEY}y' }",
    "verifier": "[verifier]\nenv = { A = '${API_KEY}' }",
    "step": "[[steps]]\nname = 's'\n[steps.verifier]\nenv = { A = '${API_KEY}' }",
    "solution": "[solution]\nenv = { A = '${API_KEY}' }",
}


@pytest.mark.parametrize("toml", VARIABLES.values(), ids=VARIABLES.keys())
@attack(
    "6", guard=without(("towline.tasks.harbor.references", lambda text: []), ("towline.tasks.harbor.expand_all", None))
)
def test_variables_of_the_user(home: Path, toml: str, unguarded: bool) -> list[str]:
    from towline.tasks import harbor as loader
    from towline.tasks import harbor_toml

    if unguarded:
        loader.expand_all = lambda texts, _: harbor_toml.expand_all(texts, os.environ)  # type: ignore[assignment]
    folder = harbor(home, toml)
    step = folder / "steps" / "s"
    for name in ("instruction.md", "tests/test.sh", "solution/solve.sh"):
        (step / name).parent.mkdir(parents=True, exist_ok=True)
        (step / name).write_text("x\n")
    found = []
    for task in loaded(folder):
        try:
            tried = [task, oracle_task(task)]
        except ConfigError:
            tried = [task]
        found += [one.task_id for one in tried if SECRET in json.dumps(one.model_dump(mode="json"))]
    return found


TOMLS = {
    "public network": "[environment]\nnetwork_mode = 'public'",
    "agent's network": "[agent]\nnetwork_mode = 'public'",
    "root": "[environment]\ndocker_image = '../../secrets'",
    "absolute root": "[environment]\ndocker_image = '{home}/secrets'",
    "linked root": "[environment]\ndocker_image = './rooted'",
}


@pytest.mark.parametrize("toml", TOMLS.values(), ids=TOMLS.keys())
@attack("5", "6", guard=OPEN_DOOR)
def test_what_a_harbor_folder_may_not_ask_for(home: Path, toml: str) -> list[str]:
    folder = harbor(home, toml.format(home=home), rooted="../../secrets")
    return [reached for task in loaded(folder) for reached in host_reach(task)]


REGULAR = without(("towline.common.untrusted.data_files.is_regular", lambda _: True))


@attack("6", guard=REGULAR)
def test_a_pipe_in_place_of_a_file(home: Path) -> list[str]:
    """Reading it would take from another program, or wait for one for ever."""
    folder = harbor(home)
    path = folder / "instruction.md"
    path.unlink()
    os.mkfifo(path)
    with open(path, "r+b", buffering=0) as pipe:
        pipe.write(SECRET.encode())
        return [task.instruction for task in loaded(folder)]


@attack("6", guard=without(("towline.common.untrusted.data_files.MAX_TEXT", 2**30)))
def test_a_file_without_end(home: Path) -> list[int]:
    path = harbor(home) / "instruction.md"
    os.truncate(path, data_files.MAX_TEXT + 1 if data_files.MAX_TEXT < 2**30 else 2**24 + 1)
    return [len(task.instruction) for task in loaded(path.parent)]


# What stays allowed


def test_files_in_the_own_folder_and_what_the_user_says_himself(home: Path) -> None:
    (home / "data" / "inner" / "words.txt").write_text("one")
    file = home / "data" / "inner" / "tasks.jsonl"
    files = [{"target": "/x", "source": name} for name in ("words.txt", "./words.txt", ".")]
    file.write_text(json.dumps({"task_id": "t", "instruction": "x", "environment": {"files": files}}) + "\n")
    options = {"command": "true", "folder": str(home / "secrets"), "packages": ["a==1"]}
    (task,) = load_tasks([file], harness="shell", harness_options=options)
    inner = home / "data" / "inner"
    assert [one.source for one in task.environment.files] == [str(inner / "words.txt")] * 2 + [str(inner)]
    assert task.harness_options == options  # the user's own words
    name = next(_NAMES)
    evil_module(home, name)
    (task,) = load_tasks([file], harness=f"{name}:HARNESS")
    assert task.harness == f"{name}:HARNESS"


def test_trust_by_name(home: Path) -> None:
    file = home / "data" / "tasks.jsonl"
    file.write_text(json.dumps(row(environment={"files": [{"target": "/x", "source": "link/key"}]})) + "\n")
    with pytest.raises(ConfigError, match=r"tasks\.jsonl:1: environment\.files\.0\.source: .*link.*--trust paths"):
        load_tasks([file], harness="pi")
    (task,) = load_tasks([file], harness="pi", trust=[Grant.PATHS])
    assert Path(task.environment.files[0].source or "").read_text() == SECRET
    (task,) = load_tasks([harbor(home, VARIABLES["environment"])], harness="pi", trust=[Grant.ENV])
    assert task.environment.env == {"A": SECRET}
    folder = harbor(home, instruction_dot_md="/dev/zero")
    assert not loaded(folder, trust=[Grant.PATHS])  # links are trusted, endless files are not
