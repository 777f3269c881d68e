"""The tests of bubblewrap's sandboxes once more, by an ordinary user: with one user id, and with a range of them."""

from __future__ import annotations

import re

import pytest

from support.sandboxes.ordinary_user import SECONDS, run_tests

pytestmark = pytest.mark.timeout(SECONDS)


@pytest.mark.parametrize("subordinate", [False, True], ids=["one id", "many ids"])
def test_sandboxes_without_root(subordinate: bool) -> None:
    _passed(["tests/sandboxes/test_bubblewrap.py"], subordinate=subordinate, least=20)


def test_escapes_without_root() -> None:
    _passed(["tests/sandboxes/test_escapes.py"], subordinate=False, least=14)


def _passed(arguments: list[str], *, subordinate: bool, least: int) -> None:
    done = run_tests(arguments, subordinate=subordinate)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least, done.stdout[-2000:]
    assert "skipped" not in done.stdout
