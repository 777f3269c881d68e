"""Long work on a request, in a thread: the event loop serves every other session meanwhile.

Reading, matching and rendering a request is pure Python and the tokenizer. A long one takes seconds, which would stop every
other session of the process. In a thread it shares the interpreter instead: the event loop gets its turn every few
milliseconds. Requests below `LARGE_BYTES` are done on the loop, where they cost less than the way to a thread and back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LARGE_BYTES = 256 * 1024
"""Bodies above this are parsed, read and rendered in a thread: below, all of it takes a few milliseconds."""
_THREADS = ThreadPoolExecutor(2, "towline-render")
"""Few, so that one session's long requests wait for each other rather than take the interpreter from the loop."""
T = TypeVar("T")


async def off_loop(work: Callable[..., T], *arguments: object) -> T:
    """The result of a function of data that is run in a thread. A cancelled caller does not stop it."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work, *arguments)
