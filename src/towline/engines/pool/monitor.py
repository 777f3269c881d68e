"""The monitor of one replica: it leaves its pool when it does not answer, and comes back once it has the pool's weights.

Weights that a trainer pushed by its own means cannot be given again: a replica comes back with them if its label says that
it has them, or if it samples as it did before it left, and else after the trainer's next push.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from towline.engines.base import AnnouncesVersions, EngineUnreachable, ReportsHealth, ReportsLoad, labelled
from towline.engines.pool.membership import PoolMembership
from towline.engines.pool.replica import PoolWeights, Replica
from towline.errors import EngineError

log = logging.getLogger("towline.engines")
_MAX_MISSED = 2
"""Consecutive failed health checks before a replica that serves counts as dead."""
_MAX_MISSED_UPDATING = 60
"""The same while it is loading weights and may be too busy to answer."""
_CHECK_TIMEOUT = 10.0
"""Seconds that a health check may take."""
_MAX_BACKOFF = 32
"""Maximum number of intervals between two attempts to bring back a replica that answers but cannot be used."""


class ReplicaMonitor:
    """Checks one replica periodically: removes it when it does not answer, and brings it back when it does."""

    def __init__(self, members: PoolMembership, replica: Replica, interval: float):
        self.members = members
        self.replica = replica
        self.interval = interval
        self._missed = 0
        self._backoff = 1
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        members.wake_callbacks.append(self._wake.set)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"monitor {self.replica.name}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.interval * self._backoff):
                    await self._wake.wait()
            self._wake.clear()
            try:
                if self.replica.serving:
                    await self._check()
                elif await self._answers():
                    await self._bring_back()
                self._backoff = 1
            except EngineError as error:
                self._not_back(error)
            except Exception:
                # A defect of one engine: without its monitor the replica would be lost for good.
                log.exception("monitoring replica %s failed", self.replica.name)

    def _not_back(self, error: EngineError) -> None:
        """The replica could not come back."""
        if isinstance(error, EngineUnreachable):
            self._backoff = 1
        else:
            self._backoff = min(self._backoff * 2, _MAX_BACKOFF)
            if str(error) != self.replica.problem:
                log.error("replica %s cannot come back: %s", self.replica.name, error)
        self.replica.problem = str(error)

    async def _check(self) -> None:
        """Check a replica that serves."""
        replica = self.replica
        if not await self._answers():
            self._missed += 1
            if self._missed >= (_MAX_MISSED_UPDATING if replica.updating else _MAX_MISSED):
                self.members.remove(replica, "it does not answer")
                replica.cancel_calls()
            return
        self._missed = 0
        if isinstance(replica.engine, ReportsLoad):
            try:
                async with asyncio.timeout(_CHECK_TIMEOUT):
                    replica.load = await replica.engine.load()
            except (EngineError, TimeoutError):
                return  # The next check tells whether it is alive.
            replica.concurrency.adapt(replica.load, replica.in_flight)
            self.members.dispatcher.fill(replica)

    async def _answers(self) -> bool:
        engine = self.replica.engine
        if not isinstance(engine, ReportsHealth):
            return True
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT):
                return await engine.healthy()
        except TimeoutError:
            return False

    async def _bring_back(self) -> None:
        replica, members = self.replica, self.members
        replica.cancel_calls()
        while True:
            weights = members.weights
            await self._prepare(weights)
            if await members.readmit(replica, weights):
                break
        self._missed = 0
        log.warning("replica %s is back, with version %d", replica.name, weights.version)

    async def _prepare(self, weights: PoolWeights) -> None:
        """Bring the replica to the given weights, or raise `EngineError`."""
        replica, engine = self.replica, self.replica.engine
        # A pause from here is over.
        await engine.resume()
        if weights.pushed:
            await self._recognise(weights)
        elif replica.info is None or weights.folder is None:
            await engine.start()
        if weights.folder is not None:
            await engine.update_weights(weights.folder, weights.version)
            replica.weights_unknown = False
            # It may have been restarted with other options: inspect it again.
            await engine.start()
        if weights.folder is None and not weights.pushed and replica.weights_unknown:
            raise EngineError(
                f"it answers, but the weights of version {weights.version} were not loaded from a folder, so the replica "
                "waits for the next folder update"
            )
        if engine.version != weights.version and not weights.pushed:
            raise EngineError(f"it answers, but with weights of version {engine.version}, not {weights.version}")
        self.members.check(replica)

    async def _recognise(self, weights: PoolWeights) -> None:
        """Start the replica if it has the weights that a trainer pushed, by its label or by how it samples."""
        engine = self.replica.engine
        same = isinstance(engine, AnnouncesVersions) and self.replica.info is not None and await engine.same_weights()
        await engine.start()
        if engine.version < weights.version and same:
            await engine.resume(weights.version)
        if not (same or (engine.version >= weights.version and labelled(engine.info))):
            raise EngineError(
                f"it answers, but is not known to have the weights of version {weights.version}, which the trainer pushed "
                "by its own means: it is used again after the next push that it gets and that is announced"
            )
