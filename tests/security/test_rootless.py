"""The attacks on sandboxes and their network once more, as an ordinary user."""

from __future__ import annotations

import os
import re

import pytest

from support.sandboxes.ordinary_user import SECONDS, run_tests

pytestmark = pytest.mark.timeout(SECONDS)


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests here already run as an ordinary user")
@pytest.mark.parametrize(
    ("arguments", "least"),
    [
        (["tests/security/test_sandbox.py"], 30),
        (["tests/security/test_network.py", "-k", "inside or sandbox or operators"], 4),
    ],
    ids=["sandbox", "network"],
)
def test_as_an_ordinary_user(arguments: list[str], least: int) -> None:
    done = run_tests(arguments)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    said = re.search(r"(\d+) attacks tried, (\d+) succeeded; (\d+) of (\d+) shown", done.stdout)
    assert said is not None, done.stdout[-2000:]
    tried, succeeded, shown, of = map(int, said.groups())
    assert tried >= least
    assert succeeded == 0
    assert shown == of
    print(f"as an ordinary user: {said[0]}")
