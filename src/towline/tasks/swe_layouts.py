"""Software-engineering data sets whose rows are not in SWE-bench's layout: SWE-smith, R2E-Gym, Multi-SWE, NeMo Gym.

| data set | recognized by | what is different |
|---|---|---|
| SWE-smith | `instance_id`, `patch`, `FAIL_TO_PASS`, no `base_commit` | `patch` is the bug, applied by the set-up |
| R2E-Gym | `expected_output_json`, `docker_image` | the tests are in the image; every result must be as expected |
| Multi-SWE | `fix_patch`, `base`, `org`, `number` | `/home/<repo>`, the image's own `/home/run.sh`; tests by name |
| NeMo Gym | `responses_create_params.metadata.instance_dict` | a row of one of the data sets, as JSON text |

What the images hold of the answer is withheld from the agent: hidden tests, gold patches, git history.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from typing import Any

from towline.tasks import swe_commands, swebench
from towline.tasks.fields import SourceLocation

Row = dict[str, Any]
Reader = Callable[[Row, SourceLocation], Row]

_BUG = "/towline-bug.patch"
_APPLY_BUG = (
    f"git -c safe.directory='*' apply --index --whitespace=nowarn {_BUG} && rm {_BUG} && "
    "git -c safe.directory='*' -c user.name=towline -c user.email=towline@localhost -c core.hooksPath=/dev/null "
    "commit -q --no-verify -m start"
)
_R2E_TESTS = ("/r2e_tests", "/testbed/r2e_tests", "/testbed/run_tests.sh", "/root/r2e_tests", "/root/run_tests.sh")
_R2E_COMMAND = "[ -e r2e_tests ] || ln -s /r2e_tests r2e_tests; PATH=/testbed/.venv/bin:$PATH bash run_tests.sh"
_MULTI_SWE = ("fix.patch", "test.patch", "fix-run.sh", "test-run.sh")
_LANGUAGES = {"go": "go", "golang": "go", "rust": "cargo", "java": "maven"}


def reader_of(row: Row) -> Reader | None:
    """How a row of a software-engineering data set is read; `None` for any other row."""
    if {"instance_id", "base_commit"} <= row.keys():
        return swebench.read_swebench_row
    if {"fix_patch", "base", "org", "number"} <= row.keys():
        return read_multi_swe_row
    if {"expected_output_json", "docker_image"} <= row.keys():
        return read_r2e_row
    if {"instance_id", "patch", "FAIL_TO_PASS"} <= row.keys():
        return read_swe_smith_row
    return None


def is_nemo_gym_swe(params: Any) -> bool:
    """Whether the parameters of a NeMo Gym row carry a software-engineering row."""
    about = params.get("metadata") if isinstance(params, dict) else None
    return isinstance(about, dict) and bool(about.get("instance_dict"))


def own_fields(row: Row) -> Row:
    """The row without fields of its data set that have another meaning in a `Task`: SWE-rebench's `environment` is text."""
    return {name: value for name, value in row.items() if name != "environment" or not isinstance(value, str)}


def read_nemo_gym_swe_row(row: Row, location: SourceLocation) -> Row:
    about = row["responses_create_params"]["metadata"]
    field = "responses_create_params.metadata.instance_dict"
    inner = about["instance_dict"]
    if isinstance(inner, str):
        try:
            inner = json.loads(inner)
        except ValueError as error:
            raise location.error(field, f"not JSON: {error}") from error
    if not isinstance(inner, dict):
        raise location.error(field, "must be a row of a software-engineering data set")
    inner = {
        **{name: about[name] for name in ("instance_id", "dataset_name", "problem_statement") if name in about},
        **inner,
    }
    if isinstance(row.get("environment"), dict):
        inner["environment"] = row["environment"]
    read = reader_of(inner)
    if read is None:
        raise location.error(field, f"not a row of a known data set; found: {', '.join(sorted(inner))}")
    made = read(own_fields(inner), location)
    made["metadata"] = {**made.get("metadata", {}), "nemo_gym": row}
    return made


def read_swe_smith_row(row: Row, location: SourceLocation) -> Row:
    bug = row["patch"]
    if not isinstance(bug, str) or "diff --git " not in bug:
        raise location.error("patch", "must be the text of a diff: the bug that the agent has to find")
    statement = row.get("problem_statement")
    if not isinstance(statement, str) or not statement.strip():
        raise location.error("problem_statement", "must be non-empty text; SWE-smith has rows without an issue")
    fail = swe_commands.test_names(row, "FAIL_TO_PASS", location)
    keep = swe_commands.test_names(row, "PASS_TO_PASS", location)
    if not fail:
        raise location.error("FAIL_TO_PASS", "names no test, so a fix could not be verified")
    name = str(row.get("repo") or row["instance_id"].rpartition(".")[0]).rpartition("/")[2]
    default = f"swebench/swesmith.x86_64.{name.lower().replace('__', '_1776_')}:latest"
    environment: Row = {
        "workdir": swebench.WORKDIR,
        "files": [{"target": _BUG, "text": bug}],
        "setup": [_APPLY_BUG],
    }
    if not isinstance(row.get("environment"), dict):
        environment |= {"sandbox": "docker", "root": str(row.get("image_name") or default)}
    return {
        "task_id": row["instance_id"],
        "instruction": statement,
        "environment": environment,
        "evaluator": {
            "kind": "patch",
            "fail_to_pass": fail,
            "pass_to_pass": keep,
            "conceal": "single",
            **swe_commands.grading(row, "", [*fail, *keep], location),
        },
        "metadata": {"repo": row.get("repo", ""), "solution_patch": bug, "solution_reversed": True},
    }


def read_r2e_row(row: Row, location: SourceLocation) -> Row:
    statement = row.get("problem_statement")
    if not isinstance(statement, str) or not statement.strip():
        raise location.error("problem_statement", "must be non-empty text")
    if not isinstance(row["docker_image"], str) or not row["docker_image"]:
        raise location.error("docker_image", "must be the name of an image")
    expected = _object(row["expected_output_json"], location, "expected_output_json")
    if not expected or not all(isinstance(word, str) for word in expected.values()):
        raise location.error("expected_output_json", "must be an object with the expected result of each test")
    identity = row.get("instance_id") or f"{row.get('repo_name', 'r2e')}-{str(row.get('commit_hash', ''))[:12]}"
    made: Row = {
        "task_id": identity,
        "instruction": statement.removeprefix("[ISSUE]").removesuffix("[/ISSUE]").strip(),
        "environment": {"workdir": swebench.WORKDIR},
        "evaluator": {
            "kind": "patch",
            "expected": expected,
            "command": ["bash", "-c", _R2E_COMMAND],
            "conceal": "beyond",
            "withheld": list(_R2E_TESTS),
        },
        "metadata": {"repo": row.get("repo_name", "")},
    }
    if not isinstance(row.get("environment"), dict):
        made["environment"] |= {"sandbox": "docker", "root": row["docker_image"]}
    if gold := _r2e_solution(row, location):
        made["metadata"]["solution_patch"] = gold
    return made


def _r2e_solution(row: Row, location: SourceLocation) -> str:
    """The change of the commit, without tests, from the contents of its files; empty if the row does not have them."""
    if not row.get("parsed_commit_content"):
        return ""
    commit = _object(row["parsed_commit_content"], location, "parsed_commit_content")
    parts = []
    for change in commit.get("file_diffs") or []:
        path = change.get("header", {}).get("file", {}).get("path", "") if isinstance(change, dict) else ""
        texts = [change.get(name) for name in ("old_file_content", "new_file_content")] if path else [None]
        if not all(isinstance(text, str) for text in texts):
            continue
        name = path.rpartition("/")[2]
        if "test" in path.split("/")[:-1] or "tests" in path.split("/")[:-1] or name.startswith("test_"):
            continue
        old, new = (str(text).splitlines(keepends=True) for text in texts)
        lines = difflib.unified_diff(old, new, f"a/{path}" if old else "/dev/null", f"b/{path}" if new else "/dev/null")
        ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
        mode = "" if old and new else f"{'deleted' if old else 'new'} file mode 100644\n"
        parts.append(f"diff --git a/{path} b/{path}\n{mode}" + "".join(ended))
    return "".join(parts)


def read_multi_swe_row(row: Row, location: SourceLocation) -> Row:
    base = row["base"].get("sha") if isinstance(row["base"], dict) else None
    if not isinstance(base, str) or not base:
        raise location.error("base.sha", "must be the commit that the agent starts from")
    issues = row.get("resolved_issues") or []
    parts = [f"{issue.get('title') or ''}\n\n{issue.get('body') or ''}" for issue in issues if isinstance(issue, dict)]
    statement = "\n\n".join(part.strip() for part in parts if part.strip()) or str(row.get("title") or "").strip()
    if not statement:
        raise location.error("resolved_issues", "has no text, and neither has `title`")
    fixed = _tests_of(row, "fixed_tests", location) or [
        test for name in ("f2p_tests", "s2p_tests", "n2p_tests") for test in _tests_of(row, name, location)
    ]
    if not fixed:
        raise location.error("fixed_tests", "names no test, so a fix could not be verified")
    org, repo, number = (str(row[name]) if name in row else "" for name in ("org", "repo", "number"))
    log_format = _LANGUAGES.get(str(row.get("lang") or row.get("language") or "").lower())
    home = "/home"
    made: Row = {
        "task_id": str(row.get("instance_id") or f"{org}__{repo}-{number}"),
        "instruction": statement,
        "environment": {"workdir": f"{home}/{repo}"},
        "evaluator": {
            "kind": "patch",
            "base": base,
            "test_patch": row.get("test_patch") or "",
            "fail_to_pass": fixed,
            "pass_to_pass": _tests_of(row, "p2p_tests", location),
            "command": ["bash", "-c", f"bash {home}/run.sh"],
            "conceal": "beyond",
            "withheld": [f"{home}/{name}" for name in _MULTI_SWE],
            **({"log_format": log_format} if log_format else {}),
        },
        "metadata": {"repo": f"{org}/{repo}"},
    }
    if row.get("fix_patch"):
        made["metadata"]["solution_patch"] = row["fix_patch"]
    if not isinstance(row.get("environment"), dict):
        image = f"mswebench/{org}_m_{repo}:pr-{number}".lower()
        made["environment"] |= {"sandbox": "docker", "root": image}
    return made


def _tests_of(row: Row, field: str, location: SourceLocation) -> list[str]:
    """The names of tests: the keys of an object, or a list."""
    value = row.get(field) or []
    if not isinstance(value, dict | list) or not all(isinstance(name, str) and name for name in value):
        raise location.error(field, "must be an object whose keys are test names")
    return list(value)


def _object(value: Any, location: SourceLocation, field: str) -> Row:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise location.error(field, f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise location.error(field, "must be an object, or one as JSON text")
    return value
