"""Processes that do a piece of work for a sandbox and end: to their end, but for no longer than they should need."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

from towline.sandboxes.base import SandboxError

SECONDS = 120.0
"""More than any step needs on a busy machine; a process that hangs in the kernel never ends."""

T = TypeVar("T")


async def within(seconds: float | None, work: Awaitable[T], what: str) -> T:
    """What comes of the work; `SandboxError` if it takes longer."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise SandboxError(f"{what} within {seconds:g} seconds") from None


async def finished(
    helper: asyncio.subprocess.Process, what: str, given: bytes | None = None, *, seconds: float = SECONDS
) -> tuple[bytes, bytes]:
    """What a helper printed on its two streams. One that takes too long, or whose caller gives up, is killed."""
    try:
        return await within(seconds, helper.communicate(given), f"{what} did not end")
    finally:
        if helper.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                helper.kill()
