"""Instrumentation of running code: CPU time per part, and operation counts.

Functions are wrapped for the duration of a measurement and then restored. A name that does not exist is an error, so that a
part can never silently read zero.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class Stopwatch:
    """CPU time of this thread per part. Parts nest; time counts only for the innermost one."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}
        """Nanoseconds per part."""
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

    def timing(self, name: str) -> Wrapper:
        """A wrapper that charges the time of a function or coroutine function to that part."""

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


class OperationCounter:
    """Counts operations, or their size."""

    def __init__(self, names: Sequence[str]) -> None:
        self.counts = dict.fromkeys(names, 0)

    def counting(self, name: str, amount: Callable[..., int]) -> Wrapper:
        """A wrapper that adds `amount(result, *arguments)` per call."""

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def counted(*given: Any, **named: Any) -> Any:
                result = function(*given, **named)
                self.counts[name] += amount(result, *given)
                return result

            return counted

        return wrap


@contextmanager
def patched(patches: Sequence[tuple[Any, str, Wrapper]]) -> Iterator[None]:
    """Replace each (module or class, name) by its wrapper until the block ends."""
    with ExitStack() as undo:
        for owner, name, wrap in patches:
            original = vars(owner)[name]
            setattr(owner, name, wrap(original))
            undo.callback(setattr, owner, name, original)
        yield
