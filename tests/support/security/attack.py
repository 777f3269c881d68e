"""Attacks as tests: each must fail with its guard and succeed without it.

An attack is a test function that returns what it gained, or nothing if it was refused. `@attack` runs it twice: guarded,
when it must gain nothing, and unguarded, when it must gain something. Without the second run an attack that cannot succeed
for another reason (a misspelt field, a missing file) would pass for a promise that is kept.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest

Guard = Callable[[], AbstractContextManager[Any]]
"""Enters a block in which the guard is gone."""


def without(*guards: tuple[str, Any]) -> Guard:
    """The guards at these dotted names are replaced: `without(("towline.x.y.check", lambda *_: None))`."""

    @contextlib.contextmanager
    def removed() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, replacement in guards:
                stack.enter_context(mock.patch(name, replacement))
            yield

    return removed


def attack(*rows: str, guard: Guard) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a function that attacks. `rows` are the numbers in the list of attacks, or names of classes of attacks.

    The function may use fixtures, be a coroutine function, and be parametrized for variants. Fixtures are made before the
    guard is removed: one that starts what the guard protects takes `unguarded: bool` and removes it by itself.
    """

    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("unguarded",)]
        takes = "unguarded" in signature.parameters

        def values(arguments: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
            unguarded = arguments["unguarded"] if takes else arguments.pop("unguarded")
            return unguarded, arguments

        @functools.wraps(function)
        async def coroutine(**arguments: Any) -> None:
            unguarded, inner = values(arguments)
            with guard() if unguarded else contextlib.nullcontext():
                gained = await function(**inner)
            _judge(unguarded, gained)

        @functools.wraps(function)
        def plain(**arguments: Any) -> None:
            unguarded, inner = values(arguments)
            with guard() if unguarded else contextlib.nullcontext():
                gained = function(**inner)
            _judge(unguarded, gained)

        test: Any = coroutine if inspect.iscoroutinefunction(function) else plain
        test.__signature__ = signature.replace(
            parameters=[*signature.parameters.values(), *([] if takes else own)], return_annotation=None
        )
        test = pytest.mark.parametrize("unguarded", [False, True], ids=["guarded", "unguarded"])(test)
        marker: Any = pytest.mark.attack(rows=rows)
        return marker(test)  # type: ignore[no-any-return]

    return marked


def _judge(unguarded: bool, gained: object) -> None:
    if unguarded:
        assert gained, "without its guard the attack must succeed, and it did not: it proves nothing"
    else:
        assert not gained, f"the attack succeeded: {gained}"


def summary(reports: Sequence[Any]) -> str:
    """What a run of attacks says at its end."""
    guarded = [one for one in reports if "guarded" in _tags(one)]
    proven = [one for one in reports if "unguarded" in _tags(one)]
    succeeded = sum(one.failed for one in guarded)
    shown = sum(one.passed for one in proven)
    return f"{len(guarded)} attacks tried, {succeeded} succeeded; {shown} of {len(proven)} shown to succeed without their guard"


def _tags(report: Any) -> set[str]:
    return set(report.nodeid.rpartition("[")[2].rstrip("]").split("-"))
