"""What is left when workers are gone: functions run in the process that asked."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from support.security.attack import Guard, without

BURNED = 0.5
"""CPU seconds of one process that count as a freeze; limits are lowered to match."""


async def inline_async(limits: Any, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    return function(*arguments, **keywords)


def inline(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    return function(*arguments, **keywords)


def without_workers(*more: tuple[str, Any]) -> Guard:
    """Hostile text is parsed in this process."""
    return without(
        ("towline.common.untrusted.workers.run_async", inline_async),
        ("towline.common.untrusted.workers.run", inline),
        *more,
    )


def backtracking(pattern: str) -> Any:
    """A pattern on Python's own engine, with the methods of `LinearPattern`."""

    class Backtracking:
        compiled = re.compile(pattern)
        groups = compiled.groups

        def sub(self, replacement: str, text: str) -> str:
            return self.compiled.sub(replacement, text)

        def search(self, text: str) -> bool:
            return self.compiled.search(text) is not None

        def last(self, text: str) -> tuple[str, ...] | None:
            found = list(self.compiled.finditer(text))
            return (found[-1][0], *found[-1].groups()) if found else None

    return Backtracking()


async def burned(work: Callable[[], Awaitable[Any]]) -> float | None:
    """The CPU seconds of this process that the work took, if they are a freeze; whatever it raises is its own affair."""
    began = time.process_time()
    with contextlib.suppress(Exception):  # refused text is what the guard is for
        await work()
    seconds = time.process_time() - began
    return seconds if seconds > BURNED else None
