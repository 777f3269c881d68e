"""SWE-bench and SWE-Gym rows: a repository at a commit, an issue, and the tests that its fix must turn.

The tests' command comes from the row (`test_cmd`, its own or that of `install_config`), else from what the repository is
known to use, else it is pytest. A row whose tests pytest cannot run, or whose log format is not known, is refused: it would
score 0 whatever the agent does. The gold patch stays in the metadata, for the oracle alone.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from towline.schema import LogFormat
from towline.tasks.errors import Place

WORKDIR = "/testbed"
_PYTEST = "python -m pytest -rA -p no:cacheprovider --color=no"
_COMMANDS = {
    "django/django": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "sympy/sympy": "PYTHONWARNINGS=ignore bin/test -C --verbose",
}
_ENVIRONMENT = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi"
_FILE = re.compile(r"^diff --git a/.* b/(.*)$", re.MULTILINE)
_PARSERS = {
    "django": LogFormat.UNITTEST,
    "seaborn": LogFormat.PYTEST,
    "matplotlib": LogFormat.PYTEST,
    "gotest": LogFormat.GO,
    "googletest": LogFormat.GTEST,
    "rust": LogFormat.CARGO,
}
"""Names of published log parsers, without `parse_log_`, whose format has another name here."""
_PYTHON = (LogFormat.PYTEST, LogFormat.UNITTEST, LogFormat.SYMPY)
_GO_TEST = re.compile(r"\bgo test\b")
_GO_VERBOSE = re.compile(r"\s-(?:test\.)?(?:v|json)\b")


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
    command, log_format = _command(row, test_patch, [*fail, *keep], place)
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
            "command": command,
            **({"log_format": log_format.value} if log_format else {}),
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


def _command(
    row: dict[str, Any], test_patch: str, tests: list[str], place: Place
) -> tuple[list[str], LogFormat | None]:
    """What runs the tests, and what prints their results if the row says so."""
    own = row["evaluator"] if isinstance(row.get("evaluator"), dict) else {}
    install = row["install_config"] if isinstance(row.get("install_config"), dict) else {}
    log_format = _log_format(own.get("log_format") or row.get("log_parser") or install.get("log_parser"), place)
    files = _FILE.findall(test_patch) or sorted({test.partition("::")[0] for test in tests if "::" in test})
    targets = [file for file in files if file.endswith(".py")]
    command = _text(own.get("command")) or _text(row.get("test_cmd"))
    if not command and (command := _text(install.get("test_cmd"))) and "pytest" in command and ".py" not in command:
        command = " ".join([command, *map(shlex.quote, targets)])
    if not command:
        _check_python(row, files, tests, log_format, place)
        if row.get("repo") == "django/django":
            targets = [file.removeprefix("tests/").removesuffix(".py").replace("/", ".") for file in targets]
        command = " ".join([_COMMANDS.get(row.get("repo", ""), _PYTEST), *map(shlex.quote, targets)])
    elif _GO_TEST.search(command) and not _GO_VERBOSE.search(command):
        raise place.error("test_cmd", f"{command!r} prints no result of a test that passed; it needs `-v` or `-json`")
    return ["sh", "-c", command] if "environment" in row else ["bash", "-c", f"{_ENVIRONMENT}; {command}"], log_format


def _check_python(
    row: dict[str, Any], files: list[str], tests: list[str], log_format: LogFormat | None, place: Place
) -> None:
    """Refuse a row that names no command and whose tests the default, Python's test programs, cannot run."""
    language = next((str(row[name]) for name in ("language", "repo_language") if row.get(name)), "")
    foreign = language.lower() not in ("", "python", "py") or log_format not in (None, *_PYTHON)
    if foreign or (files and not any(name.partition("::")[0].endswith(".py") for name in (*files, *tests))):
        what = log_format or language or ", ".join(files[:3])
        raise place.error("test_cmd", f"missing; the tests are not Python ({what}), so their command cannot be guessed")
    if row.get("repo") not in _COMMANDS and not any("::" in test for test in tests):
        raise place.error(
            "test_cmd",
            f"missing; {tests[0]!r} is not a name that pytest prints (file::test), so their command cannot be guessed",
        )


def _log_format(parser: Any, place: Place) -> LogFormat | None:
    """What prints the log that a published parser reads; `None` if the row names none."""
    if parser in (None, ""):
        return None
    name = str(parser).removeprefix("parse_log_")
    known = _PARSERS.get(name, name.partition("_")[0])
    if known not in list(LogFormat):
        raise place.error("log_parser", f"{parser!r} reads an unknown log format; there are {', '.join(LogFormat)}")
    return LogFormat(known)


def _text(command: Any) -> str:
    """A command, or several that run one after the other, as the text of a script."""
    if isinstance(command, str):
        return command
    if isinstance(command, list) and command and all(isinstance(line, str) for line in command):
        return "\n".join(command)
    return ""
