"""The stages that sessions pass through, written a few times a second and not one by one. An end has a transaction of its
own."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from towline.schema import Session, SessionState
from towline.server import queueing
from towline.server.signals import Signal
from towline.server.store import Store

_EVERY = 0.1
"""Seconds between two writings."""


class Stages:
    def __init__(self, store: Store, happened: Signal):
        self.store = store
        self.happened = happened
        self._steps: dict[str, list[Session]] = {}
        """Not written yet, by session."""
        self._last: dict[str, SessionState] = {}
        self._writing = asyncio.Lock()

    def changed(self, session: Session) -> None:
        """A session came to another stage."""
        if not session.state.terminal and session.state is not SessionState.QUEUED:
            self._steps.setdefault(session.session_id, []).append(session)
            self._last[session.session_id] = session.state

    def last(self, session_id: str) -> SessionState:
        return self._last.get(session_id, SessionState.QUEUED)

    async def take(self, session_id: str) -> list[tuple[str, dict[str, Any]]]:
        """Events of the session's stages that are not written; its end writes them."""
        # Stages that are being written at this moment come before the end.
        async with self._writing:
            steps = self._steps.pop(session_id, [])
        return [("session", queueing.step_event(step)) for step in steps]

    def forget(self, session_id: str) -> None:
        self._steps.pop(session_id, None)
        self._last.pop(session_id, None)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY)
            if not self._steps:
                continue
            async with self._writing:
                steps = [step for session in self._steps.values() for step in session]
                self._steps.clear()
                if steps:
                    await self.store.insist(partial(self._write, steps=steps), what="the stages of sessions")
            self.happened.give()

    async def _write(self, tx: AsyncConnection, *, steps: list[Session]) -> None:
        await queueing.write_steps(tx, steps, self.store.epoch, time.time())
