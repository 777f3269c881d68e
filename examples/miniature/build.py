"""Makes the miniature suite: the folders beside this file become the rows of src/towline/tasks/miniature_swe.jsonl.

Each folder is a repository at the commit that an agent starts from (`repository/`), the issue, the fix and the hidden tests.
The base commit has a fixed author and date, so that its hash is the same everywhere. The tests run before and after the fix:
those that only pass afterwards are FAIL_TO_PASS, those that pass both times are PASS_TO_PASS. A suite that does not hold
together (a fix that fails, no test that fails before it) is not written.

    python examples/miniature/build.py           # needs git, python3, node and cc
    python examples/miniature/build.py --check   # fails if the file is not what the folders make
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from towline.evaluators.testlogs import CaseResult, read_test_log
from towline.schema import LogFormat

HERE = Path(__file__).parent
ROWS = HERE.parents[1] / "src" / "towline" / "tasks" / "miniature_swe.jsonl"
WORKDIR = "/testbed"
_C = "cc -std=c11 -Wall -o /tmp/run-tests tests/*.c {} && /tmp/run-tests"
COMMANDS = {
    "py": ("python", "python3 -B -m unittest -v", LogFormat.UNITTEST),
    "js": ("javascript", "node --test --test-reporter=tap tests/*.test.js", LogFormat.TAP),
    "c": ("c", "", LogFormat.TAP),
    "sh": ("shell", "sh tests/run.sh", LogFormat.TAP),
    "awk": ("awk", "sh tests/run.sh", LogFormat.TAP),
}
"""By the first part of a folder's name: the language, the test command and the format of its log."""
IDENTITY = (
    "GIT_AUTHOR_NAME=towline GIT_AUTHOR_EMAIL=towline@localhost GIT_AUTHOR_DATE=2024-01-01T00:00:00Z "
    "GIT_COMMITTER_NAME=towline GIT_COMMITTER_EMAIL=towline@localhost GIT_COMMITTER_DATE=2024-01-01T00:00:00Z"
)
SETUP = (
    "export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1; git init -q -b main && git add -A && "
    f"{IDENTITY} git -c core.autocrlf=false commit -q -m base && rm -rf .git/logs .git/hooks"
)


def command_of(folder: Path) -> str:
    prefix = folder.name.partition("-")[0]
    if prefix == "c":
        return _C.format(f"src/{folder.name.partition('-')[2]}.c")
    return COMMANDS[prefix][1]


def row_of(folder: Path) -> dict[str, Any]:
    language, _, log_format = COMMANDS[folder.name.partition("-")[0]]
    repository = folder / "repository"
    files = [path for path in sorted(repository.rglob("*")) if path.is_file()]
    command = command_of(folder)
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        for path in files:
            target = work / path.relative_to(repository)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
        subprocess.run(["sh", "-c", SETUP], cwd=work, check=True)
        base = _run("git rev-parse HEAD", work).strip()
        _run(f"git apply {folder / 'tests.patch'}", work)
        before = _results(command, work, log_format)
        _run(f"git apply {folder / 'solution.patch'}", work)
        after = _results(command, work, log_format)
    wrong = [name for name, result in after.items() if result is not CaseResult.PASSED]
    fixed = [name for name in after if before.get(name) is not CaseResult.PASSED]
    if wrong or not fixed or len(fixed) == len(after):
        raise SystemExit(f"{folder.name}: fails after the fix: {wrong}; fixed: {fixed}")
    return {
        "instance_id": f"miniature__{folder.name}",
        "repo": f"miniature/{folder.name}",
        "version": "1",
        "language": language,
        "base_commit": base,
        "problem_statement": (folder / "issue.md").read_text("utf-8"),
        "patch": (folder / "solution.patch").read_text("utf-8"),
        "test_patch": (folder / "tests.patch").read_text("utf-8"),
        "FAIL_TO_PASS": fixed,
        "PASS_TO_PASS": [name for name in after if name not in fixed],
        "test_cmd": command,
        "environment": {
            "workdir": WORKDIR,
            "files": [
                {"target": f"{WORKDIR}/{path.relative_to(repository)}", "text": path.read_text("utf-8")}
                for path in files
            ],
            "setup": [SETUP],
        },
        "evaluator": {"log_format": log_format.value, "seconds": 120},
        "timeouts": {"run": 900},
    }


def _results(command: str, work: Path, log_format: LogFormat) -> dict[str, CaseResult]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(work), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(["sh", "-c", command], cwd=work, env=environment, capture_output=True, text=True, check=False)
    found = read_test_log(done.stdout + done.stderr, log_format).results
    # Node's test runner also reports each file, and a TAP title is known with its dash and without.
    return {name: result for name, result in found.items() if not name.startswith("- ") and not name.endswith(".js")}


def _run(command: str, work: Path) -> str:
    done = subprocess.run(["sh", "-c", command], cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    check = parser.parse_args().check
    folders = [path for path in sorted(HERE.iterdir()) if (path / "issue.md").is_file()]
    text = "".join(json.dumps(row_of(folder), ensure_ascii=False) + "\n" for folder in folders)
    if check:
        sys.exit(0 if ROWS.read_text("utf-8") == text else f"{ROWS} is not what the folders make: run {__file__}")
    ROWS.write_text(text, "utf-8")
    print(f"{len(folders)} rows, {len(text.encode()):,} bytes: {ROWS}")


if __name__ == "__main__":
    main()
