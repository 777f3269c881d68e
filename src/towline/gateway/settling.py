"""Turns in flight that nobody waits for any more: is the engine at work on them, or did it leave them lying?

When a harness ends, or gives up on a turn, the turn tells whose doing that was. A token that still arrives shows an engine
at work: the harness ran out of patience or time, which is the policy's matter. Silence up to the stall limit, or an engine
on hold, shows that the policy had no chance.
"""

from __future__ import annotations

import asyncio

from towline.engines.holds import Holds
from towline.engines.pulse import Pulse
from towline.errors import EngineError

_MOMENT = 0.05


async def problem_of(task: asyncio.Task[None], pulse: Pulse, holds: Holds, *, patient: bool) -> EngineError | None:
    """Wait until the turn shows whether the engine is at work on it; what is wrong if it is not.

    A turn that fails by itself meanwhile is not a problem found here. With `patient`, a turn that the engine is not asked
    for because it is on hold is none either.
    """
    beat = asyncio.ensure_future(pulse.next_beat())
    try:
        while not task.done() and not beat.done():
            if pulse.waiting:
                held = holds.held and not patient
                return (
                    EngineError("the harness gave up on it while the engine was paused or unusable") if held else None
                )
            if pulse.left <= 0 and pulse.blind:
                return pulse.stalled()
            await asyncio.wait((task, beat), timeout=max(pulse.left, _MOMENT), return_when=asyncio.FIRST_COMPLETED)
    finally:
        beat.cancel()
    return None
