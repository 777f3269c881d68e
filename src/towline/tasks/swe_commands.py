"""How the tests of a SWE row are run and read: the command, the format of its log, and who grades it.

The command comes from the row (`eval_script`, `test_cmd`, its own or that of `install_config`), else from the known default
of the repository, else it is pytest. A row whose tests pytest cannot run, or whose log format is unknown, is refused: it
would score 0 whatever the agent does. Where the `swebench` package is installed, it grades the rows whose parser it has.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from towline.common import swebench_package
from towline.schema import LogFormat
from towline.tasks.fields import SourceLocation

_PYTEST = "python -m pytest -rA -p no:cacheprovider --color=no"
_COMMANDS = {
    "django/django": (
        "LANG=C.UTF-8 LC_ALL=C.UTF-8 PYTHONIOENCODING=utf8 "
        "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
    ),
    "sympy/sympy": "PYTHONWARNINGS=ignore bin/test -C --verbose",
    "python/mypy": f"{_PYTEST} -n0",
}
_ENVIRONMENT = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi"
_CASES = ("python/mypy",)
"""Repositories whose tests are data: pytest selects them by name, because their files are not Python."""
_SECTION = re.compile(r"^diff --git a/.* b/(.*)$", re.MULTILINE)
_PARSERS = {
    **dict.fromkeys(
        (
            "astroid", "astropy", "flask", "marshmallow", "matplotlib", "pvlib", "pydicom", "pylint", "pytest", "pyvista",
            "requests", "scikit", "seaborn", "sphinx", "sqlfluff", "xarray",
        ),
        LogFormat.PYTEST,
    ),
    "django": LogFormat.UNITTEST,
    "gotest": LogFormat.GO,
    "googletest": LogFormat.GTEST,
    "rust": LogFormat.CARGO,
}  # fmt: skip
"""Published log parsers (without `parse_log_`, up to the first `_`) whose format has another name here."""
_REPO_PARSERS = {
    "astropy/astropy": "parse_log_astropy",
    "django/django": "parse_log_django",
    "matplotlib/matplotlib": "parse_log_matplotlib",
    "mwaskom/seaborn": "parse_log_seaborn",
    "pallets/flask": "parse_log_flask",
    "psf/requests": "parse_log_requests",
    "pydata/xarray": "parse_log_xarray",
    "pylint-dev/pylint": "parse_log_pylint",
    "pytest-dev/pytest": "parse_log_pytest",
    "scikit-learn/scikit-learn": "parse_log_scikit",
    "sphinx-doc/sphinx": "parse_log_sphinx",
    "sympy/sympy": "parse_log_sympy",
}
"""The parsers of SWE-bench's own repositories, for rows from before rows named theirs."""
_PYTHON = (LogFormat.PYTEST, LogFormat.UNITTEST, LogFormat.SYMPY)
_GO_TEST = re.compile(r"\bgo test\b")
_GO_VERBOSE = re.compile(r"\s-(?:test\.)?(?:v|json)\b")
_SCRIPT = "/eval.sh"
_END_MARK = ">>>>> End Test Output"
Evaluator = dict[str, Any]


def test_names(row: dict[str, Any], field: str, location: SourceLocation) -> list[str]:
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


def grading(row: dict[str, Any], test_patch: str, tests: list[str], location: SourceLocation) -> Evaluator:
    """The options of the `patch` evaluator that run and read the tests."""
    own = row["evaluator"] if isinstance(row.get("evaluator"), dict) else {}
    if own.get("command") or not row.get("eval_script"):
        made = _command(row, own, test_patch, tests, location)
    else:
        made = _eval_script(row, location)
    named = own.get("log_format") or _parser(row)
    default = made.pop("default", None)
    kind = row.get("eval_type") or "pass_and_fail"
    if kind not in ("pass_and_fail", "fail_only"):
        raise location.error("eval_type", "must be `pass_and_fail` or `fail_only`")
    if not own.get("log_format") and (parser := named or _REPO_PARSERS.get(row.get("repo", ""), "")):
        known = swebench_package.parsers()
        if parser in known:
            about = {"instance_id": row["instance_id"], "log_parser": parser, "eval_type": kind}
            about |= {name: str(row.get(name) or "") for name in ("repo", "version")}
            return {**made, "swebench": about}
    if kind == "fail_only":
        raise location.error(
            "eval_type", "`fail_only` is graded by the package `swebench` only: pip install 'towline[swebench]'"
        )
    log_format = known_format(named, location) or default
    return {**made, **({"log_format": log_format.value} if log_format else {})}


def _parser(row: dict[str, Any]) -> str:
    install = row["install_config"] if isinstance(row.get("install_config"), dict) else {}
    return str(row.get("log_parser") or install.get("log_parser") or "")


def known_format(parser: Any, location: SourceLocation) -> LogFormat | None:
    """The log format of a published parser; `None` if the row names none."""
    if parser in (None, ""):
        return None
    name = str(parser).removeprefix("parse_log_")
    known = _PARSERS.get(name, _PARSERS.get(name.partition("_")[0], name.partition("_")[0]))
    # Parsers of one format have a suffix (`pytest_v2`); those of one project are another format (`js_4`, `jest_json`).
    if known not in list(LogFormat) or name == "jest_json":
        hint = "" if swebench_package.parsers() else "; the package `swebench` has more parsers: 'towline[swebench]'"
        raise location.error(
            "log_parser", f"{parser!r} reads an unknown log format; known formats: {', '.join(LogFormat)}{hint}"
        )
    return LogFormat(known)


def _eval_script(row: dict[str, Any], location: SourceLocation) -> Evaluator:
    """The row's own script, which applies the test patch itself; it also records the exit code of the tests."""
    script = row["eval_script"]
    if not isinstance(script, str):
        raise location.error("eval_script", "must be the text of a shell script")
    lines = script.strip().split("\n")
    for index, line in enumerate(lines):
        if _END_MARK in line:
            record = 'echo ">>>>> Test Exit Code: $SWEBENCH_TEST_EXIT_CODE"'
            lines[index : index + 1] = ["SWEBENCH_TEST_EXIT_CODE=$?", line, record]
            break
    else:
        raise location.error("eval_script", f"does not mark the end of the tests with {_END_MARK!r}")
    return {
        "command": ["bash", "-c", f"bash {_SCRIPT} 2>&1"],
        "files": [{"target": _SCRIPT, "text": "\n".join(lines) + "\n", "mode": 0o755}],
        "command_applies_tests": True,
    }


def _command(
    row: dict[str, Any], own: dict[str, Any], test_patch: str, tests: list[str], location: SourceLocation
) -> Evaluator:
    install = row["install_config"] if isinstance(row.get("install_config"), dict) else {}
    files = patched_files(test_patch) or sorted({test.partition("::")[0] for test in tests if "::" in test})
    targets = [file for file in files if file.endswith(".py")]
    command = _text(own.get("command")) or _text(row.get("test_cmd"))
    made: Evaluator = {}
    if not command and (command := _text(install.get("test_cmd"))) and "pytest" in command and ".py" not in command:
        command = " ".join([command, *map(shlex.quote, targets)])
    if not command:
        _check_python(row, files, tests, known_format(_parser(row), location), location)
        repo = row.get("repo", "")
        if repo == "django/django":
            targets = [file.removeprefix("tests/").removesuffix(".py").replace("/", ".") for file in targets]
        elif repo in _CASES or not targets:
            targets = sorted({test.partition("::")[0] for test in tests if ".py::" in test})
        if repo in _CASES:
            names = sorted({test.rpartition("::")[2].partition("[")[0] for test in tests})
            targets += ["-k", " or ".join(names)]
        command = " ".join([_COMMANDS.get(repo, _PYTEST), *map(shlex.quote, targets)])
        default = {"django/django": LogFormat.UNITTEST, "sympy/sympy": LogFormat.SYMPY}
        made["default"] = default.get(repo, LogFormat.PYTEST)
    elif _GO_TEST.search(command) and not _GO_VERBOSE.search(command):
        raise location.error("test_cmd", f"{command!r} prints no result for passing tests; add `-v` or `-json`")
    given = isinstance(row.get("environment"), dict)
    made["command"] = ["sh", "-c", command] if given else ["bash", "-c", f"{_ENVIRONMENT}; {command}"]
    return made


def patched_files(patch: str) -> list[str]:
    """The files that exist after a patch in git's format was applied."""
    sections = re.split(r"^(?=diff --git )", patch, flags=re.MULTILINE)
    kept = [section for section in sections if "\n+++ /dev/null" not in section]
    return [file for section in kept for file in _SECTION.findall(section)[:1]]


def _check_python(
    row: dict[str, Any], files: list[str], tests: list[str], log_format: LogFormat | None, location: SourceLocation
) -> None:
    """Refuse a row that names no command and whose tests the default Python test runners cannot run."""
    language = next((str(row[name]) for name in ("language", "repo_language", "lang") if row.get(name)), "")
    foreign = language.lower() not in ("", "python", "py") or log_format not in (None, *_PYTHON)
    if foreign or (files and not any(name.partition("::")[0].endswith(".py") for name in (*files, *tests))):
        what = log_format or language or ", ".join(files[:3])
        raise location.error("test_cmd", f"missing; the tests are not Python ({what}), so there is no default command")
    if row.get("repo") not in _COMMANDS and not any("::" in test for test in tests):
        raise location.error(
            "test_cmd",
            f"missing; {tests[0]!r} is not a pytest test id (file::test), so there is no default command",
        )


def _text(command: Any) -> str:
    """A command, or a list of commands that run in order, as a shell script."""
    if isinstance(command, str):
        return command
    if isinstance(command, list) and command and all(isinstance(line, str) for line in command):
        return "\n".join(command)
    return ""
