"""Images from a real registry once more, by an ordinary user: with a range of user ids, and with one."""

from __future__ import annotations

import re

import pytest

from support.sandboxes.ordinary_user import SECONDS, run_tests

pytestmark = pytest.mark.timeout(SECONDS)


@pytest.mark.parametrize(
    ("chosen", "subordinate", "least"),
    [("not one_user_id", True, 7), ("one_user_id or mirror", False, 2)],
    ids=["many ids", "one id"],
)
def test_images_without_root(chosen: str, subordinate: bool, least: int) -> None:
    done = run_tests(["tests/e2e/images/test_images.py", "-k", chosen], subordinate=subordinate)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least, done.stdout[-2000:]
    assert "skipped" not in done.stdout
