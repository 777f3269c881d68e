"""Calls that block, in threads that nobody has to wait for.

The threads of `asyncio.to_thread` are joined when the event loop closes, and again when the interpreter ends: a call into
C that never returns would hold both for ever. These are daemons: whoever is cancelled or loses patience goes on without
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon(name: str, work: Callable[[], T]) -> T:
    """The outcome of `work`, which runs in a thread of its own."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # The event loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await outcome
