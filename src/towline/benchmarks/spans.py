"""Measuring inside running code: CPU time by part, and operations by kind.

Functions are wrapped for as long as a measurement lasts and then put back; a name that is not there any more is an error,
so that a part can never silently read zero.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Stopwatch:
    """CPU of this thread by part. Parts nest; each moment counts for the innermost one only."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}
        """Nanoseconds by part."""
        self._open: list[str] = []
        self._since = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        now = time.thread_time_ns()
        if self._open:
            name = self._open[-1]
            self.spent[name] = self.spent.get(name, 0) + now - self._since
        self._since = now

    def timing(self, name: str) -> Wrap:
        """A wrapper that counts a function's time, or a coroutine function's, as that part."""

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            if inspect.iscoroutinefunction(function):

                @functools.wraps(function)
                async def timed_async(*given: Any, **named: Any) -> Any:
                    with self.part(name):
                        return await function(*given, **named)

                return timed_async

            @functools.wraps(function)
            def timed(*given: Any, **named: Any) -> Any:
                with self.part(name):
                    return function(*given, **named)

            return timed

        return wrap


class Tally:
    """How often something was done, or how much of it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.counts = dict.fromkeys(names, 0)

    def counting(self, name: str, amount: Callable[..., int]) -> Wrap:
        """A wrapper that adds `amount(result, *arguments)` on every call."""

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def counted(*given: Any, **named: Any) -> Any:
                result = function(*given, **named)
                self.counts[name] += amount(result, *given)
                return result

            return counted

        return wrap


@contextmanager
def wrapped(places: Sequence[tuple[Any, str, Wrap]]) -> Iterator[None]:
    """Replace the function of each (module or class, name) by its wrapper until the block ends."""
    with ExitStack() as undo:
        for owner, name, wrap in places:
            original = vars(owner)[name]
            setattr(owner, name, wrap(original))
            undo.callback(setattr, owner, name, original)
        yield
