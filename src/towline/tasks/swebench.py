"""SWE-bench rows and those in its layout: a repository at a commit, an issue, and the tests that its fix must make pass.

| data set | recognized by | image | repository |
|---|---|---|---|
| SWE-bench (Verified, …) | nothing else | `image`, else `swebench/sweb.eval.x86_64.` + id with `_1776_` | `/testbed` |
| SWE-Gym | its repositories | `xingyaoww/sweb.eval.x86_64.` + id with `_s_` | `/testbed` |
| SWE-rebench V1 | `install_config` | `docker_image`, else `swerebench/sweb.eval.x86_64.` + id with `_1776_` | `/testbed` |
| SWE-rebench V2 | an image of `swerebenchv2/`, or `install_config` with `language` | `image_name` | `/<repository's name>` |

A row with an `environment` object brings its own image and folder. The images of data sets hold the fix in their git
history, which is concealed from the agent. The gold patch stays in the metadata, for the oracle only.
"""

from __future__ import annotations

import re
from typing import Any

from towline.tasks import swe_commands
from towline.tasks.fields import SourceLocation

WORKDIR = "/testbed"
SWE_GYM = frozenset(
    (
        "bokeh/bokeh", "conan-io/conan", "dask/dask", "facebookresearch/hydra", "getmoto/moto", "iterative/dvc",
        "modin-project/modin", "pandas-dev/pandas", "Project-MONAI/MONAI", "pydantic/pydantic", "python/mypy",
    )
)  # fmt: skip
"""The repositories of SWE-Gym; SWE-bench has none of them."""
_IMAGES = ("image_name", "docker_image", "image")
_CHANGED_TO = re.compile(r"^\s*cd\s+(/[^\s;&|]+)\s*$", re.MULTILINE)


def read_swebench_row(row: dict[str, Any], location: SourceLocation) -> dict[str, Any]:
    for name in ("instance_id", "base_commit", "problem_statement"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise location.error(name, "must be non-empty text")
    fail = swe_commands.test_names(row, "FAIL_TO_PASS", location)
    keep = swe_commands.test_names(row, "PASS_TO_PASS", location)
    if not fail:
        raise location.error("FAIL_TO_PASS", "names no test, so a fix could not be verified")
    test_patch = row.get("test_patch") or ""
    if not isinstance(test_patch, str):
        raise location.error("test_patch", "must be the text of a diff")
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
            **swe_commands.grading(row, test_patch, [*fail, *keep], location),
        },
        "metadata": {"repo": row.get("repo", ""), "version": row.get("version", "")},
    }
    if row.get("patch"):
        made["metadata"]["solution_patch"] = row["patch"]
    if not isinstance(row.get("environment"), dict):
        made["environment"] = {"workdir": _workdir(row), "sandbox": "docker", "root": image_of(row)}
        made["evaluator"]["conceal"] = "beyond"
    return made


def image_of(row: dict[str, Any]) -> str:
    """The row's image, else the published one of its data set."""
    for name in _IMAGES:
        if isinstance(row.get(name), str) and row[name]:
            return str(row[name])
    identity = row["instance_id"].lower()
    if row.get("repo") in SWE_GYM or "swe-gym" in str(row.get("dataset_name", "")).lower():
        return f"xingyaoww/sweb.eval.x86_64.{identity.replace('__', '_s_')}:latest"
    owner = "swerebench" if isinstance(row.get("install_config"), dict) else "swebench"
    return f"{owner}/sweb.eval.x86_64.{identity.replace('__', '_1776_')}:latest"


def _workdir(row: dict[str, Any]) -> str:
    if isinstance(row.get("eval_script"), str) and (found := _CHANGED_TO.search(row["eval_script"])):
        return found[1]
    second = isinstance(row.get("install_config"), dict) and bool(row.get("language"))
    if (second or image_of(row).startswith("swerebenchv2/")) and "/" in str(row.get("repo", "")):
        return f"/{row['repo'].rpartition('/')[2]}"
    return WORKDIR
