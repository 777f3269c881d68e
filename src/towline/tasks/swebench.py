"""SWE-bench and SWE-Gym rows: a repository at a commit, an issue, and the tests that its fix must make pass.

The test command comes from the row (`test_cmd`, its own or that of `install_config`), else from the known default of the
repository, else it is pytest. A row whose tests pytest cannot run, or whose log format is unknown, is refused: it would
score 0 whatever the agent does. The gold patch stays in the metadata, for the oracle only.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from towline.schema import LogFormat
from towline.tasks.fields import SourceLocation

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
"""Published log parsers (without `parse_log_`) whose format has another name here."""
_PYTHON = (LogFormat.PYTEST, LogFormat.UNITTEST, LogFormat.SYMPY)
_GO_TEST = re.compile(r"\bgo test\b")
_GO_VERBOSE = re.compile(r"\s-(?:test\.)?(?:v|json)\b")


def read_swebench_row(row: dict[str, Any], location: SourceLocation) -> dict[str, Any]:
    for name in ("instance_id", "base_commit", "problem_statement"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise location.error(name, "must be non-empty text")
    fail, keep = _names(row, "FAIL_TO_PASS", location), _names(row, "PASS_TO_PASS", location)
    if not fail:
        raise location.error("FAIL_TO_PASS", "names no test, so a fix could not be verified")
    test_patch = row.get("test_patch", "")
    if not isinstance(test_patch, str):
        raise location.error("test_patch", "must be the text of a diff")
    command, log_format = _command(row, test_patch, [*fail, *keep], location)
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


def _names(row: dict[str, Any], field: str, location: SourceLocation) -> list[str]:
    """A list of test names, which published rows often store as JSON text."""
    value = row.get(field, [])
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except ValueError as error:
            raise location.error(
                field, f"must be a list of test names, or such a list as JSON text: {error}"
            ) from error
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise location.error(field, "must be a list of test names")
    return list(dict.fromkeys(value))


def _command(
    row: dict[str, Any], test_patch: str, tests: list[str], location: SourceLocation
) -> tuple[list[str], LogFormat | None]:
    """The command that runs the tests, and the format of its log if the row names one."""
    own = row["evaluator"] if isinstance(row.get("evaluator"), dict) else {}
    install = row["install_config"] if isinstance(row.get("install_config"), dict) else {}
    log_format = _log_format(own.get("log_format") or row.get("log_parser") or install.get("log_parser"), location)
    files = _FILE.findall(test_patch) or sorted({test.partition("::")[0] for test in tests if "::" in test})
    targets = [file for file in files if file.endswith(".py")]
    command = _text(own.get("command")) or _text(row.get("test_cmd"))
    if not command and (command := _text(install.get("test_cmd"))) and "pytest" in command and ".py" not in command:
        command = " ".join([command, *map(shlex.quote, targets)])
    if not command:
        _check_python(row, files, tests, log_format, location)
        if row.get("repo") == "django/django":
            targets = [file.removeprefix("tests/").removesuffix(".py").replace("/", ".") for file in targets]
        command = " ".join([_COMMANDS.get(row.get("repo", ""), _PYTEST), *map(shlex.quote, targets)])
    elif _GO_TEST.search(command) and not _GO_VERBOSE.search(command):
        raise location.error("test_cmd", f"{command!r} prints no result for passing tests; add `-v` or `-json`")
    return ["sh", "-c", command] if "environment" in row else ["bash", "-c", f"{_ENVIRONMENT}; {command}"], log_format


def _check_python(
    row: dict[str, Any], files: list[str], tests: list[str], log_format: LogFormat | None, location: SourceLocation
) -> None:
    """Refuse a row that names no command and whose tests the default Python test runners cannot run."""
    language = next((str(row[name]) for name in ("language", "repo_language") if row.get(name)), "")
    foreign = language.lower() not in ("", "python", "py") or log_format not in (None, *_PYTHON)
    if foreign or (files and not any(name.partition("::")[0].endswith(".py") for name in (*files, *tests))):
        what = log_format or language or ", ".join(files[:3])
        raise location.error("test_cmd", f"missing; the tests are not Python ({what}), so there is no default command")
    if row.get("repo") not in _COMMANDS and not any("::" in test for test in tests):
        raise location.error(
            "test_cmd",
            f"missing; {tests[0]!r} is not a pytest test id (file::test), so there is no default command",
        )


def _log_format(parser: Any, location: SourceLocation) -> LogFormat | None:
    """The log format of a published parser; `None` if the row names none."""
    if parser in (None, ""):
        return None
    name = str(parser).removeprefix("parse_log_")
    known = _PARSERS.get(name, name.partition("_")[0])
    if known not in list(LogFormat):
        raise location.error(
            "log_parser", f"{parser!r} reads an unknown log format; known formats: {', '.join(LogFormat)}"
        )
    return LogFormat(known)


def _text(command: Any) -> str:
    """A command, or a list of commands that run in order, as a shell script."""
    if isinstance(command, str):
        return command
    if isinstance(command, list) and command and all(isinstance(line, str) for line in command):
        return "\n".join(command)
    return ""
