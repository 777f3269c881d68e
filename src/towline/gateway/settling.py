"""Turns in flight that nobody waits for any more: is the engine at work on them, or did it leave them lying?

When a harness ends, or gives up on a turn, the turn tells whose doing that was. A token that still arrives shows an engine
at work: the harness ran out of patience or time, which is the policy's matter. Silence up to the stall limit, or an engine
on hold, shows that the policy had no chance.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from towline.engines.base import ContextExceeded, TurnAtFault
from towline.engines.holds import Holds
from towline.engines.pulse import Pulse
from towline.errors import ApiError, EngineError
from towline.gateway.calls import FailedCall, failure_of, identity_of
from towline.tokens.graph import Node

if TYPE_CHECKING:
    from towline.gateway.session import Session

_MOMENT = 0.05


class Settling:
    """What becomes of a session's turns that come to nothing."""

    def __init__(self, session: Session):
        self._session = session
        self._tasks: set[asyncio.Task[None]] = set()

    def note(self, node: Node, error: BaseException) -> None:
        """A turn came to nothing: record it, unless that was the policy's or the harness's doing."""
        if isinstance(error, (asyncio.CancelledError, ApiError, ContextExceeded)):
            return
        said, at_fault = str(error) or repr(error), isinstance(error, TurnAtFault)
        failed = FailedCall(failure_of(error), said, node.engine, identity_of(node), node, at_fault)
        self._session.calls.fail(failed)

    def orphaned(self, node: Node) -> None:
        """Nobody waits for the turn: it ends, as soon as it is known whether its engine is at work on it."""
        task = asyncio.get_running_loop().create_task(self._settle(node))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self, *, patient: bool) -> None:
        """Settle every turn in flight; their harness has ended."""
        nodes = [self._session.graph.by_id[id] for id in self._session.work]
        await asyncio.gather(*(self._settle(node, ended=True, patient=patient) for node in nodes))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _settle(self, node: Node, *, ended: bool = False, patient: bool = False) -> None:
        session = self._session
        task, pulse = session.work.get(node.id), session.pulses.get(node.id)
        if task is None or pulse is None:
            return
        problem = await problem_of(task, pulse, session.lanes[node.engine].holds, patient=patient)
        if not ended and session.waiting.wanted(node):
            return  # A retry has come for it.
        if problem is not None:
            self.note(node, problem)
        session.cancel(node)
        await asyncio.wait((task,))


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
