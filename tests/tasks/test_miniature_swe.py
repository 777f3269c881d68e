"""The miniature suite: twelve repositories with real bugs, in SWE-bench's row format, that run without images."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.tasks.miniature import TASKS, check_row, edited_tests
from towline.sandboxes.base import Runtime
from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime
from towline.tasks.fields import TaskError
from towline.tasks.loading import SHIPPED, load_tasks

BUILD = Path(__file__).parents[2] / "examples" / "miniature" / "build.py"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runtime]:
    opened = BubblewrapRuntime(tmp_path_factory.mktemp("bubblewrap"))
    await opened.open()
    yield opened
    await opened.close()


async def test_its_shape() -> None:
    assert len(TASKS) == 12
    languages = Counter(task.metadata["language"] for task in TASKS.values())
    assert languages == {"python": 4, "javascript": 4, "c": 2, "shell": 1, "awk": 1}
    for name, task in TASKS.items():
        files = task.environment.files
        assert 3 <= len(files) <= 6, name
        assert 60 <= sum((file.text or "").count("\n") for file in files) <= 200, name
        tests = len(task.evaluator["fail_to_pass"]) + len(task.evaluator["pass_to_pass"])
        assert 6 <= tests <= 16, (name, tests)
        assert len(task.evaluator["fail_to_pass"]) >= 3, name
        assert (task.environment.root, task.environment.sandbox) == ("", None), name
    (place,) = SHIPPED.values()
    assert place.stat().st_size < 128 * 1024, "it is in the wheel"
    with pytest.raises(TaskError, match="does not exist"):
        load_tasks(["miniature-swf"], harness="pi")


async def test_the_rows_are_what_the_folders_make() -> None:
    command = [sys.executable, str(BUILD), "--check"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", list(TASKS))
async def test_the_fix_scores_1_and_nothing_else_does(name: str, runtime: Runtime, tmp_path: Path) -> None:
    assert "tests/" in edited_tests(TASKS[name])
    assert await check_row(name, runtime, tmp_path) == {"oracle": 1, "nothing": 0, "edited tests": 0}
