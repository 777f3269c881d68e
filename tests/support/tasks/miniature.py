"""What is done to every row of the miniature suite: its own fix, nothing, and tests that are edited instead of the code."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

from support.evaluators.evaluator_rig import Rig
from towline.sandboxes.base import Runtime
from towline.schema import Task
from towline.tasks.loading import SHIPPED, load_tasks
from towline.tasks.oracle import oracle_task

TASKS = {task.task_id.removeprefix("miniature__"): task for task in load_tasks(list(SHIPPED), harness="shell")}


def edited_tests(task: Task) -> str:
    """A script that edits the visible tests so that all named tests would pass, hidden ones too, whatever the code does."""
    names = [*task.evaluator["fail_to_pass"], *task.evaluator["pass_to_pass"]]
    tap = "\n".join(f"ok {number} - {name}" for number, name in enumerate(names, 1))
    prints = {
        ".sh": f"cat <<'END'\n{tap}\nEND\nfinish() {{ exit 0; }}\ncheck() {{ :; }}\n",
        ".js": "const test = require('node:test');\n" + "".join(f"test({name!r}, () => {{}});\n" for name in names),
        ".c": f"#include <stdio.h>\nint main(void) {{ puts({_c_text(tap)}); return 0; }}\n",
        ".h": "",
        ".py": _unittest(names),
    }
    files = [file.target for file in task.environment.files if file.target.startswith("/testbed/tests/")]
    return "\n".join(f"printf %s {shlex.quote(prints[Path(file).suffix])} >{shlex.quote(file)}" for file in files)


def _unittest(names: list[str]) -> str:
    classes: dict[str, list[str]] = {}
    for name in names:
        method, _, where = name.partition(" (")
        classes.setdefault(where.rstrip(")").split(".")[2] if "." in where else where, []).append(method)
    made = "".join(
        f"class {name}(unittest.TestCase):\n" + "".join(f"    def {method}(self): pass\n" for method in methods)
        for name, methods in classes.items()
    )
    return f"import unittest\n{made}"


def _c_text(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


async def check_row(name: str, runtime: Runtime, folder: Path, root: str = "") -> dict[str, float]:
    """The scores of the oracle, of doing nothing and of edited tests; `root` replaces the row's root."""
    task = TASKS[name]
    task = task.model_copy(update={"environment": task.environment.model_copy(update={"root": root})})
    oracle = oracle_task(task)
    scripts = {
        "oracle": (oracle, str(oracle.harness_options["command"])),
        "nothing": (task, "true"),
        "edited tests": (task, edited_tests(task)),
    }

    async def score(what: str, done: Task, script: str) -> float:
        logs = folder / what.replace(" ", "-")
        await asyncio.to_thread(logs.mkdir, parents=True)
        return (await Rig(runtime, done, logs).judge(script)).value

    scores = await asyncio.gather(*(score(what, *how) for what, how in scripts.items()))
    return dict(zip(scripts, scores, strict=True))
