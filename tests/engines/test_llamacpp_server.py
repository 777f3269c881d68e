"""Calls that block and may never return hold up nobody: neither the event loop as it closes, nor the interpreter."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from towline.engines.llamacpp.server import run_in_daemon

STUCK = """
import asyncio, threading
from towline.engines.llamacpp.server import run_in_daemon

async def main():
    try:
        async with asyncio.timeout(0.2):
            await run_in_daemon("stuck", threading.Event().wait)
    except TimeoutError:
        print("went on")

asyncio.run(main())
"""


async def test_the_outcome_is_that_of_the_call() -> None:
    assert await run_in_daemon("named", lambda: threading.current_thread().name) == "named"
    with pytest.raises(ZeroDivisionError):
        await run_in_daemon("fails", lambda: 1 // 0)


def test_a_call_that_never_returns_holds_neither_the_loop_nor_the_interpreter() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
