"""Accept expressions: their meaning, and that nothing else parses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.runs.accept import NAMES, Accept, AcceptError

SESSION: dict[str, Any] = {
    "reward": 0.75,
    "turns": 12,
    "end_reason": "exited",
    "truncated": False,
    "components": {"tests": 1.0},
    "metadata": {"level": "hard", "n": 3},
    "exit_code": None,
}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("reward >= 1", False),
        ("reward >= 0.75", True),
        ("0.5 < reward <= 0.75", True),
        ("0.5 < reward < 0.75", False),
        ("reward >= 1 or turns < 20", True),
        ("reward >= 1 and turns < 20", False),
        ("not (reward >= 1) and not truncated", True),
        ("end_reason == 'exited'", True),
        ("end_reason in ['timeout', 'limit']", False),
        ("end_reason not in ('timeout', 'limit')", True),
        ("components.tests == 1 and metadata.level == 'hard'", True),
        ("reward * 4 - 1 >= 2 and -turns < 0", True),
        ("turns / 0 > 1", False),
        ("True", True),
        # What a session does not have accepts nothing, whichever way it is asked.
        ("exit_code == 0", False),
        ("exit_code != 0", False),
        ("not (exit_code == 0)", False),
        ("components.style >= 0 or components.style < 0", False),
        ("metadata.nothing == 'x'", False),
        # It is looked at only where it matters.
        ("turns == 12 or exit_code == 0", True),
    ],
)
def test_expressions_accept_and_reject(text: str, kept: bool) -> None:
    assert Accept.parse(text)(SESSION) is kept


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot parse"),
        ("reward >=", "cannot parse"),
        ("reward", "is a number; compare it"),
        ("reword >= 1", "unknown name 'reword'; choose among reward,"),
        ("components >= 1", "a group of values; name a member"),
        ("reward.x > 1", "only components and metadata have members"),
        ("components.a.b > 1", "only components and metadata have members"),
        ("reward >= '1'", "is a text, but a number is needed"),
        ("end_reason > 1", "is a number, but a text is needed"),
        ("truncated > 1", "but a boolean is needed"),
        ("reward and turns", "is a number, but a boolean is needed"),
        ("end_reason in 'exited'", "'in' needs a list"),
        ("reward is None", "'is' is not allowed"),
        ("reward == None", "is not allowed"),
        ("__import__('os').system('true')", "is not allowed"),
        ("(lambda: 1)() == 1", "is not allowed"),
        ("[x for x in (1,)] == 1", "is not allowed"),
        ("reward.__class__ == 1", "only components and metadata have members"),
        ("f'{reward}' == '1'", "is not allowed"),
        ("2 ** 99999999 > 1", "is not allowed"),
        ("reward >= 1e999", "too large"),
        ("(" * 500 + "reward" + ")" * 500 + " > 1", "cannot parse"),
        ("not " * 490 + "True", "nested"),
        ("turns > " + "1" * 5000, "at most 2000"),
    ],
)
def test_invalid_expressions_are_rejected_at_parse_time(text: str, reason: str) -> None:
    with pytest.raises(AcceptError) as refused:
        Accept.parse(text)
    assert reason in str(refused.value)


@given(
    st.text(max_size=60)
    | st.lists(
        st.sampled_from(
            [*NAMES, "1", "'a'", "and", "or", "not", "in", ">=", "==", "(", ")", ".", "[", "]", "-", "+", "True"]
        ),
        max_size=12,
    ).map(" ".join)
)
def test_any_text_parses_or_raises_accept_error(text: str) -> None:
    try:
        rule = Accept.parse(text)
    except AcceptError:
        return
    assert rule(SESSION) in (True, False)
    assert rule({}) in (True, False)
