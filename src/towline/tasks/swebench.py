"""SWE-bench and SWE-Gym rows: a repository at a commit, an issue, and the tests that its fix must turn.

The tests' command comes from the row (`test_cmd`), else from what the repository is known to use. The gold patch stays in
the metadata, for the oracle alone.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from towline.tasks.errors import Place

WORKDIR = "/testbed"
_PYTEST = "python -m pytest -rA -p no:cacheprovider --color=no"
_COMMANDS = {
    "django/django": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "sympy/sympy": "PYTHONWARNINGS=ignore bin/test -C --verbose",
}
_ENVIRONMENT = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi"
_FILE = re.compile(r"^diff --git a/.* b/(.*)$", re.MULTILINE)


def read(row: dict[str, Any], place: Place) -> dict[str, Any]:
    for name in ("instance_id", "base_commit", "problem_statement"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise place.error(name, "must be text that is not empty")
    fail, keep = _names(row, "FAIL_TO_PASS", place), _names(row, "PASS_TO_PASS", place)
    if not fail:
        raise place.error("FAIL_TO_PASS", "names no test, so nothing would show that the issue is solved")
    test_patch = row.get("test_patch", "")
    if not isinstance(test_patch, str):
        raise place.error("test_patch", "must be the text of a diff")
    made: dict[str, Any] = {
        "task_id": row["instance_id"],
        "instruction": row["problem_statement"],
        "environment": {"workdir": WORKDIR},
        "evaluator": {
            "kind": "patch",
            "base": row["base_commit"],
            "test_patch": test_patch,
            "fail_to_pass": fail,
            "pass_to_pass": keep,
            "command": _command(row, test_patch, [*fail, *keep]),
        },
        "metadata": {"repo": row.get("repo", ""), "version": row.get("version", "")},
    }
    if row.get("patch"):
        made["metadata"]["solution_patch"] = row["patch"]
    if "environment" not in row:
        made["environment"] |= {"sandbox": "docker", "root": _image(row)}
    return made


def _image(row: dict[str, Any]) -> str:
    for name in ("image_name", "docker_image", "image"):
        if isinstance(row.get(name), str) and row[name]:
            return str(row[name])
    return f"swebench/sweb.eval.x86_64.{row['instance_id'].lower().replace('__', '_1776_')}:latest"


def _names(row: dict[str, Any], field: str, place: Place) -> list[str]:
    """A list of tests, which published rows often hold as the text of a list."""
    value = row.get(field, [])
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except ValueError as error:
            raise place.error(field, f"must be a list of tests, or one as JSON text: {error}") from error
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise place.error(field, "must be a list of tests' names")
    return list(dict.fromkeys(value))


def _command(row: dict[str, Any], test_patch: str, tests: list[str]) -> list[str]:
    if isinstance(row.get("test_cmd"), str) and row["test_cmd"]:
        command = row["test_cmd"]
    else:
        repo = row.get("repo", "")
        files = _FILE.findall(test_patch) or sorted({test.partition("::")[0] for test in tests if "::" in test})
        targets = [file for file in files if file.endswith(".py")]
        if repo == "django/django":
            targets = [file.removeprefix("tests/").removesuffix(".py").replace("/", ".") for file in targets]
        command = " ".join([_COMMANDS.get(repo, _PYTEST), *map(shlex.quote, targets)])
    return ["sh", "-c", command] if "environment" in row else ["bash", "-c", f"{_ENVIRONMENT}; {command}"]
