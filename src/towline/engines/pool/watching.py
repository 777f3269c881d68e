"""The watch over one replica: it leaves when it does not answer, and comes back with the current weights.

While it serves, what it tells of its load sets its pace. While it does not, it is asked again and again; once it answers
it is given the weights, looked at anew, paused if the pool is paused, and only then serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from towline.engines.base import EngineGone, Loaded, Watched
from towline.engines.pool.membership import Membership
from towline.engines.pool.replica import Replica, Weights
from towline.errors import EngineError

log = logging.getLogger("towline.engines")
_DEAD = 2
"""Looks in a row without an answer before a replica that serves is held to be dead."""
_BUSY = 60
"""The same while it is given weights: busy with them, it may not answer."""
_ANSWER = 10.0
"""Seconds that a look may take."""
_SELDOM = 32
"""How many intervals lie between two tries of a replica that answers but cannot be used."""


class Watch:
    def __init__(self, members: Membership, replica: Replica, interval: float):
        self.members = members
        self.replica = replica
        self.interval = interval
        self._silent = 0
        self._wait = 1
        self._stirred = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        members.watchers.append(self._stirred.set)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch(), name=f"watch {self.replica.name}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.interval * self._wait):
                    await self._stirred.wait()
            self._stirred.clear()
            try:
                if self.replica.serving:
                    await self._look()
                elif await self._answers():
                    await self._bring_back()
                self._wait = 1
            except EngineError as error:
                self._refused(error)
            except Exception:
                # A defect of one engine: without its watch the replica would be lost for good.
                log.exception("looking after replica %s failed", self.replica.name)

    def _refused(self, error: EngineError) -> None:
        """The replica could not come back."""
        if isinstance(error, EngineGone):
            self._wait = 1
        else:
            self._wait = min(self._wait * 2, _SELDOM)
            if str(error) != self.replica.trouble:
                log.error("replica %s cannot come back: %s", self.replica.name, error)
        self.replica.trouble = str(error)

    async def _look(self) -> None:
        """At a replica that serves."""
        replica = self.replica
        if not await self._answers():
            self._silent += 1
            if self._silent >= (_BUSY if replica.updating else _DEAD):
                self.members.lose(replica, "it does not answer")
                replica.give_up()
            return
        self._silent = 0
        if isinstance(replica.engine, Loaded):
            try:
                async with asyncio.timeout(_ANSWER):
                    replica.load = await replica.engine.load()
            except (EngineError, TimeoutError):
                return  # Whether it is alive, the next look tells.
            replica.pace.adapt(replica.load, replica.taken)
            self.members.dispatcher.fill(replica)

    async def _answers(self) -> bool:
        engine = self.replica.engine
        if not isinstance(engine, Watched):
            return True
        try:
            async with asyncio.timeout(_ANSWER):
                return await engine.healthy()
        except TimeoutError:
            return False

    async def _bring_back(self) -> None:
        replica, members = self.replica, self.members
        replica.give_up()
        while True:
            weights = members.weights
            await self._give(weights)
            if await members.readmit(replica, weights):
                break
        self._silent = 0
        log.warning("replica %s is back, with version %d", replica.name, weights.version)

    async def _give(self, weights: Weights) -> None:
        """Make the replica what it has to be, or raise `EngineError`."""
        replica, engine = self.replica, self.replica.engine
        # Whatever paused it, here or on the server, is over.
        await engine.resume()
        if replica.info is None or weights.folder is None:
            await engine.start()
        if weights.folder is not None:
            await engine.update_weights(weights.folder, weights.version)
            replica.unsure = False
            # It may have been started anew, and otherwise than before: look again at what it is.
            await engine.start()
        if weights.folder is None and (weights.pushed or replica.unsure):
            raise EngineError(
                f"it answers, but the weights of version {weights.version} did not come from a folder and cannot be "
                "given to it: it waits for the next ones that do"
            )
        if engine.version != weights.version:
            raise EngineError(f"it answers, but with weights of version {engine.version}, not {weights.version}")
        self.members.check(replica)
