"""The child process that grades a test log with the `swebench` package's own functions.

Reads a request as JSON, prints the report as JSON. Memory and CPU time are limited first, because the log is whatever the
code under test printed. Only the package's parsers and its grading are imported, without what its top imports (data sets,
docker, cloud clients), so no dependency of the package is needed. Runs by file path in isolated mode and imports nothing of
Towline.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import tempfile
import types
from typing import Any

_MEMORY = 1024**3
_START, _END, _EXIT = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"


def main() -> None:
    seconds = max(1, round(float(sys.argv[1])))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    request = json.load(sys.stdin)
    print(json.dumps(report(request)))


def report(request: dict[str, Any]) -> dict[str, Any]:
    for name, folder in (("swebench", ""), ("swebench.harness", "harness")):
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(request["package"], folder)]
        sys.modules[name] = package
    # Reads patches, which no parser does; the parsers import a module that imports it.
    unidiff: Any = types.ModuleType("unidiff")
    unidiff.PatchSet = None
    sys.modules["unidiff"] = unidiff
    grading = importlib.import_module("swebench.harness.grading")
    spec = importlib.import_module("swebench.types").TestSpec(
        instance_id=request["instance_id"],
        image="",
        eval_script_list=[],
        repo=request["repo"],
        version=request["version"],
        FAIL_TO_PASS=request["fail_to_pass"],
        PASS_TO_PASS=request["pass_to_pass"],
        log_parser=request["log_parser"],
        eval_type=request["eval_type"],
    )
    log = request["log"]
    if _START not in log:
        log = f"{_START}\n{log}\n{_END}\n{_EXIT}: {request['code']}\n"
    prediction = {"instance_id": spec.instance_id, "model_patch": "", "model_name_or_path": "agent"}
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="replace") as file:
        file.write(log)
        file.flush()
        found = grading.get_eval_report(spec, prediction, file.name, include_tests_status=True)[spec.instance_id]
        named, _ = grading.get_logs_eval(spec, file.name)
    return {**found, "named": sorted(named)}


if __name__ == "__main__":
    main()
