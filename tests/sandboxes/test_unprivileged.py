"""Roots, Dockerfiles and process sandboxes once more, by an ordinary user."""

from __future__ import annotations

import re

import pytest

from support.sandboxes.ordinary_user import SECONDS, run_tests

pytestmark = pytest.mark.timeout(SECONDS)

BUILDS = "tests/sandboxes/test_image_builds.py"
BUILT = [f"{BUILDS}::test_built_in_bubblewrap"]


@pytest.mark.parametrize(
    ("arguments", "subordinate", "least"),
    [
        (
            [
                "tests/sandboxes/test_root_cache.py",
                "tests/sandboxes/test_process.py",
                *BUILT,
                f"{BUILDS}::test_failures_leave_nothing",
            ],
            False,
            18,
        ),
        ([*BUILT, f"{BUILDS}::test_owners_and_modes_are_kept"], True, 2),
    ],
    ids=["one id", "many ids"],
)
def test_without_root(arguments: list[str], subordinate: bool, least: int) -> None:
    done = run_tests(arguments, subordinate=subordinate)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least, done.stdout[-2000:]
    assert "skipped" not in done.stdout
